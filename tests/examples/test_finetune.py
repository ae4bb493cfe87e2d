"""finetune.py with a tiny model: every method lowers the loss of held-out answers, files are read back."""

import json

import _dialogues
import finetune
import jax
import numpy as np
import pytest
import small_models as small
from pretraining import refusal

from fla_jax.checkpoints import load_checkpoint, load_extras, save_checkpoint
from fla_jax.generation import Turn, WorldTemplate, chat_template, checkpoint_tokenizer, load_tokenizer
from fla_jax.training import load_lora, load_states

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

MODEL = small.model(7, vocab_size=256, num_layers=1)
TINY = ["--sequence", "48", "--batch", "4", "--epochs", "4"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    save_checkpoint(folder / "model.pth", MODEL, small.params(MODEL))
    lines = [json.dumps({"prompt": "abc"[i % 3], "answer": "xyz"[i % 3]}) for i in range(60)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder


def run(files, out, *more):
    arguments = [
        "--checkpoint",
        files / "model.pth",
        "--data",
        files / "data.jsonl",
        "--out",
        out,
        *TINY,
        *more,
    ]
    finetune.main([str(x) for x in arguments])


@pytest.mark.parametrize("method, rate", [("lora", 0.02), ("state", 1.0), ("full", 0.01)])
def test_methods(files, tmp_path, capsys, method, rate):
    base = load_checkpoint(files / "model.pth")[1]
    run(files, tmp_path / "alone", "--method", method, "--learning-rate", rate)
    printed = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if line}
    assert float(printed["after"]) < float(printed["before"]) - 0.2
    assert 0 < float(printed["memory"]) < 1
    run(files, tmp_path / "merged", "--method", method, "--learning-rate", rate, "--merged")
    model, merged = load_checkpoint(tmp_path / "merged" / "model.pth")
    changed = [np.abs(a - b).max() > 1e-6 for a, b in zip(jax.tree.leaves(base), jax.tree.leaves(merged))]
    assert any(changed) == (method != "state")
    if method == "lora":
        pair = load_lora(tmp_path / "alone" / "adapter", model)["blocks_0"]["att"]["value"]
        want = base["blocks_0"]["att"]["value"]["kernel"] + 2 * np.asarray(pair.a) @ np.asarray(pair.b)
        np.testing.assert_allclose(merged["blocks_0"]["att"]["value"]["kernel"], want, atol=1e-5)
    if method == "state":
        states = np.asarray(load_states(tmp_path / "alone" / "states.pth", model))
        stored = load_extras(tmp_path / "merged" / "model.pth")["blocks.0.att.time_state"]
        np.testing.assert_array_equal(stored, states[0].swapaxes(1, 2))
        assert np.abs(states).max() > 0.01


def test_full_trains_float32_and_saves_the_dtype_of_the_file(tmp_path):
    model = small.model(7, vocab_size=256, num_layers=1, param_dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype("bfloat16"), small.params(model))
    options = finetune.Options(tmp_path / "base.pth", tmp_path / "data.jsonl", "full", tmp_path)
    save_checkpoint(options.checkpoint, model, params)
    step, trained = finetune.build_step(options, model, params, 2, 10)
    state = step.start(trained)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    tuned = jax.tree.map(lambda x: x + 1e-2, state.params)
    _, saved = load_checkpoint(finetune.save(options, model, params, tuned))
    jax.tree.map(np.testing.assert_array_equal, saved, jax.tree.map(lambda x: x.astype("bfloat16"), tuned))


def test_dialogues_are_as_the_server_reads_them():
    """The prompt of `fla_jax.serve`, and the answer as later prompts repeat it; bytes are tokens."""
    given = load_tokenizer("bytes"), WorldTemplate()
    tokens, learned = _dialogues.tokenized(*given, "How?\n\nWhy?", "So.\n\nThus.", 100)
    prompt, answer = b"User: How?\nWhy?\n\nAssistant:", b" So.\nThus.\0"
    assert bytes(tokens) == prompt + answer
    assert learned == [0] * len(prompt) + [1] * len(answer)


VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", *"abcxyz"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def of_checkpoint(folder, end):
    """Puts a tokenizer of VOCABULARY and the template CHATML into a folder."""
    library = pytest.importorskip("tokenizers")
    numbers = {word: i for i, word in enumerate(VOCABULARY)}
    made = library.Tokenizer(library.models.WordLevel(numbers, unk_token="a"))
    made.add_special_tokens(VOCABULARY[:3])
    made.pre_tokenizer = library.pre_tokenizers.Split("\n", "isolated")
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "end, answer", [("<|im_end|>", [9, 2]), ("<|endoftext|>", [9, 2, 3, 0]), ("<|im_start|>", [9, 2, 3, 1])]
)
def test_dialogues_in_a_checkpoints_own_format(tmp_path, end, answer):
    """The answer ends with the tokenizer's end of text: the template's, or behind all that this renders."""
    of_checkpoint(tmp_path, end)
    given = checkpoint_tokenizer(tmp_path, vocab_size=12), chat_template(tmp_path)
    tokens, learned = _dialogues.tokenized(*given, "a", "x", 100)
    prompt = [1, 4, 3, 6, 2, 3, 1, 5, 3]  # <|im_start|>user, a line, a<|im_end|>, a line, ...
    assert (tokens, learned) == (prompt + answer, [0] * 9 + [1] * len(answer))
    assert _dialogues.tokenized(*given, "a", "x", 10) == (prompt + [9], [0] * 9 + [1])


