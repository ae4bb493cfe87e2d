"""Scores and their gradients within a chunk, exact at every decay, by a binary tree over the tokens.

A pair (t, i), i < t, is split at the one block boundary m (block size 1, 2, 4, ..., C / 2) that has i in the left and t in the right half of a block, so that
its decay is a product of two factors whose exponents are both sums of log decays, hence <= 0::

    sum_{i < j <= t} g_j  =  sum_{i < j < m} g_j  +  sum_{m <= j <= t} g_j

No exponential can overflow, no large sums are subtracted, -inf is legal, and all products are matrix products. "Rows" are the tokens t (r, a), "columns" the
tokens i (k, b); a row kind is inclusive if its own decay g_t counts (r in RWKV-7) and exclusive if not (r in RWKV-6, a in RWKV-7).

Shapes: tokens [..., C, K]; p row kinds stacked [..., p, C, K]; q column kinds [..., q, C, K]; scores [..., p, C, q, C].
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


def dot(spec: str, *operands: jax.Array) -> jax.Array:
    """einsum without TF32 or bfloat16 passes."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


class Level(NamedTuple):
    """Decay factors of one tree level; ``nb`` blocks of two halves of ``s`` tokens."""

    rows: jax.Array  # [..., nb, p, s, K]: from the boundary to the row, in the right halves
    cols: jax.Array  # [..., nb, 1, s, K]: from the column to the boundary, in the left halves
    mask: jax.Array | None  # [..., nb, 1, s, 1, s]: pairs in one segment


class Decays(NamedTuple):
    """All decay factors of a chunk."""

    levels: tuple[Level, ...]  # smallest blocks first
    rows: jax.Array  # [..., p, C, K]: from the chunk's start to the row
    cols: jax.Array  # [..., 1, C, K]: from the column to the chunk's end
    through: jax.Array  # [..., K]: over the whole chunk


