"""What users of the examples can do wrong ends with one line and a status other than 0, and loses nothing."""

import io
import os
import signal
import sys
from pathlib import Path

import _cli
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import state_tracking
import state_tuning
import train_lm
from _text import read_text
from pretraining import refusal

from fla_jax.training import RunFolder, lock_folder

TINY = ["--hidden-size", "16", "--head-dim", "8", "--num-layers", "1", "--sequence", "16", "--batch", "2"]
TINY += ["--steps", "40", "--checkpoint-every", "20", "--sample-bytes", "0"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty current folder, a text of squares in it, and an earlier run."""
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    text = "".join(f"{i} squared is {i * i}, and its double is {2 * i}.\n" for i in range(600))
    Path("texts").mkdir()
    Path("texts/text").write_text(text)
    Path("earlier/checkpoints/60").mkdir(parents=True)
    Path("earlier/options.json").write_text('{"hidden_size": 16, "steps": 30, "seed": 0}')
    Path("file").write_text("kept")
    return tmp_path / "place"


def tree(folder):
    return {path: path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out", "."], "--out: . is the current folder"),
        (["--out", ".."], "--out: .. is the current folder"),
        (["--out", ""], "--out: . is the current folder"),
        (["--out", "file"], "--out: file is a file"),
        (["--out", "file", "--resume"], "--out: file is a file"),
        (["--out", "file/run"], "/file is a file, not a folder"),
        (["--out", "other"], "--out: other contains other files than a run's"),
        (["--out", "texts"], "--data: texts/text is inside texts"),
        (["--out", "earlier", "--data", "earlier/text"], "--data: earlier/text is inside earlier"),
        (["--out", "texts/run", "--data", "texts"], "--out: texts/run is inside the data, texts"),
        (["--out", "link/run", "--data", "texts"], "--out: link/run is inside the data, texts"),
        (["--out", "texts", "--data", "texts"], "--out: texts is inside the data, texts"),
        (["--out", "earlier", "--data", "."], "--out: earlier is inside the data, ."),
        (["--out", "r\udcff"], "is not UTF-8"),
        (["--prompt", "ab\udcff"], "--prompt is not UTF-8: its character 3"),
        (["--data", "/proc/self/mem"], "--data: /proc/self/mem cannot be read: "),
        (["--data", "~nobody-of-this-name/x"], "--data: there is no ~nobody-of-this-name/x"),
        (["--steps", "0"], "--steps must be a finite number above 0, got 0"),
        (["--batch", str(10**20)], "--batch must be below 2**31"),
        (["--seed", str(10**20)], "--seed must be below 2**63"),
        (["--head-dim", "512", "--hidden-size", "512"], "head_dim must be at most 256, got 512"),
        (["--out", "broken", "--resume"], "broken/options.json cannot be read"),
        (["--data", "empty"], "--data: empty contains no text"),
        (["--data", "short"], "--data: 100 bytes are too few"),
        (["--resume", "--out", "new"], "--resume: there is no run in new"),
        (["--resume", "--out", "started"], "--resume: there is no checkpoint in started"),
        (["--head-dim", "7"], "--hidden-size 16, --head-dim 7: "),
        (["--learning-rate", "-1"], "--learning-rate must be a finite number above 0, got -1"),
        (["--validation-share", "1"], "too few for --validation-share 1.0, --sequence 16"),
        (["--resume"], "--steps was 30 in earlier and is 40 now, --seed was 0 in earlier and is 1 now"),
    ],
)
def test_a_refused_run_changes_nothing(place, arguments, message):
    os.symlink("texts", "link")
    Path("other/folder").mkdir(parents=True)
    Path("earlier/text").write_bytes(Path("texts/text").read_bytes())
    for name in ("broken", "started", "empty"):
        Path(name).mkdir()
    Path("broken/options.json").write_text("{")
    Path("started/options.json").write_text('{"hidden_size": 16}')
    Path("short").write_text("x" * 100)
    before = tree(place)
    line = refusal(train_lm.main, "--data", "texts/text", "--out", "earlier", "--seed", 1, *TINY, *arguments)
    assert message in line
    assert tree(place) == before


def test_a_folder_that_cannot_be_read_is_no_smaller_text(place, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # whoever runs tests as root may read everything
    Path("texts/closed").mkdir()
    with pytest.raises(ValueError, match="--data: texts/closed cannot be read: Permission denied"):
        read_text(Path("texts"))


def test_one_process_a_run(place):
    with RunFolder("earlier"):
        os.symlink("earlier", "link")
        before = tree(place)
        for out in (["--out", "earlier"], ["--out", "earlier", "--resume"], ["--out", "link"]):
            line = refusal(train_lm.main, "--data", "texts/text", *TINY, *out)
            assert f"--out: {out[1]} is in use by process {os.getpid()} on " in line
        assert tree(place) == before  # the file with the number, too


def failing(error):
    @_cli.program(lower="--size")
    def main(arguments):
        if callable(error):
            error()
        raise error

    return main


@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("first line\nsecond line"), "test_refusals.py: first line"),
        (FileNotFoundError(2, "No such file", "a/b"), "test_refusals.py: a/b: No such file"),
        (FileNotFoundError("a/b lacks it"), "test_refusals.py: a/b lacks it"),
        (lambda: jnp.zeros(2**46), "test_refusals.py: out of memory (RESOURCE_EXHAUSTED: "),
        (lambda: np.empty(2**50, np.uint8), "test_refusals.py: out of memory (Unable to allocate"),
    ],
)
def test_errors_in_one_line(error, message):
    line = refusal(failing(error))
    assert line.startswith(message) and line.endswith("lower --size") == ("out of memory" in line)


def test_other_errors_keep_their_traceback():
    for error in (KeyError("x"), RuntimeError("x")):
        with pytest.raises(type(error)):
            failing(error)([])


def test_an_interrupt_is_no_error(capsys):
    with pytest.raises(SystemExit) as error:
        failing(KeyboardInterrupt())([])
    assert error.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "\ntest_refusals.py: interrupted\n"


def test_output_that_cannot_be_written(monkeypatch):
    greet = _cli.program(lower="")(lambda arguments: print("\u00e9"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        greet()
        assert sys.stdout.buffer.getvalue() == b"?\n"
    with monkeypatch.context() as patch, open("/dev/full", "w") as full:
        patch.setattr(sys, "stdout", full)
        assert "the output: No space left on device" in refusal(greet)  # and closing it is no error any more
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as error:
            greet([])
        assert error.value.code == 1


def test_no_device(monkeypatch):
    def no_backend():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", no_backend)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError, match=r"^JAX finds no device, with JAX_PLATFORMS='cuda'$"):
        _cli.first_device()


def test_the_other_examples_refuse_before_they_work(place):
    tuning = state_tuning
    for main in (state_tracking.main, tuning.main):
        assert "--out: file is a file" in refusal(main, "--out", "file")
        assert "--seed must be a finite number not negative" in refusal(main, "--seed", "-1")
        assert "--learning-rate must be a finite number above 0" in refusal(main, "--learning-rate", "nan")
    assert "--data: nowhere cannot be read" in refusal(tuning.main, "--data", "nowhere", "--out", "new")
    assert "--data: texts cannot be read" in refusal(tuning.main, "--data", "texts", "--out", "new")
    assert "nowhere" in refusal(tuning.main, "--checkpoint", "nowhere", "--out", "new")
    with lock_folder("new"):
        assert f"new is in use by process {os.getpid()} on " in refusal(tuning.main, "--out", "new")
    assert tree("new") == {}
    assert "--prompt is not UTF-8" in refusal(generate.main, "--prompt", "a\udcff", "--checkpoint", "new")
    assert "new holds neither" in refusal(generate.main, "--prompt", "a", "--checkpoint", "new")
    assert "no 'num_layers'" in refusal(generate.main, "--prompt", "a", "--checkpoint", "earlier")


def test_home(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place))
    options = _cli.parse(train_lm.Options, ["--data", "~/texts", "--out", "~/run"], None)
    assert (options.data, options.out) == (place / "texts", place / "run")
