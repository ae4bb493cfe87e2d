"""RWKV-6 by chunks in plain JAX. With C tokens a chunk, S0 and S1 the states at its start and
its end, and products A of `intra_exact.Tree`::

    Y = Q S0 + A V,   Q = r decayed from the chunk's start, A with r . (u k) on its diagonal
    S1 = gam S0 + K'^T V,   K' = k decayed to the chunk's end

All but the recurrence of the state is computed for a group of chunks at once. States and A are residuals.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV6Inputs
from ...core.varlen import Segments, chunk_plan, ends, segments, select, zeros
from .. import intra_exact
from ..intra_exact import Arrays, dot
from ..intra_safe import Pairs, build, by_strength

INCLUSIVE = (False,)  # r reads the state before its decay


def _masked(x: Pairs, seg: Segments | None) -> Arrays:
    """Queries of the chunk's h0, keys to its ht [..., C, K], and the decay from h0 to ht [..., K, 1], zero
    beyond restarts.
    """
    start, end, passes = ends(seg)
    queries, keys, through = (
        intra_exact.pick(x.queries_in, 0),
        intra_exact.pick(x.keys_out, 0),
        jnp.swapaxes(x.total, -1, -2),
    )
    return select(start, queries), select(end, keys), select(passes, through)


def residual_axes(ctx: Context[RWKV6Inputs, RecurrenceConfig]) -> dict[str, str]:
    """See `Rule`."""
    return {"h0": "chunk b h k v", "A": "chunk b h i j"}


def fwd(ctx: Context[RWKV6Inputs, RecurrenceConfig], x: RWKV6Inputs) -> tuple[Outputs, Residuals]:
    """See `Rule`."""
    cfg, chunks = ctx.settings, chunk_plan(ctx.settings, x.r, x.cu_seqlens)
    u = x.u.astype(cfg.compute)[:, None, :]

    def group(mild: bool, carry: jax.Array, tokens: Arrays, xs: PyTree) -> tuple[jax.Array, Arrays, Arrays]:
        (r, k, v, w), (sequences, seg) = tokens, xs
        r = r * cfg.scale
        decayed = build(mild, w, (r,), (k,), INCLUSIVE)
        A = decayed.pair_products() if seg is None else jnp.where(seg.pairs, decayed.pair_products(), 0)
        A = jnp.where(np.eye(chunks.size, dtype=bool), jnp.sum(r * u * k, -1, keepdims=True), A)
        queries, keys, through = _masked(decayed, seg)
        start, end, passes = ends(seg)

        def step(carry: jax.Array, chunk: PyTree) -> tuple[jax.Array, Arrays]:
            sequence, queries, keys, v, through, passes = chunk
            S = chunks.read(carry, sequence)
            new = select(passes, through * S) + dot("bhck,bhcv->bhkv", keys, v)
            return chunks.write(carry, new, sequence), (S, dot("bhck,bhkv->bhcv", queries, S))

        each = (sequences, queries, keys, select(end, v), through, passes)
        carry, (states, y) = chunks.each(step, carry, each)
        return carry, (select(start, y) + dot("...ij,...jv->...iv", A, v),), (states, A)

    xs = (chunks.sequence, segments(chunks, x.segment_ids))
    step = by_strength(cfg, chunks, group, 3)
    tokens = (x.r, x.k, x.v, x.w)
    final, (o,), (states, A) = chunks.scan(step, x.initial_state, tokens, xs, (x.v,), cfg.compute)
    return Outputs(o, final), {"h0": states, "A": A} if ctx.save_residuals else {}


def bwd(
    ctx: Context[RWKV6Inputs, RecurrenceConfig],
    x: RWKV6Inputs,
    residuals: Residuals,
    dy: Outputs,
) -> RWKV6Inputs:
    """See `Rule`."""
    cfg, chunks = ctx.settings, chunk_plan(ctx.settings, x.r, x.cu_seqlens)
    bonus = x.u.astype(cfg.compute)[:, None, :]

    def group(
        mild: bool, carry: tuple[jax.Array, jax.Array], tokens: Arrays, xs: PyTree
    ) -> tuple[tuple[jax.Array, jax.Array], Arrays, None]:
        (dS, du), (r, k, v, w, dy), (sequences, seg, (states, A)) = carry, tokens, xs
        r = r * cfg.scale
        decayed = build(mild, w, (r,), (k,), INCLUSIVE)
        queries, keys, through = _masked(decayed, seg)
        start, end, passes = ends(seg)

        def step(carry: jax.Array, chunk: PyTree) -> tuple[jax.Array, Arrays]:
            sequence, S, queries, keys, v, through, passes, dy = chunk
            dS = chunks.read(carry, sequence)
            new = select(passes, through * dS) + dot("bhck,bhcv->bhkv", queries, dy)
            return chunks.write(carry, new, sequence), (
                dot("bhck,bhkv->bhcv", keys, dS),
                dot("bhjv,bhkv->bhjk", v, dS),
                jnp.sum(S * dS, -1),
            )

        each = (sequences, states, queries, keys, v, through, passes, select(start, dy))
        dS, (dv, dk, passed) = chunks.each(step, dS, each, reverse=True)
        dv = select(end, dv) + dot("...ij,...iv->...jv", A, dy)
        dA, dr = dot("...iv,...jv->...ij", dy, v), dot("...iv,...kv->...ik", dy, states)
        do_v = jnp.sum(dy * v, -1, keepdims=True)
        if seg is not None:
            dA = jnp.where(seg.pairs, dA, 0)
        dr, dk = select(start, dr), select(end, dk)
        dg = select(passes, jnp.swapaxes(through, -1, -2) * passed[..., None, :])
        dg = jnp.broadcast_to(dg, w.shape)
        (dr,), (dk,), dw = decayed.gradients(dA, dr[..., None, :, :], dk[..., None, :, :], dg)
        dr, dk = (dr + do_v * bonus * k) * cfg.scale, dk + do_v * bonus * r
        return (dS, du + jnp.sum(do_v * r * k, (0, 1, 3))), (dr, dk, dv, dw), None

    do, ds = dy
    carry = (ds, zeros(x.u, do, cfg.compute))
    xs = (chunks.sequence, segments(chunks, x.segment_ids), (residuals["h0"], residuals["A"]))
    step = by_strength(cfg, chunks, group, 3)
    tokens = (x.r, x.k, x.v, x.w)
    (ds0, du), (dr, dk, dv, dw), _ = chunks.scan(
        step, carry, (*tokens, do), xs, tokens, cfg.compute, reverse=True
    )
    return RWKV6Inputs(dr, dk, dv, dw, du.astype(x.u.dtype), ds0)
