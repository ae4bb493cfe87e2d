"""The official initial values.

Source: RWKV-LM, ``RWKV-v7/train_temp/src/model.py`` (x070) and ``RWKV-v5/src/model.py`` (x060).

Values that depend on the layer are plain functions of the layer's index, which may be a traced integer: that
is how layers under `flax.linen.scan` get the very values that they have without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

Initializer = Callable[..., PyTree]  # an array, or one in a box with the names of its axes

Value = Callable[[], jax.Array | float]


def orthogonal(gain: float) -> Initializer:
    """Orthogonal matrices times ``gain``, made in float32 whatever the parameter dtype (there is no bfloat16
    QR).
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jax.nn.initializers.orthogonal(gain)(key, shape, jnp.promote_types(dtype, jnp.float32)).astype(
            dtype
        )

    return init


def low_rank_out(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """The second matrix [rank, out] of a low-rank pair of RWKV-7; the first one starts at zero."""
    rank, out = shape
    return orthogonal(0.1 * math.sqrt(max(1.0, rank / out)))(key, shape, dtype)


def symmetric_uniform(bound: float) -> Initializer:
    """U(-bound, bound)."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.promote_types(dtype, jnp.float32), -bound, bound).astype(
            dtype
        )

    return init


def computed(value: Value) -> Initializer:
    """The given array (or number) itself. It comes as a function so that nothing is computed where parameters
    exist already.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value(), jnp.promote_types(dtype, jnp.float32)), shape).astype(
            dtype
        )

    return init


def head_gain(vocab_size: int, hidden_size: int) -> float:
    """Gain of the orthogonal head."""
    return 0.5 * math.sqrt(max(1.0, vocab_size / hidden_size))


def low_rank_dim(hidden_size: int, factor: float) -> int:
    """The official rank of RWKV-7's low-rank pairs (factor 2.5 for decay and rate, 1.7 for the value
    residual, 5 for the gate).
    """
    return max(32, round(factor * math.sqrt(hidden_size) / 32) * 32)


@dataclasses.dataclass(frozen=True, eq=False)
class ByDepth:
    """Initial values [C] as functions of the position in the network.

    Attributes:
        layer_index: which layer, from 0; an int or a traced integer.
        num_layers: of how many.
        hidden_size: C.
        head_dim: channels per head.
    """

    layer_index: int | jax.Array
    num_layers: int
    hidden_size: int
    head_dim: int

    @property
    def falling(self) -> jax.Array | float:
        """1 at the first layer, falling to almost 0."""
        return 1 - self.layer_index / self.num_layers

    @property
    def rising(self) -> jax.Array | float:
        """0 at the first layer, 1 at the last."""
        return self.layer_index / max(self.num_layers - 1, 1)

    @property
    def line(self) -> jax.Array:
        """0 at the first channel, 1 at the last."""
        return jnp.arange(self.hidden_size) / max(self.hidden_size - 1, 1)

    @property
    def zigzag(self) -> jax.Array:
        """From -1 to 1 within every head, flat in the middle."""
        middle = (self.head_dim - 1) / 2
        z = (jnp.arange(self.hidden_size) % self.head_dim - middle) / max(middle, 0.5)
        return z * jnp.abs(z)

    def mix(self, exponent: jax.Array | float) -> jax.Array:
        """Token-shift coefficients: ``1 - (channel / C) ** exponent``."""
        return 1 - (jnp.arange(self.hidden_size) / self.hidden_size) ** exponent

    def mix6(self, name: str) -> jax.Array:
        """RWKV-6 ``time_maa_{name}`` of the attention."""
        mu = self.mix((0.5 if name in "rg" else 1) * self.falling)
        return mu - 0.3 * self.rising if name == "v" else mu

    def mix7(self, name: str) -> jax.Array:
        """RWKV-7 ``x_{name}`` of the attention."""
        exponent = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}[name]
        return self.mix(exponent * self.falling)

    def depth_scale(self) -> jax.Array | float:
        """Scale of the group norm after the op."""
        return ((1 + self.layer_index) / self.num_layers) ** 0.7

    def decay6(self) -> jax.Array:
        """RWKV-6 ``time_decay``."""
        return -6 + 5 * self.line ** (0.7 + 1.3 * self.rising)

    def bonus6(self) -> jax.Array:
        """RWKV-6 ``time_faaaa``, flat over heads."""
        return self.rising * (1 - self.line) + 0.1 * ((jnp.arange(self.hidden_size) + 1) % 3 - 1)

    def decay7(self) -> jax.Array:
        """RWKV-7 ``w0``."""
        return -6 + 6 * self.line ** (1 + self.rising**0.3) + 0.5 + 2.5 * self.zigzag

    def rate7(self) -> jax.Array:
        """RWKV-7 ``a0``."""
        return -0.19 + 0.3 * self.zigzag + 0.4 * (self.line - 0.5)

    def value7(self) -> jax.Array:
        """RWKV-7 ``v0``."""
        return 0.73 - 0.4 * (self.line - 0.5)

    def key7(self) -> jax.Array:
        """RWKV-7 ``k_k``."""
        return 0.71 - 0.1 * (self.line - 0.5)
