"""The rate at which the device copies, which what is bound by memory is compared with."""

from __future__ import annotations

from typing import Any

from running.timing import jax_ms

KINDS = ("copy", "negative")  # a transfer by the copy engine or the runtime's kernel, and a kernel of XLA's
DTYPES = ("float32", "bfloat16")
SIZES = (1 << 29, 1 << 30, 1 << 31)  # bytes: many times what any cache holds


def copy_rates(sizes: tuple[int, ...] = SIZES) -> dict[str, float]:
    """GB/s, read and written, of every kind of copy, by its name.

    No single one will do: how fast a copy is depends on its dtype and size as well, and a slow one would
    flatter everything that is compared with it. The best is the device's rate.
    """
    import jax
    import jax.numpy as jnp

    found: dict[str, Any] = {}
    for bytes_ in sizes:
        for dtype in DTYPES:
            x = jnp.ones(bytes_ // jnp.dtype(dtype).itemsize, dtype)
            for kind in KINDS:
                ms = jax_ms(jax.jit(getattr(jnp, kind)).lower(x).compile(), x)
                found[f"{kind} of {bytes_ >> 20} MiB {dtype}"] = 2 * bytes_ / ms / 1e6
            del x
    return found
