"""One layer of the language models: attention and feed-forward, each added to its normalised input."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from ..layers import RWKVState
from ..layers.base import with_axes
from ..layers.norm import Affine, NormParameters
from ..layers.sharding import TOKEN_AXES, ActivationSharding, constrain
from .config import RWKVConfig
from .families import family_of

Carry = tuple[Float[Array, "B T C"], Float[Array, "B T C"] | None]


def _norm(config: RWKVConfig, name: str, x: jax.Array) -> Affine:
    """Scale and bias of a norm that the next layer computes."""
    boxed = functools.partial(with_axes, axes=(None,), logical_axes=config.logical_axes)
    ones, zeros = boxed(nn.initializers.ones), boxed(nn.initializers.zeros)
    norm = NormParameters(config.hidden_size, config.param_dtype, ones, zeros, name=name)
    return norm(ActivationSharding.of(x))


def residual(x: jax.Array) -> jax.Array:
    """The residual stream [B, T, C], sharded by the rules for activations."""
    return constrain(x, *TOKEN_AXES, "activation_embed")


class RWKVBlock(nn.Module):
    """One layer of a model: ``x + att(ln1(x))``, then ``x + ffn(ln2(x))``; its family decides which layers.

    `RWKV6Block` and `RWKV7Block` are other names of it.

    Attributes:
        config: of the model.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Block, RWKV7Config
        >>> config = RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16)
        >>> x, block = jnp.ones((1, 8, 64)), RWKV7Block(config)
        >>> variables = block.init(jax.random.key(0), x)
        >>> y, state, v_first = block.apply(variables, x)
        >>> y.shape, state.wkv.shape, v_first.shape
        ((1, 8, 64), (1, 4, 16, 16), (1, 8, 64))
    """

    config: RWKVConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T C"],
        state: RWKVState | None = None,
        v_first: Float[Array, "B T C"] | None = None,
        layer_index: int | jax.Array = 0,
        segment_ids: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T C"], RWKVState, Float[Array, "B T C"] | None]:
        """Runs the layer.

        Args:
            x: [B, T, C], the residual stream.
            state: of this layer; None for zeros.
            v_first: [B, T, C], the third result of layer 0; None at layer 0, and for RWKV-6.
            layer_index: position in the network, an int or a traced integer.
            segment_ids: [B, T] integers or None.
            lengths: [B] integers or None; x must be finite at and beyond them.

        Returns:
            ``(x, state, v_first)``.
        """
        config, family = self.config, family_of(self.config)
        positions = {"segment_ids": segment_ids, "lengths": lengths}
        att = family.attention(**config.attention, layer_index=layer_index, name="att")
        y, state, v_first = att(x, state, v_first, norm=_norm(config, "ln1", x), **positions)
        ffn = family.feed_forward(**config.feed_forward, layer_index=layer_index, name="ffn")
        x, state = ffn(x, state, norm=_norm(config, "ln2", x), y=residual(y), **positions)
        return residual(x), state, v_first

    def scan_step(
        self,
        carry: Carry,
        state: RWKVState,
        layer_index: jax.Array,
        segment_ids: Int[Array, "B T"] | None,
        lengths: Int[Array, " B"] | None,
    ) -> tuple[Carry, RWKVState]:
        """The layer as a step of `flax.linen.scan`, with ``(x, v_first)`` as carry."""
        x, state, v_first = self(carry[0], state, carry[1], layer_index, segment_ids, lengths)
        return (x, v_first), state


RWKV6Block = RWKV7Block = RWKVBlock
