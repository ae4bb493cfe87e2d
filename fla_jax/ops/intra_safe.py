"""Products of queries and keys and their gradients within a chunk of mild decays, by one matrix product.

With P_t the product of a chunk's decays up to token t, the decay between two tokens is P_t / P_i: queries
times P and keys over P give all products at once. While P >= exp(-LIMIT), nothing overflows and all factors
are exact to a few roundings. At stronger decays only `intra_exact.Tree` is safe; `by_strength` selects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core.types import RecurrenceConfig
from ..core.varlen import Chunks
from .intra_exact import Arrays, Tree, dot, flat, kinds, pick, stack, sum_kinds

T = TypeVar("T")  # a pytree
LIMIT = 24.0  # largest sum of -w over a chunk


class SafeGate(NamedTuple):
    """See `intra_exact.Tree`.

    ``queries`` are decayed from the chunk's start, ``keys`` undone back to it, ``keys_out`` decayed to its
    end.
    """

    inclusive: tuple[bool, ...]
    prefix: jax.Array  # P [..., C, K], and without the token's decay
    before: jax.Array
    queries: jax.Array
    keys: jax.Array
    keys_out: jax.Array
    total: jax.Array

    @classmethod
    def build(
        cls,
        w: jax.Array,
        queries: tuple[jax.Array, ...],
        keys: tuple[jax.Array, ...],
        inclusive: tuple[bool, ...],
    ) -> SafeGate:
        """From log decays ``w`` [..., C, K] and kinds of queries and keys [..., C, K]."""
        logs = _sum(np.tril(np.ones((w.shape[-2],) * 2)), w)
        prefix, before = jnp.exp(logs), jnp.exp(logs - w)
        total = prefix[..., -1:, :]
        from_start = stack(
            [x * (prefix if is_inclusive else before) for x, is_inclusive in zip(queries, inclusive)]
        )
        to_start = stack([x / prefix for x in keys])
        return cls(inclusive, prefix, before, from_start, to_start, to_start * total[..., None, :, :], total)

    @property
    def queries_in(self) -> jax.Array:
        """See `intra_exact.Tree`."""
        return self.queries

    def _mask(self, apart: int = 0) -> np.ndarray:
        """The pairs of a query and a key that it sees, with so many decays between them at least."""
        C = self.prefix.shape[-2]
        masks = [
            np.tri(C, k=(0 if is_inclusive else -1) - apart, dtype=bool) for is_inclusive in self.inclusive
        ]
        return np.tile(np.concatenate(masks), (1, self.keys.shape[-3]))

    def pair_products(self) -> jax.Array:
        """[..., p * C, q * C], zero above the diagonal; on it, those of inclusive queries, undecayed."""
        return jnp.where(self._mask(), dot("...ik,...jk->...ij", flat(self.queries), flat(self.keys)), 0)

    def gradients(
        self, dA: jax.Array, dqueries: jax.Array, dkeys: jax.Array, dg: jax.Array
    ) -> tuple[Arrays, Arrays, jax.Array]:
        """See `intra_exact.Tree.gradients`.

        Pairs with no decay between them, a query's first one, have no part in dg: it comes from a difference,
        which their size would drown.
        """
        decayed_pairs = jnp.where(self._mask(1), dA, 0)
        reads = dqueries + dot("...ij,...jk->...ik", decayed_pairs, flat(self.keys)).reshape(dqueries.shape)
        inner = dot("...ij,...ik->...jk", decayed_pairs, flat(self.queries)).reshape(dkeys.shape)
        # dg_j: what later queries read from anywhere, less what they read from j on, and what earlier keys
        # add to the state
        ones = np.ones((dg.shape[-2],) * 2)
        read = self.queries * reads
        dg = (
            dg
            + _sum(np.triu(ones), sum_kinds(read) - sum_kinds(self.keys * inner))
            + _sum(np.tril(ones, -1), sum_kinds(self.keys_out * dkeys))
        )
        for i, is_inclusive in enumerate(self.inclusive):
            dg = dg if is_inclusive else dg - pick(read, i)
        undecayed_queries, undecayed_keys = self._undecayed_gradients(dA)
        factors = [self.prefix if is_inclusive else self.before for is_inclusive in self.inclusive]
        dkeys = (inner + undecayed_keys + dkeys * self.total[..., None, :, :]) / self.prefix[..., None, :, :]
        return (
            tuple(x * factor for x, factor in zip(kinds(reads + undecayed_queries), factors)),
            kinds(dkeys),
            dg,
        )

    def _undecayed_gradients(self, dA: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gradients of the queries and of the keys from pairs without a decay between them."""
        C, q = self.prefix.shape[-2], self.keys.shape[-3]
        numbers = dA.reshape(*dA.shape[:-2], -1)
        queries, keys = [jnp.zeros_like(self.prefix)] * len(self.inclusive), [jnp.zeros_like(self.prefix)] * q
        for i, is_inclusive in enumerate(self.inclusive):
            for j in range(q):
                # a diagonal of the block (i, j) of dA: its numbers lie q C + 1 apart
                start, count = (i * C + (not is_inclusive)) * q * C + j * C, C if is_inclusive else C - 1
                pairs = numbers[..., start : start + (count - 1) * (q * C + 1) + 1 : q * C + 1, None]
                query, key = pick(self.queries, i), pick(self.keys, j)
                if is_inclusive:
                    queries[i], keys[j] = queries[i] + pairs * key, keys[j] + pairs * query
                else:
                    queries[i] = queries[i] + _shift_later(pairs * key[..., :-1, :])
                    keys[j] = keys[j] + _shift_earlier(pairs * query[..., 1:, :])
        return stack(queries), stack(keys)


