"""The scale at which the kernels of the form for any decay take cotangents, one of each program.

Gradients are linear in the cotangents, but float32 is not: factors of 2^+-100 stand between the gradient of a
score and the gradient of a key (common/decay.py), and a mean loss over a million tokens has cotangents of
2^-20. So cotangents are multiplied by a power of two, exactly, and gradients divided by it, such that
gradients of scores are near 2^TARGET whatever the scale of the loss and of the values.
"""

import triton
import triton.language as tl

from .chunk import UNSAFE_GATE, Index, load_gate, program_split

TARGET_EXPONENT = tl.constexpr(14)
TILE_ELEMENTS = tl.constexpr(4096)  # of a tile that is looked at


@triton.jit
def exponent_of_max(x):
    """n of the largest of the absolute values of ``x``, below 2^(n + 1); 0 of zeros."""
    bits = tl.reshape(x, [x.numel], can_reorder=True).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(bits, 0)
    return tl.where(top == 0, 0, (top >> 23) - 127)


@triton.jit
def max_abs(x_, top, here, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, c: tl.constexpr):
    """``top`` [tokens, BLOCK], and the largest absolute values of every ``STEP``-th token's ``SIZE`` numbers,
    one of each place of a tile.
    """
    N: tl.constexpr = TILE_ELEMENTS // BLOCK
    token, value = tl.arange(0, N) * STEP, tl.arange(0, BLOCK)
    x_ += (here.first * c.H + tl.program_id(1)) * SIZE
    for start in tl.range(0, here.length, N * STEP, num_stages=4):
        there = (start + token < here.length)[:, None] & (value < SIZE)[None, :]
        at = (start + token).to(tl.int64)[:, None] * (c.H * SIZE) + value[None, :]
        top = tl.maximum(top, tl.abs(tl.load(x_ + at, mask=there, other=0.0).to(tl.float32)))
    return top


@triton.jit
def sampled_exponent(x_, here, SIZE: tl.constexpr, BLOCK: tl.constexpr, c: tl.constexpr):
    """`exponent_of_max` of every 16th token: enough where nothing is lost if it is off by 10."""
    zero = tl.full([TILE_ELEMENTS // BLOCK, BLOCK], 0.0, tl.float32)
    return exponent_of_max(max_abs(x_, zero, here, STEP=16, SIZE=SIZE, BLOCK=BLOCK, c=c))


@triton.jit
def cotangent_scale_kernel(
    do_, top_, r_, k_, v_, cu_seqlens_, chunk_offsets_, gate_, T, split_len, scaled_gate_, c: tl.constexpr
):
    """Grid (1, heads, stretches or packed sequences): ``form_`` like ``any_decay_``, with the exponent added
    where that says ANY_DECAY. ``top_`` like it, float32, is the largest of the other cotangents, of states.
    """
    at = tl.program_id(2) * c.H + tl.program_id(1)
    gate = load_gate(gate_, tl.program_id(2), c)
    if gate < 0:
        here = program_split(Index(gate_, cu_seqlens_, chunk_offsets_, T, split_len, gate), c)
        top = tl.full([TILE_ELEMENTS // c.BV, c.BV], 0.0, tl.float32) + tl.load(top_ + at)
        top = max_abs(do_, top, here, STEP=1, SIZE=c.V, BLOCK=c.BV, c=c)
        # gradients of scores are products of cotangents with values, or with what keys have written and read
        n = TARGET_EXPONENT - exponent_of_max(top) - sampled_exponent(v_, here, c.V, c.BV, c)
        n -= tl.maximum(sampled_exponent(r_, here, c.K, c.BK, c), 0)
        n -= tl.maximum(sampled_exponent(k_, here, c.K, c.BK, c), 0)
        gate = UNSAFE_GATE + tl.minimum(tl.maximum(n, -120), 120)
    tl.store(scaled_gate_ + at, gate)
