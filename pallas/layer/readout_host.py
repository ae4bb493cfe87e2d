"""The readouts on NVIDIA GPUs: the rule of the ops' Triton implementation (fla_jax/core/op.py)."""

from __future__ import annotations

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Readout, ReadoutInputs, ReadoutSettings
from ..common.headwise_host import HeadwiseLaunch, headwise_plan, no_residuals, sum_over_blocks
from ..common.shapes import like, like_fields
from .readout_kernels import ReadoutConfig, ReadoutGrads, readout_bwd_kernel, readout_fwd_kernel

# By pass and padded head size: BT, BH, num_warps, stages, stages_fp32, programs of `HeadwiseLaunch`.
# Heads of 64 are measured on an H200, for both readouts. The backward of the other sizes has 8 elements a
# thread: 16 spill.
LAUNCHES: dict[tuple[str, int], HeadwiseLaunch] = {
    ("fwd", 16): HeadwiseLaunch(32, 4, 4, 3, 2, 4224),
    ("fwd", 32): HeadwiseLaunch(32, 2, 4, 3, 2, 4224),
    ("fwd", 64): HeadwiseLaunch(32, 1, 4, 3, 2, 4224),
    ("fwd", 128): HeadwiseLaunch(16, 1, 4, 3, 2, 4224),
    ("fwd", 256): HeadwiseLaunch(8, 1, 4, 3, 2, 4224),
    ("bwd", 16): HeadwiseLaunch(16, 4, 4, 3, 2, 4224),
    ("bwd", 32): HeadwiseLaunch(16, 2, 4, 3, 2, 4224),
    ("bwd", 64): HeadwiseLaunch(32, 1, 4, 3, 2, 4224),
    ("bwd", 128): HeadwiseLaunch(8, 1, 4, 3, 2, 4224),
    ("bwd", 256): HeadwiseLaunch(4, 1, 4, 3, 2, 4224),
}

residual_axes = no_residuals


def fwd(ctx: Context[ReadoutInputs, ReadoutSettings], x: ReadoutInputs) -> tuple[Readout, Residuals]:
    """The result; nothing is saved."""
    run, s = headwise_plan(LAUNCHES, "fwd", x.o), ctx.settings
    out = Readout(like(x.o))
    config = ReadoutConfig(**run.fields, silu=s.silu, eps=s.eps)
    return run(readout_fwd_kernel, x, out=out, config=config), {}


def bwd(
    ctx: Context[ReadoutInputs, ReadoutSettings],
    x: ReadoutInputs,
    residuals: Residuals,
    cotangents: Readout,
) -> ReadoutInputs:
    """Gradients of all inputs, those of vectors for each sequence."""
    run, s = headwise_plan(LAUNCHES, "bwd", x.o), ctx.settings
    out = ReadoutGrads(like_fields(x, "o", "gate", "r", "k", "v"), run.sums_shape(2 if x.r_k is None else 3))
    config = ReadoutConfig(**run.fields, silu=s.silu, eps=s.eps)
    out = run(readout_bwd_kernel, x, cotangents, out=out, config=config)
    scale, bias, *r_k = sum_over_blocks(out.sums)
    return out.x._replace(scale=scale, bias=bias, r_k=r_k[0] if r_k else None)
