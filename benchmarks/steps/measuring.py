"""The time of queued training steps; ``ms_alone`` is that of a step that is waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from runner import Job
from timing import queued_steps, require_finite

from steps.sizes import PEAK, Size


def measure(step: Callable[[], Any], size: Size, job: Job) -> dict[str, Any]:
    """Times of ``step``, which starts one and returns its loss; ``float`` of the loss waits for the device.

    Raises:
        RuntimeError: a loss is not finite.
    """
    began = time.perf_counter()
    losses = [float(step())]
    first, alone = time.perf_counter() - began, []
    for _ in range(job["warmup"]):
        began = time.perf_counter()
        losses.append(float(step()))
        alone.append(1e3 * (time.perf_counter() - began))
    times, more = queued_steps(step, job["steps"])
    losses = require_finite(losses + more)
    ms = statistics.median(times)
    return {
        "ms": ms,
        "ms_min": min(times),
        "ms_max": max(times),
        "ms_alone": min(alone, default=None),
        "tokens_per_s": size.batch * size.tokens / ms * 1e3,
        "first_step_s": first,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def with_share(result: dict[str, Any], size: Size) -> dict[str, Any]:
    """The result with its rate of useful operations, 6 N a token, and the share of `PEAK`."""
    rate = 6 * size.multiplying(result["parameters"]) * result["tokens_per_s"]
    return {**result, "tflops_6n": rate / 1e12, "share_6n": rate / PEAK}


def falls_alike(ours: dict[str, Any], peer: dict[str, Any]) -> bool:
    """Whether a peer's loss starts within 5 % of ours and falls by at least 0.8 of what ours does."""
    fell = [record["loss_first"] - record["loss_last"] for record in (ours, peer)]
    return abs(peer["loss_first"] / ours["loss_first"] - 1) < 0.05 and fell[1] >= 0.8 * fell[0]