def _shift_later(x: jax.Array) -> jax.Array:
    """Zeros and then ``x`` [..., C - 1, K]."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((1, 0), (0, 0)))


def _shift_earlier(x: jax.Array) -> jax.Array:
    """``x`` [..., C - 1, K] and then zeros."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, 1), (0, 0)))


def _sum(which: np.ndarray, x: jax.Array) -> jax.Array:
    """Sums over the tokens of ``x`` [..., C, K] that each line of ``which`` [C, C] names: a product, which a
    CPU does faster than a cumulative sum.
    """
    # one copy per batch entry: a product with a shared left operand transposes the right one to and fro
    return dot(
        "...ij,...jk->...ik", jnp.broadcast_to(jnp.asarray(which, x.dtype), (*x.shape[:-2], *which.shape)), x
    )


Pairs = Tree | SafeGate


def build(
    mild: bool,
    w: jax.Array,
    queries: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    inclusive: tuple[bool, ...],
) -> Pairs:
    """`SafeGate` where ``w`` [..., C, K] is ``mild``, else `Tree`."""
    return (SafeGate if mild else Tree).build(w, queries, keys, inclusive)


@jax.custom_batching.custom_vmap
def _all(x: jax.Array) -> jax.Array:
    """`jnp.all`, over mapped axes too: what depends on it stays one branch under `jax.vmap`."""
    return jnp.all(x)


@_all.def_vmap
def _(n: int, mapped: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return _all(x), False


def by_strength(cfg: RecurrenceConfig, chunks: Chunks, group: Callable[..., T], at: int) -> Callable[..., T]:
    """The step for `varlen.Chunks.scan` made of ``group(mild, carry, tokens, xs)``; ``tokens[at]`` are the
    log decays.

    A promise (``lower_bound``) decides for all. Without one, each group of chunks goes by its decays, except
    for a few groups, where a second branch would cost more to compile than it saves, and on several devices,
    which would have to communicate.
    """
    weakest = -LIMIT / chunks.size
    if cfg.lower_bound is not None and cfg.lower_bound >= weakest:
        return functools.partial(group, True)
    if cfg.lower_bound is not None or chunks.number // chunks.group < 4 or jax.device_count() > 1:
        return functools.partial(group, False)

    def step(carry: PyTree, tokens: Arrays, xs: PyTree) -> T:
        mild = _all(tokens[at] >= weakest)
        return jax.lax.cond(
            mild, functools.partial(group, True), functools.partial(group, False), carry, tokens, xs
        )

    return step
