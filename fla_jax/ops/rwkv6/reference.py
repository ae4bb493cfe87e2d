"""RWKV-6 token by token: the definition of the op, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.context import Context, Outputs, RecurrenceConfig, RWKV6Inputs
from ..intra_exact import dot
from ..scan import prepare, scan_bwd, scan_fwd


def _step6(u):
    """S [B, H, K, V]; r, k, w [B, H, K], v [B, H, V]."""

    def step(S, token):
        r, k, v, w, restart = token
        S = jnp.where(restart[..., None], 0, S)
        y = dot("bhk,bhkv->bhv", r, S) + jnp.sum(r * u * k, -1, keepdims=True) * v
        return jnp.exp(w)[..., None] * S + k[..., None] * v[..., None, :], y

    def back(ds, x):
        S, (r, k, v, w, restart), dy = x
        S = jnp.where(restart[..., None], 0, S)
        p = jnp.sum(dy * v, -1, keepdims=True)
        decay = jnp.exp(w)
        dr = dot("bhkv,bhv->bhk", S, dy) + p * u * k
        dk = dot("bhkv,bhv->bhk", ds, v) + p * u * r
        dv = dot("bhkv,bhk->bhv", ds, k) + jnp.sum(r * u * k, -1, keepdims=True) * dy
        dw = decay * jnp.sum(S * ds, -1)
        ds = decay[..., None] * ds + r[..., None] * dy[..., None, :]
        return jnp.where(restart[..., None], 0, ds), (dr, dk, dv, dw, p * r * k)

    return step, back


def residual_axes(ctx: Context[RecurrenceConfig]) -> dict[str, str]:
    """See `fla_jax.core.op`: what the forward keeps, by chunk."""
    return {"states": "chunk b h k v"}


def fwd(ctx: Context[RecurrenceConfig], x: RWKV6Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """See `fla_jax.core.op`: outputs and what the backward reads."""
    cfg = ctx.settings
    chunks, xs = prepare(cfg, (x.r, x.k, x.v, x.w), x.segment_ids, x.cu_seqlens)
    step, _ = _step6(x.u.astype(cfg.compute))
    y, states, final = scan_fwd(step, chunks, x.initial_state, xs)
    return Outputs(chunks.join(y * cfg.scale, x.v.dtype), final), {"states": states}


def bwd(
    ctx: Context[RecurrenceConfig], x: RWKV6Inputs, residuals: dict[str, jax.Array], cotangents: Outputs
) -> RWKV6Inputs:
    """See `fla_jax.core.op`: gradients of all inputs."""
    cfg, tokens = ctx.settings, (x.r, x.k, x.v, x.w)
    chunks, xs = prepare(cfg, tokens, x.segment_ids, x.cu_seqlens)
    step, back = _step6(x.u.astype(cfg.compute))
    dy = chunks.split(cotangents.o, cfg.compute) * cfg.scale
    grads, ds0 = scan_bwd(step, back, chunks, cotangents.final_state, residuals["states"], xs, dy)
    *grads, du = grads
    du = jnp.sum(du, (0, 1, 3)).astype(x.u.dtype)
    dr, dk, dv, dw = (chunks.join(g, like.dtype) for g, like in zip(grads, tokens))
    return RWKV6Inputs(dr, dk, dv, dw, du, ds0)