def _halves(x: jax.Array, s: int) -> tuple[jax.Array, jax.Array]:
    """[..., C, K] -> left and right halves [..., C / 2s, s, K]."""
    x = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * s), 2, s, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _join(left: jax.Array, right: jax.Array) -> jax.Array:
    """Inverse of `_halves`."""
    x = jnp.stack([left, right], -3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def _exclusive(prefix: jax.Array) -> jax.Array:
    """Inclusive prefix sums along axis -2 -> exclusive ones."""
    return jnp.pad(prefix, [(0, 0)] * (prefix.ndim - 2) + [(1, 0), (0, 0)])[..., :-1, :]


def decays(g: jax.Array, inclusive: tuple[bool, ...], ids: jax.Array | None) -> Decays:
    """Factors for log decays ``g`` [..., C, K] and row kinds ``inclusive``; ``ids`` [..., C, 1] number the segments."""
    C = g.shape[-2]
    rows_of = lambda prefix: jnp.exp(jnp.stack([prefix if kind else _exclusive(prefix) for kind in inclusive], -3))
    prefix, suffix, levels, s = g, jnp.zeros_like(g), [], 1
    while s < C:
        (pl, pr), (sl, sr) = _halves(prefix, s), _halves(suffix, s)
        mask = None
        if ids is not None:
            il, ir = _halves(ids, s)
            mask = (ir == jnp.swapaxes(il, -1, -2))[..., None, :, None, :]
        levels.append(Level(rows_of(pr), jnp.exp(sl)[..., None, :, :], mask))
        prefix, suffix, s = _join(pl, pr + pl[..., -1:, :]), _join(sl + pr[..., -1:, :], sr), 2 * s
    return Decays(tuple(levels), rows_of(prefix), jnp.exp(suffix)[..., None, :, :], jnp.exp(prefix[..., -1, :]))


def _kinds(x: jax.Array) -> jax.Array:
    """Sum over the one or two kinds on axis -3. Additions and not a reduction: jaxlib 0.10's CPU backend crashes in reductions of such high rank."""
    return functools.reduce(jnp.add, (x[..., i, :, :] for i in range(x.shape[-3])))


def _kind_halves(x: jax.Array, s: int) -> tuple[jax.Array, jax.Array]:
    """[..., p, C, K] -> halves [..., C / 2s, p, s, K]."""
    left, right = _halves(x, s)
    return jnp.swapaxes(left, -4, -3), jnp.swapaxes(right, -4, -3)


def scores(rows: jax.Array, cols: jax.Array, diagonal: jax.Array, d: Decays) -> jax.Array:
    """[..., p, C, q, C]: decayed products of rows and earlier columns; ``diagonal`` [..., C, p, q] where they meet."""
    A = diagonal[..., :, None, :, None]  # [..., nb, p, s, q, s] with s = 1
    for level in d.levels:
        s = A.shape[-1]
        right = _kind_halves(rows, s)[1] * level.rows
        left = _kind_halves(cols, s)[0] * level.cols
        cross = dot("...pik,...qjk->...piqj", right, left)
        if level.mask is not None:
            cross = jnp.where(level.mask, cross, 0)
        A = A.reshape(*A.shape[:-5], -1, 2, *A.shape[-4:])
        upper, lower = A[..., 0, :, :, :, :], A[..., 1, :, :, :, :]
        A = jnp.concatenate([jnp.concatenate([upper, jnp.zeros_like(upper)], -1), jnp.concatenate([cross, lower], -1)], -3)
    return A[..., 0, :, :, :, :]


def inverse(A: jax.Array) -> jax.Array:
    """(I - A)^-1 for strictly lower triangular ``A`` [..., C, C], by block forward substitution (never by doubling: that is unstable)."""
    C = A.shape[-1]
    T = jnp.ones((*A.shape[:-2], C, 1, 1), A.dtype)
    s = 1
    while s < C:
        nb = C // (2 * s)
        blocks = A.reshape(*A.shape[:-2], nb, 2, s, nb, 2, s)[..., 1, :, :, 0, :]  # [..., nb, s, nb, s]
        off = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        T = T.reshape(*T.shape[:-3], nb, 2, s, s)
        upper, lower = T[..., 0, :, :], T[..., 1, :, :]
        cross = dot("...ij,...jk,...kl->...il", lower, off, upper)
        T = jnp.concatenate([jnp.concatenate([upper, jnp.zeros_like(upper)], -1), jnp.concatenate([cross, lower], -1)], -2)
        s *= 2
    return T[..., 0, :, :]


def gradients(dA: jax.Array, rows: jax.Array, cols: jax.Array, drows: jax.Array, dcols: jax.Array, dg: jax.Array, d: Decays, inclusive: tuple[bool, ...]):
    """Gradients of rows, columns and log decays.

    ``dA`` [..., p, C, q, C] are cotangents of the scores (only those below the diagonal are read); ``drows``, ``dcols`` [..., p or q, C, K] the parts that
    come through the states at the chunk's start and end, and ``dg`` [..., C, K] the part of the state that passes through.

    Every term of dg_j carries a decay that contains g_j: rows after j whose factor spans j, and columns before j whose factor spans j. Both are sums over half
    blocks, walked from the largest block down: nothing is added that must be subtracted again.
    """
    C = rows.shape[-2]
    p, q = rows.shape[-3], cols.shape[-3]
    D = dA[..., None, :, :, :, :]
    after = _kinds(rows * drows)[..., None, :, :]  # [..., nb, 2s, K]: row terms whose factor starts before this block
    before = _kinds(cols * dcols)[..., None, :, :]  # column terms whose factor ends after this block
    dg, drows, dcols = dg[..., None, :, :], drows[..., None, :, :, :], dcols[..., None, :, :, :]
    split = lambda x: (lambda y: (y[..., 0, :, :], y[..., 1, :, :]))(x.reshape(*x.shape[:-2], 2, x.shape[-2] // 2, x.shape[-1]))
    join = lambda left, right, axis: (lambda y: y.reshape(*y.shape[:axis - 1], -1, *y.shape[axis + 1 :]))(jnp.stack([left, right], axis))
    for level in reversed(d.levels):
        s = level.cols.shape[-2]
        right = _kind_halves(rows, s)[1]
        left = _kind_halves(cols, s)[0]
        D = D.reshape(*D.shape[:-4], p, 2, s, q, 2, s)
        cross = D[..., 1, :, :, 0, :]  # [..., nb, p, s, q, s]
        if level.mask is not None:
            cross = jnp.where(level.mask, cross, 0)
        drow = level.rows * dot("...piqj,...qjk->...pik", cross, left * level.cols)
        dcol = level.cols * dot("...piqj,...pik->...qjk", cross, right * level.rows)
        D = join(D[..., 0, :, :, 0, :], D[..., 1, :, :, 1, :], -5)
        (al, ar), (bl, br), (gl, gr) = split(after), split(before), split(dg)
        dg = join(gl + jnp.sum(ar, -2, keepdims=True), gr + jnp.sum(bl, -2, keepdims=True), -3)
        after = join(al, ar + _kinds(right * drow), -3)
        before = join(bl + _kinds(left * dcol), br, -3)
        (rl, rr), (cl, cr) = split(drows), split(dcols)
        drows, dcols = join(rl, rr + drow, -4), join(cl + dcol, cr, -4)
    flat = lambda x: jnp.moveaxis(x[..., 0, :], -3, -2)  # [..., C, p, 1, K] -> [..., p, C, K]
    drows, dcols, dg = flat(drows), flat(dcols), dg[..., 0, :]
    own = [rows[..., i, :, :] * drows[..., i, :, :] for i in range(p) if inclusive[i]]
    return drows, dcols, sum(own, start=dg)
