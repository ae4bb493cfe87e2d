"""train_lm.py and state_tracking.py with tiny sizes: they run, resume exactly, survive a full disk."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import _run
import _text
import generate
import jax
import numpy as np
import pretraining
import pytest
import state_tracking
import train_lm
from pretraining import refusal

from fla_jax.training import TrainingCheckpoints

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

EXAMPLES = pretraining.PROGRAM.parent
TINY = ["--hidden-size", "16", "--head-dim", "8", "--num-layers", "1", "--sequence", "16", "--batch", "2"]
TINY += ["--steps", "60", "--checkpoint-every", "15", "--sample-bytes", "0"]


def arguments(text, out, *more):
    return [str(x) for x in ("--data", text, "--out", out, *TINY, *more)]


def state(out):
    return TrainingCheckpoints(out / "checkpoints", read_only=True).restore()[0]


def losses(out):
    return [(row["step"], row["loss"], row["evaluation_loss"]) for row in pretraining.metrics(out)]


def assert_same(out, other):
    assert losses(out) == losses(other)
    jax.tree.map(np.testing.assert_array_equal, state(out), state(other))


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    train_lm.main(arguments(text, out, "--sample-bytes", 20))
    return out


def test_interrupted_and_resumed_equals_straight(straight, text, tmp_path):
    out = tmp_path / "run"
    process = pretraining.start(arguments(text, out), {}, EXAMPLES / "train_lm.py")
    pretraining.wait_for(process, (out / "checkpoints" / "15").exists)
    process.send_signal(signal.SIGINT)
    output = pretraining.finish(process)
    if process.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert process.returncode == 128 + signal.SIGINT and "--resume" in output, output
    train_lm.main(arguments(text, out, "--resume"))
    assert_same(out, straight)


def test_an_ended_run_that_is_resumed_has_no_speed(straight, text, tmp_path, capsys):
    out = shutil.copytree(straight, tmp_path / "run")
    train_lm.main(arguments(text, out, "--resume", "--sample-bytes", 0))
    printed = capsys.readouterr().out
    assert f"checkpoint        {out}/checkpoints/60" in printed and "nan tokens/s" not in printed


# in a process of its own: background writes would go on here
NO_DISK = """
import resource, sys
import train_lm
from fla_jax.training import TrainingCheckpoints

def no_disk(self, step, *args, save=TrainingCheckpoints.save):
    self.wait()
    if step == 45:  # writing more to a file fails, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    save(self, step, *args)

TrainingCheckpoints.save = no_disk
train_lm.main(sys.argv[1:])
"""


def test_a_full_disk(straight, text, tmp_path):
    """One line, no tracebacks of Orbax; the last good checkpoint leads to the same end."""
    out = tmp_path / "run"
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", NO_DISK, *arguments(text, out)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    full, kept = os.strerror(errno.EFBIG), f"the last good checkpoint is {out}/checkpoints/30"
    assert done.stderr == f"train_lm.py: {out}/checkpoints/45 cannot be written: {full}; {kept}\n"
    assert done.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no lock is left
    train_lm.main(arguments(text, out, "--resume"))
    assert_same(out, straight)


def test_results(straight):
    rows = losses(straight)
    assert [int(step) for step, _, _ in rows] == [*range(1, 61)]
    held_out = [float(loss) for _, _, loss in rows if loss]
    assert len(held_out) == 4 and held_out[-1] < held_out[0] < 5.6
    assert (straight / "loss.png").stat().st_size > 10_000


def test_another_seed_is_another_run_and_the_first_one_is_kept(straight, text, tmp_path, capsys):
    out = shutil.copytree(straight, tmp_path / "run")
    train_lm.main(arguments(text, out, "--seed", 1, "--steps", 20, "--sample-bytes", 5, "--prompt", "[b]12"))
    assert (tmp_path / "run-1" / "checkpoints" / "60").exists()
    assert losses(out)[0] != losses(straight)[0]
    printed = capsys.readouterr().out
    for words in (
        "moved the earlier run",
        "parameters",
        "held out",
        "[b]12",
        "tokens/s",
        "loss.png",
        "checkpoints/20",
    ):
        assert words in printed


def test_rwkv6_on_a_directory_in_fp8(text, tmp_path, capsys):
    texts = tmp_path / "texts"
    (texts / "deeper").mkdir(parents=True)
    (texts / "a.txt").write_bytes(text.read_bytes())
    (texts / "deeper" / "b.md").write_bytes(text.read_bytes()[:5000])
    (texts / "binary").write_bytes(bytes(100))
    (texts / ".hidden").write_bytes(b"hidden")
    assert _text.read_text(texts) == text.read_bytes() + b"\n\n" + text.read_bytes()[:5000]
    more = ("--model", "rwkv6", "--precision", "fp8", "--steps", 20)
    train_lm.main(arguments(texts, tmp_path / "run", *more))
    assert "rwkv6, " in capsys.readouterr().out
    model, _ = generate.load_model(tmp_path / "run")
    assert not model.config.fp8 and model.config.dtype == "float32"


def test_split_and_batches():
    text = bytes(np.random.default_rng(0).integers(0, 256, 20_001).astype(np.uint8))
    options = train_lm.Options()
    train, held = train_lm.split(text, options)
    assert train.size + held.size == 20_000 and held.shape == (8, 193)
    train = train.tobytes()
    for block in held.astype(np.uint8):
        assert block.tobytes() in text and block.tobytes()[:32] not in train
    batch = train_lm.batch_at(np.frombuffer(train, np.uint8), 3, options)
    assert batch.shape == (8, 129) and all(row.astype(np.uint8).tobytes() in train for row in batch)


def test_default_text_repeats_no_paragraph():
    text = _text.read_text(None).decode()
    assert len(text) > 300_000
    paragraphs = [p for p in text.split("\n\n") if len(p) > 80]
    assert len(set(paragraphs)) > 0.99 * len(paragraphs)


def test_a_resumed_run_has_the_same_text(straight, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_bytes(text.read_bytes()[1:])
    os.symlink(straight, "run")
    line = refusal(train_lm.main, *arguments("other", "run", "--resume"))
    assert "--resume: the text (--data)" in line and os.path.islink("run")


def test_a_plot_that_cannot_be_written_leaves_the_old_one(straight, tmp_path, monkeypatch):
    out = shutil.copytree(straight, tmp_path / "run")
    curve = (out / "loss.png").read_bytes()

    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"No space left on device: '.*loss\.png'"):
        _run.plot(out, "title")
    assert (out / "loss.png").read_bytes() == curve and not list(out.glob("*.tmp"))


def test_state_tracking(tmp_path, capsys):
    tiny = ["--steps", "50", "--length", "8", "--batch", "4", "--rate-scales", "2.0", "--out", str(tmp_path)]
    state_tracking.main(tiny)
    assert "rate scale 2" in capsys.readouterr().out and (tmp_path / "parity.png").stat().st_size > 10_000
    for wrong, message in {
        "--steps=0": "--steps",
        "--rate-scales=3": "rate_scale",
        "--head-dim=5": "head_dim",
    }.items():
        assert message in refusal(state_tracking.main, *tiny, wrong)
