"""The two ends of a language model: the embedding, and the head, which may be the same matrix."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from ..core.mesh import reshard, spec_of
from ..layers.base import with_axes
from ..layers.init import Initializer, head_gain, orthogonal, symmetric_uniform
from ..layers.sharding import ActivationSharding, DotOptions, constrain, without
from .block import residual
from .config import RWKVConfig


def head_kernel(params: Mapping[str, PyTree]) -> Float[Array, "C V"]:
    """The kernel of the head, [C, V]; of a model with ``tie_embeddings`` the transposed embedding.

    Differentiable: the gradient of a tied embedding is the sum of those of both uses.

    Args:
        params: of a language model; boxed arrays are unboxed.

    Example:
        >>> import jax
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM, head_kernel, initial_params
        >>> config = RWKV7Config(100, hidden_size=64, num_layers=2, head_dim=16, tie_embeddings=True)
        >>> params = initial_params(RWKV7ForCausalLM(config), jax.random.key(0))
        >>> "head" in params, head_kernel(params).shape
        (False, (64, 100))
    """
    if "head" in params:
        return nn.meta.unbox(params["head"]["kernel"])
    return nn.meta.unbox(params["emb"]["embedding"]).T


class Embedding(nn.Embed):
    """`flax.linen.Embed`; with explicit axes each device reads the embeddings of its own tokens."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] -> [B, T, C]."""
        # cast after the lookup: the gradient of a frequent token is a sum over thousands, in param_dtype then
        sharding, dtype = ActivationSharding.of(tokens), self.dtype or self.param_dtype
        table = self.embedding
        if sharding.mode != "explicit":
            table = constrain(constrain(table, "vocab", "embed"), "activation_vocab", None)
            return residual(jnp.take(table, tokens, axis=0).astype(dtype))
        channels = without(spec_of(table)[1], sharding.batch_axes)
        spec = P(*spec_of(tokens), channels)
        return reshard(table, None, channels).at[tokens].get(out_sharding=spec).astype(dtype)

    def attend(self, query: jax.Array) -> jax.Array:
        """[..., C] -> logits [..., V]: the head of a model with ``tie_embeddings``."""
        query, table = nn.dtypes.promote_dtype(query, self.embedding, dtype=self.dtype)
        return _head_dot(query, table.T, preferred_element_type=jnp.promote_types(query.dtype, jnp.float32))


def embedding_of(config: RWKVConfig) -> Embedding:
    """The embedding of a model. A tied one is drawn like a head: as small as others it would learn slowly."""
    drawn = _head_init(config) if config.tie_embeddings else symmetric_uniform(1e-4)
    return Embedding(
        config.vocab_size,
        config.hidden_size,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=_boxed(config)(drawn, ("vocab", "embed")),
    )


def head_of(config: RWKVConfig) -> nn.Dense:
    """The head of a model without ``tie_embeddings``."""
    wide = jnp.promote_types(config.dtype, jnp.float32)
    return nn.Dense(
        config.vocab_size,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=_boxed(config)(_head_init(config), ("embed", "vocab")),
        dot_general=functools.partial(_head_dot, preferred_element_type=wide),
    )


def _head_init(config: RWKVConfig) -> Initializer:
    return orthogonal(head_gain(config.vocab_size, config.hidden_size))


def _boxed(config: RWKVConfig) -> functools.partial:
    return functools.partial(with_axes, logical_axes=config.logical_axes)


def _head_dot(x: jax.Array, kernel: jax.Array, _: object = None, **options: Unpack[DotOptions]) -> jax.Array:
    return ActivationSharding.of(x).dot(x, kernel, ("embed", "vocab"), **options)
