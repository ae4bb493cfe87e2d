"""RWKV-7, chunked backward in Triton for large heads with bounded decays: gradients of two chunks that share
a state, as one tile.

Tiles of keys are held transposed, [K, 64]: 32 tokens of one array beside those of another, r and a, which
read, or k and b, which write. So keys are the rows of all products, and warps divide those without repeating
any operand; for compute capability 9.0 they are products of a warp group, whose operands stay in shared
memory, and results become operands where they are. The maths is large_heads.py's.
"""

import triton
import triton.language as tl

from ...device.chunk import C, chunk_segments, in_form
from ...device.decay import LOG2E
from ...device.products import product
from ...device.rows import beside, halves, sums_over_tokens, sums_over_tokens_f32
from ...device.tokens import load_tokens, store_tokens


@triton.jit
def sums_over_values(x, y, mode: tl.constexpr):
    """Sums of ``x * y`` [V, K], as [K, 1]: diagonals of products of 16 keys with the same 16, which take a
    quarter of the instructions.
    """
    N: tl.constexpr = x.shape[1] // 16
    xt = tl.permute(tl.reshape(x, (x.shape[0], N, 16)), (1, 2, 0))
    y = tl.permute(tl.reshape(y, (x.shape[0], N, 16)), (1, 0, 2))
    o = tl.arange(0, 16)
    products = product(xt, y, mode)
    own = tl.where(o[None, :, None] == o[None, None, :], products, 0.0)
    return tl.reshape(tl.sum(own, 2), (x.shape[1], 1))


