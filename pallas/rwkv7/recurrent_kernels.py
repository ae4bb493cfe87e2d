"""RWKV-7, token by token in Pallas: a scan for both directions, and the gradients over K.

The state S, and its gradient D, evolve column by column of V: ``S <- diag(d) S + b (a^T S)``, then
``S <- S + k v^T`` and ``o = S^T r``. Backwards the same two halves come in the other order:
``D <- D + r do^T`` and ``dv = D^T k``, then ``D <- diag(d) D + a (b^T D)``. With ``a^T S`` and ``b^T D`` of
every token known, b and a are a second writer and a second reader beside k and r: see
common/recurrent_pairs.py for the rest.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl

from ..common.recurrent_pairs import Arrays, Pairs, TokenTerms
from ..common.recurrent_scan import Index, Sizes, across, along, dot, fma, scan_tokens


def rwkv7_scan(
    first_: jax.Ref,
    second_: jax.Ref,
    decay_: jax.Ref,
    write_: jax.Ref,
    read_: jax.Ref,
    x_: jax.Ref,
    start_: jax.Ref,
    restart_: jax.Ref,
    bounds_: jax.Ref,
    y_: jax.Ref,
    inner_: jax.Ref,
    end_: jax.Ref,
    states_: jax.Ref,
    *,
    sizes: Sizes,
    reverse: bool,
    save: bool,
    by_value: bool,
    scales: tuple[float, float],
) -> None:
    """Grid (blocks of V, heads, sequences).

    Exchange: ``inner = S^T first``, ``S <- diag(decay) S + second inner^T``. Token: ``S <- S + write x^T``,
    ``y = S^T read``. Forward (first, second, write, read, x) are a, b, k, r, v and y, inner are o, a^T S; in
    reverse b, a, r, k, do and dv, b^T D. ``scales`` multiply x and y. The first five are [B * T' * H, parts,
    width], x, y and inner [B * T' * H, V], start and end [N * H, parts, V, width].
    """
    vs = pl.ds(pl.program_id(0) * sizes.scan.columns, sizes.scan.columns)

    def load(at: jax.Array) -> tuple[jax.Array, ...]:
        return first_[at], second_[at], decay_[at], write_[at], read_[at], x_[at, vs]

    def exchange(S: jax.Array, loaded: Arrays, at: jax.Array) -> jax.Array:
        first, second, decay = map(along, loaded[:3])
        inner = dot(S, first)
        if save:
            inner_[at, vs] = inner
        return fma(S, decay, across(inner) * second)

    def token(S: jax.Array, loaded: Arrays, at: jax.Array) -> jax.Array:
        *_, write, read, x = loaded
        S = fma(across(x) * scales[0], along(write), S)
        y_[at, vs] = (dot(S, along(read)) * scales[1]).astype(y_.dtype)
        return S

    first, second = (token, exchange) if reverse else (exchange, token)

    def both(S: jax.Array, loaded: Arrays, at: jax.Array) -> jax.Array:
        return second(first(S, loaded, at), loaded, at)

    state = pl.program_id(2) * pl.num_programs(1) + pl.program_id(1)
    end_[state, :, vs] = scan_tokens(
        load, both, start_[state, :, vs], states_, restart_, bounds_, sizes, reverse, save, by_value
    )


def rwkv7_gradients(
    decay_: jax.Ref,
    r_: jax.Ref,
    a_: jax.Ref,
    k_: jax.Ref,
    b_: jax.Ref,
    *refs: jax.Ref,
    sizes: Sizes,
    size: int,
) -> None:
    """Grid (blocks of K, heads, B * intervals): gradients of r, w, k, a, b from all sums over V
    (`sum_over_values`); ``size`` keys a program.
    """
    *sums_, product_, scores_, same_, lines_, restart_, gr_, gw_, gk_, ga_, gb_ = refs
    pairs = Pairs(size, sizes, decay_, sums_, product_, scores_, same_, lines_, restart_, 2)

    def load(t: Index) -> list[jax.Array]:
        return [pairs.token(x_, t) for x_ in (r_, a_, k_, b_)]

    def reads(
        t: jax.Array, loaded: Arrays, decay: jax.Array, same: Arrays, sums: Arrays, total: tuple[()]
    ) -> TokenTerms[tuple[()]]:
        r, a, k, b = loaded
        gr_[pairs.at(t), pairs.ks] = (fma(decay, sums[0], k * same[0]) + b * same[1]).astype(gr_.dtype)
        ga_[pairs.at(t), pairs.ks] = sums[1].astype(ga_.dtype)
        return TokenTerms((r * decay, a), (k, b), [r * x for x in same], total)

    (gk, gb), (last_k, last_b), gw, _ = pairs.scan(load, reads, True, ())
    pairs.store_writer(gk_, gk, last_k, 0)
    pairs.store_writer(gb_, gb, last_b, 1)
    pairs.store(gw_, gw)
