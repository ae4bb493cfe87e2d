"""generate.py and state_tuning.py with tiny sizes."""

import json
import re

import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
import state_tuning
from pretraining import refusal

from fla_jax.checkpoints import read_pth, save_checkpoint
from fla_jax.training import TrainingCheckpoints, save_states

pytestmark = [pytest.mark.slow, pytest.mark.one_python]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Random bytes are all that this model says."""
    model = small.model(7, vocab_size=256, num_layers=1)
    path = tmp_path_factory.mktemp("checkpoint") / "model.pth"
    save_checkpoint(path, model, small.params(model))
    return path


def run(module, capsys, *arguments):
    module.main([str(a) for a in arguments])
    return capsys.readouterr().out


def test_generate(checkpoint, tmp_path, capsys):
    arguments = ("--checkpoint", checkpoint, "--tokens", "12", "--ban", *range(128, 256), "--prompt")
    one, other = (run(generate, capsys, *arguments, prompt) for prompt in ("Hello", "You"))
    assert one.startswith("Hello") and len(one.encode()) == 17 and other.startswith("You")
    both = run(generate, capsys, *arguments, "Hello", "You")
    assert both.split("\n\n---\n\n")[0] == one  # the first prompt's seed is the same
    assert run(generate, capsys, *arguments, "Hello", "--seed", "1") != one
    save_states(tmp_path / "states.pth", 10 * np.random.default_rng(0).normal(size=(1, 2, 16, 16)))
    greedy = [
        run(generate, capsys, *arguments, "Hello", "--temperature", "0", *more)
        for more in ([], ["--states", tmp_path / "states.pth"])
    ]
    assert greedy[0] != greedy[1]


def test_generate_from_train_lm(tmp_path, capsys):
    model = small.model(7, vocab_size=256, num_layers=1)
    plain = type(model)(type(model.config)(256, 32, 1, 16))
    params = small.params(plain)
    options = {"model": "rwkv7", "hidden_size": 32, "num_layers": 1, "head_dim": 16}
    (tmp_path / "options.json").write_text(json.dumps(options))
    (tmp_path / "checkpoints").mkdir()
    more = ("--checkpoint", tmp_path, "--prompt", "a")
    assert "contains no checkpoint yet" in refusal(generate.main, *more)
    with TrainingCheckpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, {"step": jnp.int32(3), "params": params})
    loaded, restored = generate.load_model(tmp_path)
    assert loaded == plain
    np.testing.assert_array_equal(restored["head"]["kernel"], params["head"]["kernel"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--checkpoint", "nowhere", "--prompt", "a"], "nowhere"),
        (["--prompt", ""], "--prompt must not be empty"),
        (["--prompt"], "--prompt must not be empty"),
        (["--prompt", "a", "--top-p", "2"], "top_p must be from 0 to 1"),
        (["--prompt", "a", "--tokenizer", "nowhere"], "nowhere"),
        (["--prompt", "a", "--stop", "256"], "stop_tokens must hold tokens"),
        (["--prompt", "a", "--tokens", "-1"], "max_tokens must be an integer >= 0"),
    ],
)
def test_errors(checkpoint, capsys, arguments, message):
    with pytest.raises(SystemExit, match=message):
        run(generate, capsys, "--checkpoint", checkpoint, *arguments)
    assert capsys.readouterr().out == ""  # the message stands on a line of its own


def test_tokens_per_second(checkpoint, capsys):
    for prompts, count in ((["a"], 5), (["a", "b", "c"], 15)):
        generate.main(["--checkpoint", str(checkpoint), "--tokens", "5", "--prompt", *prompts])
        assert re.fullmatch(rf"{count} tokens, \d+\.\d tokens/s\n", capsys.readouterr().err.lstrip())


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
def test_not_a_number_is_one_line(tmp_path, capsys, prompts):
    model = small.model(7, vocab_size=256, num_layers=1)
    params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), small.params(model))
    save_checkpoint(tmp_path / "model.pth", model, params)
    with pytest.raises(SystemExit, match=r"^generate.py: .*model.pth: row 0: the logits for") as error:
        run(generate, capsys, "--checkpoint", tmp_path / "model.pth", "--prompt", *prompts)
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


def test_state_tuning(tmp_path, capsys):
    sizes = ("--base-size", 64, "--base-steps", 30, "--steps", 15, "--sequence", 16, "--batch", 4)
    tiny = (*sizes, "--out", tmp_path)
    out = run(state_tuning, capsys, *tiny)
    lines = [line.split() for line in out.splitlines() if line.startswith(("before", "after"))]
    before, after = (float(line[1]) for line in lines)
    assert after < before and "unchanged, bit for bit" in out
    assert [x.shape for x in read_pth(tmp_path / "states.pth").values()] == [(1, 64, 64)] * 2
    (tmp_path / "text").write_text("short")
    more = ("--checkpoint", tmp_path / "base.pth", *tiny, "--data", tmp_path / "text")
    assert "--data: 5 tokens are too few" in refusal(state_tuning.main, *more)
