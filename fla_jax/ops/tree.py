"""Scores and their gradients within a chunk, exact at every decay, by a binary tree over the tokens.

A pair (t, i), i < t, is split at the one block boundary m (block size s = 1, 2, 4, ..., C / 2) that has i in the left and t in the right half of a block of 2s
tokens. Its decay is the product of two factors, both products of decays, hence both in [0, 1]::

    prod_{i < j <= t} d_j  =  prod_{i < j < m} d_j  *  prod_{m <= j <= t} d_j

No exponential can overflow, nothing is divided, no large sums are subtracted, d = 0 (w = -inf) is legal. "Rows" are the tokens t (r, a), "columns" the tokens
i (k, b). Level s holds the rows decayed from the start of their s-block and the columns decayed to the end of theirs; one matrix product per level, masked to
its pairs, gives the scores. A row kind is inclusive if its own decay d_t counts (r in RWKV-7) and exclusive if not (r in RWKV-6, a in RWKV-7).

Shapes: decays [..., C, K]; p row kinds [..., p, C, K]; q column kinds [..., q, C, K]; scores [..., p * C, q * C].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def dot(spec: str, *operands: jax.Array) -> jax.Array:
    """einsum without TF32 or bfloat16 passes."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


class Level(NamedTuple):
    """One tree level: blocks of ``s`` tokens, ``total`` [..., C / s, K] their whole decay."""

    s: int
    rows: jax.Array
    cols: jax.Array
    total: jax.Array


def pairs(C: int, s: int) -> np.ndarray:
    """[C, C] mask of the pairs (t, i) of level ``s``: t in the right, i in the left half of one block of 2s."""
    t = np.arange(C)
    return (t[:, None] // (2 * s) == t[None, :] // (2 * s)) & ((t[:, None] // s) % 2 == 1) & ((t[None, :] // s) % 2 == 0)


def _halves(x: jax.Array, s: int) -> jax.Array:
    """[..., C, K] -> [..., C / 2s, 2, s, K]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // (2 * s), 2, s, x.shape[-1])


def _scale_half(x: jax.Array, total: jax.Array, s: int, right: bool) -> jax.Array:
    """Multiplies one half of each 2s-block of ``x`` [..., p, C, K] by the other half's whole decay."""
    total = total.reshape(*total.shape[:-2], -1, 2, total.shape[-1])
    other = total[..., None, :, 0 if right else 1, None, None, :]  # [..., 1, nb, 1, 1, K]
    is_half = (np.arange(2) == (1 if right else 0))[:, None, None]
    x2 = _halves(x, s)
    return jnp.where(is_half, x2 * other, x2).reshape(x.shape)


def levels(d: jax.Array, rows: jax.Array, cols: jax.Array, inclusive: tuple[bool, ...]) -> list[Level]:
    """All levels, from single tokens (s = 1) to the whole chunk (s = C), for decays ``d`` = exp(w)."""
    C = d.shape[-2]
    kinds = np.array(inclusive)[:, None, None]
    rows = jnp.where(kinds, rows * d[..., None, :, :], rows)
    result = [Level(1, rows, cols, d)]
    while result[-1].s < C:
        s, rows, cols, total = result[-1]
        halves = total.reshape(*total.shape[:-2], -1, 2, total.shape[-1])
        merged = halves[..., 0, :] * halves[..., 1, :]
        result.append(Level(2 * s, _scale_half(rows, total, s, True), _scale_half(cols, total, s, False), merged))
    return result


def _flat(x: jax.Array) -> jax.Array:
    """[..., p, C, K] -> [..., p * C, K]."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def scores(tree: list[Level]) -> jax.Array:
    """[..., p * C, q * C]: decayed products of rows and earlier columns, zero on and above the diagonal."""
    p, C, q = tree[0].rows.shape[-3], tree[0].rows.shape[-2], tree[0].cols.shape[-3]
    A = jnp.zeros((), tree[0].rows.dtype)
    for level in tree[:-1]:
        A = jnp.where(np.tile(pairs(C, level.s), (p, q)), dot("...ik,...jk->...ij", _flat(level.rows), _flat(level.cols)), A)
    return A if len(tree) > 1 else jnp.zeros((*_flat(tree[0].rows).shape[:-1], q * C), A.dtype)


def inverse(A: jax.Array) -> jax.Array:
    """(I - A)^-1 for strictly lower triangular ``A`` [..., C, C], by merging blocks (never by nilpotent doubling over many rows: that is unstable)."""
    C = A.shape[-1]
    T = jnp.broadcast_to(jnp.eye(C, dtype=A.dtype), A.shape)
    s = 1
    while s < C:
        off = jnp.where(pairs(C, s), A, 0)
        T = T + (off if s == 1 else dot("...ij,...jk->...ik", dot("...ij,...jk->...ik", T, off), T))
        s *= 2
    return T


def gradients(tree: list[Level], dA: jax.Array, drows: jax.Array, dcols: jax.Array, dg: jax.Array, inclusive: tuple[bool, ...]):
    """Gradients of rows, columns and log decays.

    ``dA`` [..., p * C, q * C] are the cotangents of the scores (only those below the diagonal are read); ``drows``, ``dcols`` [..., p or q, C, K] those of
    the last level's rows and columns (the state's way in and out of the chunk), and ``dg`` [..., C, K] the part of the state that passes through.

    dg_j collects every term whose decay contains d_j. At each level these are the rows right of j's block whose factor spans the block, and the columns left
    of it: sums over half blocks, walked from the whole chunk down. Nothing is added that must be subtracted again.
    """
    p, C, q = drows.shape[-3], drows.shape[-2], dcols.shape[-3]
    left = (np.arange(2) == 0)[:, None, None]
    for i in range(len(tree) - 2, -1, -1):
        above, level = tree[i + 1], tree[i]
        s = level.s
        spans = jnp.sum(_halves(_kinds(above.rows * drows), s), -2, keepdims=True)[..., 1:, :, :]  # rows of the right half reach over the left one
        spanned = jnp.sum(_halves(_kinds(above.cols * dcols), s), -2, keepdims=True)[..., :1, :, :]
        dg = (_halves(dg, s) + jnp.where(left, spans, spanned)).reshape(dg.shape)
        D = jnp.where(np.tile(pairs(C, s), (p, q)), dA, 0)
        drows = _scale_half(drows, level.total, s, True) + dot("...ij,...jk->...ik", D, _flat(level.cols)).reshape(drows.shape)
        dcols = _scale_half(dcols, level.total, s, False) + dot("...ij,...ik->...jk", D, _flat(level.rows)).reshape(dcols.shape)
    own = tree[0].rows * drows
    dg = dg + sum(own[..., i, :, :] for i in range(p) if inclusive[i])
    return jnp.where(np.array(inclusive)[:, None, None], drows * tree[0].total[..., None, :, :], drows), dcols, dg


def _kinds(x: jax.Array) -> jax.Array:
    """Sum over the one or two kinds on axis -3. Not a reduction: jaxlib 0.10's CPU backend crashes in reductions of such high rank."""
    return x[..., 0, :, :] if x.shape[-3] == 1 else x[..., 0, :, :] + x[..., 1, :, :]
