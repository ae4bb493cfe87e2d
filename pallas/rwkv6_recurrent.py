"""RWKV-6, token by token, on NVIDIA GPUs: the forward and backward rules that launch the Pallas kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..core.pallas_call import pallas_call
from ..ops.config import OpConfig
from .recurrent_launch import RATES, sum_over_values
from .recurrent_plan import STRETCH, Plan, make_plan, split
from .rwkv6_recurrent_kernels import rwkv6_gradients, rwkv6_walk


def _tokens(plan: Plan, r, k, v, w, u):
    """Padded arrays; the decay in place of its logarithm."""
    K = plan.sizes.K
    decay = jnp.exp(plan.tokens(w, K).astype(jnp.float32))
    return plan.tokens(r, K), plan.tokens(k, K), plan.tokens(v, plan.sizes.V), decay, jnp.pad(u, ((0, 0), (0, K - u.shape[1])))


def _walk(plan: Plan, reverse: bool, scale: float, rates, u: jax.Array, x: jax.Array, start: jax.Array, y_dtype):
    """(y, end, states) of a walk; ``rates`` are read, write, decay."""
    s = plan.sizes
    H = u.shape[0]
    out = (
        jax.ShapeDtypeStruct(x.shape, y_dtype),
        jax.ShapeDtypeStruct(start.shape, jnp.float32),
        jax.ShapeDtypeStruct((x.shape[0] // STRETCH, s.K, s.V), jnp.float32),
    )
    kernel = functools.partial(rwkv6_walk, sizes=s, reverse=reverse, scale=scale)
    rates = [split(rate, s.walk) for rate in (*rates, u)]
    return pallas_call(
        kernel, *rates, x, start, plan.restart, plan.bounds, out=out, grid=(s.V // s.walk.own, H, plan.rows), num_warps=1
    )  # fmt: skip


def forward(cfg: OpConfig, r, k, v, w, u, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``: the states that enter each stretch."""
    plan = make_plan(r, v, segment_ids, cu_seqlens)
    rp, kp, vp, decay, up = _tokens(plan, r, k, v, w, u)
    o, final, states = _walk(plan, False, cfg.scale, (rp, kp, decay), up, vp, plan.state(s0), v.dtype)
    return (plan.untokens(o, v), plan.unstate(final, s0)), states


def backward(cfg: OpConfig, inputs, states, do, dfinal):
    """Backward rule: gradients of the token arrays, u and the initial state."""
    r, k, v, w, u, _, segment_ids, cu_seqlens = inputs
    plan = make_plan(r, v, segment_ids, cu_seqlens)
    s, H = plan.sizes, r.shape[2]
    rp, kp, vp, decay, up = _tokens(plan, r, k, v, w, u)
    do = plan.tokens(do, s.V)
    dv, ds0, dstates = _walk(plan, True, cfg.scale, (kp, rp, decay), up, do, plan.state(dfinal), v.dtype)
    summed = sum_over_values(plan, H, (do,), (vp,), states, dstates, cfg.scale)
    out = [jax.ShapeDtypeStruct(rp.shape, x.dtype) for x in (r, w, k)]
    out.append(jax.ShapeDtypeStruct((states.shape[0], s.K), jnp.float32))
    size = min(s.K, RATES)
    kernel = functools.partial(rwkv6_gradients, sizes=s, size=size)
    grid = (s.K // size, H, r.shape[0] * s.number)
    dr, dw, dk, du = pallas_call(kernel, decay, rp, kp, up, *summed, plan.restart, out=out, grid=grid, num_warps=1)
    du = jnp.sum(du.reshape(-1, H, s.K), 0)[:, : u.shape[1]].astype(u.dtype)
    return (*(plan.untokens(g, x) for g, x in zip((dr, dk, dv, dw), (r, k, v, w))), du, plan.unstate(ds0, dfinal))
