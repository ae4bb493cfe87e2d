"""RWKV-6, token by token in Pallas: a scan for both directions, and the gradients over K.

The state S, and its gradient D, evolve element by element: ``o = S^T r + (r . u k) v``,
``S <- diag(d) S + k v^T``, and backwards the same with r, k and v, do in each other's place:
``dv = D^T k + (r . u k) do``, ``D <- diag(d) D + r do^T``. common/recurrent_pairs.py has the rest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..common.recurrent_pairs import Arrays, Pairs, TokenTerms
from ..common.recurrent_scan import Index, Sizes, across, along, dot, fma, scan_tokens


def rwkv6_scan(
    read_: jax.Ref,
    write_: jax.Ref,
    decay_: jax.Ref,
    u_: jax.Ref,
    x_: jax.Ref,
    start_: jax.Ref,
    restart_: jax.Ref,
    bounds_: jax.Ref,
    y_: jax.Ref,
    end_: jax.Ref,
    states_: jax.Ref,
    *,
    sizes: Sizes,
    reverse: bool,
    save: bool,
    scale: float,
) -> None:
    """Grid (blocks of V, heads, sequences): ``y = S^T read + (read . u write) x``,
    ``S <- diag(decay) S + write x^T``.

    Forward (read, write, x, y) are r, k, v, o, in reverse k, r, do, dv; ``scale`` multiplies r. read, write,
    decay are [B * T' * H, parts, width], u is [H, parts, width], x and y are [B * T' * H, V], start and end
    [N * H, parts, V, width].
    """
    vs = pl.ds(pl.program_id(0) * sizes.scan.columns, sizes.scan.columns)
    u = along(u_[pl.program_id(1)])
    read_scale, write_scale = (1.0, scale) if reverse else (scale, 1.0)

    def load(at: jax.Array) -> tuple[jax.Array, ...]:
        return read_[at], write_[at], decay_[at], x_[at, vs]

    def token(S: jax.Array, loaded: Arrays, at: jax.Array) -> jax.Array:
        read, write, decay, x = loaded
        read, write, x = along(read) * read_scale, along(write) * write_scale, x.astype(jnp.float32)
        y_[at, vs] = fma(dot(read * u, write), x, dot(S, read)).astype(y_.dtype)
        return fma(S, along(decay), across(x) * write)

    state = pl.program_id(2) * pl.num_programs(1) + pl.program_id(1)
    end_[state, :, vs] = scan_tokens(
        load, token, start_[state, :, vs], states_, restart_, bounds_, sizes, reverse, save
    )


def rwkv6_gradients(
    decay_: jax.Ref, r_: jax.Ref, k_: jax.Ref, u_: jax.Ref, *refs: jax.Ref, sizes: Sizes, size: int
) -> None:
    """Grid (blocks of K, heads, B * intervals): gradients of r, w, k and of u by interval, ``size`` keys
    a program.

    The references begin with all sums over V (`sum_over_values`).
    """
    *sums_, product_, scores_, same_, lines_, restart_, gr_, gw_, gk_, gu_ = refs
    pairs = Pairs(size, sizes, decay_, sums_, product_, scores_, same_, lines_, restart_, 1)
    u = u_[pl.program_id(1), pairs.ks].astype(jnp.float32)

    def load(t: Index) -> tuple[jax.Array, jax.Array]:
        return pairs.token(r_, t), pairs.token(k_, t)

    def reads(
        t: jax.Array, loaded: Arrays, decay: jax.Array, same: Arrays, sums: Arrays, total: jax.Array
    ) -> TokenTerms[jax.Array]:
        r, k = loaded
        gr_[pairs.at(t), pairs.ks] = fma(u * k, same[0], sums[0]).astype(gr_.dtype)
        return TokenTerms((r,), (k,), [r * u * same[0]], fma(r * k, same[0], total))

    (gk,), (last,), gw, gu = pairs.scan(load, reads, False, jnp.zeros_like(u))
    pairs.store_writer(gk_, gk, last, 0)
    pairs.store(gw_, gw)
    gu_[pairs.entry, pairs.ks] = gu