@triton.jit
def bounded_pair_gradients(
    tokens, ranges, kept, here, n, axes, S_, dS_, gradients, mode: tl.constexpr, LATE: tl.constexpr
):
    """`pair_gradients` in the bounded form, where arrays that share a tile have one dtype.

    ``dS_`` may be where gradients go here, too: it is in shared memory before the first one is stored. Tiles
    of keys that are loaded ``LATE`` take no registers and no shared memory before, but are waited for.
    """
    left = here.length - n * C
    pk = ((here.first + n * C) * mode.H + tl.program_id(1)) * mode.K
    pv = ((here.first + n * C) * mode.H + tl.program_id(1)) * mode.V
    o, o2 = tl.arange(0, 32), tl.arange(0, 64)
    token, half = o2 % 32, o2 // 32
    there = axes.has_value[:, None] & axes.has_key[None, :]
    there_v = (token < left)[:, None] & axes.has_value[None, :]
    there_k = axes.has_key[:, None] & (token < left)[None, :]
    there_w = axes.has_key[:, None] & (o < left)[None, :]
    at_v = token[:, None] * (mode.H * mode.V) + axes.value[None, :]
    at_k = token[None, :] * (mode.H * mode.K) + axes.key[:, None]
    at_w = o[None, :] * (mode.H * mode.K) + axes.key[:, None]
    is_r, is_dy = half[None, :] == 0, half[:, None] == 0

    S, dS = tl.load(S_, mask=there, other=0.0), tl.load(dS_, mask=there, other=0.0)
    S, dS = S.to(mode.operand), dS.to(mode.operand)
    passed = sums_over_values(S, dS, mode)
    readers = load_tokens(tl.where(is_dy, kept.dy_ + pv, kept.dz_ + pv), at_v, there_v, mode.even)
    writers = load_tokens(tl.where(is_dy, tokens.v_ + pv, kept.u_ + pv), at_v, there_v, mode.even)
    readers, writers = readers.to(mode.operand), writers.to(mode.operand)
    if not LATE:
        w = load_tokens(tokens.w_ + pk, at_w, there_w, mode.even)
        ra = load_tokens(tl.where(is_r, tokens.r_ + pk, tokens.a_ + pk), at_k, there_k, mode.even)
        kb = load_tokens(tl.where(is_r, tokens.k_ + pk, tokens.b_ + pk), at_k, there_k, mode.even)
    if mode.segments:
        # of both chunks as of one; the second may not be there
        segments = chunk_segments(ranges.seg_, here, n)
        more = chunk_segments(ranges.seg_, here, tl.where(left > C, n + 1, n))
        again = (left > C) & (more.first < C)
        bits = (segments.bits & 0xFFFF) | tl.where(again, more.bits << 16, 0)
        first = tl.where(segments.first < C, segments.first, tl.where(again, C + more.first, 2 * C))
        last = tl.where(again, C + more.last, segments.last)
        passed = tl.where(bits == 0, passed, 0.0)

    # The order of what follows decides how many registers and how much shared memory there must be: scores
    # are masked when the state's place is free.
    scores = product(readers, tl.trans(writers), mode)
    read = product(tl.trans(S), tl.trans(readers), mode)
    if mode.segments:
        read = tl.where(token[None, :] < first, read, 0.0)

    # decays from each chunk's start on, of rows, r with and a without its token's own, and back, of columns
    if LATE:  # in a function of their own they would come in another layout: 3054 instructions for 2142
        w = load_tokens(tokens.w_ + pk, at_w, there_w, mode.even)
        ra = load_tokens(tl.where(is_r, tokens.r_ + pk, tokens.a_ + pk), at_k, there_k, mode.even)
        kb = load_tokens(tl.where(is_r, tokens.k_ + pk, tokens.b_ + pk), at_k, there_k, mode.even)
    j, s = o[:, None], token[None, :]
    upto = tl.where((j // C == s // C) & (j % C + half[None, :] <= s % C), 1.0, 0.0)
    G = sums_over_tokens(w, upto, mode) * LOG2E + ranges.form
    rows, back = tl.exp2(G), tl.exp2(-halves(G)[0])
    columns = beside(back, back)
    # the decay between the two; without a second one, whose tiles are zeros, dS has it already
    post = tl.where(
        left > C,
        tl.sum(rows * tl.where(o2 == C - 1, in_form(ranges.form, mode, False), 0.0)[None, :], 1),
        1.0,
    )[:, None]
    rows *= tl.where(is_r, mode.scale, 1.0)
    ra, kb = (ra.to(tl.float32) * rows).to(mode.operand), (kb.to(tl.float32) * columns).to(mode.operand)
    second = (token >= C)[None, :]

    # pairs of a row and a column of one chunk, and of the second's rows with the first's columns
    t, i = token[:, None], token[None, :]
    near, far = (t // C == i // C) & (i % C + half[:, None] <= t % C), t // C > i // C
    if mode.segments:
        one = (bits & ((2 << t) - 1) & (-2 << i)) == 0  # no segment begins after i up to t
        near, far = near & one, far & one
    near, far = tl.where(near, scores, 0.0).to(mode.operand), tl.where(far, scores, 0.0).to(mode.operand)

    # rows
    own_second = tl.sum(tl.where(second, ra.to(tl.float32) * read, 0.0), 1)[:, None]
    read = product(kb, tl.trans(far), mode, read)
    read = product(kb, tl.trans(near), mode, tl.where(second, read * post, read))
    terms_r, terms_a = halves(ra.to(tl.float32) * read)
    out = tl.where(is_r, gradients.r_ + pk, gradients.a_ + pk)
    store_tokens(out, at_k, read * rows, there_k, mode.even)

    # columns
    written = product(tl.trans(dS), tl.trans(writers), mode)
    if mode.segments:
        written = tl.where(token[None, :] >= last, written, 0.0)
    own_first = tl.sum(tl.where(second, 0.0, kb.to(tl.float32) * written), 1)[:, None]
    written = product(ra, far, mode, written)
    written = tl.where(second, written, written * post)
    through_k, through_b = halves(kb.to(tl.float32) * written)
    pairs = product(ra, near, mode)
    pairs_k, pairs_b = halves(kb.to(tl.float32) * pairs)
    out = tl.where(is_r, gradients.k_ + pk, gradients.b_ + pk)
    store_tokens(out, at_k, (pairs + written) * columns, there_k, mode.even)

    # of a chunk's decays: pairs from token j on, what goes through the leaving state from tokens before j
    i, j = token[:, None], o[None, :]
    counted = tl.where(half[:, None] == 0, j % C - i % C, i % C - j % C + 1) <= 0
    counted = tl.where(counted & (i // C == j // C), 1.0, 0.0)
    both = beside(terms_r + terms_a - (pairs_k + pairs_b), through_k + through_b)
    dg = (passed + tl.where(o[None, :] < C, own_second, own_first)) * post - terms_a
    store_tokens(gradients.w_ + pk, at_w, sums_over_tokens_f32(both, counted, dg, mode), there_w, mode.even)
