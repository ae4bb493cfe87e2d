"""RWKV-7, chunked backward in Triton: the gradients of r, w, k, a, b of one chunk from the states and their gradients at its ends.

The gradient of the log decay adds only terms that contain the decay in question: rows through the entering state count for the tokens up to them, columns
through the leaving state for the tokens after them; pairs inside the chunk as row terms minus column terms from token j on, both from the same rounded
factors, so that what cancels, cancels to float32 rounding. In the form for any decay the pairs that are not decayed at all (r with its own token, a with the
one before) are taken apart, and a log decay that was clamped at LOG_MIN gets its true factor back.
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
from ...device.decay import factors


@triton.jit
def row_gradient(dk, db, k1, b1, k2, b2, acc, PREC: tl.constexpr, ANY: tl.constexpr):
    """``acc`` + dA times the columns [16, K], each half of the rows with its own columns."""
    hi = tl.dot(db, b2, tl.dot(dk, k2, acc, input_precision=PREC), input_precision=PREC)
    if ANY:
        lo = tl.dot(db, b1, tl.dot(dk, k1, acc, input_precision=PREC), input_precision=PREC)
        return tl.where(tl.arange(0, 16)[:, None] < 8, lo, hi)
    else:
        return hi


@triton.jit
def col_gradient(dq, da, q, a, first_half: tl.constexpr, PREC: tl.constexpr, ANY: tl.constexpr):
    """dA^T times the rows [16, K]: of tokens 0..7 or 8..15 with ``ANY``, else of all."""
    if ANY:
        lo = tl.arange(0, 16)[:, None] < 8
        keep = lo if first_half else (tl.arange(0, 16)[:, None] >= 8)
        dq, da = tl.where(keep, dq, 0.0).to(dq.dtype), tl.where(keep, da, 0.0).to(da.dtype)
    x = tl.dot(tl.trans(dq), q, input_precision=PREC)
    return tl.dot(tl.trans(da), a, x, input_precision=PREC)


@triton.jit
def scaled_tokens(r, k, a, b, decays, SCALE: tl.constexpr, DOT: tl.constexpr, ANY: tl.constexpr):
    """Rows q, a and columns k, b times their decay factors: rows for the state, rows for the scores, columns for rows 0..7, columns for rows 8..15."""
    rq, ra, c1, c2, eq, ea = decays
    q1, a1 = (r.to(tl.float32) * SCALE * rq).to(DOT), (a.to(tl.float32) * ra).to(DOT)
    k2, b2 = (k.to(tl.float32) * c2).to(DOT), (b.to(tl.float32) * c2).to(DOT)
    if ANY:
        k1, b1 = (k.to(tl.float32) * c1).to(DOT), (b.to(tl.float32) * c1).to(DOT)
        q0, a0 = (r.to(tl.float32) * SCALE * eq).to(DOT), (a.to(tl.float32) * ea).to(DOT)
    else:
        k1, b1, q0, a0 = k2, b2, q1, a1
    return q0, a0, q1, a1, k1, b1, k2, b2


@triton.jit
def token_gradients(
    tokens, decays, scaled, masks, values, states, passed, clamped, pointers, offk, mtk,
    SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr, DOT: tl.constexpr, ANY: tl.constexpr, SEG: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stores dr, dw, dk, da, db [16, K] of one chunk.

    ``values``: v, dY [16, V], U, dZ [V, 16]; ``states``: S, dS [V, K] of the entering state and of ``S pre + V^T K + U^T B``; ``passed`` [K]: what reaches
    every decay through the state that passes the chunk; ``clamped``: logs that LOG_MIN cut off.
    """
    r, k, a, b = tokens
    rq, ra, c1, c2, eq, ea = decays
    q0, a0, q1, a1, k1, b1, k2, b2 = scaled
    seen, below, start, end = masks
    v, dy, U, dZ = values
    Sd, dSd = states
    dr_, dw_, dk_, da_, db_ = pointers
    oc = tl.arange(0, 16)
    t, j = oc[:, None], oc[None, :]
    from_here = tl.where(j >= t, 1.0, 0.0)  # token sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    vt, Ut, dZt = tl.trans(v), tl.trans(U), tl.trans(dZ)
    dAqk, dAqb = tl.dot(dy, vt, input_precision=PREC), tl.dot(dy, U, input_precision=PREC)
    dAak, dAab = tl.dot(dZt, vt, input_precision=PREC), tl.dot(dZt, U, input_precision=PREC)
    dAqk, dAqb, dAak, dAab = (
        only(dAqk, seen).to(DOT),
        only(dAqb, seen).to(DOT),
        only(dAak, below).to(DOT),
        only(dAab, below).to(DOT),
    )
    if ANY:  # pairs that are not decayed at all apart: their size must not drown the rest of dw
        nqk, nqb, nak, nab = (
            only(dAqk, t == j),
            only(dAqb, t == j),
            only(dAak, t == j + 1),
            only(dAab, t == j + 1),
        )
        dAqk, dAqb, dAak, dAab = (
            only(dAqk, t > j),
            only(dAqb, t > j),
            only(dAak, t > j + 1),
            only(dAab, t > j + 1),
        )
        kd, bd, rd, ad = k.to(DOT), b.to(DOT), r.to(DOT), a.to(DOT)

    # rows: through the state (xs, ys), then with the pairs of the chunk
    xs, ys = tl.dot(dy, Sd, input_precision=PREC), tl.dot(dZt, Sd, input_precision=PREC)
    if SEG:
        xs, ys = tl.where(start, xs, 0.0), tl.where(start, ys, 0.0)
    if ANY:
        zero = tl.zeros(k.shape, tl.float32)
        xi = row_gradient(dAqk, dAqb, k1, b1, k2, b2, zero, PREC, ANY)
        yi = row_gradient(dAak, dAab, k1, b1, k2, b2, zero, PREC, ANY)
        acc = q0.to(tl.float32) * xs + q1.to(tl.float32) * xi
        y = a0.to(tl.float32) * ys + a1.to(tl.float32) * yi
        dr = eq * xs + rq * xi + row_gradient(nqk, nqb, kd, bd, kd, bd, zero, PREC, False)
        da = ea * ys + ra * yi + row_gradient(nak, nab, kd, bd, kd, bd, zero, PREC, False)
    else:
        xi = row_gradient(dAqk, dAqb, k1, b1, k2, b2, xs, PREC, ANY)
        yi = row_gradient(dAak, dAab, k1, b1, k2, b2, ys, PREC, ANY)
        acc, y = q1.to(tl.float32) * xi, a1.to(tl.float32) * yi
        dr, da = rq * xi, ra * yi
    store_tokens(dr_, offk, dr * SCALE, mtk, EVEN)
    store_tokens(da_, offk, da, mtk, EVEN)
    if not ANY:
        acc += y

    # columns: pairs of the chunk, then through the state
    zk, zb = tl.dot(v, dSd, input_precision=PREC), tl.dot(Ut, dSd, input_precision=PREC)
    if SEG:
        zk, zb = tl.where(end, zk, 0.0), tl.where(end, zb, 0.0)
    through = k2.to(tl.float32) * zk + b2.to(tl.float32) * zb
    xi = col_gradient(dAqk, dAak, q1, a1, False, PREC, ANY)
    acc -= k2.to(tl.float32) * xi
    dk = c2 * (xi + zk)
    xi = col_gradient(dAqb, dAab, q1, a1, False, PREC, ANY)
    acc -= b2.to(tl.float32) * xi
    db = c2 * (xi + zb)
    if ANY:
        xi = col_gradient(dAqk, dAak, q1, a1, True, PREC, ANY)
        acc -= k1.to(tl.float32) * xi
        dk += c1 * xi
        xi = col_gradient(dAqb, dAab, q1, a1, True, PREC, ANY)
        acc -= b1.to(tl.float32) * xi
        db += c1 * xi
        dk += tl.dot(tl.trans(nqk), rd, input_precision=PREC) * SCALE + tl.dot(
            tl.trans(nak), ad, input_precision=PREC
        )
        db += tl.dot(tl.trans(nqb), rd, input_precision=PREC) * SCALE + tl.dot(
            tl.trans(nab), ad, input_precision=PREC
        )
    store_tokens(dk_, offk, dk, mtk, EVEN)
    store_tokens(db_, offk, db, mtk, EVEN)

    dg = passed[None, :] + tl.zeros(k.shape, tl.float32)
    if ANY:
        dg = token_sums_f32(later, y, dg, HALF, PREC)
    else:
        dg -= y
    dg = token_sums_f32(from_here, acc, dg, HALF, PREC)
    dg = token_sums_f32(earlier, through, dg, HALF, PREC)
    if ANY:
        dg *= tl.exp2(clamped * LOG2E)
    store_tokens(dw_, offk, dg, mtk, EVEN)


