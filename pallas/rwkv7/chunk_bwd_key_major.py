"""RWKV-7, chunked backward with tiles of keys transposed and the state as [K, V], for products of a warp
group with bfloat16 operands: `chunk_bwd` in the layout of `key_major`.

A tile [K, 32] holds r beside a, or k beside b; [V, 32] holds do beside da_read, or v beside v_new. So the
whole q side is one operand, and the whole k side. The maths is that of `chunk_bwd` and `chunk_bwd_grads`.
"""

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    chunk_segments,
    does_h0_reach_ht,
    has_no_restart,
    masked,
    partial_sums,
    program_split,
    tile_axes,
)
from ..common.decay import LOG2E, LOG_FEW, LOG_MIN, LOG_ZERO, at_least, in_first_half, sums_to_middles
from ..common.dots import dot
from ..common.gate import cotangent_scale, inverse_state_scale, state_scale
from ..common.key_major import (
    concat,
    select_concat,
    split2,
    sums_of_gradients,
    sums_of_pairs,
    sums_of_reads,
    sums_over_tokens,
    tile2,
    upper16,
)
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, select_row, store_gradient, where_or_zero
from .chunk_A import NUM_A_TILES, tile_offsets


@triton.jit
def matrices_of_sums(c: tl.constexpr):
    """Matrices that sum decays over tokens i for token s, [16, 16 n] for n sums side by side.

    The first sums up to s, for r, and up to the token before, for a. The others are for the unsafe gate:
    over the quarter of the chunk (`lowest_logs`); and for A, from the middle of its half to s, for r, and to
    the token before, for a, then from s to the second middle and to the first, for the k side.
    """
    i, o, s = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :], tl.arange(0, C)[None, :]
    whole = tl.where(i + o // C <= o % C, 1.0, 0.0)
    if c.unsafe_gate:
        quarter = tl.where(i // 4 == s // 4, tl.where(i <= s, 1.0, 0.65625), 0.0)
        o = tl.arange(0, 4 * C)[None, :]
        part, s = o // C, o % C
        to_query, to_middle = sums_to_middles(i, s)
        before, _ = sums_to_middles(i, s - 1)
        counted = tl.where(
            part < 2, tl.where(part < 1, to_query, before), tl.where(part < 3, to_middle, -to_query)
        )
        return whole, quarter, counted
    else:
        return whole, whole, whole


@triton.jit
def decays_key_major(w, matrices, gate, c: tl.constexpr):
    """`decay_factors` in this layout: of the q side for A [K, 32], of the k side of the second and of the
    first half [K, 16], of the state for the whole chunk and ``decay_post`` [K, 1], ``clamp_ratio`` [K, 16].

    ``w`` is an operand of products only, here with the identity: Triton copies a load in the background if
    all its uses need one layout.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    of_whole, of_quarter, of_counted = matrices
    if c.unsafe_gate:
        plain = sums_over_tokens(at_least(w, LOG_ZERO), tl.where(i == j, 1.0, 0.0), c)
        quarter = sums_over_tokens(at_least(w, LOG_MIN), of_quarter, c)
        counted = tl.maximum(plain, tl.where(quarter < -41.0, LOG_MIN, LOG_FEW))
        counted_w = upper16(counted.to(tl.int32, bitcast=True)) if w.dtype == tl.bfloat16 else counted
        R, columns = split2(sums_over_tokens(counted_w, of_counted, c) * LOG2E)
        second_half, first_half = split2(columns)
        decay_post = tl.sum(tl.where(j >= 12, counted, 0.0), 1)[:, None]
        total = tl.exp2(tl.sum(plain, 1)[:, None] * LOG2E)
        first_half = tl.exp2(first_half)
        clamp_ratio = tl.exp2((plain - counted) * LOG2E)
        return tl.exp2(R), tl.exp2(second_half), first_half, total, tl.exp2(decay_post * LOG2E), clamp_ratio
    else:
        G = sums_over_tokens(w, of_whole, c) * LOG2E + gate
        gi = split2(G)[0]
        back = tl.exp2(-gi)
        decay_post = tl.exp2(tl.sum(tl.where(j == C - 1, gi, 0.0), 1) - gate)[:, None]
        return tl.exp2(G), back, back, decay_post, decay_post, back


@triton.jit
def load_A_tiles(A, chunk, c: tl.constexpr):
    """`load_A` in this layout: A_ab_inv, A_ak, and A_qk beside A_qb."""
    A += chunk * (NUM_A_TILES * C * C)
    t, o = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    A_ab_inv, ak = tl.load(A + tile_offsets()), tl.load(A + C * C + tile_offsets())
    q = tl.load(A + (2 + o // C) * (C * C) + t * C + o % C)
    return A_ab_inv.to(c.operand), ak.to(c.operand), q.to(c.operand)


@triton.jit
def chunk_bwd_key_major(x, saved, index, gate, grads, c: tl.constexpr):
    """Scans the chunks of a split, for one head and block of values.

    Triton divides small products over all warps unless it takes them for links of a chain. A product whose
    operand comes only through `tl.trans` and elementwise operations is none: hence some tiles are masked or
    rounded transposed.
    """
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    matrices = matrices_of_sums(c)
    t, j = axes.token[:, None], axes.token[None, :]
    o = tl.arange(0, 2 * C)
    token, half = o % C, o // C
    is_r = half[None, :] == 0
    to, of = token[:, None], token[None, :]
    identity = tl.where(o[:, None] == o[None, :], 1.0, 0.0)
    # number of decays between k or b (down) and r or a (across), negative for pairs of the future
    distance = of - to - half[None, :]
    of_pairs, of_reads = sums_of_gradients()

    head = (tl.program_id(2) * c.H + i_h).to(tl.int64) * (c.K * c.V)
    at_state = axes.key[:, None] * c.V + axes.value[None, :]
    has_both = axes.has_key[:, None] & axes.has_value[None, :]
    dh = tl.load(saved.dht + head + at_state, mask=has_both, other=0.0).to(tl.float32) * state_scale(
        gate, c, True
    )
    if c.unsafe_gate:
        do_scale, grad_scale = cotangent_scale(gate)
    else:
        grad_scale = 1.0
    at_k = of * (c.H * c.K) + axes.key[:, None]
    at_w = j * (c.H * c.K) + axes.key[:, None]
    at_v = t * (c.H * c.V) + axes.value[None, :]
    at_vt = j * (c.H * c.V) + axes.value[:, None]
    count = tl.cdiv(split.length, C)
    k_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.K
    v_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.V
    part = partial_sums(block, index.T, c)
    buffer = state_pointers(saved.states, 0, axes, c.num_buffers, c)
    mask_state = axes.has_key[None, :] & axes.has_value[:, None]
    for step in range(0, count):
        n = count - 1 - step
        left = split.length - n * C
        mask_k = axes.has_key[:, None] & (token < left)[None, :]
        mask_w = axes.has_key[:, None] & (axes.token < left)[None, :]
        mask_v = (axes.token < left)[:, None] & axes.has_value[None, :]
        mask_vt = (axes.token < left)[None, :] & axes.has_value[:, None]
        w = load_tokens(x.w + k_start, at_w, mask_w, c.unmasked)
        ra = load_tokens(select_row(is_r, x.r + k_start, x.a + k_start, c.K), at_k, mask_k, c.unmasked)
        kb = load_tokens(select_row(is_r, x.k + k_start, x.b + k_start, c.K), at_k, mask_k, c.unmasked)
        v = load_tokens(x.v + v_start, at_v, mask_v, c.unmasked).to(c.operand)
        do = load_tokens(saved.do + v_start, at_v, mask_v, c.unmasked).to(c.operand)
        at = state_offset(index, split, n, k_start, c.num_buffers, c)
        h = tl.trans(tl.load(buffer + at, mask=mask_state, other=0.0).to(c.operand))
        A_ab_inv, Aak, Aq = load_A_tiles(saved.A, (split.first_chunk + n) * c.H + i_h, c)

        rows, second_half, first_half, total, decay_post, clamp_ratio = decays_key_major(w, matrices, gate, c)
        rows *= tl.where(is_r, c.scale, 1.0)
        # Products of a warp group read operands that are in shared memory. Under an unsafe gate a product
        # further below brings these arrays there, under a safe one the product with the identity.
        if c.unsafe_gate:
            raf, kbf = ra.to(tl.float32), kb.to(tl.float32)
        else:
            raf, kbf = sums_over_tokens(ra, identity, c), sums_over_tokens(kb, identity, c)
        score_ra = (raf * rows).to(c.operand)
        high_kb = tl.trans(tl.trans(kbf * tile2(second_half)).to(c.operand))
        if c.unsafe_gate:
            low_kb = tl.trans(tl.trans(tl.where(of < 8, kbf * tile2(first_half), 0.0)).to(c.operand))

        pairs_there = distance >= 0
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            sees_h0, reaches_ht = of < segments.first, of >= segments.last

        if c.unsafe_gate:
            # not earlier: its exponents beside those of A would take too many registers
            of_state = tl.exp2(sums_over_tokens(at_least(w, LOG_ZERO), matrices[0], c) * LOG2E)
            of_state *= tl.where(is_r, c.scale, 1.0)
            if c.segments:
                of_state = masked(of_state, sees_h0, segments)
            read = (raf * of_state).to(c.operand)
        else:
            read = score_ra

        # This order takes the fewest registers and lets products of a warp group overlap: v_new, then the
        # state's gradient, then the q side and the decays.
        do_t, vt = tl.trans(do), tl.trans(v)
        by_A = dot(do_t, Aq, c)
        if c.unsafe_gate:
            by_A *= do_scale
        _, ag = split2(read)
        a_read = dot(tl.trans(h), ag, c)
        if c.segments and not c.unsafe_gate:
            a_read = masked(a_read, j < segments.first, segments)
            read = where_or_zero(read, sees_h0)
        a_read = dot(vt, tl.trans(Aak), c, a_read)
        v_new = dot(a_read.to(c.operand), tl.trans(A_ab_inv), c).to(c.operand)
        v_pair = tl.trans(tl.where(half[:, None] == 0, tl.trans(tile2(vt)), tl.trans(tile2(v_new))))

        dstate = (dh * decay_post).to(c.operand)
        dh *= total
        dg_pass = tl.sum(h.to(tl.float32) * dh, 1)[:, None]
        if c.segments:
            dg_pass, dh = (
                tl.where(does_h0_reach_ht(segments), dg_pass, 0.0),
                masked(dh, does_h0_reach_ht(segments), segments),
            )
        if c.segments:
            writes = dot(tl.trans(dstate), high_kb, c)
            writes = masked(writes, reaches_ht, segments) + by_A
        else:
            writes = dot(tl.trans(dstate), high_kb, c, by_A)
        dv, dv_new = split2(writes)
        da_read = dot(dv_new.to(c.operand), A_ab_inv, c).to(c.operand)
        do_pair = select_concat(do_t * do_scale.to(c.operand) if c.unsafe_gate else do_t, da_read)
        dh = dot(read, tl.trans(do_pair), c, dh)
        dv = dot(da_read, Aak, c, dv)
        store_gradient(grads.v + v_start, at_vt, dv, grad_scale, mask_vt, c)

        # the q side: through the state
        by_state = dot(h, do_pair, c)
        if c.segments and not c.unsafe_gate:
            by_state = masked(by_state, sees_h0, segments)
        if c.unsafe_gate:
            by_state *= of_state
            state_terms_r, state_terms_a = split2(raf * by_state)
            state_terms, state_terms_r = state_terms_r + state_terms_a, state_terms_r + dg_pass
            state_terms = sums_of_reads(state_terms, state_terms_r, of_reads, c)

        # gradients of all four A, transposed: k, then b, down the tile
        dA = tl.trans(dot(tl.trans(do_pair), v_pair, c))
        if c.segments:  # not earlier: these bits would take registers from the products
            pairs_there = has_no_restart(segments, to, of, pairs_there)
        if c.unsafe_gate:
            # undecayed pairs apart: their size must not drown the rest of dw
            undecayed_pairs = tl.where(pairs_there & (distance == 0), dA, 0.0) * tl.where(is_r, c.scale, 1.0)
            undecayed_pairs = undecayed_pairs.to(c.operand)
            dA = tl.where(pairs_there & (distance > 0), dA, 0.0).to(c.operand)
            # with the k side of the second and of the first half
            early = in_first_half(of, half[None, :])
            dA_both = tl.trans(
                concat(tl.trans(tl.where(early, 0.0, dA).to(dA.dtype)), tl.trans(where_or_zero(dA, early)))
            )
        else:
            dA_high = tl.where(pairs_there, dA, 0.0).to(c.operand)

        # the q side: through the pairs of the chunk
        if c.unsafe_gate:
            by_pairs = dot(concat(high_kb, low_kb), dA_both, c)
            terms_r, terms_a = split2(score_ra.to(tl.float32) * by_pairs)
            grad = by_state + rows * by_pairs
            grad = dot(kb.to(c.operand), undecayed_pairs, c, grad)
        else:
            by_pairs = dot(high_kb, dA_high, c, by_state)
            terms_r, terms_a = split2(score_ra.to(tl.float32) * by_pairs)
            grad = rows * by_pairs
        at = select_row(is_r, grads.r + part + k_start, grads.a + part + k_start, c.K)
        store_gradient(at, at_k, grad, grad_scale, mask_k, c)

        # the k side: through the state, then through the pairs
        by_state = dot(dstate, v_pair, c)
        if c.segments:  # no branch: no product is fused with a sum across one
            by_state = tl.where(reaches_ht, by_state, 0.0)
        through_k, through_b = split2(high_kb.to(tl.float32) * by_state)
        if c.unsafe_gate:
            by_pairs, pairs_low = split2(dot(score_ra, tl.trans(dA_both), c))
            k_terms = high_kb.to(tl.float32) * by_pairs
            grad = tile2(second_half) * (by_state + by_pairs)
            k_terms = tl.where(of < 8, k_terms + low_kb.to(tl.float32) * pairs_low, k_terms)
            grad = tl.where(of < 8, grad + tile2(first_half) * pairs_low, grad)
            grad = dot(ra.to(c.operand), tl.trans(undecayed_pairs), c, grad)
        else:
            by_pairs = dot(score_ra, tl.trans(dA_high), c)
            k_terms = high_kb.to(tl.float32) * by_pairs
            grad = tile2(second_half) * (by_state + by_pairs)
        at = select_row(is_r, grads.k + part + k_start, grads.b + part + k_start, c.K)
        store_gradient(at, at_k, grad, grad_scale, mask_k, c)

        # decays: each token's terms, then the sums over tokens
        terms_k, terms_b = split2(k_terms)
        dg = terms_r - (terms_k + terms_b)
        pairs, dg_state = dg + terms_a, through_k + through_b
        if not c.unsafe_gate:
            dg += dg_pass
        dg = sums_of_pairs(pairs, dg_state, dg, of_pairs, c)
        if c.unsafe_gate:
            # replace the clamped decay by the exact one
            dg = dg * clamp_ratio + state_terms
        store_gradient(grads.w + part + k_start, at_w, dg, grad_scale, mask_w, c)
        k_start -= C * c.H * c.K
        v_start -= C * c.H * c.V
    tl.store(grads.initial_state + head + at_state, dh * inverse_state_scale(gate, c), mask=has_both)
