"""RWKV-7 by chunks in plain JAX. With C tokens a chunk, S0 the state that enters it, S1 the state that leaves it, and scores A of `tree.scores`::

    U = T (A' S0 + A_ak V),   T = (I - A_ab)^-1          what the tokens write through b
    Y = Q S0 + A_qk V + A_qb U                           Q, A' = r, a decayed from the chunk's start
    S1 = gam S0 + K'^T V + B'^T U                        K', B' = k, b decayed to the chunk's end

All but the state's own recurrence is computed for a group of chunks at once. The backward transposes these lines (dU = A_qb^T dY + B' dS1, dZ = T^T dU, ...).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import tree
from .config import OpConfig
from .layout import Chunks, Segments, group_size, plan, segments
from .tree import dot

CHUNK = 16
INCLUSIVE = (True, False)  # rows: r counts its own decay, a does not


class _Intra(NamedTuple):
    """What a group of chunks needs besides its states; all [group, B, H, ...]."""

    levels: list[tree.Level]
    v: jax.Array
    rows_in: jax.Array  # Q, A' [..., 2, C, K]
    cols_out: jax.Array  # K', B'
    through: jax.Array  # gam [..., K, 1]
    A: jax.Array  # [..., 2C, 2C]: ((qk, qb), (ak, ab))
    T: jax.Array  # [..., C, C]
    W: jax.Array  # T A' [..., C, K]


def _intra(cfg: OpConfig, r, w, k, v, a, b, seg: Segments | None) -> _Intra:
    r = r * cfg.scale
    levels = tree.levels(jnp.exp(w), jnp.stack([r, a], -3), jnp.stack([k, b], -3), INCLUSIVE)
    rows_in, cols_out, through = levels[-1].rows, levels[-1].cols, levels[-1].total[..., 0, :, None]
    A = tree.scores(levels)
    C = r.shape[-2]
    own = jnp.concatenate([jnp.sum(r * k, -1, keepdims=True) * jnp.eye(C, dtype=r.dtype), jnp.sum(r * b, -1, keepdims=True) * jnp.eye(C, dtype=r.dtype)], -1)
    A = A.at[..., :C, :].add(own)  # a token reads what it writes itself, undecayed
    if seg is not None:
        A = jnp.where(jnp.tile(seg.pairs, (2, 2)), A, 0)
        rows_in, cols_out = jnp.where(seg.start[..., None, :, :], rows_in, 0), jnp.where(seg.end[..., None, :, :], cols_out, 0)
        through = jnp.where(seg.through, through, 0)
    T = tree.inverse(A[..., C:, C:])
    return _Intra(levels, v, rows_in, cols_out, through, A, T, dot("...ij,...jk->...ik", T, rows_in[..., 1, :, :]))


def _prepare(cfg: OpConfig, arrays, segment_ids, cu_seqlens):
    B, T, H, _ = arrays[0].shape
    size = min(cfg.chunk_size or CHUNK, 1 << (T - 1).bit_length())
    chunks = plan(T, size, cu_seqlens, group_size(B * H * size))
    return chunks, tuple(chunks.split(x, cfg.compute) for x in arrays), segments(chunks, segment_ids)


def forward(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    chunks, xs, seg = _prepare(cfg, (r, w, k, v, a, b), segment_ids, cu_seqlens)
    C = chunks.size

    def group(carry, x):
        sequences, xs, seg = x
        x = _intra(cfg, *xs, seg)
        own = dot("...ij,...jv->...iv", x.T, dot("...ij,...jv->...iv", x.A[..., C:, :C], x.v))  # T A_ak V

        def step(carry, chunk):
            sequence, W, own, v, cols, through = chunk
            S = chunks.read(carry, sequence)
            U = own + dot("bhck,bhkv->bhcv", W, S)
            vu = jnp.concatenate([v, U], -2)
            return chunks.write(carry, through * S + dot("bhck,bhcv->bhkv", cols, vu), sequence), (S, vu)

        cols = x.cols_out.reshape(*x.cols_out.shape[:-3], 2 * C, -1)
        carry, (states, vu) = jax.lax.scan(step, carry, (sequences, x.W, own, x.v, cols, x.through))
        y = dot("...ck,...kv->...cv", x.rows_in[..., 0, :, :], states) + dot("...ij,...jv->...iv", x.A[..., :C, :], vu)
        return carry, (y, states, vu[..., C:, :])

    final, (y, states, U) = chunks.walk(group, s0, (chunks.sequence, xs, seg))
    return (chunks.join(y, v.dtype), final), (states, U)


def backward(cfg: OpConfig, inputs, kept, dy, ds):
    """Backward rule: gradients of r, w, k, v, a, b and the initial state."""
    *arrays, _, segment_ids, cu_seqlens = inputs
    chunks, xs, seg = _prepare(cfg, arrays, segment_ids, cu_seqlens)
    C = chunks.size

    def group(carry, x):
        sequences, xs, seg, states, U, dy = x
        x = _intra(cfg, *xs, seg)
        from_y = dot("...ij,...iv->...jv", x.A[..., :C, :], dy)  # to v and U, within the chunk
        readers = jnp.concatenate([x.rows_in[..., 0, :, :], x.W], -2)

        def step(carry, chunk):
            sequence, readers, b_out, through, dy, from_y = chunk
            dS = chunks.read(carry, sequence)
            dU = from_y + dot("bhck,bhkv->bhcv", b_out, dS)
            new = through * dS + dot("bhck,bhcv->bhkv", readers, jnp.concatenate([dy, dU], -2))
            return chunks.write(carry, new, sequence), (dS, dU)

        each = (sequences, readers, x.cols_out[..., 1, :, :], x.through, dy, from_y[..., C:, :])
        carry, (dS, dU) = jax.lax.scan(step, carry, each, reverse=True)
        dZ = dot("...ij,...iv->...jv", x.T, dU)
        dv = from_y[..., :C, :] + dot("...ck,...kv->...cv", x.cols_out[..., 0, :, :], dS) + dot("...ij,...iv->...jv", x.A[..., C:, :C], dZ)

        vu, dout = jnp.concatenate([x.v, U], -2), jnp.concatenate([dy, dZ], -2)
        dA = dot("...iv,...jv->...ij", dout, vu)
        shape = x.rows_in.shape
        drows = dot("...iv,...kv->...ik", dout, states).reshape(shape)
        dcols = dot("...jv,...kv->...jk", vu, dS).reshape(shape)
        if seg is not None:
            dA = jnp.where(jnp.tile(seg.pairs, (2, 2)), dA, 0)
            drows, dcols = jnp.where(seg.start[..., None, :, :], drows, 0), jnp.where(seg.end[..., None, :, :], dcols, 0)
        dg = jnp.swapaxes(x.through * jnp.sum(states * dS, -1, keepdims=True), -1, -2)
        drows, dcols, dg = tree.gradients(x.levels, dA, drows, dcols, jnp.broadcast_to(dg, xs[0].shape), INCLUSIVE)
        # the diagonal: a token reads what it writes itself
        r, _, k, _, _, b = xs
        own_k, own_b = jnp.sum(dy * x.v, -1, keepdims=True), jnp.sum(dy * U, -1, keepdims=True)
        dr = drows[..., 0, :, :] + own_k * k + own_b * b
        dk, db = dcols[..., 0, :, :] + own_k * cfg.scale * r, dcols[..., 1, :, :] + own_b * cfg.scale * r
        return carry, (dr * cfg.scale, dg, dk, dv, drows[..., 1, :, :], db)

    ds0, grads = chunks.walk(group, ds, (chunks.sequence, xs, seg, *kept, chunks.split(dy, cfg.compute)), reverse=True)
    return tuple(chunks.join(g, x.dtype) for g, x in zip(grads, arrays)) + (ds0,)
