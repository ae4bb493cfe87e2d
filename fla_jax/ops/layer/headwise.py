"""Common to the ops on tokens and heads: checks of arguments, and the selection of their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import jax.numpy as jnp

from ...core.context import Context
from ...core.implementation import Unsupported
from ...core.types import KeysInputs, KeysSettings, ReadoutInputs, ReadoutSettings
from ...pallas.backend import triton
from ..array_checks import check_rank, check_shape, floating

HEAD_AXES, VECTOR_AXES = "b t h k", "h k"
MAX_HEAD_DIM = 256  # channels of a head that the kernels take in one tile

X = TypeVar("X", KeysInputs, ReadoutInputs)
HeadwiseContext = Context[KeysInputs, KeysSettings] | Context[ReadoutInputs, ReadoutSettings]


def check_heads(
    inputs: type[X], *, tokens: Mapping[str, object], vectors: Mapping[str, object]
) -> tuple[X, str]:
    """Checked arrays as ``inputs``, and the name of the dtype to compute in.

    Args:
        inputs: of the op; fields that are not given are None.
        tokens: by name, [B, T, H, N] each; the first one gives the sizes.
        vectors: by name, [H, N] each.

    Raises:
        TypeError, ValueError: an array does not fit; the message names it.
    """
    arrays = {name: floating(name, x) for name, x in (*tokens.items(), *vectors.items())}
    first = next(iter(tokens))
    check_rank(first, arrays[first], "[B, T, H, N]")
    shape = tuple(arrays[first].shape)
    for name, x in arrays.items():
        is_vector = name in vectors
        check_shape(name, x, shape[2:] if is_vector else shape, "[H, N]" if is_vector else "[B, T, H, N]")
    is_double = any(x.dtype == jnp.float64 for x in arrays.values())
    checked = inputs._make(arrays.get(name) for name in inputs._fields)
    return checked, "float64" if is_double else "float32"


def supports(ctx: HeadwiseContext) -> Unsupported | None:
    """None where the Triton kernels can run a call, else the reason."""
    tokens = ctx.shapes[0]
    if 0 in tokens.shape:
        return Unsupported("there are no tokens")
    if tokens.shape[-1] > MAX_HEAD_DIM:
        return Unsupported(f"its kernels take heads of up to {MAX_HEAD_DIM} channels, got {tokens.shape[-1]}")
    return triton.supports(ctx)


def preferred(ctx: HeadwiseContext) -> bool:
    """Whether an op selects these kernels by default: not for one token, which XLA fuses with other work."""
    return ctx.shapes[0].shape[1] > 1 and triton.preferred(ctx)
