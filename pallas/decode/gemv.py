"""Products of a decoded token with a few batch elements, y = W x, and what surrounds them, in one kernel::

    x = norm(x),   x = x + (last - x) mu,   y = f(W x) gate + add

A token reads every weight once, so memory traffic decides: a program starts to load its rows of the matrix
[N, K], which are adjacent, before it computes the vector that they multiply. Every program recomputes norm,
token shift and mixes while its weights are on their way; it takes several tiles of rows, so that it does so
for many of them, and loads one tile while it multiplies another. All loads are issued before the first sum
over channels, a barrier that loads do not move across. `quantised_gemv` is the same for quantised weights.

A matrix has segments, multiples of 64 rows, each with a code: the mix (or plane of the input) that it reads,
plus 16 times the kind of its activation (`activation`). Codes are compile-time constants: loading them would
delay all other loads. Grid: blocks of ``rounds`` tiles of BN rows.
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl

from ..common.sums import extended


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """Compile-time facts of a product [B, K] x [N, K] -> [B, N].

    Attributes:
        B: batch elements.
        K: channels of the input.
        N: rows of the matrix.
        BN: rows of a tile of the matrix.
        BK: channels of a tile; all of them, padded to a power of two, in a product of one token.
        x_stride: channels from one batch element of the input to the next.
        gate_stride: the same of the gate.
        gate_at: first channel of the gate.
        starts: first row of each segment of the matrix.
        codes: of each segment.
    """

    B: int
    K: int
    N: int
    BN: int
    BK: int
    x_stride: int
    gate_stride: int
    gate_at: int
    starts: tuple[int, ...]
    codes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class QuantisedConfig(ProductConfig):
    """`ProductConfig` with the group of channels that share a scale of quantised weights, and whether a byte
    has two weights.
    """

    group: int
    has_4_bits: bool


@dataclasses.dataclass(frozen=True)
class GemvConfig(ProductConfig):
    """`ProductConfig` with whether the input has planes, what the norm adds to the variance, and the tiles
    that a program takes one after another.
    """

    has_planes: bool
    eps: float
    rounds: int


class Tokens(NamedTuple):
    """The input of a product and what precedes it; None for what is absent.

    Attributes:
        x: [B, K] or [planes, B, K].
        scale: [K], of the norm.
        bias: [K].
        mixes: [mixes, K].
        last: [layers, B, K], the normalised previous tokens.
        active: [B], 0 where the state does not change.
        layer: ``2 layer + 3``, an odd number, which the compiler does not specialise.
    """

    x: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    mixes: jax.Array | None = None
    last: jax.Array | None = None
    active: jax.Array | None = None
    layer: int | None = None


class Weights(NamedTuple):
    """A matrix [N, K], or bytes [N, K / 2] of two weights, and scales [N, K / group] of quantised ones."""

    w: jax.Array
    scale: jax.Array | None = None


class Epilogue(NamedTuple):
    """Operands of what follows a product: a gate [B, gate_stride] that multiplies, and a summand [B, N]."""

    gate: jax.Array | None = None
    add: jax.Array | None = None


class GemvOut(NamedTuple):
    """y [B, N], and the normalised tokens [B, K] for the next step, None without mixes."""

    y: jax.Array
    shift: jax.Array | None


@triton.jit
def sigmoid(x):
    """The sigmoid of float32 ``x``."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activation(x, code):
    """The activation of sums ``x``, by kind: 0 none, 1 tanh, 2 sigmoid, 3 squared relu."""
    kind = code // 16
    if kind == 1:
        x = 2.0 * sigmoid(2.0 * x) - 1.0
    elif kind == 2:
        x = sigmoid(x)
    elif kind == 3:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def code_of(first, c: tl.constexpr):
    """The code of the segment of row ``first``."""
    code = c.codes[0]
    for i in tl.static_range(1, len(c.codes)):
        code = tl.where(first >= c.starts[i], c.codes[i], code)
    return code


@triton.jit
def load(ptr, offsets, mask, UNMASKED: tl.constexpr):
    """Values as float32, zero outside the mask."""
    if UNMASKED:
        return tl.load(ptr + offsets).to(tl.float32)
    else:
        return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_token(x, plane, b, k, c: tl.constexpr):
    """A batch element's token."""
    row = (plane if c.has_planes else 0) * c.B + b
    return load(x.x + row * c.x_stride, k, k < c.K, c.K == c.BK)


