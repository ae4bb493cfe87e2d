"""Chats as prompts."""

from __future__ import annotations

import datetime
import json

import pytest

from fla_jax.generation import JinjaTemplate, Turn, WorldTemplate, chat_template, load_tokenizer

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
    told = template(asked) + template.answer(asked, "So.\n\n\nThus.\n")
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


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "source, prompt, answer",
    [
        (CHATML, "<|im_start|>user\n How? <|im_end|>\n<|im_start|>assistant\n", " So.\n<|im_end|>\n"),
        (LLAMA, "<s>[INST] How? [/INST]", " So.</s>"),
    ],
)
def test_answers_of_templates(source, prompt, answer):
    """What the template renders behind the prompt, spaces kept or stripped, up to the text that ends it."""
    template, turns = JinjaTemplate(source, TOKENS), [Turn("user", " How? ")]
    assert (template(turns), template.answer(turns, " So.\n")) == (prompt, answer)


def test_a_template_that_changes_the_prompt_is_refused():
    """As those do that open a chain of thought only in the prompt."""
    template = JinjaTemplate(CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"))
    message = r"assistant\n' the prompt continues with '<think>', the answered chat with 'So.<\|im_end\|>\n'"
    with pytest.raises(ValueError, match=message.replace(r"\n", r"\\n")):
        template.answer([Turn("user", "How?")], "So.")
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    with pytest.raises(ValueError, match="the chat template refuses the messages: one message"):
        JinjaTemplate(refusing).answer([Turn("user", "How?")], "So.")


@pytest.mark.parametrize(
    "source, prompt",
    [
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }} {% endfor %}", "user "),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "assistant",
        ),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}.", "user."),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ messages[0].content | tojson }}", '"<é\'>"'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<é\'>"\n}'),
        (
            "{{ messages[1] | tojson(true, sort_keys=true, separators=(',', ':')) }}",
            '{"content":"\\u00fc","role":"assistant"}',
        ),
        ("{% if tools is not none or documents is not none %}{{ tools[0] }}{% endif %}.", "."),
    ],
)
def test_what_templates_may_use(source, prompt):
    """Tags and filters beside jinja2's own."""
    assert JinjaTemplate(source)([Turn("user", "<é'>"), Turn("assistant", "ü")]) == prompt


def test_templates_may_write_the_date():
    source = "{{ strftime_now('%Y-%m-%d') }}"
    days = [datetime.date.today().isoformat()]
    found = JinjaTemplate(source)([])
    assert found in [*days, datetime.date.today().isoformat()]


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / (messages | length - 1) }}", "division by zero"),
        ("{{ nothing | tojson }}", "Undefined is not JSON serializable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_any_error_of_a_template_is_a_refusal(source, message):
    with pytest.raises(ValueError, match=f"the chat template refuses the messages: .*{message}"):
        JinjaTemplate(source)([Turn("user", "?")])


def test_special_tokens_of_a_checkpoint(tmp_path):
    """Its own end of text comes before those of common vocabularies; templates get the texts by name."""
    library = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "<s>": 1, "</s>": 2, "?": 3}
    library.Tokenizer(library.models.WordLevel(vocabulary)).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end_of_text == 0
    config = {"chat_template": LLAMA, "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).end_of_text == 2
    assert chat_template(tmp_path)([Turn("user", "?")]) == "<s>[INST] ? [/INST]"


def test_templates_cannot_reach_python(tmp_path):
    """They come with checkpoints of others, and may refuse a chat."""
    path = tmp_path / "chat_template.jinja"
    for source in ("{% for", "{% break %}", "{% generation %}"):
        path.write_text(source)
        with pytest.raises(ValueError, match="source is not a chat template"):
            chat_template(tmp_path)
    for source in ("{{ messages.__class__.__mro__ }}", "{{ raise_exception('no system messages') }}"):
        path.write_text(source)
        with pytest.raises(ValueError, match="the chat template refuses the messages"):
            chat_template(tmp_path)(CHAT)


def test_without_a_template(tmp_path):
    assert isinstance(chat_template(tmp_path), WorldTemplate)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json must hold a JSON object, got a list"):
        chat_template(tmp_path)
