"""What the ops on tokens and heads share: checks of arguments, and when their kernels are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...core.call import Call
from ...pallas.run import triton

LARGEST = 256  # channels of a head that the kernels hold in one tile


def floating(name: str, x: Any, like: tuple[int, ...] | None, axes: str) -> jax.Array:
    """``x``, a floating-point array with the shape ``like`` and as many axes as ``axes`` names.

    Raises:
        TypeError: it is no floating-point array.
        ValueError: its shape does not fit.
    """
    if not (hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating)):
        raise TypeError(f"{name} must be a floating-point array, got {getattr(x, 'dtype', type(x).__name__)}")
    if like is None:
        if len(x.shape) != len(axes.split()):
            raise ValueError(f"{name} must have shape [{', '.join(axes.split())}], got {list(x.shape)}")
    elif tuple(x.shape) != like:
        raise ValueError(
            f"{name} must have shape [{', '.join(axes.split())}] = {list(like)}, got {list(x.shape)}"
        )
    return jnp.asarray(x)


def check_heads(tokens: Mapping[str, Any], vectors: Mapping[str, Any]) -> tuple[dict[str, jax.Array], str]:
    """Checked arrays by name, and the name of the dtype to compute in.

    Args:
        tokens: by name, [B, T, H, N] each; the first one says the sizes.
        vectors: by name, [H, N] each.

    Raises:
        TypeError, ValueError: an array does not fit; the message names it.
    """
    arrays: dict[str, jax.Array] = {}
    shape = None
    for name, x in tokens.items():
        arrays[name] = floating(name, x, shape, "B T H N")
        shape = tuple(arrays[name].shape) if shape is None else shape
    assert shape is not None
    for name, x in vectors.items():
        arrays[name] = floating(name, x, shape[2:], "H N")
    double = any(x.dtype == jnp.float64 for x in arrays.values())
    return arrays, "float64" if double else "float32"


def supports(call: Call[Any]) -> str | None:
    """None where the Triton kernels can serve ``call``, else the reason."""
    tokens = call.inputs[0]
    if 0 in tokens.shape:
        return "there are no tokens"
    if tokens.shape[-1] > LARGEST:
        return f"its kernels take heads of up to {LARGEST} channels, got {tokens.shape[-1]}"
    return triton.supports(call)


def automatic(call: Call[Any]) -> bool:
    """Whether to take them unasked: one token, as in decoding, is better fused with what is around it."""
    return call.inputs[0].shape[1] > 1 and triton.automatic(call)
