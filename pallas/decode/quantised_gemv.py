"""`gemv` of one token with int8 or 4-bit weights, by integers.

Multiplying floats would take three instructions for a weight, and they, not memory, would decide. So a token
becomes whole numbers of 16 bits, in units of its largest channel over 32767, and one instruction multiplies
two of them with two weights and adds the products, exactly. What rounding a float32 token leaves becomes a
second such number. Groups so large that their sums would not fit in 32 bits, of more than 516 weights in int8
and 4369 in 4 bits, have smaller numbers.

A program takes several tiles of BN rows and loads them all before it computes the token, which fewer programs
then do.
"""

import dataclasses

import triton
import triton.language as tl

from ..common.sums import extended
from .gemv import (
    QuantisedConfig,
    code_of,
    load_epilogue,
    load_parameters,
    load_token,
    mixed,
    store_sums,
)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MAGIC = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: added to a number below 2^22, it leaves it rounded in the low bits
MAGIC_BITS = tl.constexpr(0x4B400000)  # of it
LEAST_UNIT = tl.constexpr(1e-35)  # so that a token of zeros divides by something


@dataclasses.dataclass(frozen=True)
class QuantisedGemvConfig(QuantisedConfig):
    """`QuantisedConfig` with whether the input has planes, what the norm adds to the variance, and the tiles
    of a program.
    """

    has_planes: bool
    eps: float
    tiles: int


@triton.jit
def load_rows(weights, n, c: tl.constexpr):
    """Words of four or eight weights of rows ``n``, [BN, groups, words], and the scales [BN, groups]."""
    PER_WORD: tl.constexpr = 8 if c.has_4_bits else 4
    WORDS: tl.constexpr = c.group // PER_WORD
    group = tl.arange(0, c.BK // c.group)
    mask = (n < c.N)[:, None] & (group < c.K // c.group)[None, :]
    words = weights.w.to(tl.pointer_type(tl.int32), bitcast=True)
    word = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    w = tl.load(
        words + n[:, None, None] * (c.K // PER_WORD) + word[None, :, :], mask=mask[:, :, None], other=0
    )
    scale = tl.load(weights.scale + n[:, None] * (c.K // c.group) + group[None, :], mask=mask, other=0.0)
    return w, scale


@triton.jit
def largest(a, b):
    """The larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pairs(numbers):
    """Two words of two 16-bit numbers each, from [groups, words, 2, 2]."""
    low, high = tl.split(numbers)
    return tl.split((low & 0xFFFF) | (high << 16))


@triton.jit
def multiply(w, token, c: tl.constexpr):
    """The products of the four weights of each word with four numbers of the token, added: int32. ``token``:
    their `pairs`. Weights of 4 bits are from 0 to 15.
    """
    first, second = token[0][None, :, :], token[1][None, :, :]
    if INTERPRETED:  # there is no assembly
        sums = tl.full(w.shape, 0, tl.int32)
        for i in tl.static_range(4):
            numbers = second if i >= 2 else first
            sums += ((w << (24 - 8 * i)) >> 24) * ((numbers << (16 - 16 * (i % 2))) >> 16)
        return sums
    else:
        SIGN: tl.constexpr = "u32" if c.has_4_bits else "s32"
        ASM: tl.constexpr = (
            "{ .reg .s32 t; dp2a.lo.s32." + SIGN + " t, $2, $1, 0; dp2a.hi.s32." + SIGN + " $0, $3, $1, t; }"
        )
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [w, first, second], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def arranged(rounded, c: tl.constexpr):
    """Whole numbers plus `MAGIC` as `multiply` takes them; for weights of 4 bits, those that the low and the
    high bits of bytes meet, and what the 8 in stored weights adds to the sums.
    """
    GROUPS: tl.constexpr = c.BK // c.group
    numbers = rounded.to(tl.int32, bitcast=True)
    if c.has_4_bits:
        low, high = tl.split(tl.reshape(numbers, (GROUPS, c.group // 8, 2, 2, 2)))
        excess = 8 * tl.sum(tl.reshape(numbers - MAGIC_BITS, (GROUPS, c.group)), 1)
        return pairs(low), pairs(high), excess
    else:
        return pairs(tl.reshape(numbers, (GROUPS, c.group // 4, 2, 2)))


@triton.jit
def group_sums(w, token, c: tl.constexpr):
    """The sums of each group's products [BN, groups] in float32. ``token``: `arranged`."""
    if c.has_4_bits:
        low, high, excess = token
        sums = multiply(w & 0x0F0F0F0F, low, c) + multiply((w >> 4) & 0x0F0F0F0F, high, c)
        return (tl.sum(sums, 2) - excess[None, :]).to(tl.float32)
    else:
        return tl.sum(multiply(w, token, c), 2).to(tl.float32)


@triton.jit
def quantised_gemv_kernel(x, weights, epilogue, out, c: tl.constexpr):
    """``x``: `Tokens` of one batch element."""
    TILES: tl.constexpr = c.tiles
    WIDE: tl.constexpr = x.x.dtype.element_ty == tl.float32
    LARGEST_WEIGHT: tl.constexpr = 15 if c.has_4_bits else 127
    LEVELS: tl.constexpr = min(32767, (2**31 - 1) // (c.group * LARGEST_WEIGHT))
    first, k = tl.program_id(0) * (c.tiles * c.BN), tl.arange(0, c.BK)
    rows, operands = (), ()
    for i in tl.static_range(TILES):
        n = first + i * c.BN + tl.arange(0, c.BN)
        rows = extended(rows, load_rows(weights, n, c))
        operands = extended(operands, load_epilogue(epilogue, 0, n, c))
    code = code_of(first, c)
    parameters = load_parameters(x, code % 16, k, c)
    loaded = load_token(x, code % 16, 0, k, c)
    token = mixed(x, loaded, parameters, 0, k, out, c)

    unit = tl.maximum(tl.reduce(tl.abs(token), 0, largest) / LEVELS, LEAST_UNIT, tl.PropagateNan.ALL)
    token *= 1.0 / unit
    rounded = token + MAGIC
    numbers = arranged(rounded, c)
    if WIDE:
        rest = arranged((token - (rounded - MAGIC)) * (2.0 * LEVELS) + MAGIC, c)
    for i in tl.static_range(TILES):
        sums = group_sums(rows[i][0], numbers, c)
        if WIDE:
            sums += group_sums(rows[i][0], rest, c) * (0.5 / LEVELS)
        sums = tl.sum(sums * rows[i][1].to(tl.float32), 1) * unit
        n = first + i * c.BN + tl.arange(0, c.BN)
        store_sums(sums, operands[i], 0, n, code, epilogue, out, c)