def test_a_checkpoint_keeps_its_template(files, tmp_path, capsys):
    """The server finds the template and the tokenizer beside the tuned model."""
    checkpoint, out = tmp_path / "model", tmp_path / "tuned"
    checkpoint.mkdir()
    of_checkpoint(checkpoint, "<|im_end|>")
    save_checkpoint(checkpoint, MODEL, small.params(MODEL), format="huggingface")
    finetune.main(
        ["--checkpoint", str(checkpoint), "--data", str(files / "data.jsonl"), "--out", str(out), "--merged"]
        + TINY
    )
    assert capsys.readouterr().out.splitlines()[-1].split() == ["saved", str(out / "model")]
    assert chat_template(out / "model")([Turn("user", "a")]).endswith("a<|im_end|>\n<|im_start|>assistant\n")
    assert checkpoint_tokenizer(out / "model", vocab_size=256).end_of_text == 2
    load_checkpoint(out / "model")


def test_packing():
    """Only answers are labels, and no document predicts the next one's beginning."""
    documents = [([1, 2, 3, 0], [0, 0, 1, 1]), ([4, 5, 0], [0, 1, 1]), ([6, 7, 8, 9, 0], [0, 0, 0, 1, 1])]
    tokens, mask, ids = _dialogues.packed(documents, 9, 2)
    assert tokens.tolist() == [[1, 2, 3, 0, 4, 5, 0, 0, 0, 0], [6, 7, 8, 9, 0, 0, 0, 0, 0, 0]]
    assert ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert mask.tolist() == [[0, 1, 1, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0]]


def test_refusals(files, tmp_path):
    arguments = ["--checkpoint", files / "model.pth", "--out", tmp_path, *TINY, "--data"]
    for text, message in (
        ('{"prompt": "a"}\n' * 20, "got one without answer"),
        ('{"prompt": "a", "answer": "b"}', "too few"),
        ('{"prompt": "a", "answer": 12}\n' * 20, "--data: every answer must be text, got 12"),
    ):
        (tmp_path / "data.jsonl").write_text(text)
        assert message in refusal(finetune.main, *arguments, tmp_path / "data.jsonl")
    message = "--sequence 12 cuts off the answers of all 6 held-out dialogues"
    assert message in refusal(finetune.main, *arguments, files / "data.jsonl", "--sequence", "12")
