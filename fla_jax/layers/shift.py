"""Token shift: every token sees the one before it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.context_parallel import from_left, shard_on
from ..core.mesh import is_explicit, is_manual, shard_like, spec_of
from .sharding import sequence_axis


def token_shift(x: jax.Array, last: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """``y[:, t] = x[:, t - 1]``.

    Args:
        x: [B, T, C].
        last: [B, C], what token 0 sees: the last token of the call before, or zeros.
        segment_ids: [B, T] integers; the first token of every segment but a row's first sees zeros.

    T may be split over a mesh axis: as types or the rule for ``length`` say, also inside `jax.shard_map`.

    Returns:
        [B, T, C] in x's dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.layers import token_shift
        >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
        >>> token_shift(x, jnp.array([[9.0]]))[0, :, 0].tolist()
        [9.0, 1.0, 2.0]
        >>> token_shift(x, jnp.array([[9.0]]), jnp.array([[0, 0, 1]]))[0, :, 0].tolist()
        [9.0, 1.0, 0.0]
    """
    axis = sequence_axis(x)
    # on automatic meshes XLA moves the rows that it has to
    if axis is None or not (is_explicit() or is_manual()):
        return _shifted(x, shard_like(last, x, 0, 2), segment_ids)
    across = functools.partial(_shifted_across, axis)
    if is_manual():
        return across(x, last, segment_ids)
    last = shard_like(last, x, 0, 2)
    arrays = (x, last) if segment_ids is None else (x, last, shard_like(segment_ids, x, 0, 1))
    specs = tuple(P(*spec_of(array)) for array in arrays)
    return jax.shard_map(across, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)


def _shifted(x: jax.Array, first: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    y = jnp.concatenate([first[:, None].astype(x.dtype), x[:, :-1]], 1)
    if segment_ids is None:
        return y
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(starts, ((0, 0), (1, 0)))  # token 0 carries on with `first`
    return jnp.where(starts[..., None], 0, y)


def _shifted_across(
    axis: str, x: jax.Array, last: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """`token_shift` of one device's tokens: its first one sees the last one of the device before."""
    shard = shard_on(axis, segment_ids)
    left = shard.continued(from_left(x[:, -1], axis))
    return _shifted(x, jnp.where(shard.is_first, last.astype(x.dtype), left), segment_ids)


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
