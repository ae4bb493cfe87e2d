"""Time of a call: warm calls are queued and waited for once; the median counts, for every library alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

COPIES = ("copy", "negative")  # by the copy engine or the runtime, and by a kernel of XLA
COPY_SIZES = (1 << 29, 1 << 30, 1 << 31)  # bytes, many times the size of any cache


def timed(run: Callable[[int], float]) -> float:
    """Median milliseconds of a call; ``run(n)`` returns the milliseconds of n calls."""
    run(1)
    first = run(2) / 2
    n = min(max(math.ceil(150 / max(first, 1e-3)), 3), 50)  # about 0.15 s, fewer calls if they are slow
    return statistics.median(run(n) / n for _ in range(5 if first < 200 else 3))


def jax_ms(compiled: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds of a call of a compiled JAX function."""
    import jax

    def run(n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - began)

    return timed(run)


def torch_ms(function: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds of a call on torch's CUDA device, by its events."""
    import torch

    def run(n: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n):
            function(*arguments)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    return timed(run)


def copy_rates(sizes: tuple[int, ...] = COPY_SIZES) -> dict[str, float]:
    """GB/s of several kinds of copies. The best is the device's rate: a slow one would flatter the rest."""
    import jax
    import jax.numpy as jnp

    found = {}
    for size in sizes:
        for dtype in ("float32", "bfloat16"):
            x = jnp.ones(size // jnp.dtype(dtype).itemsize, dtype)
            for kind in COPIES:
                ms = jax_ms(jax.jit(getattr(jnp, kind)).lower(x).compile(), x)
                found[f"{kind} of {size >> 20} MiB {dtype}"] = 2 * size / ms / 1e6
            del x
    return found


def best_copy(small: bool) -> tuple[str, float]:
    """The fastest kind of copy and its GB/s, which is printed; ``small`` for a smoke test."""
    import jax

    rates = copy_rates((1 << 20,) if small else COPY_SIZES)
    kind, rate = max(rates.items(), key=lambda item: item[1])
    device = jax.devices()[0].device_kind
    print(
        f"{device}: a copy moves {rate:.0f} GB/s ({kind}; the slowest {min(rates.values()):.0f})", flush=True
    )
    return kind, rate


def queued_steps(start: Callable[[], Any], steps: int, groups: int = 3) -> tuple[list[float], list[float]]:
    """Milliseconds of a step for each group of queued steps, and the losses.

    ``start`` starts a step and returns its loss; ``float`` of the loss waits for the device.
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


def require_finite(losses: list[float]) -> list[float]:
    """The losses; raises a RuntimeError if one is not finite."""
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    return losses
