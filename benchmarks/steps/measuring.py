"""The time of a training step: every side's ``step`` does all of it and returns the loss.

Steps are queued, as training loops queue them, and waited for once: the host prepares a step while the device
is at the one before. What a step takes that is waited for by itself is in the results as well (``ms_alone``).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from running.processes import Job
from running.timing import queued_steps

from steps.rows import PEAK, Row

WARMUP = 3  # steps after the first one that are not measured


def measure(step: Callable[[], Any], row: Row, job: Job) -> dict[str, Any]:
    """Times of ``step``, which starts one and returns its loss: ``float`` of that waits for the device.

    Raises:
        RuntimeError: a loss is not finite.
    """
    began = time.perf_counter()
    losses = [float(step())]
    first, alone = time.perf_counter() - began, []
    for _ in range(job.get("warmup", WARMUP)):
        began = time.perf_counter()
        losses.append(float(step()))
        alone.append(1e3 * (time.perf_counter() - began))
    times, more = queued_steps(step, job["steps"])
    losses += more
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    ms = statistics.median(times)
    return {
        "ms": ms,
        "ms_min": min(times),
        "ms_max": max(times),
        "ms_alone": min(alone, default=None),
        "tokens_per_s": row.batch * row.tokens / ms * 1e3,
        "first_step_s": first,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def with_share(result: dict[str, Any], row: Row) -> dict[str, Any]:
    """The result with its rate of useful operations: 6 N for each token, and the share of `PEAK` that is."""
    rate = 6 * row.parameters_that_multiply(result["parameters"]) * result["tokens_per_s"]
    return {**result, "tflops_6n": rate / 1e12, "share_6n": rate / PEAK}


def falls_alike(ours: dict[str, Any], peer: dict[str, Any]) -> bool:
    """Whether a peer's loss starts where ours does, within 5 %, and falls by at least 0.8 of what ours does:
    a library that does not train is no peer, however fast.
    """
    fell = [record["loss_first"] - record["loss_last"] for record in (ours, peer)]
    return abs(peer["loss_first"] / ours["loss_first"] - 1) < 0.05 and fell[1] >= 0.8 * fell[0]
