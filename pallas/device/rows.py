"""What the chunked Triton kernels share where keys are rows: tiles of keys held transposed, [K, 16], and
states as [K, V].

Keys are then the rows of all large products, so that warps divide those without repeating an operand; for
compute capability 9.0 they are products of a warp group, whose operands stay in shared memory or, as a result
that goes on, where they are. What a key has one of, decays of the state and sums over tokens or values, lies
with the key's row: no tile is converted for it and few lanes share it. On other GPUs these forms spill.
"""

import triton
import triton.language as tl

from .chunk import C
from .decay import LOG2E, LOG_MIN, LOG_ZERO, at_least
from .products import in_two


@triton.jit
def halves(x):
    """``x`` [K, 2 N] as two [K, N]."""
    N: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, N)), (0, 2, 1)))


@triton.jit
def beside(x, y):
    """What `halves` divides."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def twice(x):
    """``x`` [K, N] beside itself."""
    N: tl.constexpr = x.shape[1]
    both = tl.broadcast_to(tl.reshape(x, (x.shape[0], N, 1)), (x.shape[0], N, 2))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (x.shape[0], 2 * N))


@triton.jit
def either(x, y):
    """`beside` for what becomes an operand of small products: after `tl.join` Triton orders those as if they
    were to be made of numbers of 8 bits, and each instruction takes six moves.
    """
    return tl.where(tl.arange(0, 2 * x.shape[1])[None, :] < x.shape[1], twice(x), twice(y))


@triton.jit
def sums_over_tokens(x, matrix, mode: tl.constexpr):
    """``x`` [K, tokens] in the dtype of memory times ``matrix`` of small multiples of 1 / 32, to float32
    accuracy: as `token_sums` for tiles that are not transposed.
    """
    if x.dtype == tl.bfloat16:
        return tl.dot(x, matrix.to(tl.bfloat16))
    elif x.dtype == tl.float16:  # its 11 bits are two bfloat16
        return sums_over_tokens_f32(x.to(tl.float32), matrix, None, mode)
    else:
        return tl.dot(x, matrix, input_precision=mode.precision)


@triton.jit
def sums_over_tokens_f32(x, matrix, acc, mode: tl.constexpr):
    """``acc + x @ matrix`` for float32 ``x``: see `token_sums_f32`."""
    if mode.operand == tl.bfloat16:
        hi, lo = in_two(x)
        m = matrix.to(tl.bfloat16)
        return tl.dot(lo, m, tl.dot(hi, m, acc))
    else:
        return tl.dot(x, matrix, acc, input_precision=mode.precision)


@triton.jit
def upper(bits):
    """The upper halves of float32 numbers' bits, as bfloat16: half an instruction. `to` takes one, and a slow
    one where its result goes on as float32, too.
    """
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def two_parts(x):
    """float32 ``x`` [K, 16] as two bfloat16 beside each other, which make 16 bits.

    The first is rounded to the nearest, halves away from zero. Of NaN it may be anything: the second is NaN.
    """
    hi = upper(x.to(tl.int32, bitcast=True) + 0x8000)
    return beside(hi, (x - hi.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def sums_of_decays():
    """Matrices [16, 32] of sums over tokens i for column s, two beside each other: of decays (the identity,
    and up to the token before s), and of those counted in scores (from the middle of its half to s, and from
    s to the second middle).
    """
    i, o = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    first, s = o < C, o % C
    of_whole = tl.where(first, tl.where(i == s, 1.0, 0.0), tl.where(i < s, 1.0, 0.0))
    middle = tl.where(s < 8, 4, 12)
    to_row = tl.where((middle <= i) & (i <= s), 1.0, tl.where((s < i) & (i < middle), -1.0, 0.0))
    to_middle = tl.where((s < i) & (i < 12), 1.0, tl.where((i >= 12) & (i <= s), -1.0, 0.0))
    return of_whole, tl.where(first, to_row, to_middle)


@triton.jit
def decays_of_rows(w, of_whole, of_counted, mode: tl.constexpr):
    """Log decays [K, 16] as they are and counted for scores; the exponents (base 2) of rows and of high
    columns for scores and of rows for the state; the state's decays [K, 1]: see `factors`.

    ``w`` goes into products only, with the identity in place of a cast: loads are copied in the background
    where all that reads a tile wants one order.
    """
    j = tl.arange(0, C)[None, :]
    plain, Gx = halves(sums_over_tokens(at_least(w, LOG_ZERO), of_whole, mode))
    counted = tl.maximum(plain, LOG_MIN)
    counted_w = upper(counted.to(tl.int32, bitcast=True)) if w.dtype == tl.bfloat16 else counted
    R, high = halves(sums_over_tokens(counted_w, of_counted, mode) * LOG2E)
    post = tl.sum(tl.where(j >= 12, counted, 0.0), 1)
    pre = tl.exp2((tl.sum(plain, 1) - post) * LOG2E)[:, None]
    return plain, counted, R, high, Gx * LOG2E, pre, tl.exp2(post * LOG2E)[:, None]
