"""Products of queries and keys within a chunk and their gradients, exact at every decay, by a binary tree
over the tokens.

A pair (t, i), i < t, is split at the one block boundary m (block size s = 1, 2, 4, ..., C / 2) that has i in
the left and t in the right half of a block of 2s tokens. Its decay is the product of two factors, both
products of decays, hence both in [0, 1]::

    prod_{i < j <= t} d_j  =  prod_{i < j < m} d_j  *  prod_{m <= j <= t} d_j

No exponential can overflow, nothing is divided, no large sums are subtracted, d = 0 (w = -inf) is legal.
Queries belong to the tokens t (r, a), keys to the tokens i (k, b). Level s has the queries decayed from the
start of their s-block and the keys decayed to the end of theirs; one matrix product a level, masked to its
pairs, gives the products A. A kind of query is inclusive if d_t counts (r in RWKV-7), exclusive if not (r in
RWKV-6, a in RWKV-7). The diagonal, a token with itself, counts for inclusive queries only, undecayed.

Shapes: decays [..., C, K]; p query kinds [..., p, C, K]; q key kinds [..., q, C, K]; products
[..., p * C, q * C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Arrays: TypeAlias = tuple[jax.Array, ...]


def dot(spec: str, *operands: jax.Array) -> jax.Array:
    """einsum without TF32 or bfloat16 passes."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


def stack(xs: Sequence[jax.Array]) -> jax.Array:
    """One or two kinds [..., C, K] to [..., 1 or 2, C, K]. By selection: concatenation inside a fusion is
    slow on a CPU.
    """
    if len(xs) == 1:
        return xs[0][..., None, :, :]
    return jnp.where(np.array([True, False])[:, None, None], xs[0][..., None, :, :], xs[1][..., None, :, :])


def pick(x: jax.Array, i: int) -> jax.Array:
    """Kind ``i`` of [..., p, C, K]."""
    return x[..., i, :, :]


def kinds(x: jax.Array) -> tuple[jax.Array, ...]:
    """The inverse of `stack`."""
    return tuple(pick(x, i) for i in range(x.shape[-3]))


def sum_kinds(x: jax.Array) -> jax.Array:
    """Sum over the kinds. Not a reduction: jaxlib 0.10's CPU backend crashes in reductions of such high
    rank.
    """
    return sum(kinds(x)[1:], kinds(x)[0])


