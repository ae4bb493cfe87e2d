"""The folder of a training run, which ``train_lm.py`` writes and ``generate.py`` reads."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from _cli import about, make_folder, reason, replacing


def check_folders(out: Path, data: Path | None, resume: bool) -> None:
    """Refuses folders in which a run would lose or mix up files; changes nothing."""
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out: {out} is a file, not a folder")
    real, text = Path(os.path.realpath(out)), data and Path(os.path.realpath(data))
    try:
        str(real).encode()
    except UnicodeEncodeError:
        raise ValueError(f"--out: {out} is not UTF-8, and checkpoints cannot be written there") from None
    if text and text.is_dir() and real.is_relative_to(text):
        raise ValueError(f"--out: {out} is inside --data {data}: the run's files would become text to learn")
    if resume:
        if not (out / "options.json").exists():
            raise ValueError(f"--resume: there is no run in {out} (--out); start it without --resume")
        if not os.access(out, os.W_OK):
            raise ValueError(f"--out: {out} is not writable")
        return
    if Path.cwd().is_relative_to(real):
        raise ValueError(f"--out: {out} is the current folder or one above it; name one for this run alone")
    if text and text.is_relative_to(real):
        raise ValueError(f"--data: {data} is inside --out {out}, which a run moves aside to begin anew")
    if out.is_dir() and any(out.iterdir()) and not (out / "options.json").exists():
        raise ValueError(f"--out: {out} holds other files than a run's; name a folder for this run alone")


def lock_file(out: Path) -> Path:
    """Where the lock on a run lies: beside the folder, which may be moved aside, or not exist yet."""
    real = Path(os.path.realpath(out))
    return real.with_name(f".{real.name}.lock")


def described(out: Path) -> dict[str, Any]:
    """The options that the run in ``out`` was started with."""
    path = out / "options.json"
    try:
        options = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(options).__name__}")
    return options


def resume(out: Path, facts: dict[str, Any]) -> ocp.CheckpointManager:
    """The checkpoints of a run to go on with; refuses other options than it began with, and names them."""
    check_same(out, facts)
    manager = _checkpoints(out)
    if manager.latest_step() is None:
        raise ValueError(f"--resume: there is no checkpoint in {out} (--out) yet; start without --resume")
    return manager


def check_same(out: Path, facts: dict[str, Any]) -> None:
    """Refuses other options than the run in ``out`` began with, and names them."""
    changes = []
    for name, then in described(out).items():
        if facts.get(name) != then:
            what = "the text (--data)" if name == "text" else "--" + name.replace("_", "-")
            changes.append(f"{what} was {then} in {out} and is {facts.get(name)} now")
    if changes:
        hint = "resume with the same options, or start another run with --out"
        raise ValueError(f"--resume: {', '.join(changes)}; {hint}")


def begin(out: Path, facts: dict[str, Any]) -> ocp.CheckpointManager:
    """Makes the folder of a new run, and its checkpoints, none yet; an earlier run is moved aside."""
    make_run(out, facts)
    return _checkpoints(out)


def make_run(out: Path, facts: dict[str, Any]) -> None:
    """Makes the folder of a new run; an earlier one is moved aside."""
    if (out / "options.json").exists():
        real = Path(os.path.realpath(out))  # a symbolic link stays: the new run shall lie on the same disk
        names = (real.with_name(f"{real.name}-{i}") for i in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        with about(f"--out: {out}", "moved aside"):
            real.rename(aside)
        here = Path.cwd()
        print(f"moved the earlier run to {aside.relative_to(here) if aside.is_relative_to(here) else aside}")
    make_folder(Path(os.path.realpath(out)))
    describe(out, facts)


def describe(out: Path, facts: dict[str, Any]) -> None:
    """Writes down what the run in ``out`` was started with."""
    with replacing(out / "options.json") as new:
        new.write_text(json.dumps(facts, indent=2) + "\n")


def _checkpoints(out: Path) -> ocp.CheckpointManager:
    """For the one process that has claimed ``out``; clears away half checkpoints that a killed one left."""
    keep = {"max_to_keep": 2, "cleanup_tmp_directories": True}
    options = ocp.CheckpointManagerOptions(**keep, enable_async_checkpointing=False)
    with about(out / "checkpoints", "opened"):
        return ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)


def save(manager: ocp.CheckpointManager, out: Path, log: list[list[float]], state: Any) -> None:
    """Saves the log and a checkpoint of the step of its last row; where that fails, those before it stay."""
    if not (out / "options.json").exists():  # Orbax would make the folders again, and leave half a run
        raise ValueError(f"--out: {out} is gone, deleted or moved while the run went on")
    with replacing(out / "log.csv") as new, open(new, "w", newline="") as file:
        csv.writer(file).writerows([["step", "train_loss", "validation_loss"], *log])
    step, kept = log[-1][0], manager.latest_step()
    try:
        with reported_once():
            manager.save(step, args=ocp.args.StandardSave(state))
    except Exception as error:  # Orbax and TensorStore raise what they like
        path = out / "checkpoints" / str(step)
        again = "" if kept is None else f"; that of step {kept} is kept, and --resume goes on from there"
        raise ValueError(f"{path} cannot be written: {reason(error)}{again}") from error


def restore(manager: ocp.CheckpointManager, out: Path, state: Any = None) -> Any:
    """The last checkpoint: placed as ``state``, or on the first device whatever it was saved from."""
    step = manager.latest_step()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        with reported_once():
            return manager.restore(step, args=ocp.args.StandardRestore(state, fallback_sharding=place))
    except Exception as error:
        path = out / "checkpoints" / str(step)
        hint = "delete it to use the one before, if there is one"
        raise ValueError(f"{path} cannot be read: {reason(error)}; {hint}") from error


def read_last(out: Path) -> Any:
    """The last checkpoint of a run, which may be going on: nothing is changed."""
    if not (out / "checkpoints").is_dir():
        raise ValueError(f"{out} holds no checkpoint yet")
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager((out / "checkpoints").absolute(), options=options) as manager:
        if manager.latest_step() is None:
            raise ValueError(f"{out} holds no checkpoint yet")
        return restore(manager, out)


@contextlib.contextmanager
def reported_once() -> Iterator[None]:
    """Leaves it to the exception to tell of an error.

    Orbax and asyncio also log it, several times, and writes that are still under way report to an event loop
    that is gone, each with a traceback. That goes on for moments after the exception, so silence stays from
    then on: the program is at its end.
    """
    hook, levels = sys.unraisablehook, {name: logging.getLogger(name).level for name in ("absl", "asyncio")}
    sys.unraisablehook = lambda unraisable: None
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield
    sys.unraisablehook = hook
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def read_log(out: Path, step: int) -> list[list[float]]:
    """The rows of log.csv up to a step, which has one."""
    path = out / "log.csv"
    try:
        with open(path, newline="") as file:
            rows = list(csv.reader(file))[1:]
        log = [[int(at), float(train), float(held)] for at, train, held in rows if int(at) <= step]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error
    if not log or log[-1][0] != step:
        raise ValueError(f"{path} has no row for step {step}, that of the last checkpoint")
    return log


def plot_log(out: Path, log: list[list[float]], averaged: int, title: str) -> None:
    """Draws the loss curve, loss.png; ``averaged`` is the number of steps that a row tells the mean of."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, train, held = np.array(log).T
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, train, color="tab:blue", alpha=0.6, lw=1, label=f"training (mean of {averaged} steps)")
    known = ~np.isnan(held)
    label = f"held out: {held[known][-1]:.3f} at the end"
    axes.plot(steps[known], held[known], "o-", color="tab:orange", label=label)
    axes.set(xlabel="optimiser step", ylabel="loss, nats per byte", title=title)
    axes.set(ylim=(0, min(6, train.max() * 1.05)))
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(out / "loss.png") as new:
        figure.savefig(new, dpi=150)
    plt.close(figure)
