"""Walks token by token with `jax.lax.scan`, forward and backward, for the definitions of both recurrences.

The states that enter every chunk are kept; the backward runs each chunk forward again and then walks it in
reverse, so memory is linear in T / chunk. Nothing is divided by a decay and no two large sums are subtracted,
so every gradient is exact at every decay.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.context import RecurrenceConfig
from ..core.varlen import Chunks, Segments, plan, segments

CHUNK = 64  # tokens between two kept states


def _tokens(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 0)  # [B, H, C, D] -> [C, B, H, D]


def _chunks(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, 2)


def _restart(seg: Segments | None, like: jax.Array) -> jax.Array:
    """[n, B, 1, C, 1]: the state is emptied before this token."""
    if seg is None:
        return jnp.zeros((like.shape[0], 1, 1, like.shape[3], 1), bool)
    return jnp.concatenate([~seg.start[..., :1, :], seg.ids[..., 1:, :] != seg.ids[..., :-1, :]], axis=-2)


def scan_fwd(step, chunks: Chunks, s0: jax.Array, xs):
    """Runs ``step(S, token) -> (S, y)`` over all chunks. Returns y in chunks, the states that enter the
    chunks, the final states.
    """

    def chunk(carry, x):
        sequence, x = x
        entering = chunks.read(carry, sequence)
        leaving, y = jax.lax.scan(step, entering, jax.tree.map(_tokens, x))
        return chunks.write(carry, leaving, sequence), (_chunks(y), entering)

    final, (y, states) = jax.lax.scan(chunk, s0, (chunks.sequence, xs))
    return y, states, final


def scan_bwd(step, back, chunks: Chunks, ds: jax.Array, states, xs, dy):
    """Walks the chunks in reverse with ``back(dS, (S_before, token, dy)) -> (dS, gradients)``. Returns token
    gradients in chunks and the final dS.
    """

    def chunk(carry, x):
        sequence, entering, x, dy = x
        x = jax.tree.map(_tokens, x)
        _, before = jax.lax.scan(lambda S, t: (step(S, t)[0], S), entering, x)
        ds, grads = jax.lax.scan(back, chunks.read(carry, sequence), (before, x, _tokens(dy)), reverse=True)
        return chunks.write(carry, ds, sequence), jax.tree.map(_chunks, grads)

    ds, grads = jax.lax.scan(chunk, ds, (chunks.sequence, states, xs, dy), reverse=True)
    return grads, ds


def prepare(
    settings: RecurrenceConfig, arrays, segment_ids, cu_seqlens
) -> tuple[Chunks, tuple[jax.Array, ...]]:
    """How the call is cut, its token arrays in chunks, and where the state restarts."""
    T = arrays[0].shape[1]
    chunks = plan(T, min(settings.chunk_size or CHUNK, T), cu_seqlens)
    xs = tuple(chunks.split(x, settings.compute) for x in arrays)
    return chunks, (*xs, _restart(segments(chunks, segment_ids), xs[0]))
