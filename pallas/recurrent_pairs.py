"""The gradients over K of one stretch of 16 tokens, by pairs of tokens, in Pallas: for both ops.

Inside a stretch the state is what entered it, S0, and what tokens i wrote, ``x_i z_i^T``, each decayed since; and its gradient is the D that leaves and what
tokens t read, ``x_t y_t^T``. RWKV-7 writes (k, v) and (b, a^T S) and reads (r, do), of the state after the token, and (a, b^T D), of the state before it; RWKV-6
writes (k, v) and reads (r, do), of the state before. So every gradient is a sum over pairs with scores ``y_t . z_i`` and factors ``exp(w_{i+1} + .. + w_t)``:
products of decays, no quotient and no difference. dw_j sums all pairs that it lies between, ``i < j <= t`` (``< t`` for a reader of the state before):

    dx_t = sum_{i<t} e_ti (y_t . z_i) x_i + e_t S0 y_t,     dx_i = sum_{t>i} e_ti (y_t . z_i) x_t + e_i D z_i
    dw_j = sum_{i<j<=t} e_ti (y_t . z_i) x_t x_i + the pairs with S0 for a writer before the first token and D for a reader after the last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..core.pallas_call import interpreting
from .recurrent_plan import STRETCH, Sizes
from .recurrent_tiles import emptied, fma, positions

BLOCK = 64  # rows and columns of a state that `contract` takes at a time


def _tile(ref: Any, rows: jax.Array, first: Any, size: int) -> jax.Array:
    """[16, size] in float32: ``ref[rows, first : first + size]``."""
    columns = first + jax.lax.broadcasted_iota(jnp.int32, (STRETCH, size), 1)
    return ref[jnp.broadcast_to(rows[:, None], columns.shape), columns].astype(jnp.float32)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x y^T`` to float32 accuracy; on a GPU as three TF32 products on tensor cores."""
    precision = jax.lax.Precision.HIGHEST if interpreting() else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def contract(*refs: Any, sizes: Sizes, readers: int, writers: int, scale: float) -> None:
    """Grid (blocks of K, heads, B * stretches): everything that sums over V.

    Takes y of each reader (the first, do, times ``scale``) and z of each writer [B * T' * H, V], then S0 and D [B * number * H, K, V]. Makes S0 y of each reader
    and D z of each writer [B * T' * H, K]; the product of S0 and D by rows [B * number * H, K]; scores [B * number * H, readers, writers, 16, 16] of reader t and
    the writer before token i, i = 0 left to be S0; and do . z of the same token [B * number * H, writers, 16].
    """
    (*values, states_, dstates_), outs = refs[: readers + writers + 2], refs[readers + writers + 2 :]
    ys_, zs_ = values[:readers], values[readers:]
    *sums_, product_, scores_, same_ = outs
    block, n = pl.program_id(0), pl.program_id(2)
    row, c = n // sizes.number, n % sizes.number
    entry, at = positions(sizes.number)(row, c), positions(sizes.tokens)
    t = jax.lax.broadcasted_iota(jnp.int32, (STRETCH,), 0)
    rows, before = at(row, c * STRETCH + t), at(row, c * STRETCH + jnp.maximum(t - 1, 0))
    size, width = min(sizes.K, BLOCK), min(sizes.V, BLOCK)
    ks = pl.ds(block * size, size)
    zero = jnp.zeros((STRETCH, size), jnp.float32)
    reads, writes, both = [zero] * readers, [zero] * writers, jnp.zeros(size, jnp.float32)
    scores = [[jnp.zeros((STRETCH, STRETCH), jnp.float32)] * writers for _ in range(readers)]
    same = [jnp.zeros(STRETCH, jnp.float32)] * writers
    for first in range(0, sizes.V, width):
        S, D = (x_[entry, ks, pl.ds(first, width)] for x_ in (states_, dstates_))
        ys = [_tile(y_, rows, first, width) * (scale if i == 0 else 1.0) for i, y_ in enumerate(ys_)]
        zs = [_tile(z_, rows, first, width) for z_ in zs_]
        earlier = [_tile(z_, before, first, width) for z_ in zs_]
        reads = [x + _product(y, S) for x, y in zip(reads, ys)]
        writes = [x + _product(z, D) for x, z in zip(writes, zs)]
        both = both + jnp.sum(S * D, 1)
        scores = [[x + _product(y, z) for x, z in zip(line, earlier)] for line, y in zip(scores, ys)]
        same = [x + jnp.sum(ys[0] * z, 1) for x, z in zip(same, zs)]
    columns = block * size + jax.lax.broadcasted_iota(jnp.int32, (STRETCH, size), 1)
    for out_, x in zip(sums_, (*reads, *writes)):
        out_[jnp.broadcast_to(rows[:, None], columns.shape), columns] = x
    product_[entry, ks] = both

    @pl.when(block == 0)
    def _() -> None:
        for i, line in enumerate(scores):
            for j, x in enumerate(line):
                scores_[entry, i, j] = x
        for j, x in enumerate(same):
            same_[entry, j] = x


