"""Scores and their gradients within a chunk where decays are mild: what `tree.Tree` does, with one matrix
product. And the choice between the two.

With P_t the product of a chunk's decays up to token t, the decay between two tokens is P_t / P_i: rows times
P and columns over P give all scores at once. While P >= exp(-LIMIT), nothing overflows and all factors are
exact to a few roundings. At stronger decays only the tree is safe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..core.types import RecurrenceConfig
from ..core.varlen import Chunks
from .intra_exact import Tree, dot, flat, kinds, pick, stack, sum_kinds

T = TypeVar("T")  # a pytree
LIMIT = 24.0  # largest sum of -w over a chunk


class SafeGate(NamedTuple):
    """See `tree.Tree`. ``rows`` are decayed from the chunk's start, ``cols`` undone back to it, ``cols_out``
    decayed to its end.
    """

    inclusive: tuple[bool, ...]
    prefix: jax.Array  # P [..., C, K], and without the token's own decay
    before: jax.Array
    rows: jax.Array
    cols: jax.Array
    cols_out: jax.Array
    total: jax.Array

    @classmethod
    def build(
        cls,
        w: jax.Array,
        rows: tuple[jax.Array, ...],
        cols: tuple[jax.Array, ...],
        inclusive: tuple[bool, ...],
    ) -> SafeGate:
        """From log decays ``w`` [..., C, K] and kinds of rows and columns [..., C, K]."""
        logs = _sum(np.tril(np.ones((w.shape[-2],) * 2)), w)
        prefix, before = jnp.exp(logs), jnp.exp(logs - w)
        total = prefix[..., -1:, :]
        from_start = stack([x * (prefix if own else before) for x, own in zip(rows, inclusive)])
        to_start = stack([x / prefix for x in cols])
        return cls(inclusive, prefix, before, from_start, to_start, to_start * total[..., None, :, :], total)

    @property
    def rows_in(self) -> jax.Array:
        """See `tree.Tree`."""
        return self.rows

    def _mask(self, apart: int = 0) -> np.ndarray:
        """The pairs of a row and a column that it sees, with so many decays between them at least."""
        C = self.prefix.shape[-2]
        seen = [np.tri(C, k=(0 if own else -1) - apart, dtype=bool) for own in self.inclusive]
        return np.tile(np.concatenate(seen), (1, self.cols.shape[-3]))

    def scores(self) -> jax.Array:
        """[..., p * C, q * C], zero above the diagonal; on it, the undecayed products of inclusive rows."""
        return jnp.where(self._mask(), dot("...ik,...jk->...ij", flat(self.rows), flat(self.cols)), 0)

    def gradients(self, dA: jax.Array, drows: jax.Array, dcols: jax.Array, dg: jax.Array):
        """See `tree.Tree.gradients`.

        Pairs with no decay between them, a row's first one, have no part in dg: it comes from a difference,
        which their size would drown.
        """
        far = jnp.where(self._mask(1), dA, 0)
        reads = drows + dot("...ij,...jk->...ik", far, flat(self.cols)).reshape(drows.shape)
        inner = dot("...ij,...ik->...jk", far, flat(self.rows)).reshape(dcols.shape)
        # dg_j: what later rows read from anywhere, less what they read from j on, and what earlier columns
        # hand to the state
        ones = np.ones((dg.shape[-2],) * 2)
        read = self.rows * reads
        dg = (
            dg
            + _sum(np.triu(ones), sum_kinds(read) - sum_kinds(self.cols * inner))
            + _sum(np.tril(ones, -1), sum_kinds(self.cols_out * dcols))
        )
        for i, own in enumerate(self.inclusive):
            dg = dg if own else dg - pick(read, i)
        near_rows, near_cols = self._near_gradients(dA)
        factors = [self.prefix if own else self.before for own in self.inclusive]
        dcols = (inner + near_cols + dcols * self.total[..., None, :, :]) / self.prefix[..., None, :, :]
        return (
            tuple(x * factor for x, factor in zip(kinds(reads + near_rows), factors)),
            kinds(dcols),
            dg,
        )

    def _near_gradients(self, dA: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the pairs with no decay between them give to the rows and to the columns."""
        C, q = self.prefix.shape[-2], self.cols.shape[-3]
        numbers = dA.reshape(*dA.shape[:-2], -1)
        rows, cols = [jnp.zeros_like(self.prefix)] * len(self.inclusive), [jnp.zeros_like(self.prefix)] * q
        for i, own in enumerate(self.inclusive):
            for j in range(q):
                # a diagonal of the block (i, j) of dA: its numbers lie q C + 1 apart
                start, count = (i * C + (not own)) * q * C + j * C, C if own else C - 1
                pairs = numbers[..., start : start + (count - 1) * (q * C + 1) + 1 : q * C + 1, None]
                row, col = pick(self.rows, i), pick(self.cols, j)
                if own:
                    rows[i], cols[j] = rows[i] + pairs * col, cols[j] + pairs * row
                else:
                    rows[i] = rows[i] + _moved_on(pairs * col[..., :-1, :])
                    cols[j] = cols[j] + _moved_back(pairs * row[..., 1:, :])
        return stack(rows), stack(cols)


