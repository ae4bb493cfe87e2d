"""The gradients over K of one interval, by pairs of its tokens, in Pallas: for both ops.

Readers, writers, scores and sums are those of token_pairs.py, the same in Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from ..backend.pallas import is_interpreting
from .recurrent_scan import Index, Sizes, fma, positions, restarted

BLOCK = 64  # keys of a state that `contract_state` takes at a time
WIDTH = 32  # values
Arrays: TypeAlias = Sequence[jax.Array]
Lists: TypeAlias = list[list[jax.Array]]  # by reader, then by writer
Loaded = TypeVar("Loaded")
Total = TypeVar("Total")


class TokenTerms(NamedTuple, Generic[Total]):
    """An op's contribution to the pairs of one token."""

    factors: Arrays  # of each reader
    written: Arrays  # x of each writer
    own: list[jax.Array]  # each writer's gradient from within the token
    total: Total


class _Token(NamedTuple, Generic[Loaded]):
    """One token's arrays, loaded while the token before is worked on."""

    decay: jax.Array
    states: list[jax.Array]
    scores: Lists
    same: list[jax.Array]
    lines: list[jax.Array]
    loaded: Loaded


class _Carry(NamedTuple, Generic[Loaded, Total]):
    """The carry of the loop over tokens: decays and written values by line, gradients by line and of w."""

    E: jax.Array
    written: list[jax.Array]
    grads: list[jax.Array]
    gw: jax.Array
    own: list[jax.Array]
    total: Total
    token: _Token[Loaded]


def _tile(ref: jax.Ref, rows: jax.Array, first: Index, size: int) -> jax.Array:
    """[interval, size] in float32: ``ref[rows, first : first + size]``."""
    columns = first + jax.lax.broadcasted_iota(jnp.int32, (*rows.shape, size), 1)
    return ref[jnp.broadcast_to(rows[:, None], columns.shape), columns].astype(jnp.float32)


def _halves(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, ...]:
    """``x`` as a sum of parts that TF32 holds: itself, if it was of 16 bits."""
    if is_interpreting() or jnp.dtype(dtype).itemsize < 4:
        return (x,)
    high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & -(1 << 13), jnp.float32)
    return high, x - high


def _product(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...], total: jax.Array) -> jax.Array:
    """``total + x y^T`` of halves to float32 accuracy, on a GPU as one to three TF32 products on tensor
    cores.

    Those truncate what they accumulate: so large and small products are summed apart, from zero, and added to
    ``total`` by a separate instruction.
    """
    precision = jax.lax.Precision.HIGHEST if is_interpreting() else jax.lax.DotAlgorithmPreset.TF32_TF32_F32

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        over_both_seconds = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(
            a, b, over_both_seconds, precision=precision, preferred_element_type=jnp.float32
        )

    small = [dot(a, y[0]) for a in x[1:]] + [dot(x[0], b) for b in y[1:]]
    for part in (*small, dot(x[0], y[0])):
        total = fma(part, 1.0, total)
    return total


