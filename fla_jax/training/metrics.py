"""Speed and metrics of a training run: tokens a second, metrics.csv, TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import jax
from jaxtyping import PyTree

from ..checkpoints.files import replacing
from .memory import peak_memory

# dense bfloat16, without sparsity, as the manufacturers state it
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


class Throughput:
    """Tokens per second, and what share of the devices' peak they use at 6 FLOP a parameter and token.

    Example:
        >>> from fla_jax.training import Throughput
        >>> throughput = Throughput(num_params=1000, peak_tflops=1.0)
        >>> sorted(throughput.measure(tokens=512))
        ['memory_gb', 'share_of_6n', 'tokens_per_second']
    """

    def __init__(self, num_params: int, peak_tflops: float | None = None):
        """Starts to measure.

        Args:
            num_params: that multiply every token, so without the embedding.
            peak_tflops: of one device; None: by its name (`PEAK_TFLOPS`), or unknown.
        """
        if peak_tflops is None:
            words = set(re.split(r"[\s-]+", jax.devices()[0].device_kind.lower()))
            names = (name for name in PEAK_TFLOPS if words.issuperset(name.lower().split()))
            peak_tflops = PEAK_TFLOPS.get(next(names, ""))
        self.peak_flops = None if peak_tflops is None else peak_tflops * 1e12 * jax.device_count()
        self._num_params, self._tokens, self._seconds = num_params, 0, 0.0
        self.restart()

    def restart(self) -> None:
        """Leaves out the time since the last call of `measure`: compilation, evaluation, a checkpoint."""
        self._since = time.perf_counter()

    def measure(self, tokens: int) -> dict[str, float]:
        """Counts tokens that were trained since the last call or `restart`.

        Returns:
            ``tokens_per_second``, ``memory_gb`` (`peak_memory`) and, with a known peak, ``share_of_6n``.
        """
        now = time.perf_counter()
        rate = tokens / (now - self._since)
        self._tokens, self._seconds, self._since = (
            self._tokens + tokens,
            self._seconds + now - self._since,
            now,
        )
        row = {"tokens_per_second": rate, "memory_gb": peak_memory() / 1e9}
        if self.peak_flops is not None:
            row["share_of_6n"] = 6 * self._num_params * rate / self.peak_flops
        return row

    @property
    def rate(self) -> float:
        """Tokens per second over all measurements; NaN without any."""
        return self._tokens / self._seconds if self._seconds else float("nan")


class MetricWriter:
    """Writes a row of numbers a step to metrics.csv, and to TensorBoard. A context manager; in a run of
    several processes only the first one writes.

    Example:
        >>> import pathlib, tempfile
        >>> from fla_jax.training import MetricWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with MetricWriter(folder, ("step", "loss")) as writer:
        ...         writer.write([{"step": 1, "loss": 0.5}, {"step": 2}])
        ...     pathlib.Path(folder, "metrics.csv").read_text().split()
        ['step,loss', '1,0.5', '2,']
    """

    def __init__(self, folder: str | os.PathLike[str], columns: Sequence[str], last_step: int = 0):
        """Opens the files.

        Args:
            folder: of the run, which exists.
            columns: names of the numbers, ``"step"`` first. Other columns of earlier rows stay behind them.
            last_step: the step that a run resumes from: rows of later steps are dropped.

        Raises:
            ImportError: tensorboardX is not installed.
            ValueError: metrics.csv of the earlier run cannot be read. OSError: a file cannot be written.
        """
        self._path, self._writes = Path(folder) / "metrics.csv", jax.process_index() == 0
        if self._writes:
            rows = self._earlier_rows(last_step) if last_step else []
            self._columns = tuple(dict.fromkeys(itertools.chain(columns, *rows[:1])))
            text = io.StringIO()
            writer = csv.DictWriter(text, self._columns)
            writer.writeheader()
            writer.writerows(rows)
            with replacing(self._path) as file:
                file.write(text.getvalue().encode())
            self._csv = open(self._path, "a", newline="")  # noqa: SIM115, close() closes it
            self._board = _summary_writer(Path(folder) / "tensorboard", last_step + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        if self._writes:
            self._board.close()
            self._csv.close()

    def write(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Appends rows, numbers by column; missing ones stay empty.

        Raises:
            OSError: a file cannot be written.
        """
        if not self._writes:
            return
        with _naming(self._path):
            csv.writer(self._csv).writerows([[row.get(name, "") for name in self._columns] for row in rows])
            self._csv.flush()
        with _naming(self._path.with_name("tensorboard")):
            for row in rows:
                for name in self._columns[1:]:
                    if name in row:
                        self._board.add_scalar(name, row[name], int(row["step"]))

    def _earlier_rows(self, last_step: int) -> list[dict[str, str]]:
        """Rows up to a step, by column."""
        if not self._path.exists():
            return []
        try:
            rows = _complete_rows(self._path.read_bytes())
            return [row for row in rows if int(row["step"]) <= last_step]
        except (OSError, ValueError, csv.Error) as error:
            raise ValueError(f"{self._path} cannot be read: {error}") from error


def _complete_rows(data: bytes) -> Iterator[dict[str, str]]:
    """Rows of a CSV file, by column, without the part of a row that a killed run may have left at the end."""
    text = data[: data.rfind(b"\n") + 1].decode()
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if "step" not in (reader.fieldnames or ["step"]):
        raise ValueError(f"its columns must include step, got {reader.fieldnames}")
    for row in reader:
        if None in row or None in row.values():  # as DictReader marks surplus and missing values
            raise ValueError(f"line {reader.line_num} must have a value for each column")
        yield row


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds a path to errors of the system, which name no file when a write fails."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _summary_writer(folder: Path, step: int) -> PyTree:
    """TensorBoard's events from ``step`` on; later ones that the folder has are superseded."""
    hide = "torch" not in sys.modules
    if hide:  # tensorboardX imports torch if it can, which takes seconds and serves nothing here
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("MetricWriter needs tensorboardX: pip install tensorboardX") from error
    finally:
        if hide:
            del sys.modules["torch"]
    return SummaryWriter(str(folder), purge_step=step, flush_secs=10)
