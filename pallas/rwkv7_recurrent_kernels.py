"""RWKV-7, token by token in Pallas: a walk for both directions, and the gradients over K.

The state S, and its gradient D, evolve column by column of V: ``S <- diag(d) S + b (a^T S)``, then ``S <- S + k v^T`` and ``o = S^T r``. Backwards the same two
halves come in the other order: ``D <- D + r do^T`` and ``dv = D^T k``, then ``D <- diag(d) D + a (b^T D)``. With ``a^T S`` and ``b^T D`` of every token known,
b and a are a second writer and a second reader beside k and r: see recurrent_pairs.py for the rest.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl

from .recurrent_pairs import Pairs
from .recurrent_plan import STRETCH, Sizes
from .recurrent_tiles import across, along, dot, fma, walk_stretches


def rwkv7_walk(
    first_: Any, second_: Any, decay_: Any, write_: Any, read_: Any, x_: Any, start_: Any, restart_: Any, bounds_: Any,
    y_: Any, inner_: Any, end_: Any, states_: Any,
    *, sizes: Sizes, reverse: bool, scales: tuple[float, float],
) -> None:  # fmt: skip
    """Grid (blocks of V, heads, sequences).

    Exchange: ``inner = S^T first``, ``S <- diag(decay) S + second inner^T``. Token: ``S <- S + write x^T``, ``y = S^T read``. Forward (first, second, write,
    read, x) are a, b, k, r, v and y, inner are o, a^T S; in reverse b, a, r, k, do and dv, b^T D. ``scales`` multiply x and y. The first five are
    [B * T' * H, parts, width], x, y and inner [B * T' * H, V], start and end [N * H, parts, V, width].
    """
    vs = pl.ds(pl.program_id(0) * sizes.walk.own, sizes.walk.own)

    def exchange(S: jax.Array, at: Any) -> jax.Array:
        inner = dot(S, along(first_[at]))
        inner_[at, vs] = inner
        return fma(S, along(decay_[at]), across(inner) * along(second_[at]))

    def token(S: jax.Array, at: Any) -> jax.Array:
        S = fma(across(x_[at, vs]) * scales[0], along(write_[at]), S)
        y_[at, vs] = (dot(S, along(read_[at])) * scales[1]).astype(y_.dtype)
        return S

    both = (lambda S, at: exchange(token(S, at), at)) if reverse else (lambda S, at: token(exchange(S, at), at))
    state = pl.program_id(2) * pl.num_programs(1) + pl.program_id(1)
    end_[state, :, vs] = walk_stretches(both, start_[state, :, vs], states_, restart_, bounds_, sizes, reverse)


def rwkv7_gradients(
    decay_: Any, r_: Any, a_: Any, k_: Any, b_: Any, *refs: Any, sizes: Sizes, size: int
) -> None:  # fmt: skip
    """Grid (blocks of K, heads, B * stretches): gradients of r, w, k, a, b from what `contract` made; ``size`` rows of K a program."""
    *sums_, product_, scores_, same_, restart_, gr_, gw_, gk_, ga_, gb_ = refs
    pairs = Pairs(size, sizes, decay_, sums_, product_, scores_, same_, restart_, 2)

    def reads(t: Any, decay: jax.Array, sums: Any, total: Any) -> Any:
        r, k, b, at = pairs.token(r_, t), pairs.token(k_, t), pairs.token(b_, t), pairs.at(t)
        gr_[at, pairs.ks] = (fma(decay, sums[0], k * pairs.same(0, t)) + b * pairs.same(1, t)).astype(gr_.dtype)
        ga_[at, pairs.ks] = sums[1].astype(ga_.dtype)
        return (r * decay, pairs.token(a_, t)), total

    (gk, gb), gw, _ = pairs.walk([pairs.before(k_), pairs.before(b_)], reads, True, ())
    before, last = pairs.before(r_), pairs.token(r_, STRETCH - 1)
    for j, (ref, tile) in enumerate(((gk_, gk), (gb_, gb))):
        pairs.store_writer(ref, fma(before, pairs.same_before(j), tile), last * pairs.same(j, STRETCH - 1), j)
    pairs.store(gw_, gw)
