"""Metrics of a training loop that does not wait for the device at every step."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from .metrics import MetricWriter, Throughput


class StepMetrics(MetricWriter):
    """Numbers of every step, added while the device still computes them; read and written every few steps.

    Attributes:
        throughput: the speed so far, see `Throughput`.

    Example:
        >>> import pathlib, tempfile, jax.numpy as jnp
        >>> from fla_jax.training import StepMetrics
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with StepMetrics(folder, ("step", "loss", "evaluation_loss"), num_params=1000) as metrics:
        ...         for step in (1, 2):
        ...             metrics.add(step, loss=jnp.float32(1 / step))
        ...         row = metrics.read(tokens=512)
        ...         row["evaluation_loss"] = 0.75
        ...         metrics.write_rows()
        ...     pathlib.Path(folder, "metrics.csv").read_text().split()
        ['step,loss,evaluation_loss', '1,1.0,', '2,0.5,0.75']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        columns: Sequence[str],
        num_params: int,
        last_step: int = 0,
        *,
        peak_tflops: float | None = None,
    ):
        """Opens the files.

        Args:
            folder, columns, last_step: see `MetricWriter`.
            num_params, peak_tflops: see `Throughput`.
        """
        super().__init__(folder, columns, last_step)
        self.throughput = Throughput(num_params, peak_tflops)
        self._first, self._rows = last_step + 1, list[dict[str, PyTree]]()
        self._measured = 0  # of the rows

    def add(self, step: int, **values: float | jax.Array) -> None:
        """A step's numbers, which may be arrays that are still being computed."""
        self._rows.append({"step": step, **values})

    def read(self, tokens: int) -> dict[str, float]:
        """Waits for the numbers since the last call of `write_rows`, and measures the speed.

        Args:
            tokens: of a step.

        Returns:
            The row of the last step, which more numbers may be added to before it is written. The run's first
            step compiles, so a row for it alone has no speed.

        Raises:
            ValueError: no step was added since the last call of `write_rows`.
            FloatingPointError: a number is NaN or infinite; the message names it and the step. The rows up to
                that step are written.
        """
        if not self._rows:
            raise ValueError("no step to read: call add before read, and again after write_rows")
        rows = self._rows = jax.tree.map(lambda x: np.asarray(x).item(), self._rows)
        if rows[0]["step"] > self._first:
            rows[-1] |= self.throughput.measure((len(rows) - self._measured) * tokens)
        self._measured = len(rows)
        for i, row in enumerate(rows):
            if wrong := [f"{name} is {x}" for name, x in row.items() if not math.isfinite(x)]:
                self.write(rows[: i + 1])
                self._rows, self._measured = [], 0
                raise FloatingPointError(f"the {' and the '.join(wrong)} at step {row['step']}")
        return rows[-1]

    def write_rows(self) -> None:
        """Writes the rows that `read` has read; the time since then counts for no speed."""
        self.write(self._rows)
        self._rows, self._measured = [], 0
        self.throughput.restart()