def _moved_on(x: jax.Array) -> jax.Array:
    """Zeros and then ``x`` [..., C - 1, K]."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((1, 0), (0, 0)))


def _moved_back(x: jax.Array) -> jax.Array:
    """``x`` [..., C - 1, K] and then zeros."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, 1), (0, 0)))


def _sum(which: np.ndarray, x: jax.Array) -> jax.Array:
    """Sums over the tokens of ``x`` [..., C, K] that each row of ``which`` [C, C] names: a product, which a
    CPU does faster than a cumulative sum.
    """
    # one copy per batch entry: a product with a shared left operand transposes the right one to and fro
    return dot(
        "...ij,...jk->...ik", jnp.broadcast_to(jnp.asarray(which, x.dtype), (*x.shape[:-2], *which.shape)), x
    )


Scores = Tree | SafeGate


def build(
    mild: bool,
    w: jax.Array,
    rows: tuple[jax.Array, ...],
    cols: tuple[jax.Array, ...],
    inclusive: tuple[bool, ...],
) -> Scores:
    """`SafeGate` where ``w`` [..., C, K] is ``mild``, else `Tree`."""
    return (SafeGate if mild else Tree).build(w, rows, cols, inclusive)


@jax.custom_batching.custom_vmap
def _all(x: jax.Array) -> jax.Array:
    """`jnp.all`, over mapped axes too: what depends on it stays one branch under `jax.vmap`."""
    return jnp.all(x)


@_all.def_vmap
def _(n: int, mapped: list[bool], x: jax.Array):
    return _all(x), False


def by_strength(cfg: RecurrenceConfig, chunks: Chunks, group: Callable[..., T], at: int) -> Callable[..., T]:
    """The step for `transform.Chunks.scan` made of ``group(mild, carry, tokens, xs)``; ``tokens[at]`` are the
    log decays.

    A promise (``lower_bound``) decides once. Without one, each group of chunks goes by its own decays:
    RWKV-7's are always mild. Nobody looks at the decays of a few groups, for which a second branch would cost
    more to compile than it saves, nor with several devices, which would all have to be asked.
    """
    weakest = -LIMIT / chunks.size
    if cfg.lower_bound is not None and cfg.lower_bound >= weakest:
        return functools.partial(group, True)
    if cfg.lower_bound is not None or chunks.number // chunks.group < 4 or jax.device_count() > 1:
        return functools.partial(group, False)

    def step(carry, tokens, xs):
        mild = _all(tokens[at] >= weakest)
        return jax.lax.cond(
            mild, functools.partial(group, True), functools.partial(group, False), carry, tokens, xs
        )

    return step
