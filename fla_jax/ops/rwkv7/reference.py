"""RWKV-7 token by token: the definition of the op, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.context import Context, Outputs, RecurrenceConfig, RWKV7Inputs
from ..intra_exact import dot
from ..scan import prepare, scan_bwd, scan_fwd


def _step7(S, token):
    """S [B, H, K, V]; r, w, k, a, b [B, H, K], v [B, H, V]."""
    r, w, k, v, a, b, restart = token
    S = jnp.where(restart[..., None], 0, S)
    sa = dot("bhk,bhkv->bhv", a, S)
    S = jnp.exp(w)[..., None] * S + b[..., None] * sa[..., None, :] + k[..., None] * v[..., None, :]
    return S, dot("bhk,bhkv->bhv", r, S)


def _back7(ds, x):
    S, (r, w, k, v, a, b, restart), dy = x
    S = jnp.where(restart[..., None], 0, S)
    decay = jnp.exp(w)
    sa = dot("bhk,bhkv->bhv", a, S)
    after = decay[..., None] * S + b[..., None] * sa[..., None, :] + k[..., None] * v[..., None, :]
    ds = ds + r[..., None] * dy[..., None, :]
    dsa = dot("bhkv,bhk->bhv", ds, b)
    grads = (
        dot("bhkv,bhv->bhk", after, dy),
        decay * jnp.sum(S * ds, -1),
        dot("bhkv,bhv->bhk", ds, v),
        dot("bhkv,bhk->bhv", ds, k),
        dot("bhkv,bhv->bhk", S, dsa),
        dot("bhkv,bhv->bhk", ds, sa),
    )
    ds = decay[..., None] * ds + a[..., None] * dsa[..., None, :]
    return jnp.where(restart[..., None], 0, ds), grads


def residual_axes(ctx: Context[RecurrenceConfig]) -> dict[str, str]:
    """See `fla_jax.core.op`: what the forward keeps, by chunk."""
    return {"states": "chunk b h k v"}


def fwd(ctx: Context[RecurrenceConfig], x: RWKV7Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """See `fla_jax.core.op`: outputs and what the backward reads."""
    cfg = ctx.settings
    chunks, xs = prepare(cfg, (x.r, x.w, x.k, x.v, x.a, x.b), x.segment_ids, x.cu_seqlens)
    y, states, final = scan_fwd(_step7, chunks, x.initial_state, xs)
    return Outputs(chunks.join(y * cfg.scale, x.v.dtype), final), {"states": states}


def bwd(
    ctx: Context[RecurrenceConfig], x: RWKV7Inputs, residuals: dict[str, jax.Array], cotangents: Outputs
) -> RWKV7Inputs:
    """See `fla_jax.core.op`: gradients of all inputs."""
    cfg, tokens = ctx.settings, (x.r, x.w, x.k, x.v, x.a, x.b)
    chunks, xs = prepare(cfg, tokens, x.segment_ids, x.cu_seqlens)
    dy = chunks.split(cotangents.o, cfg.compute) * cfg.scale
    grads, ds0 = scan_bwd(_step7, _back7, chunks, cotangents.final_state, residuals["states"], xs, dy)
    dr, dw, dk, dv, da, db = (chunks.join(g, like.dtype) for g, like in zip(grads, tokens))
    return RWKV7Inputs(dr, dw, dk, dv, da, db, ds0)
