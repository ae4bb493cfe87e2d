"""RWKV-7's keys on NVIDIA GPUs: what the op loads (fla_jax/ops/op.py); it launches the Triton kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.call import Call
from ..plan.heads import HeadPlan, Tile, head_plan, partial_sums, sums_by_row
from ..plan.kept_states import result
from ..run.triton import launch
from .keys import keys_bwd_kernel, keys_fwd_kernel

# Heads of 64 are the fastest of those tried on an H200: 0.90 of the rate of a copy forward and backward. The others
# were not measured: 8 elements a thread in the forward, 4 in the backward, rows of at least 128 bytes.
LAUNCH: dict[tuple[str, int], Tile] = {
    ("forward", 16): Tile(16, 4, 4, 2, 2112),
    ("forward", 32): Tile(16, 2, 4, 2, 2112),
    ("forward", 64): Tile(8, 2, 4, 3, 4224),
    ("forward", 128): Tile(8, 1, 4, 2, 2112),
    ("forward", 256): Tile(4, 1, 4, 2, 2112),
    ("backward", 16): Tile(8, 4, 4, 2, 2112),
    ("backward", 32): Tile(8, 2, 4, 2, 2112),
    ("backward", 64): Tile(16, 1, 4, 3, 4224),
    ("backward", 128): Tile(4, 1, 4, 2, 2112),
    ("backward", 256): Tile(2, 1, 4, 2, 2112),
}


def kept_axes(call: Call[Any]) -> dict[str, str]:
    """The backward computes everything again."""
    return {}


def _operands(plan: HeadPlan, settings: Any, x: Any) -> tuple[list[jax.Array], dict[str, Any]]:
    """The kernels' first arrays, one number in place of each that is not given, and their options."""
    none = jnp.zeros(1, jnp.int32)
    residual = x.v_first is not None
    options = plan.options | dict(
        RESIDUAL=residual, CHOOSE=x.residual is not None, DECAY_SCALE=settings.decay_scale,
        RATE_SCALE=settings.rate_scale, EPS=settings.eps,
    )  # fmt: skip
    return [none if array is None else array for array in x], options


def forward(call: Call[Any], x: Any) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """The results in the op's order. What is as it came is not written, and what comes twice once."""
    settings, shape = call.settings, x.k.shape
    plan = head_plan(LAUNCH, "forward", x.k)
    operands, options = _operands(plan, settings, x)
    out = (
        jax.ShapeDtypeStruct(shape, settings.decay_name),
        jax.ShapeDtypeStruct(shape, x.k.dtype),
        result(x.v_first is not None, shape, x.v.dtype),
        jax.ShapeDtypeStruct(shape, settings.transition_name),
        jax.ShapeDtypeStruct(shape, settings.transition_name),
        result(x.residual is not None, shape, x.v.dtype),
    )
    w, k, v, a, b, first = launch(keys_fwd_kernel, *operands, *plan.lengths, out=out, **options)
    if x.v_first is None:
        v = first = x.v
    elif x.residual is None:
        first = x.v_first
    return (w, k, v, a, b, first, k, v), {}


def backward(call: Call[Any], x: Any, kept: dict[str, jax.Array], cotangents: Any) -> Any:
    """Gradients of all inputs, of vectors by row."""
    plan = head_plan(LAUNCH, "backward", x.k)
    operands, options = _operands(plan, call.settings, x)
    residual, shape = x.v_first is not None, x.k.shape
    like = [None if array is None else array.dtype for array in x[:6]]
    out = (
        *(result(residual or name in ("decay", "rate", "k"), shape, dtype or jnp.float32)
          for name, dtype in zip(x._fields, like)),
        partial_sums(plan, 5 if residual else 4),
    )  # fmt: skip
    made = launch(keys_bwd_kernel, *operands, *cotangents, *plan.lengths, out=out, **options)
    decay, rate, mix, k, v, first, partial = made
    w0, a0, k_k, k_a, *v0 = sums_by_row(partial)
    gradients = x._replace(decay=decay, rate=rate, k=k, w0=w0, a0=a0, k_k=k_k, k_a=k_a, residual=None)
    if residual:
        return gradients._replace(mix=mix, v=v, v_first=first, v0=v0[0])
    return gradients._replace(v=cotangents.v + cotangents.v_first + cotangents.v_bonus)
