"""Token shift: every token sees the one before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.sharding import beside


def token_shift(x: jax.Array, last: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """``y[:, t] = x[:, t - 1]``.

    Args:
        x: [B, T, C].
        last: [B, C], what token 0 sees: the last token of the call before, or zeros.
        segment_ids: [B, T] integers; the first token of every segment but a row's first sees zeros.

    Returns:
        [B, T, C] in x's dtype.
    """
    last = beside(last, x, 0, 2)
    y = jnp.concatenate([last[:, None].astype(x.dtype), x[:, :-1]], 1)
    if segment_ids is None:
        return y
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(starts, ((0, 0), (1, 0)))  # token 0 carries on with `last`
    return jnp.where(starts[..., None], 0, y)


def last_token(x: jax.Array, last: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """What token 0 of the next call sees: ``x[:, -1]``, or the last token that a row has.

    Args:
        x: [B, T, C].
        last: [B, C], what token 0 of this call saw; rows without tokens keep it.
        lengths: [B] integers from 0 to T, the tokens of each row; None for T.

    Returns:
        [B, C] in x's dtype.
    """
    if lengths is None:
        return x[:, -1]
    at = jnp.maximum(lengths - 1, 0)[:, None, None]
    own = jnp.take_along_axis(x, at, 1, mode="clip")[:, 0]
    return jnp.where(lengths[:, None] > 0, own, last.astype(x.dtype))
