"""RWKV-7, chunked backward of large heads under a safe gate: gradients of two chunks that share a state, as
one tile.

Tiles of keys are held transposed, [K, 64]: 32 tokens of r beside those of a, or of k beside those of b. So
keys are the rows of all products, which are products of a warp group, and results become operands in place.
The maths is that of `chunk_bwd_split`.
"""

import triton
import triton.language as tl

from ..common.chunk import C, chunk_segments
from ..common.decay import LOG2E
from ..common.dots import dot
from ..common.gate import state_scale
from ..common.key_major import concat, split2, sums_over_tokens, sums_over_tokens_f32
from ..common.token_tiles import load_tokens, select_row, store_tokens


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
    diagonal = tl.where(o[None, :, None] == o[None, None, :], products, 0.0)
    return tl.reshape(tl.sum(diagonal, 2), (x.shape[1], 1))


@triton.jit
def safe_gate_pair_gradients(x, saved, index, gate, split, n, axes, h_, dh_, grads, c: tl.constexpr):
    """`pair_gradients` under a safe gate. Arrays that share a tile have one dtype.

    ``dh_`` is in shared memory before a gradient overwrites it. Tiles of keys that are loaded late
    (`Config.late_loads`) take no registers and no shared memory before, but are waited for.
    """
    left = split.length - n * C
    k_start = ((split.first + n * C) * c.H + tl.program_id(1)) * c.K
    v_start = ((split.first + n * C) * c.H + tl.program_id(1)) * c.V
    o, o2 = tl.arange(0, 32), tl.arange(0, 64)
    token, half = o2 % 32, o2 // 32
    mask = axes.has_value[:, None] & axes.has_key[None, :]
    mask_v = (token < left)[:, None] & axes.has_value[None, :]
    mask_k = axes.has_key[:, None] & (token < left)[None, :]
    mask_w = axes.has_key[:, None] & (o < left)[None, :]
    at_v = token[:, None] * (c.H * c.V) + axes.value[None, :]
    at_k = token[None, :] * (c.H * c.K) + axes.key[:, None]
    at_w = o[None, :] * (c.H * c.K) + axes.key[:, None]
    is_r, is_dy = half[None, :] == 0, half[:, None] == 0

    h, dh = tl.load(h_, mask=mask, other=0.0), tl.load(dh_, mask=mask, other=0.0)
    h, dh = h.to(c.operand), dh.to(c.operand)
    dg_pass = sums_over_values(h, dh, c)
    do_pair = load_tokens(
        select_row(is_dy, saved.do + v_start, saved.da_read + v_start, c.V), at_v, mask_v, c.unmasked
    )
    v_pair = load_tokens(
        select_row(is_dy, x.v + v_start, saved.v_new + v_start, c.V), at_v, mask_v, c.unmasked
    )
    do_pair, v_pair = do_pair.to(c.operand), v_pair.to(c.operand)
    if not c.late_loads:
        w = load_tokens(x.w + k_start, at_w, mask_w, c.unmasked)
        ra = load_tokens(select_row(is_r, x.r + k_start, x.a + k_start, c.K), at_k, mask_k, c.unmasked)
        kb = load_tokens(select_row(is_r, x.k + k_start, x.b + k_start, c.K), at_k, mask_k, c.unmasked)
    if c.segments:
        # of both chunks as of one; the second may be beyond the end
        segments = chunk_segments(index.segment_bits, split, n)
        more = chunk_segments(index.segment_bits, split, tl.where(left > C, n + 1, n))
        again = (left > C) & (more.first < C)
        bits = (segments.bits & 0xFFFF) | tl.where(again, more.bits << 16, 0)
        first = tl.where(segments.first < C, segments.first, tl.where(again, C + more.first, 2 * C))
        last = tl.where(again, C + more.last, segments.last)
        dg_pass = tl.where(bits == 0, dg_pass, 0.0)

    # This order takes the fewest registers and the least shared memory: A is masked when the state's is free.
    A = dot(do_pair, tl.trans(v_pair), c)
    read = dot(tl.trans(h), tl.trans(do_pair), c)
    if c.segments:
        read = tl.where(token[None, :] < first, read, 0.0)

    # decays from each chunk's start, of r with and of a without its token's own, and back, of k and b
    if c.late_loads:  # in a function of its own the loads get another layout: 3054 instructions, not 2142
        w = load_tokens(x.w + k_start, at_w, mask_w, c.unmasked)
        ra = load_tokens(select_row(is_r, x.r + k_start, x.a + k_start, c.K), at_k, mask_k, c.unmasked)
        kb = load_tokens(select_row(is_r, x.k + k_start, x.b + k_start, c.K), at_k, mask_k, c.unmasked)
    j, s = o[:, None], token[None, :]
    upto = tl.where((j // C == s // C) & (j % C + half[None, :] <= s % C), 1.0, 0.0)
    G = sums_over_tokens(w, upto, c) * LOG2E + gate
    rows, back = tl.exp2(G), tl.exp2(-split2(G)[0])
    columns = concat(back, back)
    # the decay between the two; without a second chunk, whose tiles are zeros, dh has it already
    decay_post = tl.where(
        left > C,
        tl.sum(rows * tl.where(o2 == C - 1, state_scale(gate, c, False), 0.0)[None, :], 1),
        1.0,
    )[:, None]
    rows *= tl.where(is_r, c.scale, 1.0)
    ra, kb = (ra.to(tl.float32) * rows).to(c.operand), (kb.to(tl.float32) * columns).to(c.operand)
    second = (token >= C)[None, :]

    # pairs of one chunk, and of the second's q side with the first's k side
    t, i = token[:, None], token[None, :]
    within, across = (t // C == i // C) & (i % C + half[:, None] <= t % C), t // C > i // C
    if c.segments:
        one = (bits & ((2 << t) - 1) & (-2 << i)) == 0  # no segment begins after i up to t
        within, across = within & one, across & one
    within, across = (
        tl.where(within, A, 0.0).to(c.operand),
        tl.where(across, A, 0.0).to(c.operand),
    )

    # the q side
    pass_second = tl.sum(tl.where(second, ra.to(tl.float32) * read, 0.0), 1)[:, None]
    read = dot(kb, tl.trans(across), c, read)
    read = dot(kb, tl.trans(within), c, tl.where(second, read * decay_post, read))
    terms_r, terms_a = split2(ra.to(tl.float32) * read)
    out = select_row(is_r, grads.r + k_start, grads.a + k_start, c.K)
    store_tokens(out, at_k, read * rows, mask_k, c.unmasked)

    # the k side
    written = dot(tl.trans(dh), tl.trans(v_pair), c)
    if c.segments:
        written = tl.where(token[None, :] >= last, written, 0.0)
    pass_first = tl.sum(tl.where(second, 0.0, kb.to(tl.float32) * written), 1)[:, None]
    written = dot(ra, across, c, written)
    written = tl.where(second, written, written * decay_post)
    through_k, through_b = split2(kb.to(tl.float32) * written)
    pairs = dot(ra, within, c)
    pairs_k, pairs_b = split2(kb.to(tl.float32) * pairs)
    out = select_row(is_r, grads.k + k_start, grads.b + k_start, c.K)
    store_tokens(out, at_k, (pairs + written) * columns, mask_k, c.unmasked)

    # decays of token j: pairs from j on, and what tokens before j write to the state at the end
    i, j = token[:, None], o[None, :]
    counted = tl.where(half[:, None] == 0, j % C - i % C, i % C - j % C + 1) <= 0
    counted = tl.where(counted & (i // C == j // C), 1.0, 0.0)
    both = concat(terms_r + terms_a - (pairs_k + pairs_b), through_k + through_b)
    dg = (dg_pass + tl.where(o[None, :] < C, pass_second, pass_first)) * decay_post - terms_a
    store_tokens(grads.w + k_start, at_w, sums_over_tokens_f32(both, counted, dg, c), mask_w, c.unmasked)
