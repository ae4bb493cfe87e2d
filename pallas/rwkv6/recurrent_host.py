"""RWKV-6, token by token, on NVIDIA GPUs: the functions that the op loads (fla_jax/core/op.py); they launch
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
from ...core.types import Outputs, RecurrenceConfig, RWKV6Inputs
from ..backend.pallas import pallas_call
from ..common.recurrent_plan import RecurrentPlan, by_key_block, make_plan
from ..common.value_sums_host import KEYS, float32, sum_over_values
from .recurrent_kernels import rwkv6_gradients, rwkv6_scan
from .variants import INTERVAL


def residual_axes(ctx: Context[RWKV6Inputs, RecurrenceConfig]) -> dict[str, str]:
    """The states at the starts of intervals, padded."""
    return {"states": "b c h x y"}


def _padded(plan: RecurrentPlan, x: RWKV6Inputs) -> tuple[jax.Array, ...]:
    """Arrays as kernels take them; the decay in place of its logarithm."""
    K = plan.sizes.K
    decay = jnp.exp(plan.tokens(x.w, K).astype(jnp.float32))
    u = jnp.pad(x.u, ((0, 0), (0, K - x.u.shape[1])))
    return plan.tokens(x.r, K), plan.tokens(x.k, K), plan.tokens(x.v, plan.sizes.V), decay, u


def _scan(
    plan: RecurrentPlan,
    rates: Sequence[jax.Array],
    x: jax.Array,
    start: jax.Array,
    y_dtype: DTypeLike,
    *,
    reverse: bool,
    save: bool,
    scale: float,
) -> tuple[jax.Array, ...]:
    """(y, end, states) of a scan; ``rates`` are read, write, decay, u. Without ``save``, states hold
    nothing.
    """
    s = plan.sizes
    states = float32(*plan.entries, s.K, s.V) if save else float32(1, 1, 1)
    kernel = functools.partial(rwkv6_scan, sizes=s, reverse=reverse, save=save, scale=scale)
    out = (jax.ShapeDtypeStruct(x.shape, y_dtype), float32(*start.shape), states)
    inputs = (*(by_key_block(rate, s.scan) for rate in rates), x, start, plan.restart, plan.bounds)
    return pallas_call(
        kernel, *inputs, out=out, grid=(s.V // s.scan.columns, s.heads, plan.sequences), num_warps=1
    )


def fwd(ctx: Context[RWKV6Inputs, RecurrenceConfig], x: RWKV6Inputs) -> tuple[Outputs, Residuals]:
    """Outputs and what the backward reads."""
    plan = make_plan(x, INTERVAL, ctx.save_residuals)
    r, k, v, decay, u = _padded(plan, x)
    s0 = plan.state(x.initial_state)
    rates = (r, k, decay, u)
    o, final, states = _scan(
        plan, rates, v, s0, x.v.dtype, reverse=False, save=ctx.save_residuals, scale=ctx.settings.scale
    )
    outputs = Outputs(plan.untokens(o, x.v), plan.unstate(final, x.initial_state))
    return outputs, {"states": plan.by_sequence(states)} if ctx.save_residuals else {}


def bwd(
    ctx: Context[RWKV6Inputs, RecurrenceConfig],
    x: RWKV6Inputs,
    residuals: Residuals,
    cotangents: Outputs,
) -> RWKV6Inputs:
    """Gradients of all inputs, that of u for each batch element."""
    scale, plan = ctx.settings.scale, make_plan(x, INTERVAL)
    s, states = plan.sizes, plan.flat(residuals["states"])
    r, k, v, decay, u = _padded(plan, x)
    do, ds = plan.tokens(cotangents.o, s.V), plan.state(cotangents.final_state)
    rates = (k, r, decay, u)
    dv, ds0, dstates = _scan(plan, rates, do, ds, x.v.dtype, reverse=True, save=True, scale=scale)
    summed = sum_over_values(plan, (do,), (v,), states, dstates, scale)
    out = [jax.ShapeDtypeStruct(r.shape, like.dtype) for like in (x.r, x.w, x.k)]
    out.append(float32(*plan.entries, s.K))
    size = min(s.K, KEYS)
    kernel = functools.partial(rwkv6_gradients, sizes=s, size=size)
    grid = (s.K // size, s.heads, x.r.shape[0] * s.num_intervals)
    inputs = (decay, r, k, u, *summed, plan.restart)
    dr, dw, dk, du = pallas_call(kernel, *inputs, out=out, grid=grid, num_warps=1)
    du = jnp.sum(plan.by_sequence(du), 1)[..., : x.u.shape[1]]
    made = zip((dr, dk, dv, dw), (x.r, x.k, x.v, x.w))
    dr, dk, dv, dw = (plan.untokens(g, like) for g, like in made)
    ds0 = plan.unstate(ds0, x.initial_state)
    return RWKV6Inputs(dr, dk, dv, dw, du, ds0)
