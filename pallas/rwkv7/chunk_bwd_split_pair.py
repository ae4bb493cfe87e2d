"""RWKV-7, chunked backward in Triton for large heads with bounded decays: gradients of two chunks that share
a state, as one tile.

Tiles of keys are held transposed, [K, 64]: 32 tokens of one array beside those of another, r and a, which
read, or k and b, which write. So keys are the rows of all products, and warps divide those without repeating
any operand; for compute capability 9.0 they are products of a warp group, whose operands stay in shared
memory, and results become operands where they are. The maths is chunk_bwd_split.py's.
"""

import triton
import triton.language as tl

from ..common.chunk import C, chunk_segments, state_scale
from ..common.decay import LOG2E
from ..common.dots import dot
from ..common.key_major import concat, split2, sums_over_tokens, sums_over_tokens_f32
from ..common.token_tiles import load_tokens, store_tokens


@triton.jit
def sums_over_values(x, y, c: tl.constexpr):
    """Sums of ``x * y`` [V, K], as [K, 1]: diagonals of products of 16 keys with the same 16, which take a
    quarter of the instructions.
    """
    N: tl.constexpr = x.shape[1] // 16
    xt = tl.permute(tl.reshape(x, (x.shape[0], N, 16)), (1, 2, 0))
    y = tl.permute(tl.reshape(y, (x.shape[0], N, 16)), (1, 0, 2))
    o = tl.arange(0, 16)
    products = dot(xt, y, c)
    own = tl.where(o[None, :, None] == o[None, None, :], products, 0.0)
    return tl.reshape(tl.sum(own, 2), (x.shape[1], 1))


