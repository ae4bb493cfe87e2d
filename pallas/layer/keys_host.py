"""RWKV-7's keys on NVIDIA GPUs: the rule of the op's Triton implementation (fla_jax/core/op.py)."""

from __future__ import annotations

import jax

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Keys, KeysInputs, KeysSettings
from ..backend.triton import Launch, triton_call
from ..common.headwise_host import HeadwiseLaunch, HeadwisePlan, headwise_plan, no_residuals, sum_over_blocks
from ..common.shapes import like, like_fields
from .keys_kernels import (
    FirstValues,
    KeysConfig,
    KeysGrads,
    KeysOut,
    first_values_kernel,
    keys_bwd_kernel,
    keys_fwd_kernel,
)

# By pass and padded head size: BT, BH, num_warps, stages, stages_fp32, programs of `HeadwiseLaunch`.
# Heads of 64 are measured on an H200: 0.90 of the rate of a copy, forward and backward. The other rows have
# 8 elements a thread forward, 4 backward, and tokens of at least 128 bytes.
LAUNCHES: dict[tuple[str, int], HeadwiseLaunch] = {
    ("fwd", 16): HeadwiseLaunch(16, 4, 4, 2, 2, 2112),
    ("fwd", 32): HeadwiseLaunch(16, 2, 4, 2, 2, 2112),
    ("fwd", 64): HeadwiseLaunch(8, 2, 4, 3, 2, 4224),
    ("fwd", 128): HeadwiseLaunch(8, 1, 4, 2, 2, 2112),
    ("fwd", 256): HeadwiseLaunch(4, 1, 4, 2, 2, 2112),
    ("bwd", 16): HeadwiseLaunch(8, 4, 4, 2, 2, 2112),
    ("bwd", 32): HeadwiseLaunch(8, 2, 4, 2, 2, 2112),
    ("bwd", 64): HeadwiseLaunch(16, 1, 4, 3, 2, 4224),
    ("bwd", 128): HeadwiseLaunch(4, 1, 4, 2, 2, 2112),
    ("bwd", 256): HeadwiseLaunch(2, 1, 4, 2, 2, 2112),
}
FIRST_VALUES_BLOCK, FIRST_VALUES_PROGRAMS = 1024, 528

residual_axes = no_residuals


def _config(plan: HeadwisePlan, s: KeysSettings) -> KeysConfig:
    return KeysConfig(**plan.fields, decay_scale=s.decay_scale, rate_scale=s.rate_scale, eps=s.eps)


def _first_values(x: KeysInputs) -> jax.Array:
    """v_first for the layers above, in the memory of the given one, which a loop over layers carries."""
    size, block = x.v.size, FIRST_VALUES_BLOCK
    block_len = -(-size // (FIRST_VALUES_PROGRAMS * block)) * block
    return triton_call(
        first_values_kernel,
        FirstValues(x.v, x.v_first, x.residual, size, block_len),
        out=(like(x.v),),
        config=block,
        grid=(-(-size // block_len), 1, 1),
        launch=Launch(4),
        aliases={"x.v_first": "0"},
        in_place=True,
    )[0]


def fwd(ctx: Context[KeysInputs, KeysSettings], x: KeysInputs) -> tuple[Keys, Residuals]:
    """The results in the op's order: the kernel writes none that equals an input, and k and v once."""
    settings = ctx.settings
    if x.residual is not None and not ctx.save_residuals:  # no backward needs the given v_first
        x = x._replace(v_first=_first_values(x), residual=None)
    out = KeysOut(
        w=like(x.k, settings.decay_name),
        k=like(x.k),
        v=None if x.v_first is None else like(x.v),
        a=like(x.k, settings.transition_name),
        b=like(x.k, settings.transition_name),
        v_first=None if x.residual is None else like(x.v),
    )
    run = headwise_plan(LAUNCHES, "fwd", x.k)
    out = run(keys_fwd_kernel, x, out=out, config=_config(run, settings))
    v = x.v if x.v_first is None else out.v
    first = x.v if x.v_first is None else x.v_first if x.residual is None else out.v_first
    return Keys(out.w, out.k, v, out.a, out.b, first, out.k, v), {}


def bwd(
    ctx: Context[KeysInputs, KeysSettings], x: KeysInputs, residuals: Residuals, cotangents: Keys
) -> KeysInputs:
    """Gradients of all inputs, those of vectors for each sequence."""
    run, is_mixed = headwise_plan(LAUNCHES, "bwd", x.k), x.v_first is not None
    names = ("decay", "rate", "k", *(("mix", "v", "v_first") if is_mixed else ()))
    out = KeysGrads(like_fields(x, *names), run.sums_shape(5 if is_mixed else 4))
    out = run(keys_bwd_kernel, x, cotangents, out=out, config=_config(run, ctx.settings))
    w0, a0, k_k, k_a, *v0 = sum_over_blocks(out.sums)
    grads = out.x._replace(w0=w0, a0=a0, k_k=k_k, k_a=k_a)
    if is_mixed:
        return grads._replace(v0=v0[0])
    return grads._replace(v=cotangents.v + cotangents.v_first + cotangents.v_bonus)
