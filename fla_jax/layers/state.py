"""The recurrent state: an explicit pytree that goes into a call and comes out of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from flax import struct


class RWKVState(struct.PyTreeNode):
    """What one layer remembers of the tokens before a call; for a whole model the same three arrays with a
    leading layer axis.

    It is an ordinary pytree: donate it, vmap it, differentiate it (state tuning, truncated back-propagation),
    shard it, save it. Zeros mean "no tokens yet".

    Attributes:
        att_shift: input of the attention at the last token [B, C] (a model: [L, B, C]), in the compute dtype.
        ffn_shift: input of the feed-forward at the last token, likewise.
        wkv: the matrix-valued state [B, H, K, V] (a model: [L, B, H, K, V]), K = V = head_dim, float32
            whatever the compute dtype. RWKV-LM keeps [V, K].

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> state = model.init_state(batch=3)
        >>> state.wkv.shape, state.att_shift.shape
        ((2, 3, 4, 16, 16), (2, 3, 64))
    """

    att_shift: jax.Array
    ffn_shift: jax.Array
    wkv: jax.Array


def zero_state(
    batch: int, hidden_size: int, head_dim: int, dtype: Any, *, num_layers: int | None = None
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


def check_state(state: Any, like: RWKVState) -> None:
    """Raises unless ``state`` has the shapes of ``like``."""
    if not isinstance(state, RWKVState):
        raise TypeError(f"state must be an RWKVState (see init_state), got {type(state).__name__}")
    for name in ("att_shift", "ffn_shift", "wkv"):
        want, got = getattr(like, name).shape, getattr(getattr(state, name), "shape", None)
        if got is None:
            raise TypeError(f"state.{name} must be an array, got {type(getattr(state, name)).__name__}")
        if want != got:
            raise ValueError(f"state.{name} must have shape {list(want)}, got {list(got)}")
