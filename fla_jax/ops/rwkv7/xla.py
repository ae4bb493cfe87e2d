"""RWKV-7 by chunks in plain JAX. With C tokens a chunk, S0 and S1 the states at its start and
its end, and products A of `intra_exact.Tree`::

    U = T (A' S0 + A_ak V),   T = (I - A_ab)^-1          what the tokens write through b
    Y = Q S0 + A_qk V + A_qb U                           Q, A' = r, a decayed from the chunk's start
    S1 = gam S0 + K'^T V + B'^T U                        K', B' = k, b decayed to the chunk's end

All but the recurrence of the state is computed for a group of chunks at once. The backward transposes these
lines (dU = A_qb^T dY + B' dS1, dZ = T^T dU, ...); it gets the states and U from the forward.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV7Inputs
from ...core.varlen import Segments, chunk_plan, ends, segments, select
from .. import intra_exact
from ..intra_exact import Arrays, dot
from ..intra_safe import Pairs, build, by_strength

INCLUSIVE = (True, False)  # queries: r counts its decay, a does not


class _Intra(NamedTuple):
    """Arrays of a group of chunks besides its states, all [group, B, H, ...]."""

    decayed: Pairs
    queries: jax.Array  # Q, A' [..., 2, C, K]
    keys: jax.Array  # K', B'
    through: jax.Array  # gam [..., K, 1]
    A: jax.Array  # [..., 2C, 2C]: ((qk, qb), (ak, ab))
    T: jax.Array  # [..., C, C]
    readers: jax.Array  # Q, T A' [..., 2C, K]


def _intra(
    cfg: RecurrenceConfig,
    mild: bool,
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    a: jax.Array,
    b: jax.Array,
    seg: Segments | None,
) -> _Intra:
    x = build(mild, w, (r * cfg.scale, a), (k, b), INCLUSIVE)
    A, queries, keys, through = x.pair_products(), x.queries_in, x.keys_out, jnp.swapaxes(x.total, -1, -2)
    start, end, passes = ends(seg)
    if seg is not None:
        A = jnp.where(jnp.tile(seg.pairs, (2, 2)), A, 0)
    queries, keys, through = (
        select(_kinds(start), queries),
        select(_kinds(end), keys),
        select(passes, through),
    )
    C = w.shape[-2]
    T = intra_exact.inverse(A[..., C:, C:])
    readers = intra_exact.stack(
        [intra_exact.pick(queries, 0), dot("...ij,...jk->...ik", T, intra_exact.pick(queries, 1))]
    )
    return _Intra(
        x, queries, keys, through, A, T, select(_for_both_queries(start), intra_exact.flat(readers))
    )


def _kinds(mask: jax.Array | None) -> jax.Array | None:
    """[..., C, 1] for arrays [..., 2, C, K]."""
    return None if mask is None else mask[..., None, :, :]


def _for_both_queries(mask: jax.Array | None) -> jax.Array | None:
    """[..., C, 1] for arrays [..., 2C, K]."""
    return None if mask is None else jnp.concatenate([mask, mask], -2)


def residual_axes(ctx: Context[RWKV7Inputs, RecurrenceConfig]) -> dict[str, str]:
    """See `Rule`."""
    return {"h0": "chunk b h k v", "U": "chunk b h i v"}


def fwd(ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs) -> tuple[Outputs, Residuals]:
    """See `Rule`."""
    cfg, chunks = ctx.settings, chunk_plan(ctx.settings, x.r, x.cu_seqlens)
    C = chunks.size

    def group(mild: bool, carry: jax.Array, tokens: Arrays, xs: PyTree) -> tuple[jax.Array, Arrays, Arrays]:
        (r, w, k, v, a, b), (sequences, seg) = tokens, xs
        _, _, keys, through, A, T, readers = _intra(cfg, mild, r, w, k, a, b, seg)
        v_local = dot("...ij,...jv->...iv", T, dot("...ij,...jv->...iv", A[..., C:, :C], v))  # T A_ak V
        start, end, passes = ends(seg)

        def step(carry: jax.Array, chunk: PyTree) -> tuple[jax.Array, Arrays]:
            sequence, readers, v_local, v, keys, through, start, end, passes = chunk
            S = chunks.read(carry, sequence)
            y, U = jnp.split(select(start, dot("bhck,bhkv->bhcv", readers, S)), 2, -2)
            vu = jnp.concatenate([v, v_local + U], -2)
            new = select(passes, through * S) + dot("bhck,bhcv->bhkv", keys, select(end, vu))
            return chunks.write(carry, new, sequence), (S, y, vu)

        each = (
            sequences,
            readers,
            v_local,
            v,
            intra_exact.flat(keys),
            through,
            _for_both_queries(start),
            _for_both_queries(end),
            passes,
        )
        carry, (states, y, vu) = chunks.each(step, carry, each)
        return carry, (y + dot("...ij,...jv->...iv", A[..., :C, :], vu),), (states, vu[..., C:, :])

    xs = (chunks.sequence, segments(chunks, x.segment_ids))
    step = by_strength(cfg, chunks, group, 1)
    tokens = (x.r, x.w, x.k, x.v, x.a, x.b)
    final, (o,), (states, U) = chunks.scan(step, x.initial_state, tokens, xs, (x.v,), cfg.compute)
    return Outputs(o, final), {"h0": states, "U": U} if ctx.save_residuals else {}


def bwd(
    ctx: Context[RWKV7Inputs, RecurrenceConfig],
    x: RWKV7Inputs,
    residuals: Residuals,
    dy: Outputs,
) -> RWKV7Inputs:
    """See `Rule`."""
    cfg, chunks = ctx.settings, chunk_plan(ctx.settings, x.r, x.cu_seqlens)
    C = chunks.size

    def group(mild: bool, carry: jax.Array, tokens: Arrays, xs: PyTree) -> tuple[jax.Array, Arrays, None]:
        (r, w, k, v, a, b, dy), (sequences, seg, (states, U)) = tokens, xs
        products, queries, keys, through, A, T, readers = _intra(cfg, mild, r, w, k, a, b, seg)
        from_y = dot("...ij,...iv->...jv", A[..., :C, :], dy)  # to v and U, within the chunk
        vu = intra_exact.flat(intra_exact.stack([v, U]))
        start, end, passes = ends(seg)

        def step(carry: jax.Array, chunk: PyTree) -> tuple[jax.Array, Arrays]:
            sequence, S, readers, keys, vu, through, dy, from_y, start, end, passes = chunk
            dS = chunks.read(carry, sequence)
            dvu = from_y + select(end, dot("bhck,bhkv->bhcv", keys, dS))
            new = select(passes, through * dS)
            new += dot("bhck,bhcv->bhkv", readers, select(start, jnp.concatenate([dy, dvu[..., C:, :]], -2)))
            return chunks.write(carry, new, sequence), (
                dvu,
                dot("bhjv,bhkv->bhjk", vu, dS),
                jnp.sum(S * dS, -1),
            )

        masks = (_for_both_queries(start), _for_both_queries(end), passes)
        each = (sequences, states, readers, intra_exact.flat(keys), vu, through, dy, from_y, *masks)
        carry, (dvu, dkeys, passed) = chunks.each(step, carry, each, reverse=True)
        dZ = dot("...ij,...iv->...jv", T, dvu[..., C:, :])
        dv = dvu[..., :C, :] + dot("...ij,...iv->...jv", A[..., C:, :C], dZ)
        dout = intra_exact.flat(intra_exact.stack([dy, dZ]))
        dA = dot("...iv,...jv->...ij", dout, vu)
        dqueries, dkeys = (
            dot("...iv,...kv->...ik", dout, states).reshape(queries.shape),
            dkeys.reshape(keys.shape),
        )
        if seg is not None:
            dA = jnp.where(jnp.tile(seg.pairs, (2, 2)), dA, 0)
        dqueries, dkeys = select(_kinds(start), dqueries), select(_kinds(end), dkeys)
        dg = select(passes, jnp.swapaxes(through, -1, -2) * passed[..., None, :])
        dg = jnp.broadcast_to(dg, w.shape)
        (dr, da), (dk, db), dw = products.gradients(dA, dqueries, dkeys, dg)
        return carry, (dr * cfg.scale, dw, dk, dv, da, db), None

    xs = (chunks.sequence, segments(chunks, x.segment_ids), (residuals["h0"], residuals["U"]))
    step = by_strength(cfg, chunks, group, 1)
    tokens = (x.r, x.w, x.k, x.v, x.a, x.b)
    do, ds = dy
    ds0, (dr, dw, dk, dv, da, db), _ = chunks.scan(
        step, ds, (*tokens, do), xs, tokens, cfg.compute, reverse=True
    )
    return RWKV7Inputs(dr, dw, dk, dv, da, db, ds0)
