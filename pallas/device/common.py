"""Device functions that the chunked Triton kernels share: decayed sums, small inverses, segment masks.

A chunk has 16 tokens. Sums over its tokens are matrix products with constant 0 / +-1 matrices: a third of the instructions of `tl.cumsum`, and no barriers.
``HALF`` says that the large products have bfloat16 operands (16-bit inputs) and not float32 ones; ``PREC`` is the `tl.dot` precision of float32 operands.
"""

import triton
import triton.language as tl

C = tl.constexpr(16)  # tokens per chunk
LOG2E = tl.constexpr(1.4426950408889634)
# The form for any decay counts log decays only down to here: exp(-16) = 1.1e-7, the spacing of a float32 state. Five of them, the most that one factor holds,
# stay in range with room for small keys.
LOG_MIN = tl.constexpr(-16.0)


@triton.jit
def token_sums(matrix, x, PREC: tl.constexpr):
    """``matrix`` [16, 16] of 0 and +-1 times ``x`` [16, K], to float32 accuracy."""
    if x.dtype == tl.bfloat16:
        return tl.dot(matrix.to(tl.bfloat16), x)
    elif x.dtype == tl.float16:  # 11 bits are two bfloat16
        hi = x.to(tl.bfloat16)
        lo = (x.to(tl.float32) - hi.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(matrix.to(tl.bfloat16), lo, tl.dot(matrix.to(tl.bfloat16), hi))
    else:
        return tl.dot(matrix, x, input_precision=PREC)


@triton.jit
def token_sums_f32(matrix, x, acc, HALF: tl.constexpr, PREC: tl.constexpr):
    """``acc + matrix @ x`` for float32 ``x``; with bfloat16 operands in two halves of 8 bits each."""
    if HALF:
        hi = x.to(tl.bfloat16)
        lo = (x - hi.to(tl.float32)).to(tl.bfloat16)
        m = matrix.to(tl.bfloat16)
        return tl.dot(m, lo, tl.dot(m, hi, acc))
    else:
        return tl.dot(matrix, x, acc, input_precision=PREC)


@triton.jit
def inverse16(A, PREC: tl.constexpr):
    """(I - A)^-1 for strictly lower triangular A [16, 16].

    The 8 x 8 diagonal blocks by the series (I + D)(I + D^2)(I + D^4), then one merge. Doubling over all 16 rows would lose everything for nearly parallel keys.
    """
    o = tl.arange(0, 16)
    same = (o[:, None] // 8) == (o[None, :] // 8)
    D = tl.where(same, A, 0.0)
    T = tl.where(o[:, None] == o[None, :], 1.0, 0.0) + D
    P = tl.dot(D, D, input_precision=PREC)
    T = tl.dot(P, T, T, input_precision=PREC)
    P = tl.dot(P, P, input_precision=PREC)
    T = tl.dot(P, T, T, input_precision=PREC)
    X = tl.dot(T, A - D, input_precision=PREC)
    return tl.dot(X, T, T, input_precision=PREC)


@triton.jit
def only(x, keep):
    """``x`` where ``keep``, else zero, in x's dtype."""
    return tl.where(keep, x, 0.0).to(x.dtype)


@triton.jit
def load_tokens(ptr, offsets, mask, EVEN: tl.constexpr):
    """A [16, D] tile; ``EVEN`` says that no element of any tile is missing."""
    if EVEN:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def store_tokens(ptr, offsets, x, mask, EVEN: tl.constexpr):
    """Stores a [16, D] or [D, 16] tile in the pointer's dtype."""
    if EVEN:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sequence(cu_, chunk0_, T, span, SPLITS: tl.constexpr, VAR: tl.constexpr):
    """What program axis 2 walks: a packed sequence with ``VAR``, else one of the ``SPLITS`` stretches of ``span`` tokens of a row of [B, T].

    Returns its row, the row's first token, its own first token, its number of tokens and its first chunk.
    """
    p = tl.program_id(2)
    if VAR:
        first = tl.load(cu_ + p)
        return (
            0,
            first.to(tl.int64),
            first.to(tl.int64),
            tl.load(cu_ + p + 1) - first,
            tl.load(chunk0_ + p).to(tl.int64),
        )
    else:
        row, start = p // SPLITS, (p % SPLITS) * span
        base = row.to(tl.int64) * T
        return (
            row,
            base,
            base + start,
            tl.minimum(span, T - start),
            row.to(tl.int64) * tl.cdiv(T, C) + start // C,
        )


@triton.jit
def segment_masks(seg_, base, start, left):
    """Restart counts of a chunk's 16 tokens, of the token before it, and of its last token.

    ``base`` is the row's first token, ``start`` the chunk's, ``left`` tokens remain.
    """
    o = tl.arange(0, 16)
    ids = tl.load(seg_ + start + tl.minimum(o, left - 1))
    before = tl.load(seg_ + tl.maximum(start - 1, base))
    last = tl.load(seg_ + start + tl.minimum(left, 16) - 1)
    return ids, before, last
