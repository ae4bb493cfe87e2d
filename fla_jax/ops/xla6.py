"""RWKV-6 by chunks in plain JAX. With C tokens a chunk, S0 the state that enters it, S1 the state that leaves it, and scores A of `tree.scores`::

    Y = Q S0 + A V,   Q = r decayed from the chunk's start, A with r . (u k) on its diagonal
    S1 = gam S0 + K'^T V,   K' = k decayed to the chunk's end

Everything but the state's own recurrence is computed for all chunks at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import tree
from .config import OpConfig
from .layout import Chunks, Segments, plan, segments
from .tree import dot

CHUNK = 16
INCLUSIVE = (False,)  # r reads the state before its own decay


class _Intra(NamedTuple):
    """What a chunk needs besides its state; all [n, B, H, ...]."""

    chunks: Chunks
    decays: tree.Decays
    r: jax.Array
    k: jax.Array
    v: jax.Array
    u: jax.Array  # [H, 1, K]
    r_in: jax.Array  # Q [..., C, K]
    k_out: jax.Array  # K'
    through: jax.Array  # gam [..., K, 1]
    seg: Segments | None


def _intra(cfg: OpConfig, r, k, v, w, u, segment_ids, cu_seqlens) -> _Intra:
    size = min(cfg.chunk_size or CHUNK, 1 << (r.shape[1] - 1).bit_length())
    chunks = plan(r.shape[1], size, cu_seqlens)
    seg = segments(chunks, segment_ids)
    r, k, v, w = (chunks.split(x, cfg.compute) for x in (r, k, v, w))
    r = r * cfg.scale
    d = tree.decays(w, INCLUSIVE, None if seg is None else seg.ids)
    r_in, k_out, through = r * d.rows[..., 0, :, :], k * d.cols[..., 0, :, :], d.through[..., None]
    if seg is not None:
        r_in, k_out, through = jnp.where(seg.start, r_in, 0), jnp.where(seg.end, k_out, 0), jnp.where(seg.through, through, 0)
    return _Intra(chunks, d, r, k, v, u.astype(cfg.compute)[:, None, :], r_in, k_out, through, seg)


def _scores(x: _Intra) -> jax.Array:
    """A [..., C, C]."""
    own = jnp.sum(x.r * x.u * x.k, -1)[..., None, None]
    return tree.scores(x.r[..., None, :, :], x.k[..., None, :, :], own, x.decays)[..., 0, :, 0, :]


def forward(cfg: OpConfig, r, k, v, w, u, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), states``."""
    x = _intra(cfg, r, k, v, w, u, segment_ids, cu_seqlens)

    def step(carry, chunk):
        sequence, k_out, v, through = chunk
        S = x.chunks.read(carry, sequence)
        return x.chunks.write(carry, through * S + dot("bhck,bhcv->bhkv", k_out, v), sequence), S

    final, states = jax.lax.scan(step, s0, (x.chunks.sequence, x.k_out, x.v, x.through))
    y = dot("...ck,...kv->...cv", x.r_in, states) + dot("...ij,...jv->...iv", _scores(x), x.v)
    return (x.chunks.join(y, v.dtype), final), states


def backward(cfg: OpConfig, inputs, states, dy, ds):
    """Backward rule: gradients of r, k, v, w, u and the initial state."""
    *arrays, u, _, segment_ids, cu_seqlens = inputs
    x = _intra(cfg, *arrays, u, segment_ids, cu_seqlens)
    dy = x.chunks.split(dy, cfg.compute)

    def step(carry, chunk):
        sequence, r_in, dy, through = chunk
        dS = x.chunks.read(carry, sequence)
        return x.chunks.write(carry, through * dS + dot("bhck,bhcv->bhkv", r_in, dy), sequence), dS

    ds0, dS = jax.lax.scan(step, ds, (x.chunks.sequence, x.r_in, dy, x.through), reverse=True)
    dv = dot("...ij,...iv->...jv", _scores(x), dy) + dot("...ck,...kv->...cv", x.k_out, dS)

    dA = dot("...iv,...jv->...ij", dy, x.v)[..., None, :, None, :]
    dr = x.decays.rows * dot("...iv,...kv->...ik", dy, states)[..., None, :, :]
    dk = x.decays.cols * dot("...jv,...kv->...jk", x.v, dS)[..., None, :, :]
    if x.seg is not None:
        dr, dk = jnp.where(x.seg.start[:, :, :, None], dr, 0), jnp.where(x.seg.end[:, :, :, None], dk, 0)
    dg = jnp.swapaxes(x.through * jnp.sum(states * dS, -1, keepdims=True), -1, -2)
    dr, dk, dg = tree.gradients(dA, x.r[..., None, :, :], x.k[..., None, :, :], dr, dk, jnp.broadcast_to(dg, x.r.shape), x.decays, INCLUSIVE)
    own = jnp.sum(dy * x.v, -1, keepdims=True)
    dr, dk = dr[..., 0, :, :] + own * x.u * x.k, dk[..., 0, :, :] + own * x.u * x.r
    du = jnp.sum(own * x.r * x.k, (0, 1, 3)).astype(u.dtype)
    grads = (dr * cfg.scale, dk, dv, dg)
    return tuple(x.chunks.join(g, arr.dtype) for g, arr in zip(grads, arrays)) + (du, ds0)
