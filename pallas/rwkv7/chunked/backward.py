"""RWKV-7, chunked backward in Triton: one program walks the chunks of one stretch, head and block of values in reverse, the state's gradient in registers.

States and inverses T come from the forward; everything else is computed again. With dS the gradient of the state that leaves the chunk,
``dU = A_qb^T dY + B' dS``, ``dZ = T^T dU``, ``dV = A_qk^T dY + K' dS + A_ak^T dZ``, ``dA = (dY, dZ) (V, U)^T``; then rows and columns.
All value-sided tiles are held transposed, [V, 16], as in the forward.

Heads of more than 64 numbers take two kernels, for their tiles do not fit the registers at once: the carry kernel walks only what the next chunk needs (dS,
and dV and dZ with it), with values split over programs, and stores dS by chunk; gradients.py then has programs for every chunk and block of keys.
"""

import triton
import triton.language as tl

from ...device.common import LOG_MIN, C, load_tokens, segment_masks, sequence, store_tokens
from ...device.decay import factors, score
from ...plan.kept_states import gradients_over_states, state_rows
from .gradients import scaled_tokens, token_gradients


@triton.jit
def walk_backward(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, states, inv_, T, span,
    dr_, dw_, dk_, dv_, da_, db_, ds0_, dstates_, dz_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    ARRAYS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """All chunks of one stretch, head and block of values, from the last to the first. Without FUSED only dV, the states' gradients and dZ."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    iv, h = tl.program_id(0), tl.program_id(1)
    _, base, first, length, chunk0 = sequence(cu_, chunk0_, T, span, SPLITS, VAR)
    oc, ok, ov = tl.arange(0, 16), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    t, j = oc[:, None], oc[None, :]
    incl, strict = t >= j, t > j
    head = (tl.program_id(2) * H + h).to(tl.int64)
    sq = ok[None, :] * V + ov[:, None]
    msq = mk[None, :] & mv[:, None]
    dS = tl.load(dsT_ + head * (K * V) + sq, mask=msq, other=0.0).to(tl.float32)
    offk = oc[:, None] * (H * K) + ok[None, :]
    offv = oc[:, None] * (H * V) + ov[None, :]
    offt = oc[None, :] * (H * V) + ov[:, None]
    count = tl.cdiv(length, C)
    pk = ((first + (count - 1) * C) * H + h) * K
    pv = ((first + (count - 1) * C) * H + h) * V
    part = iv.to(tl.int64) * (1 if VAR else tl.num_programs(2) // SPLITS) * T * (H * K)  # of the partial sums
    if FUSED:
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
        a = load_tokens(a_ + pk, offk, mtk, EVEN)
        b = load_tokens(b_ + pk, offk, mtk, EVEN)
        dy = load_tokens(dy_ + pv, offv, mtv, EVEN).to(DOT)
        if FUSED:
            v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
            Sd = tl.load(kept + (chunk * (K * V) if ARRAYS == 0 else pk), mask=msq, other=0.0).to(DOT)
        inv = tl.load(inv_ + chunk * 256 + oc[:, None] * 16 + oc[None, :]).to(DOT)
        wc = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype) if ANY else w
        decays, pre, post = factors(wc, ANY, PREC)
        q0, a0, q1, a1, k1, b1, k2, b2 = scaled_tokens(r, k, a, b, decays, SCALE, DOT, ANY)
        seen, below = incl, strict
        if SEG:
            ids, before, last = segment_masks(seg_, base, first + n * C, left)
            one = ids[:, None] == ids[None, :]
            seen, below = seen & one, below & one
            start, end = (ids == before)[:, None], (ids == last)[:, None]
            q0, a0 = tl.where(start, q0, 0.0).to(DOT), tl.where(start, a0, 0.0).to(DOT)
            ks, bs = tl.where(end, k2, 0.0).to(DOT), tl.where(end, b2, 0.0).to(DOT)
        else:
            ks, bs, start, end = k2, b2, m[:, None], m[:, None]
        Aak = score(a1, k1, k2, below, PREC, ANY).to(DOT)
        Aqk = score(q1, k1, k2, seen, PREC, ANY).to(DOT)
        Aqb = score(q1, b1, b2, seen, PREC, ANY).to(DOT)
        dyt = tl.trans(dy)
        dS *= post[None, :]  # now the gradient of S pre + V^T K + U^T B
        dSd = dS.to(DOT)
        dU = tl.dot(dyt, Aqb, input_precision=PREC)
        dU = tl.dot(dSd, tl.trans(bs), dU, input_precision=PREC)
        dZ = tl.dot(dU.to(DOT), inv, input_precision=PREC).to(DOT)
        dV = tl.dot(dyt, Aqk, input_precision=PREC)
        dV = tl.dot(dSd, tl.trans(ks), dV, input_precision=PREC)
        dV = tl.dot(dZ, Aak, dV, input_precision=PREC)
        store_tokens(dv_ + pv, offt, dV, m[None, :] & mv[:, None], EVEN)
        if FUSED:
            Z = tl.dot(Sd, tl.trans(a0), input_precision=PREC)
            Z = tl.dot(tl.trans(v), tl.trans(Aak), Z, input_precision=PREC)
            U = tl.dot(Z.to(DOT), tl.trans(inv), input_precision=PREC).to(DOT)
        else:
            store_tokens(dz_ + pv, offt, dZ, m[None, :] & mv[:, None], EVEN)
            tl.store(
                dstates_ + chunk * (K * V) + ov[:, None] * K + ok[None, :],
                dSd.to(dstates_.dtype.element_ty),
                mask=msq,
            )
        # the state that passes through
        if ANY:
            dS *= pre[None, :]
        if SEG:
            dS = tl.where(before == last, dS, 0.0)
        if FUSED:
            at = part + pk
            token_gradients(
                (r, k, a, b), decays, (q0, a0, q1, a1, k1, b1, k2, b2), (seen, below, start, end), (v, dy, U, dZ), (Sd, dSd),
                tl.sum(Sd.to(tl.float32) * dS, 0), w.to(tl.float32) - wc.to(tl.float32), (dr_ + at, dw_ + at, dk_ + at, da_ + at, db_ + at), offk, mtk,
                SCALE, HALF, PREC, DOT, ANY, SEG, EVEN,
            )  # fmt: skip
        dS = tl.dot(dyt, q0, dS, input_precision=PREC)
        dS = tl.dot(dZ, a0, dS, input_precision=PREC)
        pk -= C * H * K
        pv -= C * H * V
    tl.store(ds0_ + head * (K * V) + sq, dS, mask=msq)


@triton.jit
def rwkv7_bwd_kernel(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, strong_, dy_, dsT_, states0_, states1_, states2_, states3_, inv_, T, span,
    dr_, dw_, dk_, dv_, da_, db_, ds0_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, ARRAYS: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, stretches). dr, dw, dk, da, db have a leading axis of value blocks, to be summed; ``strong_`` as in the forward."""
    states = (states0_, states1_, states2_, states3_)
    dr_, dk_, da_, db_ = gradients_over_states(states, (dr_, dk_, da_, db_), TAKEN)
    if (
        tl.load(strong_ + (0 if VAR else tl.program_id(2) // SPLITS) * H + tl.program_id(1)) != 0
        if ANY
        else False
    ):
        walk_backward(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, states, inv_, T, span, dr_, dw_, dk_, dv_, da_, db_, ds0_, ds0_, ds0_,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, ARRAYS, True,
        )  # fmt: skip
    else:
        walk_backward(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, states, inv_, T, span, dr_, dw_, dk_, dv_, da_, db_, ds0_, ds0_, ds0_,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, ARRAYS, True,
        )  # fmt: skip


@triton.jit
def rwkv7_carry_kernel(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, strong_, dy_, dsT_, inv_, T, span,
    dv_, ds0_, dstates_, dz_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, stretches): dV, dZ like it, and in ``dstates_`` [.., V, K] the gradients of the states before their last decay."""
    if (
        tl.load(strong_ + (0 if VAR else tl.program_id(2) // SPLITS) * H + tl.program_id(1)) != 0
        if ANY
        else False
    ):
        walk_backward(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, (inv_,), inv_, T, span, dv_, dv_, dv_, dv_, dv_, dv_, ds0_, dstates_, dz_,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, 0, False,
        )  # fmt: skip
    else:
        walk_backward(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, (inv_,), inv_, T, span, dv_, dv_, dv_, dv_, dv_, dv_, ds0_, dstates_, dz_,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, 0, False,
        )  # fmt: skip