@triton.jit
def safe_gate_pair_gradients(
    tokens, index, buffer, split, n, axes, h_, dh_, gradients, c: tl.constexpr, LATE: tl.constexpr
):
    """`pair_gradients` in the bounded form, where arrays that share a tile have one dtype.

    ``dS_`` may be where gradients go here, too: it is in shared memory before the first one is stored. Tiles
    of keys that are loaded ``LATE`` take no registers and no shared memory before, but are waited for.
    """
    left = split.length - n * C
    pk = ((split.first + n * C) * c.H + tl.program_id(1)) * c.K
    pv = ((split.first + n * C) * c.H + tl.program_id(1)) * c.V
    o, o2 = tl.arange(0, 32), tl.arange(0, 64)
    token, half = o2 % 32, o2 // 32
    mask = axes.has_value[:, None] & axes.has_key[None, :]
    there_v = (token < left)[:, None] & axes.has_value[None, :]
    there_k = axes.has_key[:, None] & (token < left)[None, :]
    there_w = axes.has_key[:, None] & (o < left)[None, :]
    at_v = token[:, None] * (c.H * c.V) + axes.value[None, :]
    at_k = token[None, :] * (c.H * c.K) + axes.key[:, None]
    at_w = o[None, :] * (c.H * c.K) + axes.key[:, None]
    is_r, is_dy = half[None, :] == 0, half[:, None] == 0

    h, dh = tl.load(h_, mask=mask, other=0.0), tl.load(dh_, mask=mask, other=0.0)
    h, dh = h.to(c.operand), dh.to(c.operand)
    dg_pass = sums_over_values(h, dh, c)
    readers = load_tokens(tl.where(is_dy, buffer.do_ + pv, buffer.da_read_ + pv), at_v, there_v, c.unmasked)
    writers = load_tokens(tl.where(is_dy, tokens.v_ + pv, buffer.v_new_ + pv), at_v, there_v, c.unmasked)
    readers, writers = readers.to(c.operand), writers.to(c.operand)
    if not LATE:
        w = load_tokens(tokens.w_ + pk, at_w, there_w, c.unmasked)
        ra = load_tokens(tl.where(is_r, tokens.r_ + pk, tokens.a_ + pk), at_k, there_k, c.unmasked)
        kb = load_tokens(tl.where(is_r, tokens.k_ + pk, tokens.b_ + pk), at_k, there_k, c.unmasked)
    if c.segments:
        # of both chunks as of one; the second may not be there
        segments = chunk_segments(index.segment_bits_, split, n)
        more = chunk_segments(index.segment_bits_, split, tl.where(left > C, n + 1, n))
        again = (left > C) & (more.first < C)
        bits = (segments.bits & 0xFFFF) | tl.where(again, more.bits << 16, 0)
        first = tl.where(segments.first < C, segments.first, tl.where(again, C + more.first, 2 * C))
        last = tl.where(again, C + more.last, segments.last)
        dg_pass = tl.where(bits == 0, dg_pass, 0.0)

    # The order of what follows decides how many registers and how much shared memory there must be: scores
    # are masked when the state's place is free.
    scores = dot(readers, tl.trans(writers), c)
    read = dot(tl.trans(h), tl.trans(readers), c)
    if c.segments:
        read = tl.where(token[None, :] < first, read, 0.0)

    # decays from each chunk's start on, of rows, r with and a without its token's own, and back, of columns
    if LATE:  # in a function of their own they would come in another layout: 3054 instructions for 2142
        w = load_tokens(tokens.w_ + pk, at_w, there_w, c.unmasked)
        ra = load_tokens(tl.where(is_r, tokens.r_ + pk, tokens.a_ + pk), at_k, there_k, c.unmasked)
        kb = load_tokens(tl.where(is_r, tokens.k_ + pk, tokens.b_ + pk), at_k, there_k, c.unmasked)
    j, s = o[:, None], token[None, :]
    upto = tl.where((j // C == s // C) & (j % C + half[None, :] <= s % C), 1.0, 0.0)
    G = sums_over_tokens(w, upto, c) * LOG2E + index.gate
    rows, back = tl.exp2(G), tl.exp2(-split2(G)[0])
    columns = concat(back, back)
    # the decay between the two; without a second one, whose tiles are zeros, dS has it already
    decay_post = tl.where(
        left > C,
        tl.sum(rows * tl.where(o2 == C - 1, state_scale(index.gate, c, False), 0.0)[None, :], 1),
        1.0,
    )[:, None]
    rows *= tl.where(is_r, c.scale, 1.0)
    ra, kb = (ra.to(tl.float32) * rows).to(c.operand), (kb.to(tl.float32) * columns).to(c.operand)
    second = (token >= C)[None, :]

    # pairs of a row and a column of one chunk, and of the second's rows with the first's columns
    t, i = token[:, None], token[None, :]
    undecayed_pairs, far = (t // C == i // C) & (i % C + half[:, None] <= t % C), t // C > i // C
    if c.segments:
        one = (bits & ((2 << t) - 1) & (-2 << i)) == 0  # no segment begins after i up to t
        undecayed_pairs, far = undecayed_pairs & one, far & one
    undecayed_pairs, far = (
        tl.where(undecayed_pairs, scores, 0.0).to(c.operand),
        tl.where(far, scores, 0.0).to(c.operand),
    )

    # rows
    own_second = tl.sum(tl.where(second, ra.to(tl.float32) * read, 0.0), 1)[:, None]
    read = dot(kb, tl.trans(far), c, read)
    read = dot(kb, tl.trans(undecayed_pairs), c, tl.where(second, read * decay_post, read))
    terms_r, terms_a = split2(ra.to(tl.float32) * read)
    out = tl.where(is_r, gradients.r_ + pk, gradients.a_ + pk)
    store_tokens(out, at_k, read * rows, there_k, c.unmasked)

    # columns
    written = dot(tl.trans(dh), tl.trans(writers), c)
    if c.segments:
        written = tl.where(token[None, :] >= last, written, 0.0)
    own_first = tl.sum(tl.where(second, 0.0, kb.to(tl.float32) * written), 1)[:, None]
    written = dot(ra, far, c, written)
    written = tl.where(second, written, written * decay_post)
    through_k, through_b = split2(kb.to(tl.float32) * written)
    pairs = dot(ra, undecayed_pairs, c)
    pairs_k, pairs_b = split2(kb.to(tl.float32) * pairs)
    out = tl.where(is_r, gradients.k_ + pk, gradients.b_ + pk)
    store_tokens(out, at_k, (pairs + written) * columns, there_k, c.unmasked)

    # of a chunk's decays: pairs from token j on, what goes through the leaving state from tokens before j
    i, j = token[:, None], o[None, :]
    counted = tl.where(half[:, None] == 0, j % C - i % C, i % C - j % C + 1) <= 0
    counted = tl.where(counted & (i // C == j // C), 1.0, 0.0)
    both = concat(terms_r + terms_a - (pairs_k + pairs_b), through_k + through_b)
    dg = (dg_pass + tl.where(o[None, :] < C, own_second, own_first)) * decay_post - terms_a
    store_tokens(gradients.w_ + pk, at_w, sums_over_tokens_f32(both, counted, dg, c), there_w, c.unmasked)
