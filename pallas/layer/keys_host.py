"""RWKV-7's keys on NVIDIA GPUs: what the op loads (fla_jax/core/op.py); it launches the Triton kernels."""

from __future__ import annotations

from typing import Any

import jax

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Keys, KeysInputs, KeysSettings
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
from ..common.shapes import given, like, result
from .keys_kernels import first_values_kernel, keys_bwd_kernel, keys_fwd_kernel

# Those of heads of 64 are the fastest tried on an H200: 0.90 of the rate of a copy forward and backward. The
# others were not measured: 8 elements a thread in the forward, 4 in the backward, rows of at least 128 bytes.
LAUNCH: dict[tuple[str, int], Tile] = {
    ("fwd", 16): Tile(16, 4, 4, 2, 2112),
    ("fwd", 32): Tile(16, 2, 4, 2, 2112),
    ("fwd", 64): Tile(8, 2, 4, 3, 4224),
    ("fwd", 128): Tile(8, 1, 4, 2, 2112),
    ("fwd", 256): Tile(4, 1, 4, 2, 2112),
    ("bwd", 16): Tile(8, 4, 4, 2, 2112),
    ("bwd", 32): Tile(8, 2, 4, 2, 2112),
    ("bwd", 64): Tile(16, 1, 4, 3, 4224),
    ("bwd", 128): Tile(4, 1, 4, 2, 2112),
    ("bwd", 256): Tile(2, 1, 4, 2, 2112),
}
BLOCK, PROGRAMS = 1024, 528  # of the kernel that has nothing to do in all layers but one


residual_axes = no_residuals


def _launched(
    kernel: Any,
    plan: HeadwisePlan,
    ctx: Context[KeysInputs, KeysSettings],
    x: KeysInputs,
    more: dict[str, Any],
    out: dict[str, Any],
):
    """The results of a kernel that takes the op's arrays and ``more``."""
    return launch(
        kernel,
        arguments(x) | more | plan.lengths,
        out,
        RESIDUAL=x.v_first is not None,
        CHOOSE=x.residual is not None,
        DECAY_SCALE=ctx.settings.decay_scale,
        RATE_SCALE=ctx.settings.rate_scale,
        EPS=ctx.settings.eps,
        **plan.options,
    )


def _first_values(x: Any) -> jax.Array:
    """v_first for the layers above, in the memory of the one that came: a loop over layers carries it."""
    size = x.v.size
    span = -(-size // (PROGRAMS * BLOCK)) * BLOCK
    made = launch(
        first_values_kernel,
        dict(v_=x.v, v_first_=x.v_first, residual_=x.residual, size=size, span=span),
        dict(source_=like(x.v)),
        grid=(-(-size // span),),
        num_warps=4,
        num_stages=1,
        aliases={"v_first_": "source_"},
        BLOCK=BLOCK,
    )
    return made["source_"]


def fwd(ctx: Context[KeysInputs, KeysSettings], x: KeysInputs) -> tuple[Keys, Residuals]:
    """The results in the op's order. What is as it came is not written, and what comes twice once."""
    settings, shape = ctx.settings, x.k.shape
    if x.residual is not None and not ctx.save_residuals:
        # nothing keeps the v_first that came for a backward
        x = x._replace(v_first=_first_values(x), residual=None)
    plan = headwise_plan(LAUNCH, "fwd", x.k)
    out = dict(
        w_=like(x.k, settings.decay_name),
        key_=like(x.k),
        value_=result(x.v_first is not None, shape, x.v.dtype),
        a_=like(x.k, settings.transition_name),
        b_=like(x.k, settings.transition_name),
        source_=result(x.residual is not None, shape, x.v.dtype),
    )
    made = _launched(keys_fwd_kernel, plan, ctx, x, {}, out)
    w, k, a, b = (made[name] for name in ("w_", "key_", "a_", "b_"))
    v = x.v if x.v_first is None else made["value_"]
    first = made["source_"] if x.residual is not None else given(x.v_first, x.v)
    return Keys(w, k, v, a, b, first, k, v), {}


def bwd(
    ctx: Context[KeysInputs, KeysSettings], x: KeysInputs, residuals: Residuals, cotangents: Keys
) -> KeysInputs:
    """Gradients of all inputs, of vectors by row."""
    plan, residual = headwise_plan(LAUNCH, "bwd", x.k), x.v_first is not None
    tokens = ("decay", "rate", "mix", "k", "v", "v_first")
    out = token_gradients(x, tokens, tokens if residual else ("decay", "rate", "k"))
    out |= dict(sums_=partial_sums(plan, 5 if residual else 4))
    more = dict(
        dw_=cotangents.w,
        dkey_=cotangents.k,
        dvalue_=cotangents.v,
        da_=cotangents.a,
        db_=cotangents.b,
        dsource_=cotangents.v_first,
        dkey_bonus_=cotangents.k_bonus,
        dvalue_bonus_=cotangents.v_bonus,
    )
    made = _launched(keys_bwd_kernel, plan, ctx, x, more, out)
    w0, a0, k_k, k_a, *v0 = sums_by_row(made["sums_"])
    gradients = x._replace(
        decay=made["ddecay_"],
        rate=made["drate_"],
        k=made["dk_"],
        w0=w0,
        a0=a0,
        k_k=k_k,
        k_a=k_a,
        residual=None,
    )
    if residual:
        return gradients._replace(mix=made["dmix_"], v=made["dv_"], v_first=made["dv_first_"], v0=v0[0])
    return gradients._replace(v=cotangents.v + cotangents.v_first + cotangents.v_bonus)
