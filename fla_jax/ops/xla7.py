"""RWKV-7 by chunks in plain JAX. With C tokens a chunk, S0 the state that enters it, S1 the state that leaves it, and scores A of `tree.scores`::

    U = T (A' S0 + A_ak V),   T = (I - A_ab)^-1          what the tokens write through b
    Y = Q S0 + A_qk V + A_qb U                           Q, A' = r, a decayed from the chunk's start
    S1 = gam S0 + K'^T V + B'^T U                        K', B' = k, b decayed to the chunk's end

Everything but the state's own recurrence is computed for all chunks at once. The backward follows from transposing these lines (dU = A_qb^T dY + B' dS1,
dZ = T^T dU, ...).
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
INCLUSIVE = (True, False)  # rows: r counts its own decay, a does not


class _Intra(NamedTuple):
    """What a chunk needs besides its state; all [n, B, H, ...]."""

    chunks: Chunks
    decays: tree.Decays
    rows: jax.Array  # r, a: [..., 2, C, K]
    cols: jax.Array  # k, b
    v: jax.Array
    q_in: jax.Array  # Q [..., C, K]
    a_in: jax.Array  # A'
    k_out: jax.Array  # K'
    b_out: jax.Array  # B'
    through: jax.Array  # gam [..., K, 1]
    A: jax.Array  # [..., 2, C, 2, C]: ((qk, qb), (ak, ab))
    T: jax.Array  # [..., C, C]
    W: jax.Array  # T A' [..., C, K]
    seg: Segments | None


def _intra(cfg: OpConfig, r, w, k, v, a, b, segment_ids, cu_seqlens) -> _Intra:
    size = min(cfg.chunk_size or CHUNK, 1 << (r.shape[1] - 1).bit_length())
    chunks = plan(r.shape[1], size, cu_seqlens)
    seg = segments(chunks, segment_ids)
    r, w, k, v, a, b = (chunks.split(x, cfg.compute) for x in (r, w, k, v, a, b))
    r = r * cfg.scale
    rows, cols = jnp.stack([r, a], 3), jnp.stack([k, b], 3)
    d = tree.decays(w, INCLUSIVE, None if seg is None else seg.ids)
    own = jnp.stack([jnp.sum(r * k, -1), jnp.sum(r * b, -1)], -1)  # a token reads what it writes itself, undecayed
    A = tree.scores(rows, cols, jnp.stack([own, jnp.zeros_like(own)], -2), d)
    rows_in, cols_out, through = rows * d.rows, cols * d.cols, d.through[..., None]
    if seg is not None:
        rows_in = jnp.where(seg.start[:, :, :, None], rows_in, 0)
        cols_out = jnp.where(seg.end[:, :, :, None], cols_out, 0)
        through = jnp.where(seg.through, through, 0)
    T = tree.inverse(A[..., 1, :, 1, :])
    W = dot("...ij,...jk->...ik", T, rows_in[..., 1, :, :])
    halves = (rows_in[..., 0, :, :], rows_in[..., 1, :, :], cols_out[..., 0, :, :], cols_out[..., 1, :, :])
    return _Intra(chunks, d, rows, cols, v, *halves, through, A, T, W, seg)


def _written(x: _Intra, states: jax.Array) -> jax.Array:
    """U [..., C, V]."""
    return dot("...ck,...kv->...cv", x.W, states) + dot("...ij,...jv->...iv", x.T, dot("...ij,...jv->...iv", x.A[..., 1, :, 0, :], x.v))


def forward(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), states``."""
    x = _intra(cfg, r, w, k, v, a, b, segment_ids, cu_seqlens)
    own = dot("...ij,...jv->...iv", x.T, dot("...ij,...jv->...iv", x.A[..., 1, :, 0, :], x.v))  # T A_ak V
    cols = jnp.concatenate([x.k_out, x.b_out], -2)  # [..., 2C, K]

    def step(carry, chunk):
        sequence, W, own, v, cols, through = chunk
        S = x.chunks.read(carry, sequence)
        U = own + dot("bhck,bhkv->bhcv", W, S)
        new = through * S + dot("bhck,bhcv->bhkv", cols, jnp.concatenate([v, U], -2))
        return x.chunks.write(carry, new, sequence), (S, U)

    final, (states, U) = jax.lax.scan(step, s0, (x.chunks.sequence, x.W, own, x.v, cols, x.through))
    y = dot("...ck,...kv->...cv", x.q_in, states) + dot("...iqj,...qjv->...iv", x.A[..., 0, :, :, :], jnp.stack([x.v, U], -3))
    return (x.chunks.join(y, v.dtype), final), states


