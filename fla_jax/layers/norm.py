"""The normalisation of all channels of a token, or of every head on its own."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .init import Initializer
from .placement import gathered


class Norm(nn.Module):
    """``(x - mean) / sqrt(var + epsilon) * scale + bias`` over the channels of each token, or of each of its heads.

    `flax.linen.LayerNorm`, and `flax.linen.GroupNorm` with ``reduction_axes=(-1,)``, number for number, made for meshes:
    no step of it leaves the device that a row, or a head, lies on.

    Attributes:
        epsilon: added to the variance.
        head_dim: channels that are normalised together; None for all.
        dtype: of the result; None for the promotion of the input's with the parameters'. Statistics are float32 at least.
        param_dtype: of scale and bias.
        scale_init: initial scale [C].
        bias_init: initial bias [C].
    """

    epsilon: float
    head_dim: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    scale_init: Initializer = nn.initializers.ones
    bias_init: Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x [..., C]."""
        C = x.shape[-1]
        shape = (C,) if self.head_dim is None else (C // self.head_dim, self.head_dim)
        scale, bias = (
            gathered(self.param(name, init, (C,), self.param_dtype), x, None if self.head_dim is None else shape[0])
            for name, init in (("scale", self.scale_init), ("bias", self.bias_init))
        )
        dtype = jnp.result_type(x, scale, bias) if self.dtype is None else self.dtype
        wide = jnp.promote_types(x.dtype if self.dtype is None else self.dtype, jnp.float32)
        exact = x.reshape(*x.shape[:-1], *shape).astype(wide)
        mean = jnp.mean(exact, -1, keepdims=True)
        var = jnp.mean(jnp.square(exact - mean), -1, keepdims=True)
        if self.head_dim is not None:
            mean, var = (jnp.broadcast_to(y, exact.shape).reshape(x.shape) for y in (mean, var))
        return ((x - mean) * (jax.lax.rsqrt(var + self.epsilon) * scale) + bias).astype(dtype)
