"""RWKV-6, chunked backward in Triton: one program walks the chunks of one stretch, head and block of values
in reverse, the state's gradient in registers.

``dV = A^T dY + K' dS``, ``dA = dY V^T``, then rows and columns through the pairs of the chunk and through the
states at its ends. Value-sided tiles are held transposed, [V, 16].

The gradient of the log decay adds only terms that contain the decay in question (see
rwkv7/chunked/backward.py). A pair of neighbours (t, t - 1) is not decayed at all and belongs to none: it is
taken apart with the form for any decay, so that its size cannot drown the others.
"""

import triton
import triton.language as tl

from ...device.common import (
    LOG2E,
    LOG_MIN,
    C,
    load_tokens,
    only,
    segment_masks,
    sequence,
    store_tokens,
    token_sums_f32,
)
from ...device.decay import factors, score
from ...plan.kept_states import gradients_over_states, state_rows


@triton.jit
def walk_backward(
    r_, k_, v_, w_, u_, seg_, cu_, chunk0_, dy_, dsT_, states, T, span,
    dr_, dk_, dv_, dw_, du_, ds0_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, ARRAYS: tl.constexpr,
):  # fmt: skip
    """All chunks of one stretch, head and block of values, from the last to the first."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    iv, h = tl.program_id(0), tl.program_id(1)
    row, base, first, length, chunk0 = sequence(cu_, chunk0_, T, span, SPLITS, VAR)
    oc, ok, ov = tl.arange(0, 16), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    t, j = oc[:, None], oc[None, :]
    from_here = tl.where(j >= t, 1.0, 0.0)  # token sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    head = (tl.program_id(2) * H + h).to(tl.int64)
    sq = ok[None, :] * V + ov[:, None]
    msq = mk[None, :] & mv[:, None]
    dS = tl.load(dsT_ + head * (K * V) + sq, mask=msq, other=0.0).to(tl.float32)
    u = tl.load(u_ + (row * H + h) * K + ok, mask=mk, other=0.0).to(tl.float32)[None, :]
    du = tl.zeros([BK], tl.float32)
    offk = oc[:, None] * (H * K) + ok[None, :]
    offv = oc[:, None] * (H * V) + ov[None, :]
    offt = oc[None, :] * (H * V) + ov[:, None]
    count = tl.cdiv(length, C)
    pk = ((first + (count - 1) * C) * H + h) * K
    pv = ((first + (count - 1) * C) * H + h) * V
    part = iv.to(tl.int64) * (1 if VAR else tl.num_programs(2) // SPLITS) * T * (H * K)  # of the partial sums
    kept = state_rows(states, ov, H, K, BV, ARRAYS)[:, None] + ok[None, :]
    for i in range(0, count):
        n = count - 1 - i
        left = length - n * C
        m = oc < left
        mtk, mtv = m[:, None] & mk[None, :], m[:, None] & mv[None, :]
        chunk = (chunk0 + n) * H + h
        w = load_tokens(w_ + pk, offk, mtk, EVEN)
        r = load_tokens(r_ + pk, offk, mtk, EVEN)
        k = load_tokens(k_ + pk, offk, mtk, EVEN)
        v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
        dy = load_tokens(dy_ + pv, offv, mtv, EVEN).to(DOT)
        Sd = tl.load(kept + (chunk * (K * V) if ARRAYS == 0 else pk), mask=msq, other=0.0).to(DOT)
        wc = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype) if ANY else w
        decays, pre, post = factors(wc, ANY, PREC)
        _, rx, c1, c2, _, ex = decays
        rf, kf = r.to(tl.float32) * SCALE, k.to(tl.float32)
        q1, k2 = (rf * rx).to(DOT), (kf * c2).to(DOT)
        if ANY:
            k1, q0 = (kf * c1).to(DOT), (rf * ex).to(DOT)
        else:
            k1, q0 = k2, q1
        below = t > j
        ks = k2
        if SEG:
            ids, before, last = segment_masks(seg_, base, first + n * C, left)
            below = below & (ids[:, None] == ids[None, :])
            start, end = (ids == before)[:, None], (ids == last)[:, None]
            q0, ks = only(q0, start), only(k2, end)
        A = score(q1, k1, k2, below, PREC, ANY)
        A = tl.where(t == j, tl.sum(rf * u * kf, 1)[:, None], A).to(DOT)
        vt, dyt = tl.trans(v), tl.trans(dy)
        dS *= post[None, :]  # now the gradient of S pre + V^T K
        dSd = dS.to(DOT)
        dV = tl.dot(dyt, A, input_precision=PREC)
        dV = tl.dot(dSd, tl.trans(ks), dV, input_precision=PREC)
        store_tokens(dv_ + pv, offt, dV, m[None, :] & mv[:, None], EVEN)

        dA = tl.dot(dy, vt, input_precision=PREC)
        own = tl.sum(only(dA, t == j), 1)[:, None]  # dY_t . V_t
        dA = only(dA, below)
        near = only(dA, t == j + 1).to(DOT)
        if ANY:
            dA = only(dA, t > j + 1)
        dA = dA.to(DOT)
        # rows, then columns: with the pairs of the chunk (xi), through the state (xs)
        xs = tl.dot(dy, Sd, input_precision=PREC)
        if SEG:
            xs = only(xs, start)
        xi = tl.dot(dA, k2, input_precision=PREC)
        if ANY:
            xi = tl.where(t < 8, tl.dot(dA, k1, input_precision=PREC), xi)
        rows = q0.to(tl.float32) * xs + q1.to(tl.float32) * xi
        dr = (ex * xs + rx * xi) * SCALE + own * (u * kf * SCALE)
        if ANY:
            dr += tl.dot(near, k.to(DOT), input_precision=PREC) * SCALE
        store_tokens(dr_ + part + pk, offk, dr, mtk, EVEN)
        xs = tl.dot(v, dSd, input_precision=PREC)
        if SEG:
            xs = only(xs, end)
        through = k2.to(tl.float32) * xs
        xi = tl.dot(tl.trans(only(dA, t >= 8) if ANY else dA), q1, input_precision=PREC)
        cols = k2.to(tl.float32) * xi
        dk = c2 * (xs + xi) + own * u * rf
        if ANY:
            xi = tl.dot(tl.trans(only(dA, t < 8)), q1, input_precision=PREC)
            cols += k1.to(tl.float32) * xi
            dk += c1 * xi + tl.dot(tl.trans(near), r.to(DOT), input_precision=PREC) * SCALE
        store_tokens(dk_ + part + pk, offk, dk, mtk, EVEN)
        du += tl.sum(own * rf * kf, 0)

        # the state that passes through
        if ANY:
            dS *= pre[None, :]
        if SEG:
            dS = tl.where(before == last, dS, 0.0)
        dg = tl.zeros([16, BK], tl.float32) + tl.sum(Sd.to(tl.float32) * dS, 0)[None, :]
        if ANY:
            dg = token_sums_f32(later, rows, dg, HALF, PREC)
            dg = token_sums_f32(from_here, -cols, dg, HALF, PREC)
        else:
            dg = token_sums_f32(from_here, rows - cols, dg - rows, HALF, PREC)
        dg = token_sums_f32(earlier, through, dg, HALF, PREC)
        if ANY:
            dg *= tl.exp2((w.to(tl.float32) - wc.to(tl.float32)) * LOG2E)
        store_tokens(dw_ + part + pk, offk, dg, mtk, EVEN)
        dS = tl.dot(dyt, q0, dS, input_precision=PREC)
        pk -= C * H * K
        pv -= C * H * V
    tl.store(ds0_ + head * (K * V) + sq, dS, mask=msq)
    tl.store(du_ + ((iv * tl.num_programs(2) + tl.program_id(2)) * H + h) * K + ok, du, mask=mk)


@triton.jit
def rwkv6_bwd_kernel(
    r_, k_, v_, w_, u_, seg_, cu_, chunk0_, strong_, dy_, dsT_, states0_, states1_, states2_, states3_, T, span,
    dr_, dk_, dv_, dw_, du_, ds0_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, ARRAYS: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, stretches). dr, dk, dw have a leading axis of value blocks and du those of
    value blocks and stretches, to be summed.
    """
    states = (states0_, states1_, states2_, states3_)
    dr_, dk_, dv_, dw_ = gradients_over_states(states, (dr_, dk_, dv_, dw_), TAKEN)
    if (
        tl.load(strong_ + (0 if VAR else tl.program_id(2) // SPLITS) * H + tl.program_id(1)) != 0
        if ANY
        else False
    ):
        walk_backward(
            r_, k_, v_, w_, u_, seg_, cu_, chunk0_, dy_, dsT_, states, T, span, dr_, dk_, dv_, dw_, du_, ds0_,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, ARRAYS,
        )  # fmt: skip
    else:
        walk_backward(
            r_, k_, v_, w_, u_, seg_, cu_, chunk0_, dy_, dsT_, states, T, span, dr_, dk_, dv_, dw_, du_, ds0_,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, ARRAYS,
        )  # fmt: skip
