"""Products of a decoded token with more batch elements, on tensor cores.

`mix_kernel` computes norm, token shift and mixes once, as planes [mixes, B, K], and `gemm_kernel` all
products of a stage, with the mathematics of `gemv`.

Grids: (B, mixes), and (blocks of BN rows of the matrix, blocks of BB batch elements).
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl

from .gemv import QuantisedConfig, activation, code_of, layer_norm, load, unpacked


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
    """`QuantisedConfig` with the batch elements of a program, the depth of the load pipeline, and the
    precision of products.
    """

    BB: int
    stages: int
    precision: str


class GemmOut(NamedTuple):
    """y [B, N]."""

    y: jax.Array


@triton.jit
def mix_kernel(x, out, c: tl.constexpr):
    """``x``: `Tokens`."""
    UNMASKED: tl.constexpr = c.K == c.BK
    b, plane = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, c.BK)[None, :]
    inside = k < c.K
    token = load(x.x + b * c.K, k, inside, UNMASKED)
    last = load(x.last + (((x.layer - 3) // 2) * c.B + b) * c.K, k, inside, UNMASKED)
    mu = load(x.mixes + plane * c.K, k, inside, UNMASKED)
    scale, bias = load(x.scale, k, inside, UNMASKED), load(x.bias, k, inside, UNMASKED)
    token = layer_norm(token, inside, scale, bias, c.K, c.eps)
    if plane == 0:
        shift = tl.where(tl.load(x.active + b) != 0, token, last)
        tl.store(out.shift + b * c.K + k, shift.to(out.shift.dtype.element_ty), mask=inside)
    token += (last - token) * mu
    tl.store(out.planes + (plane * c.B + b) * c.K + k, token.to(out.planes.dtype.element_ty), mask=inside)


@triton.jit
def load_weights(weights, n, at, in_rows, dtype: tl.constexpr, c: tl.constexpr):
    """Weights [BK, BN] of rows ``n`` from channel ``at`` on in ``dtype``, as `Matrix.dense` has them."""
    if weights.scale is None:
        k = at + tl.arange(0, c.BK)
        return tl.load(weights.w + n[None, :] * c.K + k[:, None], mask=in_rows[None, :], other=0.0)
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
def gemm_kernel(x, weights, epilogue, out, c: tl.constexpr):
    """``x``: `Tokens`. K is a multiple of BK, and BK of the group of quantised weights, or the reverse. Sums
    over K have one order: the bits of a batch element do not depend on the batch.
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
    for at in tl.range(0, c.K, c.BK, num_stages=c.stages):
        token = tl.load(plane + b[:, None] * c.x_stride + (at + k)[None, :], mask=in_batch, other=0.0)
        w = load_weights(weights, n, at, in_rows, token.dtype, c)
        sums = tl.dot(token, w, sums, input_precision=c.precision)
    y = activation(sums, code)
    at = b[:, None] * c.N + n[None, :]
    if epilogue.gate is not None:
        y *= tl.load(
            epilogue.gate + b[:, None] * c.gate_stride + (c.gate_at + n)[None, :],
            mask=in_batch & in_rows[None, :],
            other=0.0,
        ).to(tl.float32)
    if epilogue.add is not None:
        y += tl.load(epilogue.add + at, mask=in_batch & in_rows[None, :], other=0.0).to(tl.float32)
    tl.store(out.y + at, y.to(out.y.dtype.element_ty), mask=in_batch & in_rows[None, :])
