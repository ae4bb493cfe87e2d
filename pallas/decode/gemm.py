"""Products of a decoded token with more batch elements, on tensor cores.

`mix_kernel` computes norm, token shift and mixes once, as planes [mixes, B, K], and `gemm_kernel` all
products of a stage, with the mathematics of `gemv`. Where rows are few but channels many, programs share the
channels (split-K), and `split_k_sum_kernel` adds their sums.

Grids: (B, mixes), (blocks of BN rows of the matrix, blocks of BB batch elements, split_k), and (blocks of BN
rows, B).
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl

from .gemv import QuantisedConfig, activation, code_of, load, load_parameters, load_previous, norm_and_mix


@dataclasses.dataclass(frozen=True)
class MixTokensConfig:
    """Batch elements, channels, channels padded to a power of two, and what the norm adds to the variance."""

    B: int
    K: int
    BK: int
    eps: float


class MixTokensOut(NamedTuple):
    """Planes [mixes, B, K], and the normalised tokens [B, K] for the next step."""

    planes: jax.Array
    shift: jax.Array


@dataclasses.dataclass(frozen=True)
class GemmConfig(QuantisedConfig):
    """`QuantisedConfig` and what a product on tensor cores adds.

    Attributes:
        BB: batch elements of a program.
        stages: depth of the load pipeline.
        split_k: programs that share the channels.
        scales_sums: whether scales multiply sums over a tile's channels, of one group, and not weights.
        precision: of products.
    """

    BB: int
    stages: int
    split_k: int
    scales_sums: bool
    precision: str


class GemmOut(NamedTuple):
    """y [B, N], or sums [split_k, B, N] in float32."""

    y: jax.Array


class PartialSums(NamedTuple):
    """The input of `split_k_sum_kernel`, [split_k, B, N]."""

    sums: jax.Array


@triton.jit
def mix_kernel(x, out, c: tl.constexpr):
    """``x``: `Tokens`."""
    b, plane = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, c.BK)
    token = load(x.x + b * c.K, k, k < c.K, c.K == c.BK)
    previous, parameters = load_previous(x, b, k, c), load_parameters(x, plane, k, c)
    token = norm_and_mix(x, token, previous, parameters, plane == 0, b, k, out, c)
    tl.store(out.planes + (plane * c.B + b) * c.K + k, token.to(out.planes.dtype.element_ty), mask=k < c.K)


@triton.jit
def unpacked(w):
    """Weights of 4 bits as int8, two for each byte along a new last axis."""
    return tl.join(w & 15, w >> 4).to(tl.int8) - 8


@triton.jit
def load_weights(weights, n, at, in_rows, dtype: tl.constexpr, c: tl.constexpr):
    """Weights [BK, BN] of rows ``n`` from channel ``at`` on in ``dtype``; unless `GemmConfig.scales_sums`, as
    `Matrix.dense` has them.
    """
    if weights.scale is None or c.scales_sums:
        k = at + tl.arange(0, c.BK)
        return tl.load(weights.w + n[None, :] * c.K + k[:, None], mask=in_rows[None, :], other=0).to(dtype)
    else:
        PER_BYTE: tl.constexpr = 2 if c.has_4_bits else 1
        GROUPS: tl.constexpr = max(c.BK // c.group, 1)
        stored = at // PER_BYTE + tl.arange(0, c.BK // PER_BYTE)
        w = tl.load(
            weights.w + n[:, None] * (c.K // PER_BYTE) + stored[None, :], mask=in_rows[:, None], other=0
        )
        if c.has_4_bits:
            w = tl.reshape(unpacked(w), (c.BN, c.BK))
        group = at // c.group + tl.arange(0, GROUPS)  # one, perhaps of more channels, or several
        factors = tl.load(
            weights.scale + n[:, None] * (c.K // c.group) + group[None, :], mask=in_rows[:, None], other=0.0
        ).to(tl.float32)
        w = tl.reshape(w.to(tl.float32), (c.BN, GROUPS, c.BK // GROUPS)) * factors[:, :, None]
        return tl.trans(tl.reshape(w, (c.BN, c.BK))).to(dtype)


@triton.jit
def store_product(sums, b, n, code, epilogue, out, c: tl.constexpr):
    """Stores sums [b, n] after their activation, gate and summand."""
    y, mask = activation(sums, code), (b < c.B)[:, None] & (n < c.N)[None, :]
    at = b[:, None] * c.N + n[None, :]
    if epilogue.gate is not None:
        gate = epilogue.gate + b[:, None] * c.gate_stride + (c.gate_at + n)[None, :]
        y *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    if epilogue.add is not None:
        y += tl.load(epilogue.add + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out.y + at, y.to(out.y.dtype.element_ty), mask=mask)


@triton.jit
def gemm_kernel(x, weights, epilogue, out, c: tl.constexpr):
    """``x``: `Tokens`. K / split_k is a multiple of BK, and BK of the group of quantised weights, or the
    reverse. Sums over K have one order: the bits of a batch element do not depend on the batch.
    """
    first = tl.program_id(0) * c.BN
    n = first + tl.arange(0, c.BN)
    b = tl.program_id(1) * c.BB + tl.arange(0, c.BB)
    k = tl.arange(0, c.BK)
    code = code_of(first, c)
    plane = x.x + (code % 16) * (c.B * c.x_stride)
    in_batch = (b < c.B)[:, None]
    in_rows = n < c.N
    sums = tl.full((c.BB, c.BN), 0, tl.float32)
    start = tl.program_id(2) * (c.K // c.split_k)
    for at in tl.range(start, start + c.K // c.split_k, c.BK, num_stages=c.stages):
        token = tl.load(plane + b[:, None] * c.x_stride + (at + k)[None, :], mask=in_batch, other=0.0)
        w = load_weights(weights, n, at, in_rows, token.dtype, c)
        if c.scales_sums:
            scale = weights.scale + n * (c.K // c.group) + at // c.group
            factor = tl.load(scale, mask=in_rows, other=0.0).to(tl.float32)
            sums += tl.dot(token, w, input_precision=c.precision) * factor[None, :]
        else:
            sums = tl.dot(token, w, sums, input_precision=c.precision)
    if c.split_k == 1:
        store_product(sums, b, n, code, epilogue, out, c)
    else:
        at = (tl.program_id(2) * c.B + b[:, None]) * c.N + n[None, :]
        tl.store(out.y + at, sums, mask=in_batch & in_rows[None, :])


@triton.jit
def split_k_sum_kernel(x, epilogue, out, c: tl.constexpr):
    """``x``: `PartialSums`, of a matrix with one segment."""
    b, n = tl.program_id(1) + tl.arange(0, 1), tl.program_id(0) * c.BN + tl.arange(0, c.BN)
    sums = tl.full((1, c.BN), 0, tl.float32)
    for i in tl.range(0, c.split_k):
        sums += tl.load(
            x.sums + (i * c.B + b[:, None]) * c.N + n[None, :], mask=(n < c.N)[None, :], other=0.0
        )
    store_product(sums, b, n, c.codes[0], epilogue, out, c)