def _interval(sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The program's interval; where its tokens are, and on line i the token before token i (itself on line
    0).
    """
    n = pl.program_id(2)
    row, c = n // sizes.num_intervals, n % sizes.num_intervals
    at, t = positions(sizes.tokens), jax.lax.broadcasted_iota(jnp.int32, (sizes.interval,), 0)
    return (
        positions(sizes.num_intervals)(row, c),
        at(row, c * sizes.interval + t),
        at(row, c * sizes.interval + jnp.maximum(t - 1, 0)),
    )


def contract_state(*refs: jax.Ref, sizes: Sizes, values: int, scale: float) -> None:
    """Grid (blocks of K, heads, B * intervals): a state times values, summed over V.

    Takes ``values`` arrays [B * T' * H, V], a state [B * intervals * H, K, V] and perhaps another. Makes the
    state's products with the values [B * T' * H, K], the first times ``scale``, and with the other state by
    key [B * intervals * H, K].
    """
    inputs = (len(refs) + 1) // 2
    values_, states_, outs = refs[:values], refs[values:inputs], refs[inputs:]
    entry, rows, _ = _interval(sizes)
    size, width = min(sizes.K, BLOCK), min(sizes.V, WIDTH)
    first = pl.program_id(0) * size
    ks = pl.ds(first, size)
    sums = [jnp.zeros((sizes.interval, size), jnp.float32)] * values

    def add(i: jax.Array, carry: Lists) -> Lists:
        sums, product = carry
        S, *other = (x_[entry, ks, pl.ds(i * width, width)] for x_ in states_)
        halves = _halves(S, jnp.float32)
        sums = [
            _product(_halves(_tile(y_, rows, i * width, width), y_.dtype), halves, x)
            for x, y_ in zip(sums, values_)
        ]
        return [sums, [x + jnp.sum(S * y, 1) for x, y in zip(product, other)]]

    product = [jnp.zeros(size, jnp.float32)] * (len(states_) - 1)
    sums, product = jax.lax.fori_loop(0, sizes.V // width, add, [sums, product])
    columns = first + jax.lax.broadcasted_iota(jnp.int32, (sizes.interval, size), 1)
    for i, x in enumerate(sums):
        outs[i][jnp.broadcast_to(rows[:, None], columns.shape), columns] = (
            x * scale if i == 0 and scale != 1.0 else x
        )
    for out_, x in zip(outs[values:], product):
        out_[entry, ks] = x


def contract_values(*refs: jax.Ref, sizes: Sizes, readers: int, writers: int, scale: float) -> None:
    """Grid (1, heads, B * intervals): scores of all pairs of tokens of an interval.

    Takes y of each reader (the first, do, times ``scale``) and z of each writer [B * T' * H, V]. Makes
    ``y_t . z_{i-1}`` [B * intervals * H, readers, writers, interval, interval] (column 0, which stands for
    the state at the start, is unused) and ``do . z`` of the same token
    [B * intervals * H, writers, interval].
    """
    ys_, zs_, (scores_, same_) = refs[:readers], refs[readers : readers + writers], refs[readers + writers :]
    entry, rows, before = _interval(sizes)
    width = min(sizes.V, WIDTH)
    C = sizes.interval
    zero, none = jnp.zeros((C, C), jnp.float32), jnp.zeros(C, jnp.float32)

    def add(n: jax.Array, carry: tuple[Lists, list[jax.Array]]) -> tuple[Lists, list[jax.Array]]:
        scores, same = carry
        ys, zs = ([_tile(x_, rows, n * width, width) for x_ in refs] for refs in (ys_, zs_))
        same = [x + jnp.sum(ys[0] * z, 1) for x, z in zip(same, zs)]
        earlier = [_halves(_tile(z_, before, n * width, width), z_.dtype) for z_ in zs_]
        lines = [
            [_product(_halves(y, y_.dtype), z, x) for x, z in zip(line, earlier)]
            for line, y, y_ in zip(scores, ys, ys_)
        ]
        return lines, same

    scores, same = jax.lax.fori_loop(
        0, sizes.V // width, add, ([[zero] * writers] * readers, [none] * writers)
    )
    if scale != 1.0:
        scores[0], same = [x * scale for x in scores[0]], [x * scale for x in same]
    for j in range(writers):
        same_[entry, j] = same[j]
        for i in range(readers):
            scores_[entry, i, j] = scores[i][j]


class Pairs:
    """The pairs of one interval, head and block of K: references to arrays, and the loop over tokens t.

    Tiles are [interval, keys] in registers of one warp; line i belongs to the writer before token i, line 0
    to S0; lines of later tokens are zero. Tiles are made in the loop and never loaded, so that Triton gives
    each of 32 keys to a lane and sums over lines stay within a thread. ``lines_`` [3, interval, interval]
    marks the lines before, of and after each token: comparisons would take more instructions than the sums.
    """

    def __init__(
        self,
        size: int,
        sizes: Sizes,
        decay_: jax.Ref,
        sums_: Sequence[jax.Ref],
        product_: jax.Ref,
        scores_: jax.Ref,
        same_: jax.Ref,
        lines_: jax.Ref,
        restart_: jax.Ref,
        writers: int,
    ):
        n = pl.program_id(2)
        self.row, self.c = n // sizes.num_intervals, n % sizes.num_intervals
        self.entry, at = positions(sizes.num_intervals)(self.row, self.c), positions(sizes.tokens)
        self.at = lambda t: at(self.row, self.c * sizes.interval + t)
        self.first, self.size = pl.program_id(0) * size, size
        self.ks = pl.ds(self.first, size)
        self.line = jax.lax.broadcasted_iota(jnp.int32, (sizes.interval, size), 0)
        self.sizes, self.decay_, self.lines_, self.restart_, self.writers = (
            sizes,
            decay_,
            lines_,
            restart_,
            writers,
        )
        self.reads_, self.writes_ = sums_[: len(sums_) - writers], sums_[len(sums_) - writers :]
        self.product_, self.scores_, self.same_ = product_, scores_, same_

    def token(self, ref: jax.Ref, t: Index) -> jax.Array:
        """[size]: one token's row of an array, in float32."""
        return ref[self.at(t), self.ks].astype(jnp.float32)

    def _load(self, load: Callable[[Index], Loaded], t: Index) -> _Token[Loaded]:
        readers, writers = range(len(self.reads_)), range(self.writers)
        scores = [[self.scores_[self.entry, i, j, t] for j in writers] for i in readers]
        reads = [self.token(x_, t) for x_ in self.reads_]
        same = [self.same_[self.entry, j, t] for j in writers]
        lines = [self.lines_[i, t] for i in range(3)]
        return _Token(self.token(self.decay_, t), reads, scores, same, lines, load(t))

    def scan(
        self,
        load: Callable[[Index], Loaded],
        reads: Callable[[jax.Array, Loaded, jax.Array, Arrays, Arrays, Total], TokenTerms[Total]],
        inclusive: bool,
        total: Total,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array, Total]:
        """Scans the tokens of the interval, then adds the pairs with D at its end. Each token's arrays are
        loaded while the one before is worked on.

        Args:
            load: what ``reads`` needs of token t.
            reads: ``reads(t, loaded, decay, same, sums, total)``, given do . z of each writer and what each
                reader sees of earlier tokens; stores gradients of readers.
            inclusive: the first reader reads the state after its token.
            total: arrays to sum over tokens, passed on to ``reads``.

        Returns:
            The gradient tile of each writer (line i: of token i - 1); the last writers' gradients from within
            their token; the gradient tile of w (line j: of token j); ``total``.
        """
        zero = jnp.zeros((self.sizes.interval, self.size), jnp.float32)
        readers, writers = range(len(self.reads_)), range(self.writers)

        def step(t: jax.Array, carry: _Carry[Loaded, Total]) -> _Carry[Loaded, Total]:
            E, written, grads, gw, _, total, (decay, states, scores, same, lines, loaded) = carry
            following = self._load(load, jnp.minimum(t + 1, self.sizes.interval - 1))
            E = restarted(E, self.restart_, self.row, self.c * self.sizes.interval + t, self.sizes)
            scores = [[x[:, None] for x in line] for line in scores]
            before, here, following_line = (x[:, None] for x in lines)
            read = []
            for i in readers:
                q = written[0] * scores[i][0]
                for x, score in zip(written[1:], scores[i][1:]):
                    q = fma(x, score, q)
                read.append(E * jnp.where(self.line == 0, states[i][None], q))
            sums = [jnp.sum(x, 0) for x in read]
            factors, new, own, total = reads(t, loaded, decay, same, sums, total)
            pairs = read[0] * factors[0][None]
            for x, factor in zip(read[1:], factors[1:]):
                pairs = fma(x, factor[None], pairs)
            gw = fma(before, jnp.cumsum(pairs, 0), gw)
            if inclusive:  # its own decay lies between the first reader and all earlier writers
                gw = fma(here, (factors[0] * sums[0])[None], gw)
            fresh = []
            for j in writers:
                coefficient = factors[0][None] * scores[0][j]
                for i in readers[1:]:
                    coefficient = fma(factors[i][None], scores[i][j], coefficient)
                fresh.append(fma(following_line, own[j][None], fma(coefficient, E, grads[j])))
            written = [fma(following_line, x[None], w) for x, w in zip(new, written)]
            return _Carry(fma(E, decay[None], following_line), written, fresh, gw, own, total, following)

        tiles, vectors = [zero] * self.writers, [jnp.zeros(self.size, jnp.float32)] * self.writers
        start = _Carry(
            jnp.where(self.line == 0, 1.0, zero),
            tiles,
            tiles,
            zero,
            vectors,
            total,
            self._load(load, 0),
        )
        E, written, grads, gw, last, total, _ = jax.lax.fori_loop(0, self.sizes.interval, step, start)
        t = jax.lax.broadcasted_iota(jnp.int32, (self.sizes.interval,), 0)
        at_end = [_tile(x_, self.at(jnp.maximum(t - 1, 0)), self.first, self.size) for x_ in self.writes_]
        pairs = sum(x * y for x, y in zip(written, at_end))
        pairs = jnp.where(self.line == 0, self.product_[self.entry, self.ks][None], pairs)
        return [fma(E, y, g) for g, y in zip(grads, at_end)], last, gw + jnp.cumsum(E * pairs, 0), total

    def store_writer(self, ref: jax.Ref, tile: jax.Array, last: jax.Array, writer: int) -> None:
        """Stores the gradient of a writer: all lines of ``tile`` but the first, and for the last token
        ``last`` on top of what D gives it.
        """
        t = jax.lax.broadcasted_iota(jnp.int32, (self.sizes.interval,), 0)
        rows = jnp.broadcast_to(self.at(jnp.maximum(t - 1, 0))[:, None], tile.shape)
        columns = self.first + jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        pltriton.store(ref.at[rows, columns], tile.astype(ref.dtype), mask=self.line > 0)
        end = self.sizes.interval - 1
        ref[self.at(end), self.ks] = (last + self.token(self.writes_[writer], end)).astype(ref.dtype)

    def store(self, ref: jax.Ref, tile: jax.Array) -> None:
        """Stores a gradient whose line t is token t."""
        t = jax.lax.broadcasted_iota(jnp.int32, (self.sizes.interval,), 0)
        columns = self.first + jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        ref[jnp.broadcast_to(self.at(t)[:, None], tile.shape), columns] = tile.astype(ref.dtype)
