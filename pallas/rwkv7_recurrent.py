"""RWKV-7, token by token, on NVIDIA GPUs: the forward and backward rules that launch the Pallas kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..core.pallas_call import pallas_call
from ..ops.config import OpConfig
from .recurrent_launch import RATES, sum_over_values
from .recurrent_plan import STRETCH, Plan, make_plan, split
from .rwkv7_recurrent_kernels import rwkv7_gradients, rwkv7_walk


def _tokens(plan: Plan, r, w, k, v, a, b):
    """Padded arrays; the decay in place of its logarithm."""
    r, w, k, a, b = (plan.tokens(x, plan.sizes.K) for x in (r, w, k, a, b))
    return r, jnp.exp(w.astype(jnp.float32)), k, plan.tokens(v, plan.sizes.V), a, b


def _walk(plan: Plan, H: int, reverse: bool, scales: tuple[float, float], rates, x: jax.Array, start: jax.Array, y_dtype):
    """(y, inner, end, states) of a walk; ``rates`` are first, second, decay, write, read."""
    s = plan.sizes
    out = (
        jax.ShapeDtypeStruct(x.shape, y_dtype),
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        jax.ShapeDtypeStruct(start.shape, jnp.float32),
        jax.ShapeDtypeStruct((x.shape[0] // STRETCH, s.K, s.V), jnp.float32),
    )
    kernel = functools.partial(rwkv7_walk, sizes=s, reverse=reverse, scales=scales)
    rates = [split(rate, s.walk) for rate in rates]
    return pallas_call(
        kernel, *rates, x, start, plan.restart, plan.bounds, out=out, grid=(s.V // s.walk.own, H, plan.rows), num_warps=1
    )  # fmt: skip


def forward(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``: the states that enter each stretch and a^T S of each token."""
    plan = make_plan(r, v, segment_ids, cu_seqlens)
    rp, decay, kp, vp, ap, bp = _tokens(plan, r, w, k, v, a, b)
    o, sa, final, states = _walk(plan, r.shape[2], False, (1.0, cfg.scale), (ap, bp, decay, kp, rp), vp, plan.state(s0), v.dtype)
    return (plan.untokens(o, v), plan.unstate(final, s0)), (states, sa)


def backward(cfg: OpConfig, inputs, kept, do, dfinal):
    """Backward rule: gradients of the token arrays and the initial state."""
    r, w, k, v, a, b, _, segment_ids, cu_seqlens = inputs
    states, sa = kept
    plan = make_plan(r, v, segment_ids, cu_seqlens)
    s, H = plan.sizes, r.shape[2]
    rp, decay, kp, vp, ap, bp = _tokens(plan, r, w, k, v, a, b)
    do = plan.tokens(do, s.V)
    dv, db, ds0, dstates = _walk(plan, H, True, (cfg.scale, 1.0), (bp, ap, decay, rp, kp), do, plan.state(dfinal), v.dtype)
    summed = sum_over_values(plan, H, (do, db), (vp, sa), states, dstates, cfg.scale)
    out = [jax.ShapeDtypeStruct(rp.shape, x.dtype) for x in (r, w, k, a, b)]
    size = min(s.K, RATES)
    kernel = functools.partial(rwkv7_gradients, sizes=s, size=size)
    grid = (s.K // size, H, r.shape[0] * s.number)
    dr, dw, dk, da, db = pallas_call(kernel, decay, rp, ap, kp, bp, *summed, plan.restart, out=out, grid=grid, num_warps=1)
    return (*(plan.untokens(g, x) for g, x in zip((dr, dw, dk, dv, da, db), (r, w, k, v, a, b))), plan.unstate(ds0, dfinal))
