"""Types and constants of a decoded token, for plain JAX and for kernels: the weights of layers, matrices
[N, K] with their output channels in memory order, the states that steps write.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

CODE_ROWS = 64  # output channels that share a code, see pallas/decode/gemv.py
NONE, TANH, SIGMOID, SQUARE = range(4)  # activations; SQUARE: the square of the positive part
NORM_EPS, GROUP_EPS, KEY_EPS, DECAY_SCALE = 1e-5, 64e-5, 1e-12, -math.exp(-0.5)
Norm = tuple[jax.Array, jax.Array]  # scale and bias
Shifts = tuple[jax.Array, jax.Array | None]  # of this attention, and of the feed-forward below


class States(Protocol):
    """The recurrent states of all layers, an `fla_jax.layers.RWKVState`: ``wkv`` [L, B, H, N, N] in any
    floating-point dtype, token shifts [L, B, C].
    """

    @property
    def wkv(self) -> jax.Array:
        """Matrix-valued states."""

    @property
    def att_shift(self) -> jax.Array:
        """Previous tokens of the attentions."""

    @property
    def ffn_shift(self) -> jax.Array:
        """Previous tokens of the feed-forwards."""

    def replace(self, **arrays: jax.Array) -> Self:
        """The same with other arrays."""


def layer_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """The layer norm of x [..., C], in float32."""
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, -1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + NORM_EPS)
    return x * norm[0].astype(jnp.float32) + norm[1].astype(jnp.float32)


def activate(x: jax.Array, kind: int) -> jax.Array:
    """The activation ``kind`` of a matrix's segment."""
    if kind == TANH:
        return jnp.tanh(x)
    if kind == SIGMOID:
        return jax.nn.sigmoid(x)
    return jnp.square(jax.nn.relu(x)) if kind == SQUARE else x


class Matrix(struct.PyTreeNode):
    """A matrix that vectors are multiplied with: ``y[n] = sum over k of weight[n, k] x[k]``.

    Attributes:
        weight: [N, K], in the compute dtype, or int8; or [N, K / 2] uint8 with two weights of 4 bits, each
            plus 8: that of channel 2i is in the low bits of byte i, that of 2i + 1 in the high ones.
        scale: [N, K / G], factors of int8 and 4-bit weights in groups of G along a row; else None.
        segments: ``(rows, plane, kind)`` of consecutive rows: their number, the plane of the input that they
            read, and the activation of their sums. All but the last are multiples of 64 rows.
    """

    weight: jax.Array
    scale: jax.Array | None
    segments: tuple[tuple[int, int, int], ...] = struct.field(pytree_node=False)

    @property
    def has_4_bits(self) -> bool:
        """Whether a byte has two weights."""
        return self.weight.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, stored = self.weight.shape
        return N, 2 * stored if self.has_4_bits else stored

    def dense(self, dtype: DTypeLike) -> jax.Array:
        """The weights [N, K] in ``dtype``."""
        if self.scale is None:
            return self.weight.astype(dtype)
        weight = self.weight
        if self.has_4_bits:
            weight = jnp.stack([weight & 15, weight >> 4], -1).astype(jnp.int8) - 8
        grouped = weight.astype(jnp.float32).reshape(*self.scale.shape, -1)
        return (grouped * self.scale.astype(jnp.float32)[..., None]).reshape(self.shape).astype(dtype)


class Quantisation(NamedTuple):
    """How weights are rounded: to 8 or 4 bits, with a factor for every ``group`` of them along a row."""

    bits: int
    group: int


