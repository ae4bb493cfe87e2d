"""`gemv` of one token with int8 or 4-bit weights, in integer arithmetic.

Converting each weight to float32 and multiplying takes three instructions, which limits speed before memory
does. Instead the token is rounded to 16-bit integers with one scale, and `dp2a` multiplies two of them with
two weights and adds the products, exactly. A float32 channel becomes two such integers: the second holds what
rounding the first left. The sums of a group must fit in 32 bits, so for groups of more than 516 weights in
int8, or 4369 in 4 bits, the token has fewer levels.

A program takes ``tiles`` tiles of BN rows at once, ``rounds`` times, and loads those of the next round while
it multiplies: most of its instructions are for the token.
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
    load_previous,
    load_token,
    norm_and_mix,
    store_sums,
)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# 1.5 * 2^23: its sum with a number below 2^22 ends in that number, rounded
ROUNDER = tl.constexpr(12582912.0)
ROUNDER_BITS = tl.constexpr(0x4B400000)
LEAST_SCALE = tl.constexpr(1e-35)  # of a token of zeros


@dataclasses.dataclass(frozen=True)
class QuantisedGemvConfig(QuantisedConfig):
    """`QuantisedConfig` with whether the input has planes, what the norm adds to the variance, the tiles that
    a program takes at once, and how often it does.
    """

    has_planes: bool
    eps: float
    tiles: int
    rounds: int

    @property
    def levels(self) -> int:
        """The largest integer of a rounded token."""
        return min(32767, (2**31 - 1) // (self.group * (15 if self.has_4_bits else 127)))


@triton.jit
def load_tile(weights, n, c: tl.constexpr):
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
def nan_maximum(a, b):
    """The larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def packed(integers):
    """Pairs of 16-bit integers as 32-bit words: the first and the second pair of each four, [groups, words],
    from [groups, words, 2, 2].
    """
    low, high = tl.split(integers)
    return tl.split((low & 0xFFFF) | (high << 16))


@triton.jit
def dot4(w, token, c: tl.constexpr):
    """The dot product of the four weights of each word with four integers of the token, `packed`: int32.
    Weights of 4 bits are from 0 to 15.
    """
    first, second = token[0][None, :, :], token[1][None, :, :]
    if INTERPRETED:  # there is no assembly
        sums = tl.full(w.shape, 0, tl.int32)
        for i in tl.static_range(4):
            pair = second if i >= 2 else first
            sums += ((w << (24 - 8 * i)) >> 24) * ((pair << (16 - 16 * (i % 2))) >> 16)
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
def integers(token, c: tl.constexpr):
    """A token of whole numbers plus `ROUNDER` as operands of `dot4`. With 4-bit weights: of the even
    channels, whose weights are the low bits of bytes, of the odd ones, and by how much the sum of a group is
    too large because weights are stored with a zero point of 8.
    """
    GROUPS: tl.constexpr = c.BK // c.group
    bits = token.to(tl.int32, bitcast=True)
    if c.has_4_bits:
        even, odd = tl.split(tl.reshape(bits, (GROUPS, c.group // 8, 2, 2, 2)))
        excess = 8 * tl.sum(tl.reshape(bits - ROUNDER_BITS, (GROUPS, c.group)), 1)
        return packed(even), packed(odd), excess
    else:
        return packed(tl.reshape(bits, (GROUPS, c.group // 4, 2, 2)))


@triton.jit
def group_sums(w, token, c: tl.constexpr):
    """The dot products of each group [BN, groups] in float32. ``token``: `integers`."""
    if c.has_4_bits:
        even, odd, excess = token
        sums = dot4(w & 0x0F0F0F0F, even, c) + dot4((w >> 4) & 0x0F0F0F0F, odd, c)
        return (tl.sum(sums, 2) - excess[None, :]).to(tl.float32)
    else:
        return tl.sum(dot4(w, token, c), 2).to(tl.float32)


@triton.jit
def rows_of_tile(first, i, c: tl.constexpr):
    """Rows of the i-th tile after row ``first``."""
    return first + i * c.BN + tl.arange(0, c.BN)


@triton.jit
def multiply_tile(tile, n, token, scale, code, epilogue, out, c: tl.constexpr):
    """Multiplies a tile, rows ``n``, with `integers` of a token, coarse and perhaps fine ones, and stores the
    sums.
    """
    operands = load_epilogue(epilogue, 0, n, c)
    w, weight_scale = tile
    sums = group_sums(w, token[0], c)
    if len(token) > 1:
        sums += group_sums(w, token[1], c) * (0.5 / c.levels)
    sums = tl.sum(sums * weight_scale.to(tl.float32), 1) * scale
    store_sums(sums, operands, 0, n, code, epilogue, out, c)


@triton.jit
def quantised_gemv_kernel(x, weights, epilogue, out, c: tl.constexpr):
    """``x``: `Tokens` of one batch element."""
    TILES: tl.constexpr = c.tiles
    IS_FLOAT32: tl.constexpr = x.x.dtype.element_ty == tl.float32
    first, k = tl.program_id(0) * (c.rounds * TILES * c.BN), tl.arange(0, c.BK)
    tiles = ()
    for i in tl.static_range(TILES):
        tiles = extended(tiles, load_tile(weights, rows_of_tile(first, i, c), c))
    code = code_of(first, c)
    parameters = load_parameters(x, code % 16, k, c)
    token, previous = load_token(x, code % 16, 0, k, c), load_previous(x, 0, k, c)
    token = norm_and_mix(x, token, previous, parameters, first == 0, 0, k, out, c)

    scale = tl.reduce(tl.abs(token), 0, nan_maximum) / c.levels
    scale = tl.maximum(scale, LEAST_SCALE, tl.PropagateNan.ALL)
    token *= 1.0 / scale
    rounded = token + ROUNDER
    operands = (integers(rounded, c),)
    if IS_FLOAT32:
        fine = (token - (rounded - ROUNDER)) * (2.0 * c.levels) + ROUNDER
        operands = extended(operands, integers(fine, c))
    row = first
    for _ in range(1, c.rounds):
        following = ()
        for i in tl.static_range(TILES):
            following = extended(following, load_tile(weights, rows_of_tile(row, TILES + i, c), c))
            multiply_tile(tiles[i], rows_of_tile(row, i, c), operands, scale, code, epilogue, out, c)
        tiles = following
        row += TILES * c.BN
    for i in tl.static_range(TILES):
        multiply_tile(tiles[i], rows_of_tile(row, i, c), operands, scale, code, epilogue, out, c)
