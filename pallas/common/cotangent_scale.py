"""The scale at which kernels compute with cotangents under an unsafe gate.

Gradients are linear in the cotangents, float32 is not: factors of 2^+-100 stand between the gradient of an A
matrix and the gradient of a key (`decay`), and a mean loss over a million tokens has cotangents of 2^-20. So
kernels multiply cotangents by a power of two, exactly, and divide gradients by it. The power brings
gradients of A to about 2^TARGET_EXPONENT whatever the scale of the loss and of the values.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from .chunk import program_split
from .gate import UNSAFE_GATE, load_gate

TARGET_EXPONENT = tl.constexpr(14)
LOWEST_V_EXPONENT = tl.constexpr(-24)  # else tokens that are not read and 2^40 times as large would overflow
MAX_WHOLE_READ = tl.constexpr(256)  # tokens of a split up to which all are read
STEP = tl.constexpr(16)  # of longer splits one token in so many is read
TILE_ELEMENTS = tl.constexpr(4096)  # of a tile of `max_abs`


class Cotangents(NamedTuple):
    """The arrays that decide the scale.

    Attributes:
        do: cotangents of outputs, [B, T, H, V].
        dht_max: largest absolute cotangent of the final state, [splits, H] float32.
        r, k: [B, T, H, K].
        v: [B, T, H, V].
    """

    do: Tensor
    dht_max: Tensor
    r: Tensor
    k: Tensor
    v: Tensor


class ScaledGates(NamedTuple):
    """Output of the kernel: `Index.gates` with the exponent of the scale added to unsafe gates."""

    gates: Tensor


@triton.jit
def exponent_of_max(x):
    """n of the largest of the absolute values of ``x``, below 2^(n + 1); 0 of zeros."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.where(top == 0, 0, (top >> 23) - 127)


@triton.jit
def max_abs(x, top, split, step, SIZE: tl.constexpr, BLOCK: tl.constexpr, c: tl.constexpr):
    """The maximum of ``top`` [tokens, BLOCK] and the absolute values of one token in ``step``, a power of
    two up to 16, elementwise over tiles.

    Which of ``step`` tokens it is follows no period that data may have.
    """
    N: tl.constexpr = TILE_ELEMENTS // BLOCK
    value = tl.arange(0, BLOCK)
    x += (split.first * c.H + tl.program_id(1)) * SIZE
    for start in tl.range(0, tl.cdiv(split.length, step), N, num_stages=4):
        sample = start + tl.arange(0, N)
        mixed = (sample.to(tl.uint32) * 0x9E3779B1) >> 28  # the golden ratio's bits: evenly spread
        token = sample * step + (mixed.to(tl.int32) & (step - 1))
        mask = (token < split.length)[:, None] & (value < SIZE)[None, :]
        at = token.to(tl.int64)[:, None] * (c.H * SIZE) + value[None, :]
        top = tl.maximum(top, tl.abs(tl.load(x + at, mask=mask, other=0.0).to(tl.float32)))
    return top


@triton.jit
def sampled_exponent(x, split, SIZE: tl.constexpr, BLOCK: tl.constexpr, c: tl.constexpr):
    """`exponent_of_max`; of a split of more than `MAX_WHOLE_READ` tokens from one in `STEP`, which may be
    too low.
    """
    step = tl.where(split.length > MAX_WHOLE_READ, STEP, 1)
    zero = tl.full([TILE_ELEMENTS // BLOCK, BLOCK], 0.0, tl.float32)
    return exponent_of_max(max_abs(x, zero, split, step, SIZE=SIZE, BLOCK=BLOCK, c=c))


@triton.jit
def cotangent_scale_kernel(x, index, out, c: tl.constexpr):
    """Grid (1, heads, splits)."""
    at = tl.program_id(2) * c.H + tl.program_id(1)
    gate = load_gate(index, tl.program_id(2), c)
    if gate < 0:
        split = program_split(index, c)
        top = tl.full([TILE_ELEMENTS // c.BV, c.BV], 0.0, tl.float32) + tl.load(x.dht_max + at)
        top = max_abs(x.do, top, split, 1, SIZE=c.V, BLOCK=c.BV, c=c)
        # gradients of A are products of cotangents with values, or with reads of the state
        n = TARGET_EXPONENT - exponent_of_max(top)
        n -= tl.maximum(sampled_exponent(x.v, split, c.V, c.BV, c), LOWEST_V_EXPONENT)
        n -= tl.maximum(sampled_exponent(x.r, split, c.K, c.BK, c), 0)
        n -= tl.maximum(sampled_exponent(x.k, split, c.K, c.BK, c), 0)
        gate = UNSAFE_GATE + tl.minimum(tl.maximum(n, -120), 120)
    tl.store(out.gates + at, gate)
