"""How long a call takes: warm calls are queued and waited for once, and the median of several times counts.

The number of calls and of repetitions is the same for every library.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any


def plan_calls(first_ms: float) -> tuple[int, int]:
    """(calls queued, repetitions): about 0.15 s each, fewer of what is slow."""
    return min(max(math.ceil(150 / max(first_ms, 1e-3)), 3), 50), 5 if first_ms < 200 else 3


def timed(run: Callable[[int], float]) -> float:
    """Median milliseconds of a call; ``run(n)`` gives the milliseconds of n."""
    run(1)
    n, repetitions = plan_calls(run(2) / 2)
    return statistics.median(run(n) / n for _ in range(repetitions))


def jax_calls(compiled: Callable[..., Any], arguments: tuple[Any, ...], n: int) -> float:
    """Milliseconds of n calls of a compiled JAX function."""
    import jax

    began = time.perf_counter()
    for _ in range(n):
        result = compiled(*arguments)
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - began)


def torch_calls(function: Callable[..., Any], arguments: tuple[Any, ...], n: int) -> float:
    """Milliseconds of n calls on torch's CUDA device, by its events."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n):
        function(*arguments)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def jax_ms(compiled: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds of a call of a compiled JAX function."""
    return timed(functools.partial(jax_calls, compiled, arguments))


def torch_ms(function: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds of a call on torch's CUDA device."""
    return timed(functools.partial(torch_calls, function, arguments))


def queued_steps(start: Callable[[], Any], steps: int, groups: int = 3) -> tuple[list[float], list[float]]:
    """Milliseconds of a training step, a number for each of ``groups`` groups of about ``steps`` in all, and
    the losses.

    Steps are queued as training loops queue them, so that the host prepares one while the device is at the
    one before. ``start`` starts a step and returns its loss; ``float`` of that waits for the device.
    """
    times: list[float] = []
    losses: list[float] = []
    queued = max(1, math.ceil(steps / groups))
    for _ in range(groups):
        began = time.perf_counter()
        started = [start() for _ in range(queued)]
        float(started[-1])
        times.append(1e3 * (time.perf_counter() - began) / queued)
        losses += map(float, started)
    return times, losses
