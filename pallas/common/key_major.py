"""Tiles of keys held transposed, [K, 16], with states as [K, V], in the chunked backward.

Keys are then the rows of all large products, so warps divide them without repeating an operand. On compute
capability 9.0 they are products of a warp group, whose operands stay in shared memory. Per-key values, such
as decays of the state and sums over tokens, lie with the key's row, so no tile is converted for them. On
other GPUs this layout spills.
"""

import triton
import triton.language as tl

from .chunk import C
from .chunk_config import with_exact_products
from .dots import bf16x2, dot


@triton.jit
def split2(x):
    """``x`` [K, 2 N] as two [K, N]."""
    N: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, N)), (0, 2, 1)))


@triton.jit
def concat(x, y):
    """The inverse of `split2`."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def tile2(x):
    """``x`` [K, N] beside itself."""
    N: tl.constexpr = x.shape[1]
    both = tl.broadcast_to(tl.reshape(x, (x.shape[0], N, 1)), (x.shape[0], N, 2))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (x.shape[0], 2 * N))


@triton.jit
def select_concat(x, y):
    """`concat` for operands of small products: after `tl.join` Triton lays those out as if for 8-bit
    numbers, with six moves for each instruction.
    """
    return tl.where(tl.arange(0, 2 * x.shape[1])[None, :] < x.shape[1], tile2(x), tile2(y))


@triton.jit
def sums_over_tokens(x, matrix, c: tl.constexpr):
    """`token_sums` in this layout: ``x`` [K, tokens] as loaded times ``matrix`` of small multiples of 1 /
    32."""
    if x.dtype == tl.bfloat16:
        return tl.dot(x, matrix.to(tl.bfloat16))
    elif x.dtype == tl.float16:  # its 11 bits fit two bfloat16
        return sums_over_tokens_f32(x.to(tl.float32), matrix, None, c)
    else:
        return dot(x, matrix, with_exact_products(c))


@triton.jit
def sums_over_tokens_f32(x, matrix, acc, c: tl.constexpr):
    """`token_sums_f32` in this layout: ``acc + x @ matrix``."""
    if c.operand == tl.bfloat16:
        hi, lo = bf16x2(x)
        m = matrix.to(tl.bfloat16)
        return tl.dot(lo, m, tl.dot(hi, m, acc))
    else:
        return dot(x, matrix, with_exact_products(c), acc)


@triton.jit
def upper16(bits):
    """The upper 16 bits of float32 numbers, as bfloat16, in half an instruction. `to` takes a whole one."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def bf16x2_concat(x):
    """Float32 ``x`` [K, 16] as two bfloat16 side by side, 16 bits in sum. Of NaN the second is NaN."""
    hi = upper16(x.to(tl.int32, bitcast=True) + 0x8000)
    return concat(hi, (x - hi.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def sums_of_gradients():
    """Matrices of 0 and 1 for `sums_of_pairs` [64, 16] and `sums_of_reads` [32, 16]: token s sums the tokens
    after it of the first tile and the tokens before it of the second, each tile as two bfloat16.
    """
    i, s = tl.arange(0, 4 * C)[:, None], tl.arange(0, C)[None, :]
    of_pairs = tl.where(tl.where(i < 2 * C, i % C - s, s - i % C) > 0, 1.0, 0.0).to(tl.bfloat16)
    of_reads = tl.where(tl.arange(0, 2 * C)[:, None] % C > s, 1.0, 0.0).to(tl.bfloat16)
    return of_pairs, of_reads


@triton.jit
def sums_of_pairs(pairs, through, acc, of_pairs, c: tl.constexpr):
    """``acc`` plus ``pairs`` of the tokens after each and ``through`` of those before it, float32 [K, 16]."""
    if c.operand == tl.bfloat16:
        return tl.dot(concat(bf16x2_concat(pairs), bf16x2_concat(through)), of_pairs, acc)
    else:
        i, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        acc = dot(pairs, tl.where(i > s, 1.0, 0.0), with_exact_products(c), acc)
        return dot(through, tl.where(i < s, 1.0, 0.0), with_exact_products(c), acc)


@triton.jit
def sums_of_reads(reads, acc, of_reads, c: tl.constexpr):
    """``acc`` plus ``reads`` of the tokens after each, float32 [K, 16]."""
    if c.operand == tl.bfloat16:
        return tl.dot(bf16x2_concat(reads), of_reads, acc)
    else:
        i, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        return dot(reads, tl.where(i > s, 1.0, 0.0), with_exact_products(c), acc)