@triton.jit
def load_previous(x, b, k, c: tl.constexpr):
    """The previous token of a batch element, and whether the element is active; 0 without mixes."""
    last, active = 0.0, 0
    if x.mixes is not None:
        last = load(x.last + (((x.layer - 3) // 2) * c.B + b) * c.K, k, k < c.K, c.K == c.BK)
        active = tl.load(x.active + b)
    return last, active


@triton.jit
def load_parameters(x, plane, k, c: tl.constexpr):
    """Scale and bias of the norm, and the mix of the plane; 0 for what is absent."""
    UNMASKED: tl.constexpr = c.K == c.BK
    scale, bias, mix = 0.0, 0.0, 0.0
    if x.scale is not None:
        scale, bias = load(x.scale, k, k < c.K, UNMASKED), load(x.bias, k, k < c.K, UNMASKED)
    if x.mixes is not None:
        mix = load(x.mixes + plane * c.K, k, k < c.K, UNMASKED)
    return scale, bias, mix


@triton.jit
def load_epilogue(epilogue, b, n, c: tl.constexpr):
    """The gate and the summand of rows ``n``; 0 for what is absent."""
    gate, add = 0.0, 0.0
    if epilogue.gate is not None:
        gate = load(epilogue.gate + b * c.gate_stride + c.gate_at, n, n < c.N, False)
    if epilogue.add is not None:
        add = load(epilogue.add + b * c.N, n, n < c.N, False)
    return gate, add


@triton.jit
def layer_norm(x, mask, scale, bias, K: tl.constexpr, EPS: tl.constexpr):
    """Layer norm of K channels, padded by zeros."""
    mean = tl.sum(x, 0) / K
    x = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(x * x, 0) / K
    return x * tl.rsqrt(variance + EPS) * scale + bias


@triton.jit
def norm_and_mix(x, token, previous, parameters, is_first, b, k, out, c: tl.constexpr):
    """The token after norm and mix, as a matrix multiplies it. The program that ``is_first`` stores the shift
    for the next step: the normalised token, or the previous one of an inactive batch element.
    """
    last, active = previous
    scale, bias, mix = parameters
    if x.scale is not None:
        token = layer_norm(token, k < c.K, scale, bias, c.K, c.eps)
    if x.mixes is not None:
        if is_first:
            shift = tl.where(active != 0, token, last)
            tl.store(out.shift + b * c.K + k, shift.to(out.shift.dtype.element_ty), mask=k < c.K)
        token += (last - token) * mix
    return token


@triton.jit
def store_sums(sums, operands, b, n, code, epilogue, out, c: tl.constexpr):
    """Stores the sums of rows ``n`` after their activation, gate and summand."""
    y = activation(sums, code)
    if epilogue.gate is not None:
        y *= operands[0]
    if epilogue.add is not None:
        y += operands[1]
    tl.store(out.y + b * c.N + n, y.to(out.y.dtype.element_ty), mask=n < c.N)


@triton.jit
def load_rows(weights, n, k, c: tl.constexpr):
    """Rows ``n`` of the matrix."""
    offsets = n[:, None] * c.K + k[None, :]
    if c.N % (c.BN * c.rounds) != 0:
        return tl.load(weights.w + offsets, mask=(n < c.N)[:, None] & (k < c.K)[None, :], other=0)
    elif c.K == c.BK:
        return tl.load(weights.w + offsets)
    else:
        return tl.load(weights.w + offsets, mask=(k < c.K)[None, :], other=0)


@triton.jit
def multiply_rows(w, n, tokens, code, epilogue, out, c: tl.constexpr):
    """Multiplies rows ``n`` with the tokens of all batch elements, and stores the sums."""
    B: tl.constexpr = c.B
    for b in tl.static_range(B):
        operands = load_epilogue(epilogue, b, n, c)
        sums = tl.sum(w.to(tl.float32) * tokens[b][None, :], 1)
        store_sums(sums, operands, b, n, code, epilogue, out, c)


@triton.jit
def gemv_kernel(x, weights, epilogue, out, c: tl.constexpr):
    """``x``: `Tokens`."""
    B: tl.constexpr = c.B
    first = tl.program_id(0) * (c.rounds * c.BN)
    n, k = first + tl.arange(0, c.BN), tl.arange(0, c.BK)
    w = load_rows(weights, n, k, c)
    code = code_of(first, c)
    parameters = load_parameters(x, code % 16, k, c)
    tokens = ()
    for b in tl.static_range(B):
        token, previous = load_token(x, code % 16, b, k, c), load_previous(x, b, k, c)
        token = norm_and_mix(x, token, previous, parameters, first == 0, b, k, out, c)
        tokens = extended(tokens, token)
    for _ in range(1, c.rounds):
        following = load_rows(weights, n + c.BN, k, c)
        multiply_rows(w, n, tokens, code, epilogue, out, c)
        w = following
        n += c.BN
    multiply_rows(w, n, tokens, code, epilogue, out, c)
