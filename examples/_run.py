"""The folder of a training run: options.json, checkpoints/, metrics.csv, tensorboard/; its progress bar."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
from _cli import flag
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fla_jax.checkpoints.files import replacing
from fla_jax.models import RWKVConfig, family_of
from fla_jax.training import (
    RunFolder,
    StepMetrics,
    TrainingCheckpoints,
    count_parameters,
    last_checkpoint,
)


def build_model(options: Any, **more: Any) -> Any:
    """The model of the options."""
    sizes = {name: getattr(options, name) for name in ("hidden_size", "num_layers", "head_dim")}
    try:
        config = RWKVConfig.from_dict({"model_type": options.model, **sizes, **more})
        return family_of(config).model(config)
    except ValueError as error:
        named = f"--hidden-size {options.hidden_size}, --head-dim {options.head_dim}"
        raise ValueError(f"{named}: {error}") from error


def facts(options: Any, may_change: set[str], **more: str) -> dict[str, Any]:
    """What stays the same between a run and its resumption."""
    return {name: x for name, x in dataclasses.asdict(options).items() if name not in may_change} | more


def start(
    folder: RunFolder, options: Any, facts: dict[str, Any], step: Any, **more: Any
) -> tuple[TrainingCheckpoints, Any, dict[str, Any]]:
    """`RunFolder.start` with the state of a `TrainStep`; prints what happened."""
    init = lambda: step.init(jax.random.key(options.seed))
    checkpoints, state, data = folder.start(facts, init, step.abstract_state, **more)
    if jax.process_index() == 0:
        if folder.moved:
            print(f"moved the earlier run to {os.path.relpath(folder.moved)}")
        for name, (then, now) in folder.changes.items():
            print(f"{flag(name)} was {then} before and is {now} from now on")
        if options.resume:
            print(f"resuming at step {int(state.step)}")
    return checkpoints, state, data


class Metrics(StepMetrics):
    """The metrics of a run, with a progress bar; ``evaluation_loss`` is the last one."""

    def __init__(self, options: Any, checkpoints: Any, columns: Any, state: Any, peak: float | None = None):
        """``peak``: TFLOP/s of a device; None for that of its name."""
        total, multiplied = count_parameters(state.params)
        first = int(state.step)
        super().__init__(options.out, columns, multiplied, first, peak_tflops=peak)
        self._options, self._checkpoints, self.evaluation_loss = options, checkpoints, float("nan")
        self._row: dict[str, float] = {}
        self._console = Console(highlight=False, soft_wrap=True, quiet=jax.process_index() > 0)
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        self._console.print(f"{options.model}, {total:,} parameters, {devices}")
        text = TextColumn(
            "loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s{task.fields[share]}"
        )
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), text, TimeRemainingColumn()
        self._progress = Progress(*columns, console=self._console, disable=self._console.quiet)
        fields: dict[str, Any] = {"loss": float("nan"), "rate": 0.0, "share": ""}
        self._bar = self._progress.add_task("", total=options.steps, completed=first, **fields)
        self._progress.start()

    def close(self) -> None:
        self._progress.stop()
        super().close()

    def read(self, tokens: int) -> dict[str, float]:
        """See `StepMetrics.read`; the error says where to go on from."""
        try:
            self._row = super().read(tokens)
        except FloatingPointError as error:
            self._checkpoints.wait()
            last = last_checkpoint(self._checkpoints.folder)
            good = f"the last good checkpoint is {last}, and --resume continues from it, perhaps with a"
            hint = f"{good} lower --learning-rate" if last else "try a lower --learning-rate"
            raise ValueError(f"{error}; {hint}") from error
        return self._row

    def evaluated(self, loss: float) -> None:
        """Adds an evaluation to the last step's numbers, and prints it."""
        self.evaluation_loss = self._row["evaluation_loss"] = loss
        losses = f"training loss {self._row['loss']:.4f}, held out {loss:.4f} nats per token"
        self._console.print(f"step {self._row['step']:6}: {losses}")

    def write_rows(self) -> None:
        """Writes the steps since the last call, and moves the bar."""
        row = self._row
        share = f", {row['share_of_6n']:.1%} of 6N" if "share_of_6n" in row else ""
        shown = {"loss": row["loss"], "rate": row.get("tokens_per_second", 0.0), "share": share}
        self._progress.update(self._bar, completed=row["step"], **shown)
        super().write_rows()

    def exit_stopped(self, step: int, number: int) -> None:
        """Ends a program that a signal stopped, when its checkpoint is complete."""
        self._checkpoints.close()
        again = shlex.join([*sys.argv, *([] if self._options.resume else ["--resume"])])
        done = f"stopped at step {step} of {self._options.steps}, checkpoint saved"
        self._console.print(f"{done}. Resume with: python {again}")
        sys.exit(128 + number)

    def print_results(self, more: str = "") -> None:
        """The last lines of a run."""
        if not math.isnan(self.evaluation_loss):
            self._console.print(f"held-out loss     {self.evaluation_loss:.4f} nats per token{more}")
        if not math.isnan(self.throughput.rate):  # no step was timed
            self._console.print(f"speed             {self.throughput.rate:,.0f} tokens/s")
        self._console.print(f"checkpoint        {last_checkpoint(self._checkpoints.folder)}")


def plot(out: Path, title: str) -> None:
    """Draws metrics.csv as loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, style, label in (("loss", "-", "training loss"), ("evaluation_loss", "o-", "held-out loss")):
        known = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        axes.plot(*zip(*known), style, label=f"{label}: {known[-1][1]:.3f} at the end")
    axes.set(xlabel="optimiser step", ylabel="nats per token", title=title)
    axes.set_ylim(0, min(6, max(float(row["loss"]) for row in rows) * 1.05))
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(out / "loss.png") as file:
        figure.savefig(file, dpi=150, format="png")
    plt.close(figure)
    print(f"loss curve        {out / 'loss.png'}")