class Pairs:
    """The pairs of one stretch, head and block of K: references to arrays, and the loop over tokens t.

    Tiles are [16, rows of K]; line i belongs to the writer before token i, line 0 to S0.
    """

    def __init__(self, size: int, sizes: Sizes, decay_: Any, sums_: Sequence[Any], product_: Any, scores_: Any, same_: Any, restart_: Any, writers: int):
        n = pl.program_id(2)
        self.row, self.c = n // sizes.number, n % sizes.number
        self.entry, at = positions(sizes.number)(self.row, self.c), positions(sizes.tokens)
        self.at = lambda t: at(self.row, self.c * STRETCH + t)
        self.first, self.size = pl.program_id(0) * size, size
        self.ks = pl.ds(self.first, size)
        self.line = jax.lax.broadcasted_iota(jnp.int32, (STRETCH, size), 0)
        self.sizes, self.decay_, self.restart_, self.writers = sizes, decay_, restart_, writers
        self.reads_, self.writes_ = sums_[: len(sums_) - writers], sums_[len(sums_) - writers :]
        self.product_, self.scores_, self.same_ = product_, scores_, same_

    def token(self, ref: Any, t: Any) -> jax.Array:
        """[size]: one token's row of an array, in float32."""
        return ref[self.at(t), self.ks].astype(jnp.float32)

    def before(self, ref: Any) -> jax.Array:
        """[16, size]: on line i the token before token i."""
        t = jax.lax.broadcasted_iota(jnp.int32, (STRETCH,), 0)
        return _tile(ref, self.at(jnp.maximum(t - 1, 0)), self.first, self.size)

    def same(self, writer: int, t: Any) -> jax.Array:
        """do . z of token ``t`` and a writer."""
        return self.same_[self.entry, writer, t]

    def same_before(self, writer: int) -> jax.Array:
        """[16, 1]: do . z of the token before token i."""
        t = jax.lax.broadcasted_iota(jnp.int32, (STRETCH,), 0)
        return self.same_[self.entry, writer, jnp.maximum(t - 1, 0)][:, None]

    def walk(self, written: Sequence[jax.Array], reads: Any, inclusive: bool, total: Any):
        """Over tokens t, then over what leaves the stretch.

        Args:
            written: x of each writer on the line after its token.
            reads: ``reads(t, decay, sums, total) -> factors, total``, given what each reader sees of earlier tokens; stores gradients of readers and
                returns the reader's own factor for each.
            inclusive: the first reader reads the state after its token.
            total: arrays to sum over tokens, passed on to ``reads``.

        Returns:
            Gradient tiles of each writer (line i: of token i - 1) but for pairs within one token, the gradient tile of w (line j: token j), ``total``.
        """
        zero = jnp.zeros((STRETCH, self.size), jnp.float32)
        readers = range(len(self.reads_))

        def step(t: Any, carry: Any) -> Any:
            E, grads, gw, total = carry
            E = emptied(E, self.restart_, self.row, self.c * STRETCH + t, self.sizes)
            decay = self.decay_[self.at(t), self.ks]
            scores = [[self.scores_[self.entry, i, j, t][:, None] for j in range(self.writers)] for i in readers]
            seen = []
            for i in readers:
                q = written[0] * scores[i][0]
                for x, score in zip(written[1:], scores[i][1:]):
                    q = fma(x, score, q)
                seen.append(E * jnp.where(self.line == 0, self.token(self.reads_[i], t)[None], q))
            sums = [jnp.sum(x, 0) for x in seen]
            factors, total = reads(t, decay, sums, total)
            pairs = seen[0] * factors[0][None]
            for x, factor in zip(seen[1:], factors[1:]):
                pairs = fma(x, factor[None], pairs)
            here = (factors[0] * sums[0])[None] if inclusive else 0.0  # its own decay lies between the first reader and all earlier writers
            gw = gw + jnp.where(self.line < t, jnp.cumsum(pairs, 0), jnp.where(self.line == t, here, 0.0))
            new = []
            for j in range(self.writers):
                coefficient = factors[0][None] * scores[0][j]
                for i in readers[1:]:
                    coefficient = fma(factors[i][None], scores[i][j], coefficient)
                new.append(fma(coefficient, E, grads[j]))
            return jnp.where(self.line == t + 1, 1.0, E * decay[None]), tuple(new), gw, total

        start = (jnp.where(self.line == 0, 1.0, zero), (zero,) * self.writers, zero, total)
        E, grads, gw, total = jax.lax.fori_loop(0, STRETCH, step, start)
        leaving = [self.before(x_) for x_ in self.writes_]
        pairs = sum(x * y for x, y in zip(written, leaving))
        pairs = jnp.where(self.line == 0, self.product_[self.entry, self.ks][None], pairs)
        return [fma(E, y, g) for g, y in zip(grads, leaving)], gw + jnp.cumsum(E * pairs, 0), total

    def store_writer(self, ref: Any, tile: jax.Array, last: jax.Array, writer: int) -> None:
        """Stores the gradient of a writer: lines 1 to 15 of ``tile``, and for token 15 ``last`` on top of what D gives it."""
        t = jax.lax.broadcasted_iota(jnp.int32, (STRETCH,), 0)
        rows = jnp.broadcast_to(self.at(jnp.maximum(t - 1, 0))[:, None], tile.shape)
        columns = self.first + jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        pltriton.store(ref.at[rows, columns], tile.astype(ref.dtype), mask=self.line > 0)
        end = STRETCH - 1
        ref[self.at(end), self.ks] = (last + self.token(self.writes_[writer], end)).astype(ref.dtype)

    def store(self, ref: Any, tile: jax.Array) -> None:
        """Stores a gradient whose line t is token t."""
        t = jax.lax.broadcasted_iota(jnp.int32, (STRETCH,), 0)
        columns = self.first + jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        ref[jnp.broadcast_to(self.at(t)[:, None], tile.shape), columns] = tile.astype(ref.dtype)
