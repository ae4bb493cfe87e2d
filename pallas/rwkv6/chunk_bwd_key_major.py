"""RWKV-6, chunked backward with tiles of keys transposed, [K, 16], and the state as [K, V], for products of
a warp group with bfloat16 operands: `chunk_bwd` in the layout of `key_major`.
"""

import triton
import triton.language as tl

from ..backend.versions import triton_release
from ..common.chunk import (
    C,
    chunk_segments,
    does_h0_reach_ht,
    hidden,
    in_one_segment,
    masked,
    partial_sums,
    program_split,
    tile_axes,
)
from ..common.decay import LOG2E, LOG_MIN, LOG_ZERO, at_least, in_first_half, sums_to_middles
from ..common.dots import dot
from ..common.gate import cotangent_scale, inverse_state_scale, state_scale
from ..common.key_major import (
    concat,
    split2,
    sums_of_gradients,
    sums_of_pairs,
    sums_of_reads,
    sums_over_tokens,
    upper16,
)
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, store_gradient, where_or_zero

TRITON_BEFORE_3_7 = tl.constexpr(triton_release() < (3, 7))


@triton.jit
def sums_of_decays():
    """Matrices [16, 32] that sum decays over tokens i for token s, two side by side: the identity and the
    tokens before s; and for A, from the middle of its half to the token before s, and from s to the second
    middle.
    """
    i, o = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    first, s = o < C, o % C
    of_whole = tl.where(first, tl.where(i == s, 1.0, 0.0), tl.where(i < s, 1.0, 0.0))
    before, _ = sums_to_middles(i, s - 1)
    _, to_middle = sums_to_middles(i, s)
    return of_whole, tl.where(first, before, to_middle)


@triton.jit
def decays_of_queries(w, of_whole, of_counted, c: tl.constexpr):
    """Log decays [K, 16], exact and clamped for A; exponents (base 2) of queries and of keys of the second
    half for A, and of queries of the state; the state's decays [K, 1]: see `decay_factors`.

    ``w`` is an operand of products only, with the identity in place of a cast: Triton copies a load in the
    background if all its uses need one layout.
    """
    j = tl.arange(0, C)[None, :]
    plain, Gx = split2(sums_over_tokens(at_least(w, LOG_ZERO), of_whole, c))
    counted = tl.maximum(plain, LOG_MIN)
    counted_w = upper16(counted.to(tl.int32, bitcast=True)) if w.dtype == tl.bfloat16 else counted
    Rx, second_half = split2(sums_over_tokens(counted_w, of_counted, c) * LOG2E)
    decay_post = tl.sum(tl.where(j >= 12, counted, 0.0), 1)
    total = tl.exp2(tl.sum(plain, 1) * LOG2E)[:, None]
    return plain, counted, Rx, second_half, Gx * LOG2E, total, tl.exp2(decay_post * LOG2E)[:, None]


