"""The normalisation of all channels of a token."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .init import Initializer
from .sharding import ActivationSharding


class Norm(nn.Module):
    """``(x - mean) / sqrt(var + epsilon) * scale + bias`` over the channels of each token.

    The same numbers as `flax.linen.LayerNorm`, without communication on a mesh: each device normalises its
    own tokens.

    Attributes:
        epsilon: added to the variance.
        dtype: of the result; None for the promotion of the input's with the parameters'. Statistics are
            float32 at least.
        param_dtype: of scale and bias.
        scale_init: initial scale [C].
        bias_init: initial bias [C].
    """

    epsilon: float
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    scale_init: Initializer = nn.initializers.ones
    bias_init: Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """Normalises x [..., C]."""
        sharding = ActivationSharding.of(x)
        scale, bias = (
            sharding.unshard(self.param(name, init, (x.shape[-1],), self.param_dtype), (None,))
            for name, init in (("scale", self.scale_init), ("bias", self.bias_init))
        )
        dtype = jnp.result_type(x, scale, bias) if self.dtype is None else self.dtype
        exact = x.astype(jnp.promote_types(x.dtype if self.dtype is None else self.dtype, jnp.float32))
        mean = jnp.mean(exact, -1, keepdims=True)
        var = jnp.mean(jnp.square(exact - mean), -1, keepdims=True)
        return ((x - mean) * (jax.lax.rsqrt(var + self.epsilon) * scale) + bias).astype(dtype)


Affine = tuple[jax.Array, jax.Array]  # scale and bias [C]


class NormParameters(nn.Module):
    """Scale and bias of a norm whose arithmetic is part of an op (`fla_jax.ops.layer`).

    Attributes:
        features: C.
        param_dtype: dtype of the parameters.
        scale_init: initial values of the scale, boxed or not.
        bias_init: initial values of the bias, boxed or not.
    """

    features: int
    param_dtype: DTypeLike
    scale_init: Initializer
    bias_init: Initializer

    @nn.compact
    def __call__(self, sharding: ActivationSharding, axis: str | None = None) -> Affine:
        """``(scale, bias)`` [C] for use with activations; ``axis`` is their logical axis."""
        scale, bias = (
            sharding.unshard(self.param(name, init, (self.features,), self.param_dtype), (axis,))
            for name, init in (("scale", self.scale_init), ("bias", self.bias_init))
        )
        return scale, bias
