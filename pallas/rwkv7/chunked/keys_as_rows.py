"""RWKV-7, chunked backward in Triton with keys as rows, for bfloat16 and compute capability 9.0:
`walk_backward` of backward.py with tiles of keys held transposed and the state as [K, V] (device/rows.py says
why).

A tile [K, 32] holds r beside a, which read, or k beside b, which write; [V, 32] holds dY beside dZ, or V
beside U: all that reads is one operand, and all that writes. The maths is that of backward.py and
gradients.py, the decay factors are those of device/decay.py.
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
    unbroken,
)
from ...device.decay import LOG2E, LOG_FEW, LOG_MIN, LOG_ZERO, at_least, in_first_half, sums_to_middles
from ...device.kept_states import state_place, state_rows
from ...device.products import product
from ...device.rows import (
    beside,
    either,
    halves,
    sums_of_gradients,
    sums_of_pairs,
    sums_of_reads,
    sums_over_tokens,
    twice,
    upper,
)
from ...device.tokens import load_tokens, only, store_gradient
from .scores import COUNT, tile_offsets


@triton.jit
def matrices_of_sums(mode: tl.constexpr):
    """Matrices of sums over tokens i for column s, [16, 16 n] for n sums beside each other.

    The first is of decays: up to s, for r, and up to the token before, for a. The others are for any decay:
    of the quarter that `lowest_logs` looks at; and of what is counted in scores, from the middle of its half
    to s, for r, and to the token before, for a, then from s to the second middle, for high columns, and to
    the first, for low ones.
    """
    i, o, s = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :], tl.arange(0, C)[None, :]
    whole = tl.where(i + o // C <= o % C, 1.0, 0.0)
    if mode.any_decay:
        quarter = tl.where(i // 4 == s // 4, tl.where(i <= s, 1.0, 0.65625), 0.0)
        o = tl.arange(0, 4 * C)[None, :]
        part, s = o // C, o % C
        to_row, to_middle = sums_to_middles(i, s)
        before, _ = sums_to_middles(i, s - 1)
        counted = tl.where(
            part < 2, tl.where(part < 1, to_row, before), tl.where(part < 3, to_middle, -to_row)
        )
        return whole, quarter, counted
    else:
        return whole, whole, whole


@triton.jit
def decays_of_tiles(w, matrices, form, mode: tl.constexpr):
    """Factors of rows for scores [K, 32], of high and of low columns [K, 16]; the state's, of the whole chunk
    and after its writes [K, 1]; what clamping took [K, 16]: see `factors`.

    Low columns are of use for tokens 0..7 only; the bounded form has one kind of column and one factor of the
    state, ``post``.

    ``w`` goes into products only, with the identity in place of a cast: loads are copied in the background
    where all that reads a tile wants one order.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    of_whole, of_quarter, of_counted = matrices
    if mode.any_decay:
        plain = sums_over_tokens(at_least(w, LOG_ZERO), tl.where(i == j, 1.0, 0.0), mode)
        quarter = sums_over_tokens(at_least(w, LOG_MIN), of_quarter, mode)
        counted = tl.maximum(plain, tl.where(quarter < -41.0, LOG_MIN, LOG_FEW))
        counted_w = upper(counted.to(tl.int32, bitcast=True)) if w.dtype == tl.bfloat16 else counted
        R, columns = halves(sums_over_tokens(counted_w, of_counted, mode) * LOG2E)
        high, low = halves(columns)
        post = tl.sum(tl.where(j >= 12, counted, 0.0), 1)[:, None]
        total = tl.exp2(tl.sum(plain, 1)[:, None] * LOG2E)
        low = tl.exp2(low)
        cut = tl.exp2((plain - counted) * LOG2E)
        return tl.exp2(R), tl.exp2(high), low, total, tl.exp2(post * LOG2E), cut
    else:
        G = sums_over_tokens(w, of_whole, mode) * LOG2E + form
        incl = halves(G)[0]
        back = tl.exp2(-incl)
        post = tl.exp2(tl.sum(tl.where(j == C - 1, incl, 0.0), 1) - form)[:, None]
        return tl.exp2(G), back, back, post, post, back


