"""Chats as prompts: RWKV World's format, or the template of a checkpoint."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .tokenizer import tokenizer_config

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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
        >>> template.answer([Turn("user", "Hello")], "Hi!")
        ' Hi!'
    """

    stop = ("\n\nUser:", "\n\nSystem:")

    def __call__(self, turns: Sequence[Turn]) -> str:
        """See `ChatTemplate`."""
        messages = (f"{_ROLES[turn.role]}: {_without_empty_lines(turn.content)}\n\n" for turn in turns)
        return "".join(messages) + "Assistant:"

    def answer(self, turns: Sequence[Turn], content: str) -> str:
        """The text that follows the prompt of ``turns``, for fine-tuning; later prompts repeat it."""
        return f" {_without_empty_lines(content)}"


class JinjaTemplate:
    """A template as Hugging Face checkpoints have it, run in a sandbox of jinja2.

    Templates may use ``break``, ``continue`` and ``generation`` blocks, ``raise_exception(message)``,
    ``strftime_now(format)``, and ``tojson``, which does not escape HTML here.

    Args:
        source: the template.
        tokens: texts of special tokens by the names that the source uses, such as ``eos_token``.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: the source is not a template.

    Example:
        >>> from fla_jax.generation import JinjaTemplate, Turn
        >>> source = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
        >>> source += "{% if add_generation_prompt %}[assistant]{% endif %}"
        >>> template = JinjaTemplate(source, {"eos_token": "</s>"})
        >>> template([Turn("user", "Hello")])
        '[user] Hello</s>[assistant]'
        >>> template.answer([Turn("user", "Hello")], "Hi!")
        ' Hi!</s>'
    """

    stop = ()

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source, globals=dict(tokens or {}))
        except Exception as error:  # jinja2's, and Python's for a break outside of a loop
            raise ValueError(f"source is not a chat template: {error}") from None

    def __call__(self, turns: Sequence[Turn]) -> str:
        """See `ChatTemplate`."""
        return self._rendered(turns, add_generation_prompt=True)

    def answer(self, turns: Sequence[Turn], content: str) -> str:
        """The text that follows the prompt of ``turns``, for fine-tuning: the assistant's message as the
        template renders it, up to and including the text that ends it.

        Raises:
            ValueError: the template refuses the chat, or renders the answered chat without its prompt at the
                beginning.
        """
        prompt = self(turns)
        whole = self._rendered([*turns, Turn("assistant", content)], add_generation_prompt=False)
        if not whole.startswith(prompt):
            same = next(n for n in range(len(prompt)) if not whole.startswith(prompt[: n + 1]))
            raise ValueError(
                "the chat template changes the prompt when the answer is known: after "
                f"{prompt[max(0, same - 20) : same]!r} the prompt continues with {prompt[same:][:40]!r}, the "
                f"answered chat with {whole[same:][:40]!r}"
            )
        return whole[len(prompt) :]

    def _rendered(self, turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
        messages = [turn._asdict() for turn in turns]
        try:
            # templates compare these with none, and an undefined name is not none
            absent = {"tools": None, "documents": None}
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **absent
            )
        except Exception as error:  # a template may compute anything from messages
            raise ValueError(f"the chat template refuses the messages: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """A sandbox with the tags, functions and filters that Hugging Face's templates use."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("JinjaTemplate needs jinja2: pip install jinja2") from error

    class Generation(Extension):
        """Tags around the assistant's text, which is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    environment.filters["tojson"] = _json
    return environment


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson``."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def chat_template(checkpoint: Path) -> WorldTemplate | JinjaTemplate:
    """The template in a checkpoint's folder, `WorldTemplate` if there is none.

    Read are ``chat_template.jinja``, and of ``tokenizer_config.json`` the field ``chat_template`` and the
    texts of special tokens.

    Raises:
        ValueError: the file is not one that Hugging Face's packages write.

    Example:
        >>> from pathlib import Path
        >>> from fla_jax.generation import chat_template
        >>> type(chat_template(Path("a folder without a template"))).__name__
        'WorldTemplate'
    """
    config = tokenizer_config(checkpoint)
    source = config.get("chat_template")
    if (path := checkpoint / "chat_template.jinja").is_file():
        source = path.read_text()
    elif isinstance(source, list):  # several by name
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    tokens = {name: x for name, x in config.items() if name.endswith("_token") and isinstance(x, str)}
    return JinjaTemplate(source, tokens) if isinstance(source, str) else WorldTemplate()


def _without_empty_lines(text: str) -> str:
    return "\n".join(line for line in text.strip().splitlines() if line.strip())
