"""RWKV-6, chunked backward in Triton with keys as rows, for bfloat16 and compute capability 9.0:
`walk_backward` of backward.py with tiles of keys held transposed, [K, 16], and the state as [K, V]
(device/rows.py says why).
"""

import triton
import triton.language as tl

from ...device.chunk import (
    C,
    chunk_segments,
    cotangent_scale,
    in_form,
    masked,
    out_of_form,
    partial_sums,
    passing,
    sequence,
    tile_axes,
    together,
)
from ...device.decay import LOG2E, LOG_MIN, LOG_ZERO, at_least, in_first_half, sums_to_middles
from ...device.kept_states import state_place, state_rows
from ...device.products import product
from ...device.rows import (
    beside,
    halves,
    sums_of_gradients,
    sums_of_pairs,
    sums_of_reads,
    sums_over_tokens,
    upper,
)
from ...device.tokens import load_tokens, only, store_gradient


@triton.jit
def sums_of_decays():
    """Matrices [16, 32] of sums over tokens i for column s, two beside each other: of decays (the identity,
    and up to the token before s), and of those counted in scores (from the middle of its half to the token
    before s, and from s to the second middle).
    """
    i, o = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    first, s = o < C, o % C
    of_whole = tl.where(first, tl.where(i == s, 1.0, 0.0), tl.where(i < s, 1.0, 0.0))
    before, _ = sums_to_middles(i, s - 1)
    _, to_middle = sums_to_middles(i, s)
    return of_whole, tl.where(first, before, to_middle)


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
    Rx, high = halves(sums_over_tokens(counted_w, of_counted, mode) * LOG2E)
    post = tl.sum(tl.where(j >= 12, counted, 0.0), 1)
    total = tl.exp2(tl.sum(plain, 1) * LOG2E)[:, None]
    return plain, counted, Rx, high, Gx * LOG2E, total, tl.exp2(post * LOG2E)[:, None]


