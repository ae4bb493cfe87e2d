"""RWKV-7, token by token, on NVIDIA GPUs: the functions that the op loads (fla_jax/core/op.py); they launch
the Pallas kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV7Inputs
from ..backend import pallas, triton
from ..common.recurrent_plan import RecurrentPlan, by_key_block, make_plan
from ..common.value_sums_host import KEYS, float32, sum_over_values
from . import variants
from .recurrent_kernels import rwkv7_gradients, rwkv7_scan
from .recurrent_step import has_step_kernel, step


def residual_axes(ctx: Context[RWKV7Inputs, RecurrenceConfig]) -> dict[str, str]:
    """The states at the starts of intervals and a^T S of each token, padded."""
    return {"states": "b c h x y", "inner": "b s h y"}


def _padded(plan: RecurrentPlan, x: RWKV7Inputs) -> tuple[jax.Array, ...]:
    """Token arrays as kernels take them; the decay in place of its logarithm."""
    r, w, k, a, b = (plan.tokens(array, plan.sizes.K) for array in (x.r, x.w, x.k, x.a, x.b))
    return r, jnp.exp(w.astype(jnp.float32)), k, plan.tokens(x.v, plan.sizes.V), a, b


def has_chunk_gradients(ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs) -> bool:
    """`variants.has_chunk_gradients`, where Triton can run that kernel."""
    runs = pallas.preferred(ctx) and triton.supports(ctx) is None
    return runs and variants.has_chunk_gradients(ctx, x)


def _scan(
    plan: RecurrentPlan,
    rates: Sequence[jax.Array],
    x: jax.Array,
    start: jax.Array,
    y_dtype: DTypeLike,
    *,
    reverse: bool,
    save: bool,
    by_value: bool,
    scales: tuple[float, float],
) -> tuple[jax.Array, ...]:
    """(y, inner, end, states) of a scan; ``rates`` are first, second, decay, write, read.

    Without ``save``, inner and states hold nothing.
    """
    s = plan.sizes
    inner, states = float32(1, 1), float32(1, 1, 1)
    if save:
        inner, states = float32(*x.shape), float32(*plan.entries, *((s.V, s.K) if by_value else (s.K, s.V)))
    kernel = functools.partial(
        rwkv7_scan, sizes=s, reverse=reverse, save=save, by_value=by_value, scales=scales
    )
    out = (jax.ShapeDtypeStruct(x.shape, y_dtype), inner, float32(*start.shape), states)
    inputs = (*(by_key_block(rate, s.scan) for rate in rates), x, start, plan.restart, plan.bounds)
    return pallas.pallas_call(
        kernel, *inputs, out=out, grid=(s.V // s.scan.columns, s.heads, plan.sequences), num_warps=1
    )


def fwd(ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs) -> tuple[Outputs, Residuals]:
    """Outputs and what the backward reads."""
    scale, K, V = ctx.settings.scale, x.r.shape[3], x.v.shape[3]
    if x.r.shape[1] == 1 and not ctx.save_residuals and x.cu_seqlens is None and has_step_kernel(K, V):
        return step(scale, x), {}
    plan = make_plan(x, variants.INTERVAL, ctx.save_residuals)
    r, decay, k, v, a, b = _padded(plan, x)
    o, inner, final, states = _scan(
        plan,
        (a, b, decay, k, r),
        v,
        plan.state(x.initial_state),
        x.v.dtype,
        reverse=False,
        save=ctx.save_residuals,
        by_value=has_chunk_gradients(ctx, x),
        scales=(1.0, scale),
    )
    outputs = Outputs(plan.untokens(o, x.v), plan.unstate(final, x.initial_state))
    if not ctx.save_residuals:
        return outputs, {}
    return outputs, {"states": plan.by_sequence(states), "inner": plan.by_sequence(inner)}


def bwd(
    ctx: Context[RWKV7Inputs, RecurrenceConfig],
    x: RWKV7Inputs,
    residuals: Residuals,
    cotangents: Outputs,
) -> RWKV7Inputs:
    """Gradients of all inputs."""
    scale, plan, by_chunks = ctx.settings.scale, make_plan(x, variants.INTERVAL), has_chunk_gradients(ctx, x)
    states, inner = plan.flat(residuals["states"]), plan.flat(residuals["inner"])
    r, decay, k, v, a, b = _padded(plan, x)
    do, ds = plan.tokens(cotangents.o, plan.sizes.V), plan.state(cotangents.final_state)
    dv, db_inner, ds0, dstates = _scan(
        plan,
        (b, a, decay, r, k),
        do,
        ds,
        x.v.dtype,
        reverse=True,
        save=True,
        by_value=by_chunks,
        scales=(scale, 1.0),
    )
    if by_chunks:
        dr, dw, dk, da, db = _gradients_by_chunks(
            ctx, plan, x, (do, inner, db_inner), states, dstates, cotangents.final_state
        )
    else:
        summed = sum_over_values(plan, (do, db_inner), (v, inner), states, dstates, scale)
        dr, dw, dk, da, db = _gradients_by_pairs(plan, x, (decay, r, a, k, b, *summed))
    made = zip((dr, dw, dk, dv, da, db), (x.r, x.w, x.k, x.v, x.a, x.b))
    dr, dw, dk, dv, da, db = (plan.untokens(g, like) for g, like in made)
    first = plan.unstate(ds0, x.initial_state)
    return RWKV7Inputs(dr, dw, dk, dv, da, db, first)


def _gradients_by_pairs(
    plan: RecurrentPlan, x: RWKV7Inputs, arrays: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """dr, dw, dk, da, db by the kernel that takes ``arrays``, tokens and sums over values."""
    s = plan.sizes
    size = min(s.K, KEYS)
    kernel = functools.partial(rwkv7_gradients, sizes=s, size=size)
    shape = (plan.B * s.tokens * s.heads, s.K)
    out = [jax.ShapeDtypeStruct(shape, like.dtype) for like in (x.r, x.w, x.k, x.a, x.b)]
    grid = (s.K // size, s.heads, plan.B * s.num_intervals)
    return pallas.pallas_call(kernel, *arrays, plan.restart, out=out, grid=grid, num_warps=1)


def _gradients_by_chunks(
    ctx: Context[RWKV7Inputs, RecurrenceConfig],
    plan: RecurrentPlan,
    x: RWKV7Inputs,
    values: Sequence[jax.Array],
    states: jax.Array,
    dstates: jax.Array,
    dht: jax.Array,
) -> tuple[jax.Array, ...]:
    """dr, dw, dk, da, db by the chunked form's kernel, from ``values``, do, a^T S and b^T D of each token.

    Intervals are its chunks. The states at both ends of each are given, so packed sequences are one sequence
    for it.
    """
    from .chunk_bwd_grads_host import bwd_grads_from_scans, plan_from_scans  # Triton is optional
    from .chunk_bwd_split import GradsSaved

    s, ids = plan.sizes, x.segment_ids

    def padded(array: jax.Array, wide: int) -> jax.Array:
        return plan.tokens(array, wide).reshape(plan.B, s.tokens, s.heads, wide)

    if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (0, s.tokens - ids.shape[1])), mode="edge")
    r, w, k, a, b = (padded(array, s.K) for array in (x.r, x.w, x.k, x.a, x.b))
    whole = RWKV7Inputs(r, w, k, padded(x.v, s.V), a, b, x.initial_state, ids)
    do, v_new, da_read = (array.reshape(whole.v.shape) for array in values)
    saved = GradsSaved(do, v_new, da_read, states, (dstates,))
    grads = bwd_grads_from_scans(ctx, plan_from_scans(ctx, whole, do, dht), whole, saved)
    return tuple(array.reshape(-1, s.K) for array in (grads.r, grads.w, grads.k, grads.a, grads.b))