def flat(x: jax.Array) -> jax.Array:
    """[..., p, C, K] -> [..., p * C, K]."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def pairs(C: int, s: int) -> np.ndarray:
    """[C, C] mask of the pairs (t, i) of level ``s``: t in the right, i in the left half of one block of
    2s.
    """
    t = np.arange(C)
    return (
        (t[:, None] // (2 * s) == t[None, :] // (2 * s))
        & ((t[:, None] // s) % 2 == 1)
        & ((t[None, :] // s) % 2 == 0)
    )


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


class Level(NamedTuple):
    """One tree level: blocks of ``s`` tokens, ``total`` [..., C / s, K] their whole decay."""

    s: int
    queries: jax.Array
    keys: jax.Array
    total: jax.Array


class Tree(NamedTuple):
    """All levels, from single tokens (s = 1) to the whole chunk (s = C)."""

    inclusive: tuple[bool, ...]
    first: tuple[jax.Array, jax.Array]  # queries and keys, undecayed
    levels: tuple[Level, ...]

    @classmethod
    def build(
        cls,
        w: jax.Array,
        queries: tuple[jax.Array, ...],
        keys: tuple[jax.Array, ...],
        inclusive: tuple[bool, ...],
    ) -> Tree:
        """From log decays ``w`` [..., C, K] and kinds of queries and keys [..., C, K]."""
        d = jnp.exp(w)
        first = stack(queries), stack(keys)
        levels = [
            Level(
                1,
                stack([x * d if is_inclusive else x for x, is_inclusive in zip(queries, inclusive)]),
                first[1],
                d,
            )
        ]
        while levels[-1].s < w.shape[-2]:
            s, r, c, total = levels[-1]
            halves = total.reshape(*total.shape[:-2], -1, 2, total.shape[-1])
            levels.append(
                Level(
                    2 * s,
                    _scale_half(r, total, s, True),
                    _scale_half(c, total, s, False),
                    halves[..., 0, :] * halves[..., 1, :],
                )
            )
        return cls(inclusive, first, tuple(levels))

    @property
    def queries_in(self) -> jax.Array:
        """Queries decayed from the chunk's start, which read its h0."""
        return self.levels[-1].queries

    @property
    def keys_out(self) -> jax.Array:
        """Keys decayed to the chunk's end, which write to its ht."""
        return self.levels[-1].keys

    @property
    def total(self) -> jax.Array:
        """[..., 1, K]: the chunk's whole decay."""
        return self.levels[-1].total

    def pair_products(self) -> jax.Array:
        """[..., p * C, q * C], zero above the diagonal; on it, those of inclusive queries, undecayed."""
        first, keys = self.first
        p, C, q = first.shape[-3], first.shape[-2], keys.shape[-3]
        diagonals = [
            jnp.sum(pick(first, i) * key, -1, keepdims=True) if self.inclusive[i] else None
            for i in range(p)
            for key in kinds(keys)
        ]
        eye = np.eye(C, dtype=bool)
        A = jnp.zeros((), first.dtype)
        for n, x in enumerate(diagonals):
            if x is not None:
                place = np.kron(np.eye(1, p * q, n, dtype=bool).reshape(p, q), eye)
                A = jnp.where(place, jnp.tile(x, (p, 1)), A)
        A = jnp.broadcast_to(A, (*flat(first).shape[:-1], q * C))
        for level in self.levels[:-1]:
            A = jnp.where(
                np.tile(pairs(C, level.s), (p, q)),
                dot("...ik,...jk->...ij", flat(level.queries), flat(level.keys)),
                A,
            )
        return A

    def gradients(
        self, dA: jax.Array, dqueries: jax.Array, dkeys: jax.Array, dg: jax.Array
    ) -> tuple[Arrays, Arrays, jax.Array]:
        """Gradients of the queries and keys given to `build` and of the log decays.

        ``dA`` [..., p * C, q * C] are the cotangents of the products (not read above the diagonal);
        ``dqueries``, ``dkeys`` [..., p or q, C, K] those of `queries_in` and `keys_out`, and ``dg``
        [..., C, K] the share of the state that passes through.

        dg_j collects every term whose decay contains d_j. At each level these are the queries right of j's
        block whose factor spans the block, and the keys left of it: sums over half blocks, from the whole
        chunk down. Nothing is added that must be subtracted again.
        """
        p, C, q = dqueries.shape[-3], dqueries.shape[-2], dkeys.shape[-3]
        left = np.array([True, False])[:, None, None]
        for above, level in zip(self.levels[:0:-1], self.levels[-2::-1]):
            s = level.s
            # the right half's queries reach over the left
            spans = jnp.sum(_halves(sum_kinds(above.queries * dqueries), s), -2, keepdims=True)[..., 1:, :, :]
            spanned = jnp.sum(_halves(sum_kinds(above.keys * dkeys), s), -2, keepdims=True)[..., :1, :, :]
            dg = (_halves(dg, s) + jnp.where(left, spans, spanned)).reshape(dg.shape)
            D = jnp.where(np.tile(pairs(C, s), (p, q)), dA, 0)
            dqueries = _scale_half(dqueries, level.total, s, True) + dot(
                "...ij,...jk->...ik", D, flat(level.keys)
            ).reshape(dqueries.shape)
            dkeys = _scale_half(dkeys, level.total, s, False) + dot(
                "...ij,...ik->...jk", D, flat(level.queries)
            ).reshape(dkeys.shape)
        dr, dc, d = list(kinds(dqueries)), list(kinds(dkeys)), self.levels[0].total
        for i in range(p):
            if self.inclusive[i]:
                dg = dg + pick(self.levels[0].queries, i) * dr[i]
                dr[i] = d * dr[i]
                for j in range(q):
                    diagonal = jnp.sum(
                        jnp.where(
                            np.eye(C, dtype=bool), dA[..., i * C : (i + 1) * C, j * C : (j + 1) * C], 0
                        ),
                        -1,
                        keepdims=True,
                    )
                    dr[i], dc[j] = (
                        dr[i] + diagonal * pick(self.first[1], j),
                        dc[j] + diagonal * pick(self.first[0], i),
                    )
        return tuple(dr), tuple(dc), dg


def inverse(A: jax.Array) -> jax.Array:
    """(I - A)^-1 for strictly lower triangular ``A`` [..., C, C], by merging blocks (never by nilpotent
    doubling over many tokens: that is unstable).
    """
    C = A.shape[-1]
    T = jnp.broadcast_to(jnp.eye(C, dtype=A.dtype), A.shape)
    s = 1
    while s < C:
        off = jnp.where(pairs(C, s), A, 0)
        T = T + (off if s == 1 else dot("...ij,...jk->...ik", dot("...ij,...jk->...ik", T, off), T))
        s *= 2
    return T
