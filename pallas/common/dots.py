"""Matrix products of the chunked kernels: of operands, in float32 from TF32 parts; sums over tokens;
A_ab_inv of a chunk.

A sum over the 16 tokens of a chunk is a product with a constant matrix of 0 and +-1: a third of the
instructions of `tl.cumsum`, and no barriers.
"""

import triton
import triton.language as tl

from .chunk_config import with_exact_products


@triton.jit
def dot(x, y, c: tl.constexpr, acc=None):
    """``acc + x @ y``, in float32.

    Float32 operands are two TF32 parts each; the product of the smaller parts, 2^-22, is dropped. Triton's
    "tf32x3" truncates parts and tests every number for NaN, a quarter of all instructions; here infinities
    become NaN. Where TF32 is enough they are rounded: the GPU truncates, which errs to one side.
    """
    if c.tf32x3:
        high_x, high_y = tf32_part(x), tf32_part(y)
        acc = tl.dot(x - high_x, high_y, acc, input_precision="tf32")
        acc = tl.dot(high_x, y - high_y, acc, input_precision="tf32")
        return tl.dot(high_x, high_y, acc, input_precision="tf32")
    elif c.exact_sums:
        return tl.dot(tf32_part(x), tf32_part(y), acc, input_precision="tf32")
    else:
        return tl.dot(x, y, acc, input_precision="tf32")


@triton.jit
def transposed_A(A, c: tl.constexpr):
    """The transpose of ``A`` [16, 16], the result of a product, as the right operand of another product.

    Each thread already holds the elements that it needs. Triton recognises this in a permutation of three
    axes (`Config.A_in_registers`); it takes `tl.trans` through shared memory.
    """
    if c.A_in_registers:
        return tl.reshape(tl.permute(tl.reshape(A, (16, 2, 8)), (1, 2, 0)), (16, 16))
    else:
        return tl.trans(A)


@triton.jit
def tf32_part(x):
    """Float32 ``x`` rounded to the 11 bits of TF32. The remainder fits TF32 but for its last bit."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def token_sums(matrix, x, c: tl.constexpr, BATCHED16: tl.constexpr = False):
    """``matrix`` [16, 16] of small multiples of 1 / 32 times ``x`` [16, K] as loaded, to float32 accuracy
    (TF32 for float32 decays beside 16-bit tokens).

    Warps do not divide a product with 16 rows: each computes all of it. With ``BATCHED16`` it is a batch of
    products of 16 columns, which warps divide: less work where elementwise operations follow, as in the
    forward. In the backward the result meets tiles of other products, which would be converted. ``x`` may be
    [K / 16, 16, 16] then.
    """
    if BATCHED16:
        parts = x if len(x.shape) == 3 else to_batched16(x)
        N: tl.constexpr = parts.shape[0]
        sums = exact_dot(tl.broadcast_to(matrix[None, :, :], (N, 16, 16)), parts, c)
        return tl.reshape(tl.permute(sums, (1, 0, 2)), (16, 16 * N))
    else:
        return exact_dot(matrix, x, c)


@triton.jit
def to_batched16(x):
    """``x`` [16, K] as [K / 16, 16, 16]."""
    N: tl.constexpr = x.shape[1] // 16
    return tl.permute(tl.reshape(x, (16, N, 16)), (1, 0, 2))


@triton.jit
def exact_dot(matrix, x, c: tl.constexpr):
    """`token_sums` of one product or a batch."""
    if x.dtype == tl.bfloat16:
        return tl.dot(matrix.to(tl.bfloat16), x)
    elif x.dtype == tl.float16:  # its 11 bits fit two bfloat16
        hi, lo = bf16x2(x.to(tl.float32))
        return tl.dot(matrix.to(tl.bfloat16), lo, tl.dot(matrix.to(tl.bfloat16), hi))
    else:
        return sums_bf16x2(matrix, x, c)


@triton.jit
def token_sums_f32(matrix, x, acc, c: tl.constexpr):
    """``acc + matrix @ x`` for float32 ``x`` [16, K], as two bfloat16 where operands are bfloat16."""
    if c.operand == tl.bfloat16:
        hi, lo = bf16x2(x)
        m = matrix.to(tl.bfloat16)
        return tl.dot(m, lo, tl.dot(m, hi, acc))
    else:
        return sums_bf16x2(matrix, x, c, acc)


@triton.jit
def sums_bf16x2(matrix, x, c: tl.constexpr, acc=None):
    """`dot` for a ``matrix`` that is exact in TF32."""
    if c.exact_sums:
        high = tf32_part(x)
        return tl.dot(
            matrix, high, tl.dot(matrix, x - high, acc, input_precision="tf32"), input_precision="tf32"
        )
    else:
        return tl.dot(matrix, x, acc, input_precision="tf32")


@triton.jit
def bf16x2(x):
    """Float32 ``x`` as the sum of two bfloat16."""
    hi = x.to(tl.bfloat16)
    return hi, (x - hi.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot16(x, yt, c: tl.constexpr, acc=None):
    """``acc + x @ yt^T`` of float32 results of products [16, 16], whose registers become the operands.

    A thread has neighbouring columns of a result, but columns that are four apart of an operand. So both
    operands take their columns in another order, of every eight first the even ones.
    """
    left = tl.permute(tl.reshape(x, (16, 2, 4, 2)), (0, 1, 3, 2))
    right = tl.permute(tl.reshape(yt, (16, 2, 4, 2)), (1, 3, 2, 0))
    return dot(tl.reshape(left, (16, 16)), tl.reshape(right, (16, 16)), c, acc)


@triton.jit
def inverse16(A, c: tl.constexpr):
    """(I - A)^-1 for strictly lower triangular A [16, 16], to float32 accuracy where ``c.exact_sums``.

    Newton's iteration X <- X + X R, with R = I - X + A X: two steps from I + D, with the 8 x 8 diagonal
    blocks D for A, invert the blocks, and a third gives the whole. Steps from I + A would lose all digits for
    nearly parallel keys. Names that end in t are transposes, which `dot16` takes.
    """
    exact: tl.constexpr = with_exact_products(c)
    o = tl.arange(0, 16)
    same = (o[:, None] // 8) == (o[None, :] // 8)
    identity = tl.where(o[:, None] == o[None, :], 1.0, 0.0)
    At = dot16(identity, A, exact)
    D, Dt = tl.where(same, A, 0.0), tl.where(same, At, 0.0)
    X, Xt = identity + D, identity + Dt
    for _ in tl.static_range(2):
        Rt = dot16(Xt, D, exact, identity - Xt)
        X, Xt = dot16(X, Rt, exact, X), dot16(Rt, X, exact, Xt)
    Rt = dot16(Xt, A, exact, identity - Xt)
    return dot16(X, Rt, exact, X)
