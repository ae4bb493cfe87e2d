"""Sequences that devices split: what they exchange along one mesh axis.

A device's tokens take a recurrence's state S to ``M S + N`` (transition M, update N). One gather of all
devices' (M, N) gives each its h0; in the backward, M^T and the gradient of h0 from the outputs alone do the
same for gradients. Whether a segment begins, and the token shift, need the left neighbour's last token.

Everything here runs inside `jax.shard_map` or a partitioned kernel, where collectives name a mesh axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .context import ContextParallel
from .mesh import vary_alike


class SequenceShard(NamedTuple):
    """One device's tokens of all sequences.

    Attributes:
        axis: the mesh axis that splits the tokens.
        begins: [B] booleans, whether the first token here begins a segment that is not the first of its
            sequence; None for no segments.
    """

    axis: str
    begins: jax.Array | None

    @property
    def is_first(self) -> jax.Array:
        """Whether sequences begin on this device."""
        return jax.lax.axis_index(self.axis) == 0

    @property
    def is_last(self) -> jax.Array:
        """Whether sequences end on this device."""
        return jax.lax.axis_index(self.axis) == jax.lax.axis_size(self.axis) - 1

    def continued(self, x: jax.Array) -> jax.Array:
        """``x`` [B, ...], zeros where the first token here begins a segment."""
        return x if self.begins is None else jnp.where(_by_batch(self.begins, x), 0, x)

    def enter(self, M: jax.Array, N: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """h0 of this device's tokens, and the final state; [B, H, K, V] float32.

        Args:
            M: [B, H, K, K], or [B, H, K] where it is diagonal.
            N: [B, H, K, V].
            start: [B, H, K, V], the initial state.
        """
        entering, final = _exchange(self.axis, self.continued(M), N, start, False)
        return self.continued(entering), final

    def enter_backward(self, M: jax.Array, D: jax.Array, end: jax.Array) -> jax.Array:
        """The gradient of ht of this device's tokens.

        Args:
            M: transposed, else as in `enter`.
            D: [B, H, K, V], the gradient of h0 from the outputs here alone.
            end: [B, H, K, V], the gradient of the final state.
        """
        return _exchange(self.axis, self.continued(M), self.continued(D), end, True)[0]


def shard_of(cp: ContextParallel, segment_ids: jax.Array | None) -> SequenceShard | None:
    """This device's shard of the sequences of a call, or None where it has whole sequences."""
    return None if cp.axis is None or cp.size == 1 else shard_on(cp.axis, segment_ids)


def shard_on(axis: str, segment_ids: jax.Array | None) -> SequenceShard:
    """This device's shard of sequences that ``axis`` splits; ``segment_ids`` [B, T] of its tokens."""
    if segment_ids is None:
        return SequenceShard(axis, None)
    left = from_left(segment_ids[:, -1], axis)
    return SequenceShard(axis, (jax.lax.axis_index(axis) > 0) & (left != segment_ids[:, 0]))


def from_left(x: jax.Array, axis: str) -> jax.Array:
    """``x`` of the device before this one; zeros on the first."""
    return jax.lax.ppermute(x, axis, [(i, i + 1) for i in range(jax.lax.axis_size(axis) - 1)])


def from_right(x: jax.Array, axis: str) -> jax.Array:
    """``x`` of the device after this one; zeros on the last."""
    return jax.lax.ppermute(x, axis, [(i + 1, i) for i in range(jax.lax.axis_size(axis) - 1)])


def _by_batch(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


def _apply(M: jax.Array, S: jax.Array) -> jax.Array:
    """``M S``; M [..., K, K], or [..., K, 1] where it is diagonal."""
    if M.shape[-1] == 1:
        return M * S
    return jnp.einsum("...ij,...jv->...iv", M, S, precision=jax.lax.Precision.HIGHEST)


def _exchange(
    axis: str, M: jax.Array, N: jax.Array, start: jax.Array, reverse: bool
) -> tuple[jax.Array, jax.Array]:
    """The h0 of this device, from those before it (``reverse``: after it), and the last ht."""
    M = M[..., None] if M.ndim == 3 else M
    width = M.shape[-1]
    maps = jax.lax.all_gather(jnp.concatenate([M, N], -1), axis)  # float32, the one collective

    def step(S: jax.Array, one: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _apply(one[..., :width], S) + one[..., width:], S

    start = vary_alike(start, maps)
    # a loop costs more than a step
    end, h0 = jax.lax.scan(step, start, maps, reverse=reverse, unroll=8)
    return jax.lax.dynamic_index_in_dim(h0, jax.lax.axis_index(axis), keepdims=False), end
