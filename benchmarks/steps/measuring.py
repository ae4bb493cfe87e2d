"""The time of a training step: every side's ``step`` does all of it and returns the loss."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from running.processes import Job

from steps.rows import PEAK, Row

WARMUP = 3  # steps after the first one that are not measured


def measure(step: Callable[[], float], row: Row, job: Job) -> dict[str, Any]:
    """Times of ``step``, which returns the loss once the device is done.

    Raises:
        RuntimeError: a loss is not finite.
    """
    began = time.perf_counter()
    losses = [step()]
    first = time.perf_counter() - began
    losses += [step() for _ in range(job.get("warmup", WARMUP))]
    times = []
    for _ in range(job["steps"]):
        began = time.perf_counter()
        losses.append(step())
        times.append(1e3 * (time.perf_counter() - began))
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    ms = statistics.median(times)
    return {
        "ms": ms,
        "ms_min": min(times),
        "ms_max": max(times),
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
