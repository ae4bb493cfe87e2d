"""Matrix products that the chunked Triton kernels share: those of operands, in float32 of TF32 parts, sums
over a chunk's tokens, small inverses.

A sum over the 16 tokens of a chunk is a product with a constant matrix, mostly of 0 and +-1: that takes a
third of the instructions of `tl.cumsum`, and no barriers.
"""

import triton
import triton.language as tl


@triton.jit
def dot(x, y, c: tl.constexpr, acc=None):
    """``acc + x @ y``, in float32.

    Float32 operands are two parts each, and all but the product of the smaller ones, 2^-22, is summed up.
    Triton's own "tf32x3" cuts parts off and tests every number for NaN, a quarter of all instructions; here
    what is infinite becomes NaN.
    """
    if c.tf32x3:
        high_x, high_y = tf32_part(x), tf32_part(y)
        acc = tl.dot(x - high_x, high_y, acc, input_precision="tf32")
        acc = tl.dot(high_x, y - high_y, acc, input_precision="tf32")
        return tl.dot(high_x, high_y, acc, input_precision="tf32")
    else:
        return tl.dot(x, y, acc, input_precision="tf32")


@triton.jit
def tf32_part(x):
    """float32 ``x`` rounded to the 11 bits of TF32, which also holds what is left, but for its last bit."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def token_sums(matrix, x, c: tl.constexpr, BATCHED16: tl.constexpr = False):
    """``matrix`` [16, 16] of small multiples of 1 / 32 times ``x`` [16, K] in the dtype of memory, to float32
    accuracy; float32 decays beside tokens of 16 bits to that of TF32.

    A product of 16 rows has none to divide, so that every warp makes all of it and holds all of the result.
    With ``SPREAD`` it is a batch of products of 16 columns, which warps do divide: less work where the result
    goes on elementwise, as in the forward. The backward has other products' tiles of 16 rows to meet it, and
    would convert them. ``x`` may be divided already then: [K / 16, 16, 16].
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
    """What `token_sums` makes of one product or of a batch."""
    if x.dtype == tl.bfloat16:
        return tl.dot(matrix.to(tl.bfloat16), x)
    elif x.dtype == tl.float16:  # its 11 bits are two bfloat16
        hi, lo = bf16x2(x.to(tl.float32))
        return tl.dot(matrix.to(tl.bfloat16), lo, tl.dot(matrix.to(tl.bfloat16), hi))
    else:
        return sums_bf16x2(matrix, x, c)


@triton.jit
def token_sums_f32(matrix, x, acc, c: tl.constexpr):
    """``acc + matrix @ x`` for float32 ``x`` [16, K].

    Where products have bfloat16 operands, ``x`` goes in two halves of 8 bits each.
    """
    if c.operand == tl.bfloat16:
        hi, lo = bf16x2(x)
        m = matrix.to(tl.bfloat16)
        return tl.dot(m, lo, tl.dot(m, hi, acc))
    else:
        return sums_bf16x2(matrix, x, c, acc)


@triton.jit
def sums_bf16x2(matrix, x, c: tl.constexpr, acc=None):
    """`dot` for a ``matrix`` that TF32 holds."""
    if c.tf32x3:
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
def inverse16(A, c: tl.constexpr):
    """(I - A)^-1 for strictly lower triangular A [16, 16].

    The 8 x 8 diagonal blocks come by the series (I + D)(I + D^2)(I + D^4), then one merge makes the rest.
    Doubling over all 16 rows would lose everything where keys are nearly parallel.
    """
    o = tl.arange(0, 16)
    same = (o[:, None] // 8) == (o[None, :] // 8)
    D = tl.where(same, A, 0.0)
    T = tl.where(o[:, None] == o[None, :], 1.0, 0.0) + D
    P = dot(D, D, c)
    T = dot(P, T, c, T)
    P = dot(P, P, c)
    T = dot(P, T, c, T)
    X = dot(T, A - D, c)
    return dot(X, T, c, T)
