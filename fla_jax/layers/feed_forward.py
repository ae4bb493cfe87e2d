"""The feed-forward of both versions (RWKV calls it channel mix)."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..ops.layer import squared_relu
from .base import Layer, LayerCall
from .init import ByDepth, computed, orthogonal
from .norm import Affine
from .sharding import ActivationSharding
from .state import RWKVState, check_state

_zeros = nn.initializers.zeros


class FeedForward(Layer):
    """A feed-forward: ``W_v relu(W_k x_k)^2``, gated by ``sigmoid(W_r x_r)`` if ``is_gated``.

    Each mix is ``x_n = x + (shift(x) - x) mu_n``. A subclass sets the class attributes ``mix_names``, the
    names of the mixes' parameters, k first and r second, ``mix_exponent`` of their initial values and
    ``is_gated``, and defines `default_width`.

    Attributes:
        intermediate_size: I, width of the hidden layer; None for the official one.

    The other fields: `Layer`.

    Example:
        >>> from fla_jax.layers import FeedForward, RWKV7FeedForward
        >>> isinstance(RWKV7FeedForward(hidden_size=64, intermediate_size=96), FeedForward)
        True
    """

    intermediate_size: int | None = None

    mix_names: ClassVar[tuple[str, ...]]
    mix_exponent: ClassVar[int]
    is_gated: ClassVar[bool] = False

    def default_width(self) -> int:
        """The official width of the hidden layer."""
        raise NotImplementedError

    def add_residual(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """``x + out``, both [B, T, C]."""
        return x + out

    def prepare(
        self,
        x: jax.Array,
        state: RWKVState | None,
        segment_ids: jax.Array | None,
        lengths: jax.Array | None,
        norm: Affine | None,
    ) -> tuple[LayerCall, RWKVState]:
        """The checked call and state; raises ValueError or TypeError unless the arguments fit each other."""
        x = self.checked_input(x, segment_ids, lengths, norm)
        zeros = RWKVState(None, jnp.zeros((x.shape[0], self.hidden_size), x.dtype), None)  # type: ignore[arg-type]
        state = zeros if state is None else state
        check_state(state, zeros, ("ffn_shift",))
        sharding = ActivationSharding.of(x)
        return LayerCall(self, x, state.ffn_shift, segment_ids, lengths, norm, sharding), state

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T C"],
        state: RWKVState | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        norm: Affine | None = None,
        y: Float[Array, "B T C"] | None = None,
    ) -> tuple[Float[Array, "B T C"], RWKVState]:
        """Mixes channels; ``segment_ids``, ``lengths`` and errors as for `RWKV7Attention`.

        Args:
            x: [B, T, C], normalised hidden states, T >= 1.
            state: of this layer; None for zeros. Only ``ffn_shift`` is read; the rest is passed through.
            segment_ids: [B, T] integers.
            lengths: [B] integers.
            norm: scale and bias [C] of the layer norm before this layer. x is then the residual stream, and
                so is the first result: ``x + y`` plus the output of this layer.
            y: [B, T, C], the output of the attention, added to the residual stream; only with ``norm``.

        Returns:
            ``(y, state)``: y [B, T, C] in the compute dtype, and the state after the last token.
        """
        call, state = self.prepare(x, state, segment_ids, lengths, norm)
        C, depth = self.hidden_size, ByDepth(self.layer_index, self.num_layers, self.hidden_size, 1)
        width = self.default_width() if self.intermediate_size is None else self.intermediate_size
        mu = computed(lambda: depth.mix(depth.falling**self.mix_exponent))
        mixed = call.shift_mix([call.vector(name, mu, None) for name in self.mix_names], y)
        h = call.dense("key", width, orthogonal(1.0), ("embed", "mlp"), mixed.mixed[0])
        out = call.dense("value", C, _zeros, ("mlp", "embed"), squared_relu(h))
        if self.is_gated:
            out = jax.nn.sigmoid(call.dense("receptance", C, _zeros, ("embed", None), mixed.mixed[1])) * out
        out = out if norm is None or mixed.x is None else self.add_residual(mixed.x, out)
        return out, state.replace(ffn_shift=mixed.last)
