"""Chats as prompts."""

from __future__ import annotations

import json

import pytest

from fla_jax.generation import Turn, WorldTemplate, chat_template

CHAT = [
    Turn("system", "Be brief."),
    Turn("user", "One.\n\n\nTwo."),
    Turn("assistant", "Three."),
    Turn("user", "?"),
]
SOURCE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"


def test_the_format_of_world_models():
    """As in the model card: an empty line between messages, none inside."""
    want = "System: Be brief.\n\nUser: One.\nTwo.\n\nAssistant: Three.\n\nUser: ?\n\nAssistant:"
    assert WorldTemplate()(CHAT) == want


def test_an_answer_follows_its_prompt():
    """Learned text and the prompt of the next message agree, also where the answer has empty lines."""
    template, asked = WorldTemplate(), [Turn("user", "\nHow?\n\nWhy?")]
    told = template(asked) + template.answer("So.\n\n\nThus.\n")
    assert told == "User: How?\nWhy?\n\nAssistant: So.\nThus."
    assert template([*asked, Turn("assistant", "So.\n\n\nThus.\n"), Turn("user", "!")]).startswith(
        f"{told}\n\n"
    )


@pytest.mark.parametrize("layout", ["file", "config", "list"])
def test_a_checkpoints_own_template(tmp_path, layout):
    if layout == "file":
        (tmp_path / "chat_template.jinja").write_text(SOURCE)
    else:
        named = [{"name": "tools", "template": "no"}, {"name": "default", "template": SOURCE}]
        config = {"chat_template": SOURCE if layout == "config" else named}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template(tmp_path)(CHAT[-1:]) == "<user>?<a>"


def test_templates_cannot_reach_python(tmp_path):
    """They come with checkpoints of others, and may refuse a chat."""
    path = tmp_path / "chat_template.jinja"
    path.write_text("{% for")
    with pytest.raises(ValueError, match="source is not a chat template"):
        chat_template(tmp_path)
    for source in ("{{ messages.__class__.__mro__ }}", "{{ raise_exception('no system messages') }}"):
        path.write_text(source)
        with pytest.raises(ValueError, match="the chat template refuses the messages"):
            chat_template(tmp_path)(CHAT)


def test_without_a_template(tmp_path):
    assert isinstance(chat_template(tmp_path), WorldTemplate)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not a JSON object"):
        chat_template(tmp_path)
