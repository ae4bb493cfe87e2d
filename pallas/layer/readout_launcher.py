"""The readouts on NVIDIA GPUs: what the ops load (fla_jax/ops/op.py); it launches the Triton kernels."""

from __future__ import annotations

from typing import Any

import jax

from ...core.call import Call
from ..plan.heads import (
    HeadPlan,
    Tile,
    arguments,
    head_plan,
    nothing_kept,
    partial_sums,
    sums_by_row,
    token_gradients,
)
from ..plan.shapes import like
from ..run.triton import launch
from .readout import readout_bwd_kernel, readout_fwd_kernel

# Those of heads of 64 are the best for both readouts of those tried on an H200
# (docs/performance_models.md). Other sizes follow them, the backward with 8 elements a thread: 16 take all
# registers, or are spilled.
LAUNCH: dict[tuple[str, int], Tile] = {
    ("forward", 16): Tile(32, 4, 4, 3, 4224),
    ("forward", 32): Tile(32, 2, 4, 3, 4224),
    ("forward", 64): Tile(32, 1, 4, 3, 4224),
    ("forward", 128): Tile(16, 1, 4, 3, 4224),
    ("forward", 256): Tile(8, 1, 4, 3, 4224),
    ("backward", 16): Tile(16, 4, 4, 3, 4224),
    ("backward", 32): Tile(16, 2, 4, 3, 4224),
    ("backward", 64): Tile(32, 1, 4, 3, 4224),
    ("backward", 128): Tile(8, 1, 4, 3, 4224),
    ("backward", 256): Tile(4, 1, 4, 3, 4224),
}


kept_axes = nothing_kept


def _launched(
    kernel: Any, plan: HeadPlan, call: Call[Any], x: Any, more: dict[str, Any], out: dict[str, Any]
):
    """The results of a kernel that takes the op's arrays and ``more``."""
    return launch(
        kernel,
        arguments(x) | more | plan.lengths,
        out,
        BONUS=x.r is not None,
        SILU=call.settings.silu,
        EPS=call.settings.eps,
        **plan.options,
    )


def forward(call: Call[Any], x: Any) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """y."""
    plan = head_plan(LAUNCH, "forward", x.o)
    made = _launched(readout_fwd_kernel, plan, call, x, {}, dict(y_=like(x.o)))
    return (made["y_"],), {}


def backward(call: Call[Any], x: Any, kept: dict[str, jax.Array], cotangents: Any) -> Any:
    """Gradients of all inputs, of vectors by row."""
    plan, bonus = head_plan(LAUNCH, "backward", x.o), x.r is not None
    tokens = ("o", "gate", "r", "k", "v")
    out = token_gradients(x, tokens, tokens if bonus else tokens[:2])
    out |= dict(sums_=partial_sums(plan, 3 if bonus else 2))
    made = _launched(readout_bwd_kernel, plan, call, x, dict(dy_=cotangents[0]), out)
    scale, bias, *r_k = sums_by_row(made["sums_"])
    gradients = x._replace(o=made["do_"], gate=made["dgate_"], scale=scale, bias=bias)
    if not bonus:
        return gradients
    return gradients._replace(r=made["dr_"], k=made["dk_"], v=made["dv_"], r_k=r_k[0])
