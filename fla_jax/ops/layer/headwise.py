"""What the ops on tokens and heads share: checks of arguments, and when their kernels are taken."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...pallas.backend import triton
from ..array_checks import check_rank, check_shape, floating

LARGEST = 256  # channels of a head that the kernels hold in one tile


def check_heads(tokens: dict[str, Any], vectors: dict[str, Any]) -> tuple[dict[str, jax.Array], str]:
    """Checked arrays by name, and the name of the dtype to compute in.

    Args:
        tokens: by name, [B, T, H, N] each; the first one says the sizes.
        vectors: by name, [H, N] each.

    Raises:
        TypeError, ValueError: an array does not fit; the message names it.
    """
    arrays = {name: floating(name, x) for name, x in (tokens | vectors).items()}
    first = next(iter(tokens))
    check_rank(first, arrays[first], "[B, T, H, N]")
    shape = tuple(arrays[first].shape)
    for name in tokens:
        check_shape(name, arrays[name], shape, "[B, T, H, N]")
    for name in vectors:
        check_shape(name, arrays[name], shape[2:], "[H, N]")
    double = any(x.dtype == jnp.float64 for x in arrays.values())
    return arrays, "float64" if double else "float32"


def supports(ctx: Context[Any]) -> str | None:
    """None where the Triton kernels can serve ``call``, else the reason."""
    tokens = ctx.inputs[0]
    if 0 in tokens.shape:
        return "there are no tokens"
    if tokens.shape[-1] > LARGEST:
        return f"its kernels take heads of up to {LARGEST} channels, got {tokens.shape[-1]}"
    return triton.supports(ctx)


def preferred(ctx: Context[Any]) -> bool:
    """Whether to take them unasked: one token, as in decoding, is better fused with what is around it."""
    return ctx.inputs[0].shape[1] > 1 and triton.preferred(ctx)
