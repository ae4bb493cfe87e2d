"""RWKV-7, token by token, on NVIDIA GPUs: the forward and backward rules that launch the Pallas kernels."""

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
from .rwkv7_recurrent_kernels import rwkv7_gradients, rwkv7_walk
from .rwkv7_step import step, takes

TOKENS = "b t h k, b t h k, b t h k, b t h v, b t h k, b t h k"
KEPT = "b c h x y, b s h y"  # states that enter each stretch, a^T S of each token; padded


def _padded(plan: Plan, r, w, k, v, a, b):
    """Token arrays as kernels take them; the decay in place of its logarithm."""
    r, w, k, a, b = (plan.tokens(x, plan.sizes.K) for x in (r, w, k, a, b))
    return r, jnp.exp(w.astype(jnp.float32)), k, plan.tokens(v, plan.sizes.V), a, b


def _walk(plan: Plan, reverse: bool, keep: bool, scales: tuple[float, float], rates: Sequence[jax.Array], x: jax.Array, start: jax.Array, y_dtype):
    """(y, inner, end, states) of a walk; ``rates`` are first, second, decay, write, read. Without ``keep``, inner and states hold nothing."""
    s = plan.sizes
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    kept = (f32(*x.shape), f32(*plan.entries, s.K, s.V)) if keep else (f32(1, 1), f32(1, 1, 1))
    kernel = functools.partial(rwkv7_walk, sizes=s, reverse=reverse, keep=keep, scales=scales)
    out = (jax.ShapeDtypeStruct(x.shape, y_dtype), kept[0], f32(*start.shape), kept[1])
    inputs = (*(split(rate, s.walk) for rate in rates), x, start, plan.restart, plan.bounds)
    return pallas_call(kernel, *inputs, out=out, grid=(s.V // s.walk.own, s.heads, plan.rows), num_warps=1)


def forward(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    check_dtype(cfg)
    layout = Layout(segment_ids, cu_seqlens)
    if r.shape[1] == 1 and not cfg.keep and cu_seqlens is None and takes(r.shape[3], v.shape[3]):
        one = partitioned(functools.partial(step, cfg.scale), f"{TOKENS}, b h k v -> b t h v, b h k v")
        return one(r, w, k, v, a, b, s0), ()

    def run(r, w, k, v, a, b, s0, *rest):
        plan = make_plan(r, v, *layout.unpack(rest))
        rp, decay, kp, vp, ap, bp = _padded(plan, r, w, k, v, a, b)
        o, sa, final, states = _walk(plan, False, cfg.keep, (1.0, cfg.scale), (ap, bp, decay, kp, rp), vp, plan.state(s0), v.dtype)
        out = plan.untokens(o, v), plan.unstate(final, s0)
        return (*out, plan.by_row(states), plan.by_row(sa)) if cfg.keep else out

    rule = f"{TOKENS}, {layout.state}{layout.rule} -> b t h v, {layout.state}" + (f", {KEPT}" if cfg.keep else "")
    o, final, *kept = partitioned(run, rule, layout.fold)(r, w, k, v, a, b, s0, *layout.operands)
    return (o, final), tuple(kept)


def backward(cfg: OpConfig, inputs, kept, do, dfinal):
    """Backward rule: gradients of r, w, k, v, a, b and the initial state."""
    r, w, k, v, a, b, _, segment_ids, cu_seqlens = inputs
    layout = Layout(segment_ids, cu_seqlens)

    def run(r, w, k, v, a, b, do, dfinal, states, sa, *rest):
        plan = make_plan(r, v, *layout.unpack(rest))
        s = plan.sizes
        states, sa = plan.flat(states), plan.flat(sa)
        rp, decay, kp, vp, ap, bp = _padded(plan, r, w, k, v, a, b)
        dop = plan.tokens(do, s.V)
        dv, db, ds0, dstates = _walk(plan, True, True, (cfg.scale, 1.0), (bp, ap, decay, rp, kp), dop, plan.state(dfinal), v.dtype)
        summed = sum_over_values(plan, (dop, db), (vp, sa), states, dstates, cfg.scale)
        out = [jax.ShapeDtypeStruct(rp.shape, x.dtype) for x in (r, w, k, a, b)]
        size = min(s.K, RATES)
        kernel = functools.partial(rwkv7_gradients, sizes=s, size=size)
        grid = (s.K // size, s.heads, r.shape[0] * s.number)
        dr, dw, dk, da, db = pallas_call(kernel, decay, rp, ap, kp, bp, *summed, plan.restart, out=out, grid=grid, num_warps=1)
        return (*(plan.untokens(g, x) for g, x in zip((dr, dw, dk, dv, da, db), (r, w, k, v, a, b))), plan.unstate(ds0, dfinal))

    rule = f"{TOKENS}, b t h v, {layout.state}, {KEPT}{layout.rule} -> {TOKENS}, {layout.state}"
    return partitioned(run, rule, layout.fold)(r, w, k, v, a, b, do, dfinal, *kept, *layout.operands)
