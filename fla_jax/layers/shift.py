"""Token shift: the input of each token's mixes is the token before it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ..core.context_parallel import from_left, shard_on
from ..core.mesh import is_explicit, is_manual, shard_like, spec_of
from .sharding import length_axis


def token_shift(
    x: Float[Array, "B T C"], last: Float[Array, "B C"], segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T C"]:
    """``y[:, t] = x[:, t - 1]``.

    Args:
        x: [B, T, C].
        last: [B, C], the token before token 0: the last token of the call before, or zeros.
        segment_ids: [B, T] integers; the token before the first of a later segment is zero.

    T may be split over a mesh axis, by types or the rule for ``activation_length``, also inside
    `jax.shard_map`.

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
    axis = length_axis(x)
    # on automatic meshes XLA inserts the communication
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
    starts = jnp.pad(starts, ((0, 0), (1, 0)))  # token 0 continues the segment of `first`
    return jnp.where(starts[..., None], 0, y)


def _shifted_across(
    axis: str, x: jax.Array, last: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """`token_shift` of one device's tokens: before its first one comes the last of the device before."""
    shard = shard_on(axis, segment_ids)
    left = shard.continued(from_left(x[:, -1], axis))
    return _shifted(x, jnp.where(shard.is_first, last.astype(x.dtype), left), segment_ids)


def last_token(x: jax.Array, last: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """The last token of each example: ``x[:, -1]``, or that before ``lengths``.

    Args:
        x: [B, T, C].
        last: [B, C], the result for examples without tokens.
        lengths: [B] integers from 0 to T, the number of tokens of each example; None for T.

    Returns:
        [B, C] in x's dtype.
    """
    if lengths is None:
        return x[:, -1]
    at = jnp.maximum(lengths - 1, 0)[:, None, None]
    end = jnp.take_along_axis(x, at, 1, mode="clip")[:, 0]
    return jnp.where(lengths[:, None] > 0, end, last.astype(x.dtype))
