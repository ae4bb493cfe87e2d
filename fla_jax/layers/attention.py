"""The attention layers' common part: fields, call, recurrence, norm of each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..core.mesh import shard_like
from .base import Layer, LayerCall, with_axes, zero_beyond
from .init import ByDepth, Value, computed
from .norm import Affine, NormParameters
from .sharding import TOKEN_AXES, ActivationSharding, constrain
from .state import RWKVState, SegmentState, check_state, zero_state

R = TypeVar("R")


class Attention(Layer):
    """Fields and helpers of the attention layers (RWKV calls them time mix).

    Attributes:
        head_dim: channels per head, K = V.
        chunk_size: tokens per chunk of the op; None for the implementation's choice.
        implementation: name of the op's implementation; None for the best that qualifies.

    The other fields: `Layer`.

    Example:
        >>> from fla_jax.layers import RWKV7Attention
        >>> layer = RWKV7Attention(hidden_size=64, head_dim=16, implementation="xla")
        >>> layer.init_state(batch=2).wkv.shape
        (2, 4, 16, 16)
    """

    head_dim: int = 64
    chunk_size: int | None = None
    implementation: str | None = None

    @nn.nowrap
    def init_state(self, batch: int) -> RWKVState:
        """The state before the first token; needs no parameters."""
        return zero_state(
            batch, self.hidden_size, self.head_dim, self.param_dtype if self.dtype is None else self.dtype
        )

    @property
    def depth(self) -> ByDepth:
        """Initial values for this layer."""
        return ByDepth(self.layer_index, self.num_layers, self.hidden_size, self.head_dim)

    def prepare(
        self,
        x: jax.Array,
        state: RWKVState | None,
        segment_ids: jax.Array | None,
        lengths: jax.Array | None,
        norm: Affine | None,
    ) -> AttentionCall:
        """The checked call; raises ValueError or TypeError unless the arguments fit each other."""
        x = self.checked_input(x, segment_ids, lengths, norm)
        zeros = zero_state(x.shape[0], self.hidden_size, self.head_dim, x.dtype)
        if state is None:
            state = zeros
        else:
            check_state(state, zeros)
        sharding = ActivationSharding.of(x, self.hidden_size // self.head_dim)
        return AttentionCall(self, x, state.att_shift, segment_ids, lengths, norm, sharding, state)


@dataclasses.dataclass(frozen=True)
class AttentionCall(LayerCall):
    """One call of an attention layer.

    Attributes:
        state: of the layer before the call.
    """

    layer: Attention
    state: RWKVState

    def heads(self, x: jax.Array) -> jax.Array:
        """[B, T, C] -> [B, T, H, N]."""
        x = x.reshape(*x.shape[:-1], -1, self.layer.head_dim)
        return constrain(x, *TOKEN_AXES, "activation_heads", "activation_kv")

    def by_head(self, x: jax.Array) -> jax.Array:
        """[C] -> [H, N]."""
        return x.reshape(-1, self.layer.head_dim)

    def head_vector(self, name: str, init: Value) -> jax.Array:
        """A parameter [H, N] with the initial value that ``init`` returns."""
        C, N = self.layer.hidden_size, self.layer.head_dim
        return self.vector(name, computed(init), "heads", "kv", shape=(C // N, N))

    def run(self, op: Callable[..., R], *args: Any, **options: Any) -> R:
        """An op of [B, T, ...] arrays on the mesh axis that T is split over, if any."""
        return op(*args, sequence_axis=self.sharding.length, **options)

    def recurrence(
        self,
        chunk: Callable[..., Any],
        fused_recurrent: Callable[..., Any],
        arrays: tuple[jax.Array, ...],
        **chunk_options: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """The recurrence of [B, T, H, N] arrays, r first: output and final state [B, H, K, V].

        A single token runs ``fused_recurrent``, more run ``chunk`` with ``chunk_options``.
        """
        layer, T = self.layer, arrays[0].shape[1]
        if self.lengths is not None:
            # A token that is 0 in every input but r leaves the state as it is. Selected, not multiplied: the
            # values at and beyond `lengths` may be NaN.
            r, *others = arrays
            arrays = (r, *(zero_beyond(x, self.lengths) if x.ndim == 4 else x for x in others))
        if layer.has_variable("segment_states", "wkv"):
            return self._recurrence_of_segments(chunk, arrays, **chunk_options)
        arrays = tuple(shard_like(x, arrays[0], 0, 1, 2, None) if x.ndim == 4 else x for x in arrays)
        h0 = shard_like(self.state.wkv, arrays[0], 0, 2, None, None)
        # a symbolic T is no int; the chunked op refuses it with a message
        is_chunked = not isinstance(T, int) or T > 1
        o, ht = self.run(
            chunk if is_chunked else fused_recurrent,
            *arrays,
            initial_state=constrain(h0, TOKEN_AXES[0], "activation_heads", "activation_kv", None),
            output_final_state=True,
            segment_ids=self.segment_ids,
            implementation=layer.implementation,
            **({"chunk_size": layer.chunk_size, **chunk_options} if is_chunked else {}),
        )
        # the dtype of `zero_state`, also where parameters are wider than the compute dtype
        ht = ht.astype(jnp.promote_types(arrays[0].dtype, jnp.float32))
        return constrain(o, *TOKEN_AXES, "activation_heads", "activation_kv"), ht

    def _recurrence_of_segments(
        self,
        chunk: Callable[..., tuple[jax.Array, jax.Array]],
        arrays: tuple[jax.Array, ...],
        **options: float,
    ) -> tuple[jax.Array, jax.Array]:
        """`recurrence` with the same state before every segment: all of the batch as packed sequences."""
        start: SegmentState = self.layer.get_variable("segment_states", "wkv")
        B, T = arrays[0].shape[:2]
        ids = jnp.zeros((B, T), jnp.int32) if self.segment_ids is None else self.segment_ids
        is_first = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        number, N = jnp.sum(is_first), B * start.max_segments
        (starts,) = jnp.nonzero(is_first.reshape(-1), size=N, fill_value=B * T)
        packed = [x.reshape(1, B * T, *x.shape[2:]) if x.ndim == 4 else x for x in arrays]
        o, ht = self.run(
            chunk,
            *packed,
            initial_state=jnp.broadcast_to(start.wkv, (N, *start.wkv.shape)),
            output_final_state=True,
            cu_seqlens=jnp.append(starts, B * T),
            implementation=self.layer.implementation,
            chunk_size=self.layer.chunk_size,
            **options,
        )
        last = jnp.cumsum(jnp.sum(is_first, 1)) - 1
        o = jnp.where(number > N, jnp.nan, o).reshape(B, T, *o.shape[2:])
        return o, ht[last].astype(jnp.promote_types(arrays[0].dtype, jnp.float32))

    def group_norm(self) -> Affine:
        """Scale and bias [H, N] of the norm of each head, whose eps is 64e-5 whatever the size of a head."""
        layer = self.layer
        scale, bias = NormParameters(
            layer.hidden_size,
            layer.param_dtype,
            with_axes(computed(layer.depth.depth_scale), ("heads",), layer.logical_axes),
            with_axes(nn.initializers.zeros, ("heads",), layer.logical_axes),
            name="ln_x",
        )(self.sharding, "heads")
        return self.by_head(scale), self.by_head(bias)
