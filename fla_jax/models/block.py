"""One layer of the language models: attention and feed-forward, each behind a norm and added to its input."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax

from ..layers import RWKV6Attention, RWKV6FeedForward, RWKV7Attention, RWKV7FeedForward, RWKVState
from ..layers.base import with_axes
from ..layers.norm import Affine, NormParameters
from ..layers.sharding import constrain
from .config import RWKV6Config, RWKV7Config, RWKVConfig

Carry = tuple[jax.Array, jax.Array | None]


def _norm(config: RWKVConfig, name: str, x: jax.Array) -> Affine:
    """Scale and bias of a norm that the layer behind it computes."""
    boxed = functools.partial(with_axes, axes=(None,), logical_axes=config.logical_axes)
    ones, zeros = boxed(nn.initializers.ones), boxed(nn.initializers.zeros)
    return NormParameters(config.hidden_size, config.param_dtype, ones, zeros, name=name)(x)


def residual(x: jax.Array) -> jax.Array:
    """The residual stream [B, T, C], held to where it belongs on a mesh."""
    return constrain(x, "batch", "length", "activation_embed")


class RWKV6Block(nn.Module):
    """One layer of RWKV-6: ``x + att(ln1(x))``, then ``x + ffn(ln2(x))``.

    Attributes:
        config: of the model.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV6Block, RWKV6Config, RWKV6ForCausalLM
        >>> config = RWKV6Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16)
        >>> state = jax.tree.map(lambda x: x[0], RWKV6ForCausalLM(config).init_state(1))
        >>> carry = jnp.ones((1, 8, 64)), None
        >>> block = RWKV6Block(config)
        >>> (x, _), state = block.apply(block.init(jax.random.key(0), carry, state), carry, state)
        >>> x.shape
        (1, 8, 64)
    """

    config: RWKV6Config

    @nn.compact
    def __call__(
        self,
        carry: Carry,
        state: RWKVState,
        layer_index: Any = 0,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[Carry, RWKVState]:
        """Runs the layer.

        Args:
            carry: ``(x, None)``, x [B, T, C].
            state: of this layer.
            layer_index: position in the network, an int or a traced integer.
            segment_ids: [B, T] integers or None.
            lengths: [B] integers or None; what stands behind them must be finite.

        Returns:
            ``(carry, state)``.
        """
        config, (x, v_first) = self.config, carry
        att = RWKV6Attention(**config.attention, layer_index=layer_index, name="att")
        y, state = att(x, state, segment_ids, lengths, _norm(config, "ln1", x))
        ffn = RWKV6FeedForward(**config.feed_forward, layer_index=layer_index, name="ffn")
        x, shift = ffn(x, state.ffn_shift, segment_ids, lengths, _norm(config, "ln2", x), residual(y))
        return (residual(x), v_first), state.replace(ffn_shift=shift)


class RWKV7Block(nn.Module):
    """One layer of RWKV-7: ``x + att(ln1(x))``, then ``x + ffn(ln2(x))``.

    Attributes:
        config: of the model.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Block, RWKV7Config, RWKV7ForCausalLM
        >>> config = RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16)
        >>> state = jax.tree.map(lambda x: x[0], RWKV7ForCausalLM(config).init_state(1))
        >>> carry = jnp.ones((1, 8, 64)), None
        >>> block = RWKV7Block(config)
        >>> (x, v_first), state = block.apply(block.init(jax.random.key(0), carry, state), carry, state)
        >>> x.shape, v_first.shape
        ((1, 8, 64), (1, 8, 64))
    """

    config: RWKV7Config

    @nn.compact
    def __call__(
        self,
        carry: Carry,
        state: RWKVState,
        layer_index: Any = 0,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[Carry, RWKVState]:
        """Runs the layer.

        Args:
            carry: ``(x, v_first)``, both [B, T, C]; v_first comes from layer 0, which ignores the one it
                gets.
            state: of this layer.
            layer_index: position in the network, an int or a traced integer.
            segment_ids: [B, T] integers or None.
            lengths: [B] integers or None; what stands behind them must be finite.

        Returns:
            ``(carry, state)``.
        """
        config, (x, v_first) = self.config, carry
        att = RWKV7Attention(**config.attention, layer_index=layer_index, name="att")
        y, state, v_first = att(x, state, v_first, segment_ids, lengths, _norm(config, "ln1", x))
        ffn = RWKV7FeedForward(**config.feed_forward, layer_index=layer_index, name="ffn")
        x, shift = ffn(x, state.ffn_shift, segment_ids, lengths, _norm(config, "ln2", x), residual(y))
        return (residual(x), v_first), state.replace(ffn_shift=shift)