@triton.jit
def chunk_gradients(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, u_, dz_, states_, dstates_, T, span,
    dr_, dw_, dk_, da_, db_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One chunk and block of keys; BK is the block's size here."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    n, h = tl.program_id(0) // BLOCKS, tl.program_id(1)
    _, base, first, length, chunk0 = sequence(cu_, chunk0_, T, span, SPLITS, VAR)
    left = length - n * C
    if left > 0:
        oc, ok, ov = tl.arange(0, 16), (tl.program_id(0) % BLOCKS) * BK + tl.arange(0, BK), tl.arange(0, BV)
        mk, mv, m = ok < K, ov < V, oc < left
        mtk, mtv = m[:, None] & mk[None, :], m[:, None] & mv[None, :]
        offk, offv = oc[:, None] * (H * K) + ok[None, :], oc[:, None] * (H * V) + ov[None, :]
        pk, pv = ((first + n * C) * H + h) * K, ((first + n * C) * H + h) * V
        chunk = (chunk0 + n) * H + h
        w = load_tokens(w_ + pk, offk, mtk, EVEN)
        r = load_tokens(r_ + pk, offk, mtk, EVEN)
        k = load_tokens(k_ + pk, offk, mtk, EVEN)
        a = load_tokens(a_ + pk, offk, mtk, EVEN)
        b = load_tokens(b_ + pk, offk, mtk, EVEN)
        v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
        dy = load_tokens(dy_ + pv, offv, mtv, EVEN).to(DOT)
        U = tl.trans(load_tokens(u_ + pv, offv, mtv, EVEN).to(DOT))
        dZ = tl.trans(load_tokens(dz_ + pv, offv, mtv, EVEN).to(DOT))
        at = chunk * (K * V) + ov[:, None] * K + ok[None, :]
        Sd = tl.load(states_ + at, mask=mv[:, None] & mk[None, :], other=0.0)
        dS = tl.load(dstates_ + at, mask=mv[:, None] & mk[None, :], other=0.0)
        wc = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype) if ANY else w
        decays, pre, _post = factors(wc, ANY, PREC)  # dstates have the latter in them
        q0, a0, q1, a1, k1, b1, k2, b2 = scaled_tokens(r, k, a, b, decays, SCALE, DOT, ANY)
        seen, below = oc[:, None] >= oc[None, :], oc[:, None] > oc[None, :]
        start, end = m[:, None], m[:, None]
        passed = tl.sum(Sd.to(tl.float32) * dS.to(tl.float32), 0)
        if ANY:
            passed *= pre
        if SEG:
            ids, before, last = segment_masks(seg_, base, first + n * C, left)
            one = ids[:, None] == ids[None, :]
            seen, below = seen & one, below & one
            start, end = (ids == before)[:, None], (ids == last)[:, None]
            q0, a0 = only(q0, start), only(a0, start)
            passed = tl.where(before == last, passed, 0.0)
        token_gradients(
            (r, k, a, b), decays, (q0, a0, q1, a1, k1, b1, k2, b2), (seen, below, start, end), (v, dy, U, dZ), (Sd.to(DOT), dS.to(DOT)), passed,
            w.to(tl.float32) - wc.to(tl.float32), (dr_ + pk, dw_ + pk, dk_ + pk, da_ + pk, db_ + pk), offk, mtk,
            SCALE, HALF, PREC, DOT, ANY, SEG, EVEN,
        )  # fmt: skip


@triton.jit
def rwkv7_gradients_kernel(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, strong_, dy_, u_, dz_, states_, dstates_, T, span,
    dr_, dw_, dk_, da_, db_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (chunks times blocks of keys, heads, stretches), for large heads: after the carry kernel has stored dZ and the gradients of the states."""
    if (
        tl.load(strong_ + (0 if VAR else tl.program_id(2) // SPLITS) * H + tl.program_id(1)) != 0
        if ANY
        else False
    ):
        chunk_gradients(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, u_, dz_, states_, dstates_, T, span, dr_, dw_, dk_, da_, db_,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, BLOCKS,
        )  # fmt: skip
    else:
        chunk_gradients(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, u_, dz_, states_, dstates_, T, span, dr_, dw_, dk_, da_, db_,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, BLOCKS,
        )  # fmt: skip
