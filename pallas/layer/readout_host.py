"""The readouts on NVIDIA GPUs: what the ops load (fla_jax/core/op.py); it launches the Triton kernels."""

from __future__ import annotations

from typing import Any

import jax

from ...core.context import Context
from ..backend.triton import launch
from ..common.headwise_host import (
    HeadwisePlan,
    Tile,
    arguments,
    headwise_plan,
    no_residuals,
    partial_sums,
    sums_by_row,
    token_gradients,
)
from ..common.shapes import like
from .readout_kernels import readout_bwd_kernel, readout_fwd_kernel

# Heads of 64: the fastest of those tried on an H200 (pallas/DESIGN.md, "Layer kernels"). Other sizes follow
# them, the backward with 8 elements a thread: 16 would spill.
LAUNCH: dict[tuple[str, int], Tile] = {
    ("fwd", 16): Tile(32, 4, 4, 3, 4224),
    ("fwd", 32): Tile(32, 2, 4, 3, 4224),
    ("fwd", 64): Tile(32, 1, 4, 3, 4224),
    ("fwd", 128): Tile(16, 1, 4, 3, 4224),
    ("fwd", 256): Tile(8, 1, 4, 3, 4224),
    ("bwd", 16): Tile(16, 4, 4, 3, 4224),
    ("bwd", 32): Tile(16, 2, 4, 3, 4224),
    ("bwd", 64): Tile(32, 1, 4, 3, 4224),
    ("bwd", 128): Tile(8, 1, 4, 3, 4224),
    ("bwd", 256): Tile(4, 1, 4, 3, 4224),
}


residual_axes = no_residuals


def _launched(
    kernel: Any, plan: HeadwisePlan, ctx: Context[Any], x: Any, more: dict[str, Any], out: dict[str, Any]
):
    """The results of a kernel that takes the op's arrays and ``more``."""
    return launch(
        kernel,
        arguments(x) | more | plan.lengths,
        out,
        BONUS=x.r is not None,
        SILU=ctx.settings.silu,
        EPS=ctx.settings.eps,
        **plan.options,
    )


def fwd(ctx: Context[Any], x: Any) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """y."""
    plan = headwise_plan(LAUNCH, "fwd", x.o)
    made = _launched(readout_fwd_kernel, plan, ctx, x, {}, dict(y_=like(x.o)))
    return (made["y_"],), {}


def bwd(ctx: Context[Any], x: Any, residuals: dict[str, jax.Array], cotangents: Any) -> Any:
    """Gradients of all inputs, of vectors by row."""
    plan, bonus = headwise_plan(LAUNCH, "bwd", x.o), x.r is not None
    tokens = ("o", "gate", "r", "k", "v")
    out = token_gradients(x, tokens, tokens if bonus else tokens[:2])
    out |= dict(sums_=partial_sums(plan, 3 if bonus else 2))
    made = _launched(readout_bwd_kernel, plan, ctx, x, dict(dy_=cotangents[0]), out)
    scale, bias, *r_k = sums_by_row(made["sums_"])
    gradients = x._replace(o=made["do_"], gate=made["dgate_"], scale=scale, bias=bias)
    if not bonus:
        return gradients
    return gradients._replace(r=made["dr_"], k=made["dk_"], v=made["dv_"], r_k=r_k[0])