@triton.jit
def scores_of_tiles(kept_, chunk, mode: tl.constexpr):
    """What `kept_scores` loads: the inverse, the scores of a with k, and those of r with k beside b."""
    kept_ += chunk * (COUNT * C * C)
    t, o = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    inverse, ak = tl.load(kept_ + tile_offsets()), tl.load(kept_ + C * C + tile_offsets())
    q = tl.load(kept_ + (2 + o // C) * (C * C) + t * C + o % C)
    return inverse.to(mode.operand), ak.to(mode.operand), q.to(mode.operand)


@triton.jit
def walk_backward_by_rows(tokens, ranges, given, out, mode: tl.constexpr, ARRAYS: tl.constexpr):
    """`walk_backward` of backward.py, where it makes all gradients, both forms.

    Where a product takes a tile only through `tl.trans` and what is elementwise, on its own side or the
    tile's, Triton does not take it for a link of a chain, and divides small products over all warps: that is
    why some tiles are masked or rounded while they lie the other way.
    """
    block, h = tl.program_id(0), tl.program_id(1)
    here = sequence(ranges, mode)
    axes = tile_axes(0, block, mode)
    matrices = matrices_of_sums(mode)
    t, j = axes.token[:, None], axes.token[None, :]
    o = tl.arange(0, 2 * C)
    token, half = o % C, o // C
    is_r = half[None, :] == 0
    to, of = token[:, None], token[None, :]
    identity = tl.where(o[:, None] == o[None, :], 1.0, 0.0)
    # how many decays lie between a column k or b (down) and a row r or a (across): below 0 where it is later
    distance = of - to - half[None, :]
    of_pairs, of_reads = sums_of_gradients()

    head = (tl.program_id(2) * mode.H + h).to(tl.int64) * (mode.K * mode.V)
    at_state = axes.key[:, None] * mode.V + axes.value[None, :]
    has_both = axes.has_key[:, None] & axes.has_value[None, :]
    dS = tl.load(given.dsT_ + head + at_state, mask=has_both, other=0.0).to(tl.float32) * in_form(
        ranges.form, mode, True
    )
    if mode.any_decay:
        up, down = cotangent_scale(ranges.form)
    else:
        down = 1.0
    at_k = of * (mode.H * mode.K) + axes.key[:, None]
    at_w = j * (mode.H * mode.K) + axes.key[:, None]
    at_v = t * (mode.H * mode.V) + axes.value[None, :]
    at_vt = j * (mode.H * mode.V) + axes.value[:, None]
    count = tl.cdiv(here.length, C)
    pk = ((here.first + (count - 1) * C) * mode.H + h) * mode.K
    pv = ((here.first + (count - 1) * C) * mode.H + h) * mode.V
    part = partial_sums(block, ranges.T, mode)
    kept = state_rows(given.states, 0, axes, mode, ARRAYS)
    there_kept = axes.has_key[None, :] & axes.has_value[:, None]
    for step in range(0, count):
        n = count - 1 - step
        left = here.length - n * C
        there_k = axes.has_key[:, None] & (token < left)[None, :]
        there_w = axes.has_key[:, None] & (axes.token < left)[None, :]
        there_v = (axes.token < left)[:, None] & axes.has_value[None, :]
        there_vt = (axes.token < left)[None, :] & axes.has_value[:, None]
        w = load_tokens(tokens.w_ + pk, at_w, there_w, mode.even)
        ra = load_tokens(tl.where(is_r, tokens.r_ + pk, tokens.a_ + pk), at_k, there_k, mode.even)
        kb = load_tokens(tl.where(is_r, tokens.k_ + pk, tokens.b_ + pk), at_k, there_k, mode.even)
        v = load_tokens(tokens.v_ + pv, at_v, there_v, mode.even).to(mode.operand)
        dy = load_tokens(given.dy_ + pv, at_v, there_v, mode.even).to(mode.operand)
        place = state_place(ranges, here, n, pk, mode, ARRAYS, 1)
        S = tl.trans(tl.load(kept + place, mask=there_kept, other=0.0).to(mode.operand))
        inv, Aak, Aq = scores_of_tiles(given.scores_, (here.chunk0 + n) * mode.H + h, mode)

        rows, high, low, total, post, cut = decays_of_tiles(w, matrices, ranges.form, mode)
        rows *= tl.where(is_r, mode.scale, 1.0)
        # Arrays that are operands as they are come to where products of a warp group read them. In the form
        # for any decay that is further below, in the bounded one it takes the identity, which also casts.
        if mode.any_decay:
            raf, kbf = ra.to(tl.float32), kb.to(tl.float32)
        else:
            raf, kbf = sums_over_tokens(ra, identity, mode), sums_over_tokens(kb, identity, mode)
        score_ra = (raf * rows).to(mode.operand)
        high_kb = tl.trans(tl.trans(kbf * twice(high)).to(mode.operand))
        if mode.any_decay:
            low_kb = tl.trans(tl.trans(tl.where(of < 8, kbf * twice(low), 0.0)).to(mode.operand))

        pairs_there = distance >= 0
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n)
            start, end = of < segments.first, of >= segments.last

        if mode.any_decay:
            # not before: its exponents beside those of the scores would take too many registers
            of_state = tl.exp2(sums_over_tokens(at_least(w, LOG_ZERO), matrices[0], mode) * LOG2E)
            of_state *= tl.where(is_r, mode.scale, 1.0)
            if mode.segments:
                of_state = masked(of_state, start, segments)
            read = (raf * of_state).to(mode.operand)
        else:
            read = score_ra

        # The order of what follows decides how many registers there must be, and whether products of a warp
        # group wait for each other: U, then the state's gradient, then what reads the state and its decays.
        dyt, vt = tl.trans(dy), tl.trans(v)
        by_scores = product(dyt, Aq, mode)
        if mode.any_decay:
            by_scores *= up
        _, read_a = halves(read)
        Z = product(tl.trans(S), read_a, mode)
        if mode.segments and not mode.any_decay:
            Z = masked(Z, j < segments.first, segments)
            read = only(read, start)
        Z = product(vt, tl.trans(Aak), mode, Z)
        U = product(Z.to(mode.operand), tl.trans(inv), mode).to(mode.operand)
        writers = tl.trans(tl.where(half[:, None] == 0, tl.trans(twice(vt)), tl.trans(twice(U))))

        dstate = (dS * post).to(mode.operand)
        dS *= total
        passed = tl.sum(S.to(tl.float32) * dS, 1)[:, None]
        if mode.segments:
            passed, dS = tl.where(passing(segments), passed, 0.0), masked(dS, passing(segments), segments)
        if mode.segments:
            writes = product(tl.trans(dstate), high_kb, mode)
            writes = masked(writes, end, segments) + by_scores
        else:
            writes = product(tl.trans(dstate), high_kb, mode, by_scores)
        dV, dU = halves(writes)
        dZ = product(dU.to(mode.operand), inv, mode).to(mode.operand)
        readers = either(dyt * up.to(mode.operand) if mode.any_decay else dyt, dZ)
        dS = product(read, tl.trans(readers), mode, dS)
        dV = product(dZ, Aak, mode, dV)
        store_gradient(out.tokens.v_ + pv, at_vt, dV, down, there_vt, mode)

        # rows: what they read of the state
        by_state = product(S, readers, mode)
        if mode.segments and not mode.any_decay:
            by_state = masked(by_state, start, segments)
        if mode.any_decay:
            by_state *= of_state
            reads_r, reads_a = halves(raf * by_state)
            reads, reads_r = reads_r + reads_a, reads_r + passed
            reads = sums_of_reads(reads, reads_r, of_reads, mode)

        # gradients of the scores of all pairs, rows of the tile are columns: k, then b
        dA = tl.trans(product(tl.trans(readers), writers, mode))
        if mode.segments:  # not before: bits that wait here for their use take registers from the products
            pairs_there = unbroken(segments, to, of, pairs_there)
        if mode.any_decay:
            # pairs that are not decayed at all come apart: their size must not drown the rest of dw
            near = tl.where(pairs_there & (distance == 0), dA, 0.0) * tl.where(is_r, mode.scale, 1.0)
            near = near.to(mode.operand)
            dA = tl.where(pairs_there & (distance > 0), dA, 0.0).to(mode.operand)
            # with high and with low columns
            early = in_first_half(of, half[None, :])
            dA_both = tl.trans(
                beside(tl.trans(tl.where(early, 0.0, dA).to(dA.dtype)), tl.trans(only(dA, early)))
            )
        else:
            dA_high = tl.where(pairs_there, dA, 0.0).to(mode.operand)

        # rows: the pairs of the chunk
        if mode.any_decay:
            by_pairs = product(beside(high_kb, low_kb), dA_both, mode)
            terms_r, terms_a = halves(score_ra.to(tl.float32) * by_pairs)
            grad = by_state + rows * by_pairs
            grad = product(kb.to(mode.operand), near, mode, grad)
        else:
            by_pairs = product(high_kb, dA_high, mode, by_state)
            terms_r, terms_a = halves(score_ra.to(tl.float32) * by_pairs)
            grad = rows * by_pairs
        at = tl.where(is_r, out.tokens.r_ + part + pk, out.tokens.a_ + part + pk)
        store_gradient(at, at_k, grad, down, there_k, mode)

        # columns: through the state, then the pairs
        by_state = product(dstate, writers, mode)
        if mode.segments:  # without a branch, across which no product is fused with the sum that it goes into
            by_state = tl.where(end, by_state, 0.0)
        through_k, through_b = halves(high_kb.to(tl.float32) * by_state)
        if mode.any_decay:
            by_pairs, pairs_low = halves(product(score_ra, tl.trans(dA_both), mode))
            column_terms = high_kb.to(tl.float32) * by_pairs
            grad = twice(high) * (by_state + by_pairs)
            column_terms = tl.where(of < 8, column_terms + low_kb.to(tl.float32) * pairs_low, column_terms)
            grad = tl.where(of < 8, grad + twice(low) * pairs_low, grad)
            grad = product(ra.to(mode.operand), tl.trans(near), mode, grad)
        else:
            by_pairs = product(score_ra, tl.trans(dA_high), mode)
            column_terms = high_kb.to(tl.float32) * by_pairs
            grad = twice(high) * (by_state + by_pairs)
        at = tl.where(is_r, out.tokens.k_ + part + pk, out.tokens.b_ + part + pk)
        store_gradient(at, at_k, grad, down, there_k, mode)

        # decays: what spans its own token and no later row or earlier column, then the sums
        terms_k, terms_b = halves(column_terms)
        dg = terms_r - (terms_k + terms_b)
        pairs, through = dg + terms_a, through_k + through_b
        if not mode.any_decay:
            dg += passed
        dg = sums_of_pairs(pairs, through, dg, of_pairs, mode)
        if mode.any_decay:
            # what has clamped factors gets the true one of the decay in question back
            dg = dg * cut + reads
        store_gradient(out.tokens.w_ + part + pk, at_w, dg, down, there_w, mode)
        pk -= C * mode.H * mode.K
        pv -= C * mode.H * mode.V
    tl.store(out.ds0_ + head + at_state, dS * out_of_form(ranges.form, mode), mask=has_both)