@triton.jit
def chunk_bwd_key_major(x, saved, index, gate, grads, c: tl.constexpr):
    """Scans the chunks of a split, for one head and block of values."""
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    of_whole, of_counted = sums_of_decays()
    of_pairs, of_reads = sums_of_gradients()
    t, j = axes.token[:, None], axes.token[None, :]
    head = (tl.program_id(2) * c.H + i_h).to(tl.int64) * (c.K * c.V)
    at_state = axes.key[:, None] * c.V + axes.value[None, :]
    has_both = axes.has_key[:, None] & axes.has_value[None, :]
    dh = tl.load(saved.dht + head + at_state, mask=has_both, other=0.0).to(tl.float32) * state_scale(
        gate, c, True
    )
    u = tl.load(x.u + (split.row * c.H + i_h) * c.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[:, None]
    du = tl.full([c.BK], 0.0, tl.float32)
    if c.unsafe_gate:
        do_scale, grad_scale = cotangent_scale(gate)
    else:
        grad_scale = 1.0
    at_k = axes.token[None, :] * (c.H * c.K) + axes.key[:, None]
    at_v = axes.token[:, None] * (c.H * c.V) + axes.value[None, :]
    at_vt = axes.token[None, :] * (c.H * c.V) + axes.value[:, None]
    count = tl.cdiv(split.length, C)
    k_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.K
    v_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.V
    part = partial_sums(block, index.T, c)
    mask_state = axes.has_key[None, :] & axes.has_value[:, None]
    for step in range(0, count):
        n = count - 1 - step
        left = split.length - n * C
        is_token = axes.token < left
        mask_k = axes.has_key[:, None] & is_token[None, :]
        mask_v = is_token[:, None] & axes.has_value[None, :]
        mask_vt = is_token[None, :] & axes.has_value[:, None]
        w = load_tokens(x.w + k_start, at_k, mask_k, c.unmasked)
        r = load_tokens(x.r + k_start, at_k, mask_k, c.unmasked)
        k = load_tokens(x.k + k_start, at_k, mask_k, c.unmasked)
        v = load_tokens(x.v + v_start, at_v, mask_v, c.unmasked).to(c.operand)
        do = load_tokens(saved.do + v_start, at_v, mask_v, c.unmasked).to(c.operand)
        at = state_offset(index, split, n, k_start, c.num_buffers, c)
        buffer = state_pointers(saved.states, hidden(0, 1, split, n), axes, c.num_buffers, c)
        h = tl.trans(tl.load(buffer + at, mask=mask_state, other=0.0).to(c.operand))

        if c.unsafe_gate:
            plain, counted, Rx, second_half, Gx, total, decay_post = decays_of_queries(
                w, of_whole, of_counted, c
            )
            second_half, state_excl = tl.exp2(second_half), tl.exp2(Gx)
            score_excl = tl.exp2(Rx)
            first_half = tl.where(j < 8, tl.exp2(-Rx - counted * LOG2E), 0.0)
        else:
            plain, Gx = split2(sums_over_tokens(w, of_whole, c) * LOG2E)
            decay_post = tl.exp2(tl.sum(plain, 1))[:, None]
            total = decay_post
            Gx += gate
            score_excl, second_half = tl.exp2(Gx), tl.exp2(-plain - Gx)
        if c.unsafe_gate or c.operand == tl.float32 or (c.both_gates and TRITON_BEFORE_3_7):
            rf, kf = r.to(tl.float32), k.to(tl.float32)
        else:
            # Products with the identity: from Triton 3.7 on only loads that products read are copied in the
            # background. Up to 3.6 they gain less, and slow down the code of the unsafe gate by 4 %.
            identity = tl.where(t == j, 1.0, 0.0)
            rf, kf = tl.dot(r, identity.to(r.dtype)), tl.dot(k, identity.to(k.dtype))
        rf *= c.scale
        score_r, high_k = (rf * score_excl).to(c.operand), (kf * second_half).to(c.operand)
        if c.unsafe_gate:
            state_r, low_k = (rf * state_excl).to(c.operand), (kf * first_half).to(c.operand)
        else:
            state_r, low_k = score_r, high_k
        strict = t > j
        qg, kg = state_r, high_k
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            strict = in_one_segment(segments, strict)
            sees_h0, reaches_ht = j < segments.first, j >= segments.last
            qg, kg = where_or_zero(qg, sees_h0), where_or_zero(kg, reaches_ht)
        A = dot(tl.trans(score_r), high_k, c)
        if c.unsafe_gate:
            A = tl.where(in_first_half(t, 1), dot(tl.trans(score_r), low_k, c), A)
        A = tl.where(strict, A, 0.0)
        A = tl.where(t == j, tl.sum(rf * (u * kf), 0)[None, :], A)
        if c.unsafe_gate:
            A *= do_scale
        A = A.to(c.operand)

        # This order takes the fewest registers: the state's gradient first
        dstate = (dh * decay_post).to(c.operand)  # of h decay_pre + v^T kg
        dh *= total
        dg_pass = tl.sum(h.to(tl.float32) * dh, 1)[:, None]
        if c.segments:
            dg_pass, dh = (
                tl.where(does_h0_reach_ht(segments), dg_pass, 0.0),
                tl.where(does_h0_reach_ht(segments), dh, 0.0),
            )
        if c.unsafe_gate:
            qg *= do_scale.to(c.operand)
        dh = dot(qg, do, c, dh)
        dv = dot(tl.trans(do), A, c)
        dv = dot(tl.trans(dstate), kg, c, dv)
        store_gradient(grads.v + v_start, at_vt, dv, grad_scale, mask_vt, c)

        dA = dot(do, tl.trans(v), c)
        if c.unsafe_gate:
            dA *= do_scale
        diagonal = tl.sum(where_or_zero(dA, t == j), 0)[None, :]  # do_t . v_t
        dA = where_or_zero(dA, strict)
        if c.unsafe_gate:
            undecayed_pairs = where_or_zero(dA, t == j + 1).to(c.operand)
            dA = where_or_zero(dA, t > j + 1).to(c.operand)
            early = in_first_half(t, 1)
            # pairs with the k side of the second and of the first half
            dA = concat(tl.where(early, 0.0, dA).to(dA.dtype), where_or_zero(dA, early))
            columns = concat(high_k, low_k)
        else:
            dA, columns = dA.to(c.operand), high_k
        # the q side, then the k side: through the state, and through the pairs of the chunk
        by_state = dot(h, tl.trans(do), c)
        if c.segments:
            # under a safe gate a branch makes ptxas convert the bit of `does_h0_reach_ht` for each number
            by_state = (
                masked(by_state, sees_h0, segments) if c.unsafe_gate else where_or_zero(by_state, sees_h0)
            )
        by_pairs = dot(columns, tl.trans(dA), c)
        if c.unsafe_gate:
            by_state = by_state * state_excl * do_scale
            state_terms, q_terms = rf * by_state, score_r.to(tl.float32) * by_pairs
            dr = (by_state + score_excl * by_pairs) * c.scale
            dr += dot(k.to(c.operand), tl.trans(undecayed_pairs), c) * c.scale
        else:
            by_pairs += by_state
            q_terms = score_r.to(tl.float32) * by_pairs
            dr = score_excl * by_pairs * c.scale
        dr += diagonal * (u * kf) * c.scale
        store_gradient(grads.r + part + k_start, at_k, dr, grad_scale, mask_k, c)
        by_state = dot(dstate, tl.trans(v), c) * second_half
        if c.segments:
            by_state = masked(by_state, reaches_ht, segments)
        dg_state = kf * by_state
        by_pairs = dot(score_r, dA, c)
        if c.unsafe_gate:
            by_pairs, pairs_low = split2(by_pairs)
            k_terms = high_k.to(tl.float32) * by_pairs + low_k.to(tl.float32) * pairs_low
            dk = by_state + second_half * by_pairs + first_half * pairs_low + u * (diagonal * rf)
            dk += dot(r.to(c.operand), undecayed_pairs, c) * c.scale
        else:
            k_terms = high_k.to(tl.float32) * by_pairs
            dk = by_state + second_half * by_pairs + u * (diagonal * rf)
        store_gradient(grads.k + part + k_start, at_k, dk, grad_scale, mask_k, c)
        du += tl.sum(diagonal * rf * kf, 1)

        dg, pairs = -k_terms, q_terms - k_terms
        if not c.unsafe_gate:
            dg += dg_pass
        dg = sums_of_pairs(pairs, dg_state, dg, of_pairs, c)
        if c.unsafe_gate:
            # in place of the clamped decay the exact one, from decays read again: kept, they would be spilled
            minus = sums_over_tokens(at_least(w, LOG_ZERO), tl.where(t == j, -1.0, 0.0), c)
            dg *= tl.exp2((-minus - tl.maximum(-minus, LOG_MIN)) * LOG2E)
            dg = sums_of_reads(state_terms, dg + dg_pass, of_reads, c)
        store_gradient(grads.w + part + k_start, at_k, dg, grad_scale, mask_k, c)
        k_start -= C * c.H * c.K
        v_start -= C * c.H * c.V
    if c.unsafe_gate:
        du *= grad_scale
    tl.store(grads.initial_state + head + at_state, dh * inverse_state_scale(gate, c), mask=has_both)
    at_du = ((block * tl.num_programs(2) + tl.program_id(2)) * c.H + i_h) * c.K
    tl.store(grads.u + at_du + axes.key, du, mask=axes.has_key)