def backward(cfg: OpConfig, inputs, states, dy, ds):
    """Backward rule: gradients of r, w, k, v, a, b and the initial state."""
    *arrays, _, segment_ids, cu_seqlens = inputs
    x = _intra(cfg, *arrays, segment_ids, cu_seqlens)
    dy = x.chunks.split(dy, cfg.compute)
    U = _written(x, states)
    values = jnp.stack([x.v, U], -3)  # [..., 2, C, V]
    from_y = dot("...iqj,...iv->...qjv", x.A[..., 0, :, :, :], dy)  # to v and U
    dS_y = dot("...ck,...cv->...kv", x.q_in, dy) + dot("...ck,...cv->...kv", x.W, from_y[..., 1, :, :])

    def step(carry, chunk):
        sequence, W, b_out, through, dS_y = chunk
        dS = x.chunks.read(carry, sequence)
        new = through * dS + dS_y + dot("bhck,bhcv->bhkv", W, dot("bhck,bhkv->bhcv", b_out, dS))
        return x.chunks.write(carry, new, sequence), dS

    ds0, dS = jax.lax.scan(step, ds, (x.chunks.sequence, x.W, x.b_out, x.through, dS_y), reverse=True)
    dU = from_y[..., 1, :, :] + dot("...ck,...kv->...cv", x.b_out, dS)
    dZ = dot("...ij,...iv->...jv", x.T, dU)
    dv = from_y[..., 0, :, :] + dot("...ck,...kv->...cv", x.k_out, dS) + dot("...ij,...iv->...jv", x.A[..., 1, :, 0, :], dZ)

    dout = jnp.stack([dy, dZ], -3)
    dA = dot("...piv,...qjv->...piqj", dout, values)
    drows = x.decays.rows * dot("...piv,...kv->...pik", dout, states)
    dcols = x.decays.cols * dot("...qjv,...kv->...qjk", values, dS)
    dg = x.through * jnp.sum(states * dS, -1, keepdims=True)
    if x.seg is not None:
        drows = jnp.where(x.seg.start[:, :, :, None], drows, 0)
        dcols = jnp.where(x.seg.end[:, :, :, None], dcols, 0)
    dg = jnp.broadcast_to(jnp.swapaxes(dg, -1, -2), x.rows[..., 0, :, :].shape)
    drows, dcols, dg = tree.gradients(dA, x.rows, x.cols, drows, dcols, dg, x.decays, INCLUSIVE)
    # the diagonal: a token reads what it writes itself
    own = jnp.diagonal(dA[..., 0, :, :, :], axis1=-3, axis2=-1)[..., None]  # [..., q, C, 1]
    dr = drows[..., 0, :, :] + own[..., 0, :, :] * x.cols[..., 0, :, :] + own[..., 1, :, :] * x.cols[..., 1, :, :]
    dcols = dcols + own * x.rows[..., :1, :, :]
    grads = (dr * cfg.scale, dg, dcols[..., 0, :, :], dv, drows[..., 1, :, :], dcols[..., 1, :, :])
    return tuple(x.chunks.join(g, arr.dtype) for g, arr in zip(grads, arrays)) + (ds0,)
