"""The recurrent state: an explicit argument and result of every call."""

from __future__ import annotations

import jax.export
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RWKVState(struct.PyTreeNode):
    """The recurrent state of one layer, or of a model: the same three arrays with a leading layer axis.

    An ordinary pytree, zero before the first token.

    Attributes:
        att_shift: input of the attention at the last token [B, C] (a model: [L, B, C]), in the compute dtype.
        ffn_shift: input of the feed-forward at the last token, of the same shape.
        wkv: the matrix-valued state [B, H, K, V] (a model: [L, B, H, K, V]), K = V = head_dim, float32
            for every compute dtype. RWKV-LM stores [V, K].

    Example:
        >>> from fla_jax.layers import RWKV7Attention
        >>> state = RWKV7Attention(hidden_size=64, head_dim=16).init_state(batch=3)
        >>> state.wkv.shape, state.att_shift.shape
        ((3, 4, 16, 16), (3, 64))
    """

    att_shift: Float[Array, "*L B C"]
    ffn_shift: Float[Array, "*L B C"]
    wkv: Float[Array, "*L B H K V"]


class SegmentState(struct.PyTreeNode):
    """The state from which an attention starts every segment: ``wkv`` in the collection ``segment_states``.

    Attributes:
        wkv: [H, K, V]; stacked layers have a leading layer axis.
        max_segments: number of segments that memory is for, a sequence on average. Outputs are NaN if there
            are more.
    """

    wkv: Float[Array, "*L H K V"]
    max_segments: int = struct.field(pytree_node=False)


def zero_state(
    batch: int, hidden_size: int, head_dim: int, dtype: DTypeLike, *, num_layers: int | None = None
) -> RWKVState:
    """The state before the first token, of one layer or of ``num_layers``.

    Raises:
        ValueError: ``batch`` is no positive integer.
    """
    if not jax.export.is_symbolic_dim(batch) and (type(batch) is not int or batch < 1):
        raise ValueError(f"batch must be a positive integer, got {batch!r}")
    lead = () if num_layers is None else (num_layers,)
    shift = (*lead, batch, hidden_size)
    wkv = (*lead, batch, hidden_size // head_dim, head_dim, head_dim)
    # two arrays and not one twice: donating a buffer twice is an error
    return RWKVState(
        jnp.zeros(shift, dtype),
        jnp.zeros(shift, dtype),
        jnp.zeros(wkv, jnp.promote_types(dtype, jnp.float32)),
    )


FIELDS = ("att_shift", "ffn_shift", "wkv")


def check_state(state: object, like: RWKVState, fields: tuple[str, ...] = FIELDS) -> None:
    """Raises TypeError or ValueError unless ``state`` is an `RWKVState` with the shapes of ``like``."""
    if not isinstance(state, RWKVState):
        raise TypeError(f"state must be an RWKVState (see init_state), got {type(state).__name__}")
    for name in fields:
        want, got = getattr(like, name).shape, getattr(getattr(state, name), "shape", None)
        if got is None:
            raise TypeError(f"state.{name} must be an array, got {type(getattr(state, name)).__name__}")
        if want != got:
            raise ValueError(f"state.{name} must have shape {list(want)}, got {list(got)}")
