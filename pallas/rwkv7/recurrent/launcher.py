"""RWKV-7, token by token, on NVIDIA GPUs: the functions that the op loads (fla_jax/ops/op.py); they launch
the Pallas kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ....core.call import Call, Outputs, Recurrence, RWKV7Inputs
from ...plan.recurrent import RecurrentPlan, make_plan, split
from ...plan.value_sums import RATES, float32, sum_over_values
from ...run.pallas import pallas_call
from .kernels import rwkv7_gradients, rwkv7_walk
from .step import step, takes

WINDOW = 16  # with 32, the gradients of the rates spill: the op takes 24 ms and more for 18 on an H200


def kept_axes(call: Call[Recurrence]) -> dict[str, str]:
    """The states that enter each window and a^T S of each token, padded."""
    return {"states": "b c h x y", "inner": "b s h y"}


def _padded(plan: RecurrentPlan, x: RWKV7Inputs) -> tuple[jax.Array, ...]:
    """Token arrays as kernels take them; the decay in place of its logarithm."""
    r, w, k, a, b = (plan.tokens(array, plan.sizes.K) for array in (x.r, x.w, x.k, x.a, x.b))
    return r, jnp.exp(w.astype(jnp.float32)), k, plan.tokens(x.v, plan.sizes.V), a, b


def _walk(
    plan: RecurrentPlan,
    rates: Sequence[jax.Array],
    x: jax.Array,
    start: jax.Array,
    y_dtype,
    *,
    reverse: bool,
    keep: bool,
    scales: tuple[float, float],
):
    """(y, inner, end, states) of a walk; ``rates`` are first, second, decay, write, read.

    Without ``keep``, inner and states hold nothing.
    """
    s = plan.sizes
    inner, states = float32(1, 1), float32(1, 1, 1)
    if keep:
        inner, states = float32(*x.shape), float32(*plan.entries, s.K, s.V)
    kernel = functools.partial(rwkv7_walk, sizes=s, reverse=reverse, keep=keep, scales=scales)
    out = (jax.ShapeDtypeStruct(x.shape, y_dtype), inner, float32(*start.shape), states)
    inputs = (*(split(rate, s.walk) for rate in rates), x, start, plan.restart, plan.bounds)
    return pallas_call(kernel, *inputs, out=out, grid=(s.V // s.walk.own, s.heads, plan.rows), num_warps=1)


def forward(call: Call[Recurrence], x: RWKV7Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """Outputs and what the backward reads."""
    scale, K, V = call.settings.scale, x.r.shape[3], x.v.shape[3]
    if x.r.shape[1] == 1 and not call.keep and x.cu_seqlens is None and takes(K, V):
        return step(scale, x), {}
    plan = make_plan(x, WINDOW, call.keep)
    r, decay, k, v, a, b = _padded(plan, x)
    o, inner, final, states = _walk(
        plan,
        (a, b, decay, k, r),
        v,
        plan.state(x.initial_state),
        x.v.dtype,
        reverse=False,
        keep=call.keep,
        scales=(1.0, scale),
    )
    outputs = Outputs(plan.untokens(o, x.v), plan.unstate(final, x.initial_state))
    return outputs, {"states": plan.by_row(states), "inner": plan.by_row(inner)} if call.keep else {}


def backward(
    call: Call[Recurrence], x: RWKV7Inputs, kept: dict[str, jax.Array], cotangents: Outputs
) -> RWKV7Inputs:
    """Gradients of all inputs."""
    scale, plan = call.settings.scale, make_plan(x, WINDOW)
    s = plan.sizes
    states, inner = plan.flat(kept["states"]), plan.flat(kept["inner"])
    r, decay, k, v, a, b = _padded(plan, x)
    do, ds = plan.tokens(cotangents.o, s.V), plan.state(cotangents.final_state)
    dv, db_inner, ds0, dstates = _walk(
        plan, (b, a, decay, r, k), do, ds, x.v.dtype, reverse=True, keep=True, scales=(scale, 1.0)
    )
    summed = sum_over_values(plan, (do, db_inner), (v, inner), states, dstates, scale)
    out = [jax.ShapeDtypeStruct(r.shape, like.dtype) for like in (x.r, x.w, x.k, x.a, x.b)]
    size = min(s.K, RATES)
    kernel = functools.partial(rwkv7_gradients, sizes=s, size=size)
    grid = (s.K // size, s.heads, x.r.shape[0] * s.number)
    inputs = (decay, r, a, k, b, *summed, plan.restart)
    dr, dw, dk, da, db = pallas_call(kernel, *inputs, out=out, grid=grid, num_warps=1)
    made = zip((dr, dw, dk, dv, da, db), (x.r, x.w, x.k, x.v, x.a, x.b))
    dr, dw, dk, dv, da, db = (plan.untokens(g, like) for g, like in made)
    first = plan.unstate(ds0, x.initial_state)
    return RWKV7Inputs(dr, dw, dk, dv, da, db, first)
