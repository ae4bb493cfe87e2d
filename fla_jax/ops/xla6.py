"""RWKV-6 by chunks in plain JAX. With C tokens a chunk, S0 the state that enters it, S1 the state that leaves it, and scores A of `tree.scores`::

    Y = Q S0 + A V,   Q = r decayed from the chunk's start, A with r . (u k) on its diagonal
    S1 = gam S0 + K'^T V,   K' = k decayed to the chunk's end

All but the state's own recurrence is computed for a group of chunks at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import tree
from .config import OpConfig
from .layout import Segments, group_size, plan, segments
from .tree import dot

CHUNK = 16
INCLUSIVE = (False,)  # r reads the state before its own decay


class _Intra(NamedTuple):
    """What a group of chunks needs besides its states; all [group, B, H, ...]."""

    levels: list[tree.Level]
    r_in: jax.Array  # Q [..., C, K]
    k_out: jax.Array  # K'
    through: jax.Array  # gam [..., K, 1]
    A: jax.Array  # [..., C, C]


def _intra(cfg: OpConfig, r, k, w, u, seg: Segments | None) -> _Intra:
    r = r * cfg.scale
    levels = tree.levels(jnp.exp(w), r[..., None, :, :], k[..., None, :, :], INCLUSIVE)
    r_in, k_out, through = levels[-1].rows[..., 0, :, :], levels[-1].cols[..., 0, :, :], levels[-1].total[..., 0, :, None]
    A = tree.scores(levels) + jnp.sum(r * u * k, -1, keepdims=True) * jnp.eye(r.shape[-2], dtype=r.dtype)
    if seg is not None:
        A = jnp.where(seg.pairs, A, 0)
        r_in, k_out, through = jnp.where(seg.start, r_in, 0), jnp.where(seg.end, k_out, 0), jnp.where(seg.through, through, 0)
    return _Intra(levels, r_in, k_out, through, A)


def _prepare(cfg: OpConfig, arrays, segment_ids, cu_seqlens):
    B, T, H, _ = arrays[0].shape
    size = min(cfg.chunk_size or CHUNK, 1 << (T - 1).bit_length())
    chunks = plan(T, size, cu_seqlens, group_size(B * H * size))
    return chunks, tuple(chunks.split(x, cfg.compute) for x in arrays), segments(chunks, segment_ids)


def forward(cfg: OpConfig, r, k, v, w, u, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    chunks, xs, seg = _prepare(cfg, (r, k, v, w), segment_ids, cu_seqlens)
    u = u.astype(cfg.compute)[:, None, :]

    def group(carry, x):
        sequences, (r, k, v, w), seg = x
        x = _intra(cfg, r, k, w, u, seg)

        def step(carry, chunk):
            sequence, k_out, v, through = chunk
            S = chunks.read(carry, sequence)
            return chunks.write(carry, through * S + dot("bhck,bhcv->bhkv", k_out, v), sequence), S

        carry, states = jax.lax.scan(step, carry, (sequences, x.k_out, v, x.through))
        return carry, (dot("...ck,...kv->...cv", x.r_in, states) + dot("...ij,...jv->...iv", x.A, v), states)

    final, (y, states) = chunks.walk(group, s0, (chunks.sequence, xs, seg))
    return (chunks.join(y, v.dtype), final), states


def backward(cfg: OpConfig, inputs, states, dy, ds):
    """Backward rule: gradients of r, k, v, w, u and the initial state."""
    *arrays, u, _, segment_ids, cu_seqlens = inputs
    chunks, xs, seg = _prepare(cfg, arrays, segment_ids, cu_seqlens)
    bonus = u.astype(cfg.compute)[:, None, :]

    def group(carry, x):
        (carry, du), (sequences, (r, k, v, w), seg, states, dy) = carry, x
        x = _intra(cfg, r, k, w, bonus, seg)

        def step(carry, chunk):
            sequence, r_in, dy, through = chunk
            dS = chunks.read(carry, sequence)
            return chunks.write(carry, through * dS + dot("bhck,bhcv->bhkv", r_in, dy), sequence), dS

        carry, dS = jax.lax.scan(step, carry, (sequences, x.r_in, dy, x.through), reverse=True)
        dv = dot("...ij,...iv->...jv", x.A, dy) + dot("...ck,...kv->...cv", x.k_out, dS)
        dA = dot("...iv,...jv->...ij", dy, v)
        dr, dk = dot("...iv,...kv->...ik", dy, states), dot("...jv,...kv->...jk", v, dS)
        if seg is not None:
            dA, dr, dk = jnp.where(seg.pairs, dA, 0), jnp.where(seg.start, dr, 0), jnp.where(seg.end, dk, 0)
        dg = jnp.swapaxes(x.through * jnp.sum(states * dS, -1, keepdims=True), -1, -2)
        dr, dk, dg = tree.gradients(x.levels, dA, dr[..., None, :, :], dk[..., None, :, :], jnp.broadcast_to(dg, r.shape), INCLUSIVE)
        own = jnp.sum(dy * v, -1, keepdims=True) * cfg.scale
        dr, dk = dr[..., 0, :, :] * cfg.scale + own * bonus * k, dk[..., 0, :, :] + own * bonus * r
        return (carry, du + jnp.sum(own * r * k, (0, 1, 3))), (dr, dk, dv, dg)

    carry = (ds, jnp.zeros(u.shape, cfg.compute))
    (ds0, du), grads = chunks.walk(group, carry, (chunks.sequence, xs, seg, states, chunks.split(dy, cfg.compute)), reverse=True)
    return tuple(chunks.join(g, x.dtype) for g, x in zip(grads, arrays)) + (du.astype(u.dtype), ds0)
