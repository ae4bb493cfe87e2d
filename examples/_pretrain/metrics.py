"""The metrics of ``pretrain.py``: a progress bar, metrics.csv, TensorBoard."""

from __future__ import annotations

import csv
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
from _cli import about, reason, replacing
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

COLUMNS = ("step", "loss", "gradient_norm", "learning_rate", "evaluation_loss", "tokens_per_second")
COLUMNS += ("share_of_6n", "memory_gb")
# dense bf16, without sparsity, as their makers state them
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "H800": 989.0,
    "L40S": 362.0,
    "A40": 150.0,
    "A6000": 155.0,
    "RTX 5090": 210.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}


def peak_flops(given: float | None) -> float | None:
    """FLOP/s of a device: as given, by its name, or unknown."""
    words = set(re.split(r"[\s-]+", jax.devices()[0].device_kind.lower()))
    known = next((peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.lower().split())), None)
    tflops = known if given is None else given
    return None if tflops is None else tflops * 1e12


def memory_gb() -> float:
    """The most that one of this process' devices has held; on a CPU, that the process has."""
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if None not in found:
        return max(found) / 1e9
    if sys.platform == "win32":
        return float("nan")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def summary_writer(folder: Path, step: int) -> Any:
    """TensorBoard's events from ``step`` on; TensorBoard drops what the folder has of later ones."""
    hide = "torch" not in sys.modules
    if hide:  # tensorboardX imports it where it is installed, for seconds, and for nothing that is used here
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    return SummaryWriter(str(folder), purge_step=step, flush_secs=10)


class Metrics:
    """Where the numbers of a run go; in other processes than the first, nowhere. A context manager."""

    def __init__(
        self, out: Path, first: int, total: int, flops_per_token: float, peak: float | None, console: Console
    ):
        """``first`` is the step that the run goes on from: rows of later ones are dropped."""
        self._out, self._first, self._total, self._console = out, first, total, console
        self._flops, self._peak = flops_per_token, peak
        self._mine = jax.process_index() == 0
        self._rate = self._share = float("nan")
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> Metrics:
        if self._mine:
            self._csv = open_csv(self._out / "metrics.csv", self._first)
            with about(self._out / "tensorboard", "written"):
                self._board = summary_writer(self._out / "tensorboard", self._first + 1)
        text = "loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s{task.fields[share]}"
        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn(text)]
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
        self._progress = Progress(*columns, console=self._console, disable=not self._mine)
        fields: dict[str, Any] = {"loss": float("nan"), "rate": 0.0, "share": ""}
        self._bar = self._progress.add_task("", total=self._total, completed=self._first, **fields)
        self._progress.start()
        self.restart()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()
        if self._mine:
            self._board.close()
            self._csv.close()

    def restart(self) -> None:
        """Begins to measure: what was before (compiling, say) does not count."""
        self._since = time.perf_counter()

    def measured(self, tokens: int) -> None:
        """So many tokens were trained on since `restart`, or since this was called before."""
        now = time.perf_counter()
        self._rate = tokens / (now - self._since)
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + now - self._since
        self._share = self._flops * self._rate / self._peak if self._peak else float("nan")
        self._since = now

    def write(self, rows: list[dict[str, float]]) -> None:
        """Rows of `COLUMNS`; speed and memory are added to the last one."""
        if not self._mine or not rows:
            return
        speed = {"tokens_per_second": self._rate, "share_of_6n": self._share, "memory_gb": memory_gb()}
        rows[-1].update({name: value for name, value in speed.items() if value == value})
        with about(self._out / "metrics.csv", "written"):
            csv.writer(self._csv).writerows([[row.get(name, "") for name in COLUMNS] for row in rows])
            self._csv.flush()
        with about(self._out / "tensorboard", "written"):
            for row in rows:
                for name in COLUMNS[1:]:
                    if name in row:
                        self._board.add_scalar(name, row[name], int(row["step"]))
        share = f", {self._share:.1%} of 6N" if self._share == self._share else ""
        shown = {
            "loss": rows[-1]["loss"],
            "rate": 0.0 if self._rate != self._rate else self._rate,
            "share": share,
        }
        self._progress.update(self._bar, completed=int(rows[-1]["step"]), **shown)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self._progress.print(line)

    @property
    def rate(self) -> float:
        """Tokens per second, over all that was measured."""
        return self._tokens / self._seconds if self._seconds else float("nan")


def _is_whole(row: list[str], step: int) -> bool:
    """Whether it is a row of at most this step; a killed run may have left a part of a later one."""
    return len(row) == len(COLUMNS) and int(row[0]) <= step


def open_csv(path: Path, step: int) -> Any:
    """The file to append rows of the steps after ``step`` to; those that it has of them are dropped."""
    kept: list[list[str]] = []
    if path.exists() and step:
        try:
            with open(path, newline="") as file:
                kept = [row for row in list(csv.reader(file))[1:] if _is_whole(row, step)]
        except (OSError, ValueError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read: {reason(error)}") from error
    with replacing(path) as new, open(new, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *kept])
    return open(path, "a", newline="")
