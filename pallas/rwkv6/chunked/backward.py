"""RWKV-6, chunked backward in Triton: one program walks the chunks of one stretch, head and block of values
in reverse, the state's gradient in registers.

``dV = A^T dY + K' dS``, ``dA = dY V^T``, then rows and columns through the pairs of the chunk and through the
states at its ends (docs/maths.md, section 5). Value-sided tiles are held transposed, [V, 16].

The gradient of the log decay adds only terms that contain the decay in question (section 6 there). A pair of
neighbours (t, t - 1) is not decayed at all and belongs to none: in the form for any decay it is taken apart,
so that its size cannot drown the others.
"""

import triton
import triton.language as tl

from ...device.chunk import (
    C,
    Ranges,
    bounded,
    chunk_elements,
    chunk_offsets,
    chunk_segments,
    cotangent_scale,
    form_of,
    load_state,
    needs_any_decay,
    partial_sums,
    passing,
    reached,
    reaching,
    sequence,
    state_tile,
    store_state,
    tile_axes,
    together,
    turned,
)
from ...device.decay import factors, in_first_half, score
from ...device.kept_states import gradients_over_states, state_place, state_rows
from ...device.products import product, token_sums_f32
from ...device.tokens import load_tokens, only, store_gradient
from .keys_as_rows import walk_backward_by_rows
from .tokens import Tokens, scaled_tokens


@triton.jit
def walk_backward(
    tokens, ranges, dy_, dsT_, states, gradients, ds0_, mode: tl.constexpr, ARRAYS: tl.constexpr
):
    """All chunks of one stretch, head and block of values, from the last to the first."""
    block, h = tl.program_id(0), tl.program_id(1)
    here = sequence(ranges, mode)
    axes = tile_axes(0, block, mode)
    t, j = axes.token[:, None], axes.token[None, :]
    from_here = tl.where(j >= t, 1.0, 0.0)  # sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    head, tile = (tl.program_id(2) * mode.H + h).to(tl.int64), state_tile(axes, mode)
    dS = load_state(dsT_, head, tile, ranges.form, mode, GRADIENT=True)
    u = tl.load(tokens.u_ + (here.row * mode.H + h) * mode.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[None, :]
    du = tl.full([mode.BK], 0.0, tl.float32)
    if mode.any_decay:
        up, down = cotangent_scale(ranges.form)
    else:
        down = 1.0
    offsets = chunk_offsets(axes, mode)
    count = tl.cdiv(here.length, C)
    pk = ((here.first + (count - 1) * C) * mode.H + h) * mode.K
    pv = ((here.first + (count - 1) * C) * mode.H + h) * mode.V
    part = partial_sums(block, ranges.T, mode)
    kept = state_rows(states, 0, axes, mode, ARRAYS)
    for i in range(0, count):
        n = count - 1 - i
        left = here.length - n * C
        there = chunk_elements(left, axes)
        w = load_tokens(tokens.w_ + pk, offsets.key, there.key, mode.even)
        r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even)
        k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even)
        v = load_tokens(tokens.v_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
        dy = load_tokens(dy_ + pv, offsets.value, there.value, mode.even).to(mode.operand)
        place = state_place(ranges, here, n, pk, mode, ARRAYS, 1)
        S = tl.load(kept + place, mask=tile.there, other=0.0).to(mode.operand)
        if mode.any_decay:
            dy *= up.to(mode.operand)
        decays = factors(w, ranges.form, mode, DELTA=False)
        rf, kf = r.to(tl.float32) * mode.scale, k.to(tl.float32)
        scaled = scaled_tokens(rf, kf, decays, mode)
        below = t > j
        read, written = scaled.r.state, scaled.k.high
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n)
            below = together(segments, below)
            start, end = reached(segments), reaching(segments)
            read, written = only(read, start), only(written, end)
        A = score(scaled.r, scaled.k, below, mode, EXCL=1)
        A = tl.where(t == j, tl.sum(rf * u * kf, 1)[:, None], A).to(mode.operand)
        vt, dyt = tl.trans(v), tl.trans(dy)
        dS *= decays.post[None, :]  # now the gradient of S pre + V^T K
        dstate = dS.to(mode.operand)
        dV = product(dyt, A, mode)
        dV = product(dstate, tl.trans(written), mode, dV)
        store_gradient(gradients.v_ + pv, offsets.turned, dV, down, turned(there, axes), mode)

        dA = product(dy, vt, mode)
        own = tl.sum(only(dA, t == j), 1)[:, None]  # dY_t . V_t
        dA = only(dA, below)
        near = only(dA, t == j + 1).to(mode.operand)
        if mode.any_decay:
            dA = only(dA, t > j + 1)
        dA = dA.to(mode.operand)
        # rows, then columns: through the state, and with the pairs of the chunk
        by_state = product(dy, S, mode)
        if mode.segments:
            by_state = only(by_state, start)
        by_pairs = product(dA, scaled.k.high, mode)
        if mode.any_decay:
            by_pairs = tl.where(in_first_half(t, 1), product(dA, scaled.k.low, mode), by_pairs)
        reads, row_terms = read.to(tl.float32) * by_state, scaled.r.score.to(tl.float32) * by_pairs
        if not mode.any_decay:
            row_terms = reads + row_terms
        dr = (decays.state_excl * by_state + decays.score_excl * by_pairs) * mode.scale
        dr += own * (u * kf * mode.scale)
        if mode.any_decay:
            dr += product(near, k.to(mode.operand), mode) * mode.scale
        store_gradient(gradients.r_ + part + pk, offsets.key, dr, down, there.key, mode)
        by_state = product(v, dstate, mode)
        if mode.segments:
            by_state = only(by_state, end)
        through = scaled.k.high.to(tl.float32) * by_state
        dA_high = tl.where(in_first_half(t, 1), 0.0, dA).to(dA.dtype) if mode.any_decay else dA
        by_pairs = product(tl.trans(dA_high), scaled.r.score, mode)
        column_terms = scaled.k.high.to(tl.float32) * by_pairs
        dk = decays.high * (by_state + by_pairs) + own * u * rf
        if mode.any_decay:
            by_pairs = product(tl.trans(only(dA, in_first_half(t, 1))), scaled.r.score, mode)
            column_terms += scaled.k.low.to(tl.float32) * by_pairs
            dk_low = decays.low * by_pairs
            undecayed = product(tl.trans(near), r.to(mode.operand), mode)
            dk += dk_low + undecayed * mode.scale
        store_gradient(gradients.k_ + part + pk, offsets.key, dk, down, there.key, mode)
        du += tl.sum(own * rf * kf, 0)

        # the state that passes through
        if mode.any_decay:
            dS *= decays.pre[None, :]
        if mode.segments:
            dS = tl.where(passing(segments), dS, 0.0)
        dg = tl.full([C, mode.BK], 0.0, tl.float32) + tl.sum(S.to(tl.float32) * dS, 0)[None, :]
        if mode.any_decay:
            # what has clamped factors gets the true one of the decay in question back
            exact = token_sums_f32(later, reads, dg, mode)
            dg = token_sums_f32(later, row_terms - column_terms, -column_terms, mode)
            dg = exact + decays.cut * token_sums_f32(earlier, through, dg, mode)
        else:
            dg = token_sums_f32(from_here, row_terms - column_terms, dg - row_terms, mode)
            dg = token_sums_f32(earlier, through, dg, mode)
        store_gradient(gradients.w_ + part + pk, offsets.key, dg, down, there.key, mode)
        dS = product(dyt, read, mode, dS)
        pk -= C * mode.H * mode.K
        pv -= C * mode.H * mode.V
    if mode.any_decay:
        du *= down
    store_state(ds0_, head, dS, tile, ranges.form, mode, GRADIENT=True)
    at_du = ((block * tl.num_programs(2) + tl.program_id(2)) * mode.H + h) * mode.K
    tl.store(gradients.u_ + at_du + axes.key, du, mask=axes.has_key)


