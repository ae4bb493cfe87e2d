"""RWKV-7 token by token: the definition of the op, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.call import Call, Outputs, Recurrence, RWKV7Inputs
from ..common.tree import dot
from ..common.walk import prepare, walk_backward, walk_forward


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


def kept_axes(call: Call[Recurrence]) -> dict[str, str]:
    """See `fla_jax.ops.op`: what the forward keeps, by chunk."""
    return {"states": "chunk b h k v"}


def forward(call: Call[Recurrence], x: RWKV7Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """See `fla_jax.ops.op`: outputs and what the backward reads."""
    cfg = call.settings
    chunks, xs = prepare(cfg, (x.r, x.w, x.k, x.v, x.a, x.b), x.segment_ids, x.cu_seqlens)
    y, states, final = walk_forward(_step7, chunks, x.initial_state, xs)
    return Outputs(chunks.join(y * cfg.scale, x.v.dtype), final), {"states": states}


def backward(
    call: Call[Recurrence], x: RWKV7Inputs, kept: dict[str, jax.Array], cotangents: Outputs
) -> RWKV7Inputs:
    """See `fla_jax.ops.op`: gradients of all inputs."""
    cfg, tokens = call.settings, (x.r, x.w, x.k, x.v, x.a, x.b)
    chunks, xs = prepare(cfg, tokens, x.segment_ids, x.cu_seqlens)
    dy = chunks.split(cotangents.o, cfg.compute) * cfg.scale
    grads, ds0 = walk_backward(_step7, _back7, chunks, cotangents.final_state, kept["states"], xs, dy)
    dr, dw, dk, dv, da, db = (chunks.join(g, like.dtype) for g, like in zip(grads, tokens))
    return RWKV7Inputs(dr, dw, dk, dv, da, db, ds0)
