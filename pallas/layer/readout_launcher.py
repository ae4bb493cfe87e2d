"""The readouts on NVIDIA GPUs: what the ops load (fla_jax/ops/op.py); it launches the Triton kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.call import Call
from ..plan.heads import HeadPlan, Tile, head_plan, partial_sums, sums_by_row
from ..plan.kept_states import result
from ..run.triton import launch
from .readout import readout_bwd_kernel, readout_fwd_kernel

# Not measured: 8 elements a thread in the forward, 4 in the backward, rows of at least 128 bytes
LAUNCH: dict[tuple[str, int], Tile] = {
    ("forward", 16): Tile(16, 4, 4, 2, 2112),
    ("forward", 32): Tile(16, 2, 4, 2, 2112),
    ("forward", 64): Tile(16, 1, 4, 2, 2112),
    ("forward", 128): Tile(8, 1, 4, 2, 2112),
    ("forward", 256): Tile(4, 1, 4, 2, 2112),
    ("backward", 16): Tile(8, 4, 4, 2, 2112),
    ("backward", 32): Tile(8, 2, 4, 2, 2112),
    ("backward", 64): Tile(8, 1, 4, 2, 2112),
    ("backward", 128): Tile(4, 1, 4, 2, 2112),
    ("backward", 256): Tile(2, 1, 4, 2, 2112),
}


def kept_axes(call: Call[Any]) -> dict[str, str]:
    """The backward computes everything again."""
    return {}


def _operands(plan: HeadPlan, settings: Any, x: Any) -> tuple[list[jax.Array], dict[str, Any]]:
    """The kernels' first arrays, one number in place of each that is not given, and their options."""
    none = jnp.zeros(1, jnp.int32)
    options = plan.options | dict(BONUS=x.r is not None, SILU=settings.silu, EPS=settings.eps)
    return [none if array is None else array for array in x], options


def forward(call: Call[Any], x: Any) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """y."""
    plan = head_plan(LAUNCH, "forward", x.o)
    operands, options = _operands(plan, call.settings, x)
    out = (jax.ShapeDtypeStruct(x.o.shape, x.o.dtype),)
    return launch(readout_fwd_kernel, *operands, *plan.lengths, out=out, **options), {}


def backward(call: Call[Any], x: Any, kept: dict[str, jax.Array], cotangents: Any) -> Any:
    """Gradients of all inputs, of vectors by row."""
    plan = head_plan(LAUNCH, "backward", x.o)
    operands, options = _operands(plan, call.settings, x)
    tokens = x[:5]
    out = (
        *(
            result(array is not None, x.o.shape, x.o.dtype if array is None else array.dtype)
            for array in tokens
        ),
        partial_sums(plan, 2 if x.r is None else 3),
    )
    made = launch(readout_bwd_kernel, *operands, *cotangents, *plan.lengths, out=out, **options)
    do, dgate, dr, dk, dv, partial = made
    dscale, dbias, *dr_k = sums_by_row(partial)
    gradients = x._replace(o=do, gate=dgate, scale=dscale, bias=dbias)
    return gradients if x.r is None else gradients._replace(r=dr, k=dk, v=dv, r_k=dr_k[0])
