"""Chats as prompts: RWKV World's format, or the template of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class Turn(NamedTuple):
    """A message: its role (``"system"``, ``"developer"``, ``"user"``, ``"assistant"``) and its text.

    Example:
        >>> from fla_jax.generation import Turn
        >>> Turn("user", "Hello").content
        'Hello'
    """

    role: str
    content: str


class ChatTemplate(Protocol):
    """Turns a chat into the prompt of the assistant's next message.

    Example:
        >>> from fla_jax.generation import Turn
        >>> class LastMessage:
        ...     stop = ()
        ...
        ...     def __call__(self, turns):
        ...         return turns[-1].content
        >>> LastMessage()([Turn("user", "Once upon a")])
        'Once upon a'
    """

    @property
    def stop(self) -> Sequence[str]:
        """Texts that end the assistant's message."""
        ...

    def __call__(self, turns: Sequence[Turn]) -> str:
        """The prompt.

        Raises:
            ValueError: the template refuses the chat.
        """
        ...


class WorldTemplate:
    """The format that RWKV World models are trained on: ``User: ...``, ``Assistant: ...``, between them an
    empty line, which a message itself must not contain (BlinkDL, RWKV-5-World model card).

    Example:
        >>> from fla_jax.generation import Turn, WorldTemplate
        >>> template = WorldTemplate()
        >>> template([Turn("user", "Hello")])
        'User: Hello\\n\\nAssistant:'
        >>> template.answer("Hi!")
        ' Hi!'
    """

    stop = ("\n\nUser:", "\n\nSystem:")

    def __call__(self, turns: Sequence[Turn]) -> str:
        """See `ChatTemplate`."""
        messages = (f"{_ROLES[turn.role]}: {_without_empty_lines(turn.content)}\n\n" for turn in turns)
        return "".join(messages) + "Assistant:"

    def answer(self, content: str) -> str:
        """The text that follows a prompt, which fine-tuning learns; later prompts repeat it."""
        return f" {_without_empty_lines(content)}"


class JinjaTemplate:
    """A template as Hugging Face checkpoints have it, run in a sandbox of jinja2.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: the source is not a template.

    Example:
        >>> from fla_jax.generation import JinjaTemplate, Turn
        >>> template = JinjaTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}")
        >>> template([Turn("user", "Hello")])
        '[user] Hello '
    """

    stop = ()

    def __init__(self, source: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ImportError("JinjaTemplate needs jinja2: pip install jinja2") from error

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            self._template, self._error = environment.from_string(source), TemplateError
        except TemplateError as error:
            raise ValueError(f"source is not a chat template: {error}") from None

    def __call__(self, turns: Sequence[Turn]) -> str:
        """See `ChatTemplate`."""
        messages = [turn._asdict() for turn in turns]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except self._error as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None


def chat_template(checkpoint: Path) -> ChatTemplate:
    """The template in a checkpoint's folder, `WorldTemplate` if there is none.

    Read are ``chat_template.jinja`` and the field ``chat_template`` of ``tokenizer_config.json``.

    Raises:
        ValueError: the file is not one that Hugging Face's packages write.

    Example:
        >>> from pathlib import Path
        >>> from fla_jax.generation import chat_template
        >>> type(chat_template(Path("a folder without a template"))).__name__
        'WorldTemplate'
    """
    if (path := checkpoint / "chat_template.jinja").is_file():
        return JinjaTemplate(path.read_text())
    if not (path := checkpoint / "tokenizer_config.json").is_file():
        return WorldTemplate()
    try:
        source = json.loads(path.read_text()).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from None
    if isinstance(source, list):  # several by name
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    return JinjaTemplate(source) if isinstance(source, str) else WorldTemplate()


def _without_empty_lines(text: str) -> str:
    return "\n".join(line for line in text.strip().splitlines() if line.strip())
