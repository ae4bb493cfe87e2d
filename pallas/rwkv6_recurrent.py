"""RWKV-6, token by token, on NVIDIA GPUs: the forward and backward rules that launch the Pallas kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..core.pallas_call import pallas_call
from ..core.partition import partitioned
from ..ops.config import OpConfig
from .chunk_plan import Layout
from .recurrent_launch import RATES, sum_over_values
from .recurrent_plan import Plan, check_dtype, make_plan, split
from .rwkv6_recurrent_kernels import rwkv6_gradients, rwkv6_walk

TOKENS = "b t h k, b t h k, b t h v, b t h k"
KEPT = "b c h x y"  # states that enter each stretch, padded


def _padded(plan: Plan, r, k, v, w, u):
    """Arrays as kernels take them; the decay in place of its logarithm."""
    K = plan.sizes.K
    decay = jnp.exp(plan.tokens(w, K).astype(jnp.float32))
    return plan.tokens(r, K), plan.tokens(k, K), plan.tokens(v, plan.sizes.V), decay, jnp.pad(u, ((0, 0), (0, K - u.shape[1])))


def _walk(plan: Plan, reverse: bool, keep: bool, scale: float, rates: Sequence[jax.Array], x: jax.Array, start: jax.Array, y_dtype):
    """(y, end, states) of a walk; ``rates`` are read, write, decay, u. Without ``keep``, states hold nothing."""
    s = plan.sizes
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    states = f32(*plan.entries, s.K, s.V) if keep else f32(1, 1, 1)
    kernel = functools.partial(rwkv6_walk, sizes=s, reverse=reverse, keep=keep, scale=scale)
    out = (jax.ShapeDtypeStruct(x.shape, y_dtype), f32(*start.shape), states)
    inputs = (*(split(rate, s.walk) for rate in rates), x, start, plan.restart, plan.bounds)
    return pallas_call(kernel, *inputs, out=out, grid=(s.V // s.walk.own, s.heads, plan.rows), num_warps=1)


def forward(cfg: OpConfig, r, k, v, w, u, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    check_dtype(cfg)
    layout = Layout(segment_ids, cu_seqlens)

    def run(r, k, v, w, u, s0, *rest):
        plan = make_plan(r, v, *layout.unpack(rest))
        rp, kp, vp, decay, up = _padded(plan, r, k, v, w, u)
        o, final, states = _walk(plan, False, cfg.keep, cfg.scale, (rp, kp, decay, up), vp, plan.state(s0), v.dtype)
        out = plan.untokens(o, v), plan.unstate(final, s0)
        return (*out, plan.by_row(states)) if cfg.keep else out

    rule = f"{TOKENS}, h k, {layout.state}{layout.rule} -> b t h v, {layout.state}" + (f", {KEPT}" if cfg.keep else "")
    o, final, *kept = partitioned(run, rule, False)(r, k, v, w, u, s0, *layout.operands)
    return (o, final), tuple(kept)


def backward(cfg: OpConfig, inputs, kept, do, dfinal):
    """Backward rule: gradients of r, k, v, w, u and the initial state."""
    r, k, v, w, u, _, segment_ids, cu_seqlens = inputs
    layout = Layout(segment_ids, cu_seqlens)

    def run(r, k, v, w, u, do, dfinal, states, *rest):
        plan = make_plan(r, v, *layout.unpack(rest))
        s = plan.sizes
        states = plan.flat(states)
        rp, kp, vp, decay, up = _padded(plan, r, k, v, w, u)
        dop = plan.tokens(do, s.V)
        dv, ds0, dstates = _walk(plan, True, True, cfg.scale, (kp, rp, decay, up), dop, plan.state(dfinal), v.dtype)
        summed = sum_over_values(plan, (dop,), (vp,), states, dstates, cfg.scale)
        out = [jax.ShapeDtypeStruct(rp.shape, x.dtype) for x in (r, w, k)]
        out.append(jax.ShapeDtypeStruct((*plan.entries, s.K), jnp.float32))
        size = min(s.K, RATES)
        kernel = functools.partial(rwkv6_gradients, sizes=s, size=size)
        grid = (s.K // size, s.heads, r.shape[0] * s.number)
        dr, dw, dk, du = pallas_call(kernel, decay, rp, kp, up, *summed, plan.restart, out=out, grid=grid, num_warps=1)
        du = jnp.sum(plan.by_row(du), 1)[..., : u.shape[1]]
        return (*(plan.untokens(g, x) for g, x in zip((dr, dk, dv, dw), (r, k, v, w))), du, plan.unstate(ds0, dfinal))

    rule = f"{TOKENS}, h k, b t h v, {layout.state}, {KEPT}{layout.rule} -> {TOKENS}, b h k, {layout.state}"
    *grads, du, ds0 = partitioned(run, rule, False)(r, k, v, w, u, do, dfinal, *kept, *layout.operands)
    return (*grads, jnp.sum(du, 0).astype(u.dtype), ds0)
