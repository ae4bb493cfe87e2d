"""The example programs: run, waited for, refused; what runs of pretrain.py leave."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fla_jax.data import BinIdxWriter

PROGRAM = Path(__file__).parents[1] / "examples" / "pretrain.py"
TINY = ["--hidden-size", "32", "--head-dim", "16", "--num-layers", "2", "--sequence", "32", "--batch", "8"]
TINY += ["--save-every", "10", "--eval-every", "20", "--eval-rows", "12", "--log-every", "5"]
TINY += ["--held-out", "0.1"]
STEPS = 60
EXACT = ("step", "loss", "gradient_norm", "learning_rate", "evaluation_loss")


def documents(folder):
    """A binidx pair of counting bytes, of many lengths."""
    rng = np.random.default_rng(0)
    with BinIdxWriter(folder / "d") as writer:
        for _ in range(400):
            begin, length = rng.integers(0, 200), rng.integers(2, 60)
            writer.add([*(begin + np.arange(length)) % 200 + 1, 0])
    return folder / "d.bin"


def arguments(data, out, *more, steps=STEPS):
    return [str(x) for x in ("--data", data, "--out", out, *TINY, "--steps", steps, *more)]


def start(more, variables, program=PROGRAM):
    """A program, with its output in a pipe, and environment variables beside those of this process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, program, *more], env={**os.environ, **variables}, **pipes)


def finish(process, seconds=240):
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return output


def refusal(main, *more):
    with pytest.raises(SystemExit) as error:
        main([str(x) for x in more])
    line = str(error.value)
    assert line and "\n" not in line and line.split(": ")[0].endswith(".py"), line
    return line


def wait_for(process, is_there, seconds=600):
    deadline = time.time() + seconds
    while not is_there() and process.poll() is None and time.time() < deadline:
        time.sleep(0.001)


def metrics(out):
    with open(out / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def exact(out):
    """What two runs that are the same have in common, to the last bit."""
    return [[row[name] for name in EXACT] for row in metrics(out)]


def column(out, name):
    return np.array([float(row[name]) for row in metrics(out) if row[name]])


def saved(out, step=STEPS):
    """Everything in a checkpoint, on this process' one device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.CheckpointManager((out / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == step
        items = {"state": ocp.args.StandardRestore(fallback_sharding=place), "data": ocp.args.JsonRestore()}
        found = manager.restore(step, args=ocp.args.Composite(**items))
    return found["state"], found["data"]


def assert_same(out, other):
    assert exact(out) == exact(other)
    jax.tree.map(np.testing.assert_array_equal, saved(out), saved(other))