@triton.jit
def rwkv6_bwd_kernel(
    r_,
    k_,
    v_,
    w_,
    u_,
    seg_,
    cu_,
    chunk0_,
    any_decay_,
    dy_,
    dsT_,
    states0_,
    states1_,
    states2_,
    states3_,
    T,
    span,
    dr_,
    dk_,
    dv_,
    dw_,
    du_,
    ds0_,
    mode: tl.constexpr,
    ARRAYS: tl.constexpr,
    TAKEN: tl.constexpr,
    KEYS_AS_ROWS: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences); ``any_decay_`` as in the forward.
    ``KEYS_AS_ROWS`` takes both forms from keys_as_rows.py.

    dr, dk, dw have a leading axis of value blocks and du those of value blocks and stretches, to be summed.
    """
    form = form_of(any_decay_, tl.program_id(2), mode)
    tokens, ranges = Tokens(r_, k_, v_, w_, u_), Ranges(seg_, cu_, chunk0_, T, span, form)
    states = (states0_, states1_, states2_, states3_)
    dr_, dk_, dv_, dw_ = gradients_over_states(states, (dr_, dk_, dv_, dw_), TAKEN)
    gradients = Tokens(dr_, dk_, dv_, dw_, du_)
    if KEYS_AS_ROWS:
        if needs_any_decay(form, mode):
            walk_backward_by_rows(tokens, ranges, dy_, dsT_, states, gradients, ds0_, mode, ARRAYS)
        else:
            walk_backward_by_rows(tokens, ranges, dy_, dsT_, states, gradients, ds0_, bounded(mode), ARRAYS)
    elif needs_any_decay(form, mode):
        walk_backward(tokens, ranges, dy_, dsT_, states, gradients, ds0_, mode=mode, ARRAYS=ARRAYS)
    else:
        walk_backward(tokens, ranges, dy_, dsT_, states, gradients, ds0_, mode=bounded(mode), ARRAYS=ARRAYS)