@triton.jit
def walk_backward_by_rows(
    tokens, ranges, dy_, dsT_, states, gradients, ds0_, mode: tl.constexpr, ARRAYS: tl.constexpr
):
    """All chunks of one stretch, head and block of values, from the last to the first; both forms."""
    block, h = tl.program_id(0), tl.program_id(1)
    here = sequence(ranges, mode)
    axes = tile_axes(0, block, mode)
    of_whole, of_counted = sums_of_decays()
    of_pairs, of_reads = sums_of_gradients()
    t, j = axes.token[:, None], axes.token[None, :]
    head = (tl.program_id(2) * mode.H + h).to(tl.int64) * (mode.K * mode.V)
    at_state = axes.key[:, None] * mode.V + axes.value[None, :]
    has_both = axes.has_key[:, None] & axes.has_value[None, :]
    dS = tl.load(dsT_ + head + at_state, mask=has_both, other=0.0).to(tl.float32) * in_form(
        ranges.form, mode, True
    )
    u = tl.load(tokens.u_ + (here.row * mode.H + h) * mode.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[:, None]
    du = tl.full([mode.BK], 0.0, tl.float32)
    if mode.any_decay:
        up, down = cotangent_scale(ranges.form)
    else:
        down = 1.0
    at_k = axes.token[None, :] * (mode.H * mode.K) + axes.key[:, None]
    at_v = axes.token[:, None] * (mode.H * mode.V) + axes.value[None, :]
    at_vt = axes.token[None, :] * (mode.H * mode.V) + axes.value[:, None]
    count = tl.cdiv(here.length, C)
    pk = ((here.first + (count - 1) * C) * mode.H + h) * mode.K
    pv = ((here.first + (count - 1) * C) * mode.H + h) * mode.V
    part = partial_sums(block, ranges.T, mode)
    kept = state_rows(states, 0, axes, mode, ARRAYS)
    there_kept = axes.has_key[None, :] & axes.has_value[:, None]
    for step in range(0, count):
        n = count - 1 - step
        left = here.length - n * C
        is_token = axes.token < left
        there_k = axes.has_key[:, None] & is_token[None, :]
        there_v = is_token[:, None] & axes.has_value[None, :]
        there_vt = is_token[None, :] & axes.has_value[:, None]
        w = load_tokens(tokens.w_ + pk, at_k, there_k, mode.even)
        r = load_tokens(tokens.r_ + pk, at_k, there_k, mode.even)
        k = load_tokens(tokens.k_ + pk, at_k, there_k, mode.even)
        v = load_tokens(tokens.v_ + pv, at_v, there_v, mode.even).to(mode.operand)
        dy = load_tokens(dy_ + pv, at_v, there_v, mode.even).to(mode.operand)
        place = state_place(ranges, here, n, pk, mode, ARRAYS, 1)
        S = tl.trans(tl.load(kept + place, mask=there_kept, other=0.0).to(mode.operand))

        if mode.any_decay:
            plain, counted, Rx, high, Gx, total, post = decays_of_rows(w, of_whole, of_counted, mode)
            high, state_excl = tl.exp2(high), tl.exp2(Gx)
            score_excl = tl.exp2(Rx)
            low = tl.where(j < 8, tl.exp2(-Rx - counted * LOG2E), 0.0)
        else:
            plain, Gx = halves(sums_over_tokens(w, of_whole, mode) * LOG2E)
            post = tl.exp2(tl.sum(plain, 1))[:, None]
            total = post
            Gx += ranges.form
            score_excl, high = tl.exp2(Gx), tl.exp2(-plain - Gx)
        rf, kf = r.to(tl.float32) * mode.scale, k.to(tl.float32)
        score_r, high_k = (rf * score_excl).to(mode.operand), (kf * high).to(mode.operand)
        if mode.any_decay:
            state_r, low_k = (rf * state_excl).to(mode.operand), (kf * low).to(mode.operand)
        else:
            state_r, low_k = score_r, high_k
        below = t > j
        read, written = state_r, high_k
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n)
            below = together(segments, below)
            start, end = j < segments.first, j >= segments.last
            read, written = only(read, start), only(written, end)
        A = product(tl.trans(score_r), high_k, mode)
        if mode.any_decay:
            A = tl.where(in_first_half(t, 1), product(tl.trans(score_r), low_k, mode), A)
        A = tl.where(below, A, 0.0)
        A = tl.where(t == j, tl.sum(rf * (u * kf), 0)[None, :], A)
        if mode.any_decay:
            A *= up
        A = A.to(mode.operand)

        # The order of what follows decides how many registers there must be: the state's gradient first
        dstate = (dS * post).to(mode.operand)  # the gradient of S pre + V^T K
        dS *= total
        passed = tl.sum(S.to(tl.float32) * dS, 1)[:, None]
        if mode.segments:
            passed, dS = tl.where(passing(segments), passed, 0.0), tl.where(passing(segments), dS, 0.0)
        if mode.any_decay:
            read *= up.to(mode.operand)
        dS = product(read, dy, mode, dS)
        dV = product(tl.trans(dy), A, mode)
        dV = product(tl.trans(dstate), written, mode, dV)
        store_gradient(gradients.v_ + pv, at_vt, dV, down, there_vt, mode)

        dA = product(dy, tl.trans(v), mode)
        if mode.any_decay:
            dA *= up
        own = tl.sum(only(dA, t == j), 0)[None, :]  # dY_t . V_t
        dA = only(dA, below)
        if mode.any_decay:
            near = only(dA, t == j + 1).to(mode.operand)
            dA = only(dA, t > j + 1).to(mode.operand)
            early = in_first_half(t, 1)
            # pairs with high and with low columns
            dA = beside(tl.where(early, 0.0, dA).to(dA.dtype), only(dA, early))
            columns = beside(high_k, low_k)
        else:
            dA, columns = dA.to(mode.operand), high_k
        # rows, then columns: through the state, and with the pairs of the chunk
        by_state = product(S, tl.trans(dy), mode)
        if mode.segments:
            # a branch here, in the bounded form, makes ptxas convert the one bit of `passing` for each number
            by_state = masked(by_state, start, segments) if mode.any_decay else only(by_state, start)
        by_pairs = product(columns, tl.trans(dA), mode)
        if mode.any_decay:
            by_state = by_state * state_excl * up
            reads, row_terms = rf * by_state, score_r.to(tl.float32) * by_pairs
            dr = (by_state + score_excl * by_pairs) * mode.scale
            dr += product(k.to(mode.operand), tl.trans(near), mode) * mode.scale
        else:
            by_pairs += by_state
            row_terms = score_r.to(tl.float32) * by_pairs
            dr = score_excl * by_pairs * mode.scale
        dr += own * (u * kf) * mode.scale
        store_gradient(gradients.r_ + part + pk, at_k, dr, down, there_k, mode)
        by_state = product(dstate, tl.trans(v), mode) * high
        if mode.segments:
            by_state = masked(by_state, end, segments)
        through = kf * by_state
        by_pairs = product(score_r, dA, mode)
        if mode.any_decay:
            by_pairs, pairs_low = halves(by_pairs)
            column_terms = high_k.to(tl.float32) * by_pairs + low_k.to(tl.float32) * pairs_low
            dk = by_state + high * by_pairs + low * pairs_low + u * (own * rf)
            dk += product(r.to(mode.operand), near, mode) * mode.scale
        else:
            column_terms = high_k.to(tl.float32) * by_pairs
            dk = by_state + high * by_pairs + u * (own * rf)
        store_gradient(gradients.k_ + part + pk, at_k, dk, down, there_k, mode)
        du += tl.sum(own * rf * kf, 1)

        dg, pairs = -column_terms, row_terms - column_terms
        if not mode.any_decay:
            dg += passed
        dg = sums_of_pairs(pairs, through, dg, of_pairs, mode)
        if mode.any_decay:
            # what has clamped factors gets the true one of the decay in question back
            dg *= tl.exp2((plain - counted) * LOG2E)
            dg = sums_of_reads(reads, dg + passed, of_reads, mode)
        store_gradient(gradients.w_ + part + pk, at_k, dg, down, there_k, mode)
        pk -= C * mode.H * mode.K
        pv -= C * mode.H * mode.V
    if mode.any_decay:
        du *= down
    tl.store(ds0_ + head + at_state, dS * out_of_form(ranges.form, mode), mask=has_both)
    at_du = ((block * tl.num_programs(2) + tl.program_id(2)) * mode.H + h) * mode.K
    tl.store(gradients.u_ + at_du + axes.key, du, mask=axes.has_key)