def quantised(matrix: Matrix, quantisation: Quantisation) -> Matrix:
    """``matrix`` with rounded weights.

    In int8 the factor of a group is its largest weight over 127. In 4 bits, whole numbers from -8 to 7, the
    weight of the largest magnitude has a negative number: its factor is the weight over -8, times the one of
    eight shares that gives the group the least squared error.
    """
    bits, group = quantisation
    (N, K), segments = matrix.shape, matrix.segments
    grouped = matrix.weight.astype(jnp.float32).reshape(N, K // group, group)
    if bits == 8:
        scale = (jnp.max(jnp.abs(grouped), -1) / 127).astype(jnp.float16)
        return Matrix(_levels(grouped, scale, -127, 127).astype(jnp.int8).reshape(N, K), scale, segments)
    at = jnp.argmax(jnp.abs(grouped), -1, keepdims=True)
    largest = jnp.take_along_axis(grouped, at, -1)[..., 0] / -8

    def error(share: jax.Array) -> jax.Array:
        scale = (share * largest).astype(jnp.float16)
        rounded = _levels(grouped, scale, -8, 7) * scale.astype(jnp.float32)[..., None]
        return jnp.sum(jnp.square(rounded - grouped), -1)

    shares = jnp.linspace(0.7, 1.15, 8)
    scale = (shares[jnp.argmin(jax.lax.map(error, shares), 0)] * largest).astype(jnp.float16)
    levels = (_levels(grouped, scale, -8, 7) + 8).astype(jnp.uint8).reshape(N, K)
    return Matrix(levels[:, ::2] | levels[:, 1::2] << 4, scale, segments)


def _levels(grouped: jax.Array, scale: jax.Array, least: int, most: int) -> jax.Array:
    """Weights [N, K / G, G] over their factors as whole numbers."""
    # divide by the factor as it is stored: rounded, and not 0
    exact = jnp.where(scale == 0, 1, scale.astype(jnp.float32))[..., None]
    return jnp.clip(jnp.round(grouped / exact), least, most)


class Layer7(struct.PyTreeNode):
    """A layer of RWKV-7; vectors [C] in the dtype of the parameters.

    Attributes:
        norm, ffn_norm, group_norm: scale and bias.
        mixes: [6, C], of r, w, k, v, a, g.
        ranks: of decay, rate, value and gate, filled up to multiples of 64.
        into: the matrix of the mixed tokens: C rows each of r, k, v, then the first low-rank stages of decay,
            rate, value and gate, as many rows as their ranks.
        second: [4, C, R], the second stages; R is the largest rank, the others are filled up with zeros.
        output: [C, C].
        ffn_mixes: [1, C].
        key: [I, C].
        value: [C, I].
    """

    norm: Norm
    mixes: jax.Array
    into: Matrix
    second: jax.Array
    w0: jax.Array
    a0: jax.Array
    v0: jax.Array
    k_k: jax.Array
    k_a: jax.Array
    r_k: jax.Array
    group_norm: Norm
    output: Matrix
    ffn_norm: Norm
    ffn_mixes: jax.Array
    key: Matrix
    value: Matrix
    ranks: tuple[int, ...] = struct.field(pytree_node=False)

    def low_rank_inputs(self, projections: jax.Array) -> jax.Array:
        """Inputs of the second stages, from the product of `into`: [B, 4, R] in their dtype, zeros beyond
        each rank.
        """
        C, R = self.second.shape[1:]
        at, parts = 3 * C, []
        for rank in self.ranks:
            parts.append(
                jnp.pad(projections[:, at : at + rank].astype(self.second.dtype), ((0, 0), (0, R - rank)))
            )
            at += rank
        return jnp.stack(parts, 1)


class Layer6(struct.PyTreeNode):
    """A layer of RWKV-6.

    Attributes:
        norm, ffn_norm, group_norm: scale and bias.
        mix_x: [1, C].
        first: the first low-rank stage of the five mix_deltas, [5 R and more, C].
        mix_delta: [5, R, C], the second stage, of w, k, v, r, g.
        mixes: [5, C].
        into: C rows each of r, k, v and gate, then D of the decay's first stage.
        second: [C, D], its second stage.
        base: [C], time_decay.
        bonus: [C], time_faaaa.
        output: [C, C].
        ffn_mixes: [2, C], of k and r.
        key: I rows of the key, filled up to a multiple of 64, and C of the receptance.
        value: [C, I].
    """

    norm: Norm
    mix_x: jax.Array
    first: Matrix
    mix_delta: jax.Array
    mixes: jax.Array
    into: Matrix
    second: jax.Array
    base: jax.Array
    bonus: jax.Array
    group_norm: Norm
    output: Matrix
    ffn_norm: Norm
    ffn_mixes: jax.Array
    key: Matrix
    value: Matrix
