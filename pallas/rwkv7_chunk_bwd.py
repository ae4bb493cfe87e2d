"""RWKV-7, chunked backward in Triton: one program walks the chunks of one sequence, head and block of values in reverse, the state's gradient in registers.

States, inverses T and whole-chunk decays come from the forward; everything else is computed again. With dS the gradient of the state that leaves the chunk,
``dU = A_qb^T dY + B' dS``, ``dZ = T^T dU``, ``dV = A_qk^T dY + K' dS + A_ak^T dZ``, ``dA = (dY, dZ) (V, U)^T``; then rows and columns.
All value-sided tiles are held transposed, [V, 16], as in the forward.

The gradient of the log decay adds only terms that contain the decay in question: rows through the entering state count for the tokens up to them, columns
through the leaving state for the tokens after them; pairs inside the chunk as row terms minus column terms from token j on, both from the same rounded
factors, so that what cancels, cancels to float32 rounding. In the form for any decay the pairs that are not decayed at all (r with its own token, a with the
one before) are taken apart, and a log decay that was clamped at LOG_MIN gets its true factor back.
"""

import triton
import triton.language as tl

from .common import LOG2E, LOG_MIN, C, load_tokens, only, segment_masks, sequence, store_tokens, token_sums_f32
from .decay import factors, score


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
def walk_backward(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, states_, inv_, decay_, T,
    dr_, dw_, dk_, dv_, da_, db_, ds0_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """All chunks of one sequence, head and block of values, from the last to the first."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    iv, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, length, chunk0 = sequence(cu_, chunk0_, row, T, VAR)
    oc, ok, ov = tl.arange(0, 16), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    t, j = oc[:, None], oc[None, :]
    incl, strict = t >= j, t > j
    from_here = tl.where(j >= t, 1.0, 0.0)  # token sums over the tokens from t on
    later = tl.where(j > t, 1.0, 0.0)
    earlier = tl.where(j < t, 1.0, 0.0)
    head = (row * H + h).to(tl.int64)
    sq = ok[None, :] * V + ov[:, None]
    msq = mk[None, :] & mv[:, None]
    dS = tl.load(dsT_ + head * (K * V) + sq, mask=msq, other=0.0).to(tl.float32)
    offk = oc[:, None] * (H * K) + ok[None, :]
    offv = oc[:, None] * (H * V) + ov[None, :]
    offt = oc[None, :] * (H * V) + ov[:, None]
    count = tl.cdiv(length, C)
    pk = ((first + (count - 1) * C) * H + h) * K
    pv = ((first + (count - 1) * C) * H + h) * V
    part = iv.to(tl.int64) * (1 if VAR else tl.num_programs(2)) * T * (H * K)  # of the partial sums
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
        v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
        dy = load_tokens(dy_ + pv, offv, mtv, EVEN).to(DOT)
        Sd = tl.load(states_ + chunk * (K * V) + ov[:, None] * K + ok[None, :], mask=msq, other=0.0).to(DOT)
        inv = tl.load(inv_ + chunk * 256 + oc[:, None] * 16 + oc[None, :]).to(DOT)
        pre = tl.load(decay_ + chunk * (2 * K) + ok, mask=mk, other=1.0)
        post = tl.load(decay_ + chunk * (2 * K) + K + ok, mask=mk, other=1.0)
        wc = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype) if ANY else w
        rq, ra, c1, c2, eq, ea = factors(wc, ANY, PREC, False)
        q1, a1 = (r.to(tl.float32) * SCALE * rq).to(DOT), (a.to(tl.float32) * ra).to(DOT)
        k2, b2 = (k.to(tl.float32) * c2).to(DOT), (b.to(tl.float32) * c2).to(DOT)
        if ANY:
            k1, b1 = (k.to(tl.float32) * c1).to(DOT), (b.to(tl.float32) * c1).to(DOT)
            q0, a0 = (r.to(tl.float32) * SCALE * eq).to(DOT), (a.to(tl.float32) * ea).to(DOT)
        else:
            k1, b1, q0, a0 = k2, b2, q1, a1
        seen, below = incl, strict
        if SEG:
            ids, before, last = segment_masks(seg_, first, n * C, left)
            one = ids[:, None] == ids[None, :]
            seen, below = seen & one, below & one
            start, end = (ids == before)[:, None], (ids == last)[:, None]
            q0, a0 = tl.where(start, q0, 0.0).to(DOT), tl.where(start, a0, 0.0).to(DOT)
            ks, bs = tl.where(end, k2, 0.0).to(DOT), tl.where(end, b2, 0.0).to(DOT)
        else:
            ks, bs = k2, b2
        Aak = score(a1, k1, k2, below, PREC, ANY).to(DOT)
        Aqk = score(q1, k1, k2, seen, PREC, ANY).to(DOT)
        Aqb = score(q1, b1, b2, seen, PREC, ANY).to(DOT)
        vt, dyt = tl.trans(v), tl.trans(dy)
        Z = tl.dot(Sd, tl.trans(a0), input_precision=PREC)
        Z = tl.dot(vt, tl.trans(Aak), Z, input_precision=PREC)
        U = tl.dot(Z.to(DOT), tl.trans(inv), input_precision=PREC).to(DOT)
        dS *= post[None, :]  # now the gradient of S pre + V^T K + U^T B
        dSd = dS.to(DOT)
        dU = tl.dot(dyt, Aqb, input_precision=PREC)
        dU = tl.dot(dSd, tl.trans(bs), dU, input_precision=PREC)
        dZ = tl.dot(dU.to(DOT), inv, input_precision=PREC).to(DOT)
        dV = tl.dot(dyt, Aqk, input_precision=PREC)
        dV = tl.dot(dSd, tl.trans(ks), dV, input_precision=PREC)
        dV = tl.dot(dZ, Aak, dV, input_precision=PREC)
        store_tokens(dv_ + pv, offt, dV, m[None, :] & mv[:, None], EVEN)

        Ut, dZt = tl.trans(U), tl.trans(dZ)
        dAqk, dAqb = tl.dot(dy, vt, input_precision=PREC), tl.dot(dy, U, input_precision=PREC)
        dAak, dAab = tl.dot(dZt, vt, input_precision=PREC), tl.dot(dZt, U, input_precision=PREC)
        dAqk, dAqb, dAak, dAab = only(dAqk, seen).to(DOT), only(dAqb, seen).to(DOT), only(dAak, below).to(DOT), only(dAab, below).to(DOT)
        if ANY:  # pairs that are not decayed at all apart: their size must not drown the rest of dw
            nqk, nqb, nak, nab = only(dAqk, t == j), only(dAqb, t == j), only(dAak, t == j + 1), only(dAab, t == j + 1)
            dAqk, dAqb, dAak, dAab = only(dAqk, t > j), only(dAqb, t > j), only(dAak, t > j + 1), only(dAab, t > j + 1)
            kd, bd, rd, ad = k.to(DOT), b.to(DOT), r.to(DOT), a.to(DOT)

        # rows: through the state (xs, ys), then with the pairs of the chunk
        xs, ys = tl.dot(dy, Sd, input_precision=PREC), tl.dot(dZt, Sd, input_precision=PREC)
        zero = tl.zeros([16, BK], tl.float32)
        if ANY:
            if SEG:
                xs, ys = tl.where(start, xs, 0.0), tl.where(start, ys, 0.0)
            xi = row_gradient(dAqk, dAqb, k1, b1, k2, b2, zero, PREC, ANY)
            yi = row_gradient(dAak, dAab, k1, b1, k2, b2, zero, PREC, ANY)
            acc = q0.to(tl.float32) * xs + q1.to(tl.float32) * xi
            y = a0.to(tl.float32) * ys + a1.to(tl.float32) * yi
            dr = eq * xs + rq * xi + row_gradient(nqk, nqb, kd, bd, kd, bd, zero, PREC, False)
            da = ea * ys + ra * yi + row_gradient(nak, nab, kd, bd, kd, bd, zero, PREC, False)
        else:
            if SEG:
                xs, ys = tl.where(start, xs, 0.0), tl.where(start, ys, 0.0)
            xi = row_gradient(dAqk, dAqb, k1, b1, k2, b2, xs, PREC, ANY)
            yi = row_gradient(dAak, dAab, k1, b1, k2, b2, ys, PREC, ANY)
            acc, y = q1.to(tl.float32) * xi, a1.to(tl.float32) * yi
            dr, da = rq * xi, ra * yi
        store_tokens(dr_ + part + pk, offk, dr * SCALE, mtk, EVEN)
        store_tokens(da_ + part + pk, offk, da, mtk, EVEN)
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
            dk += tl.dot(tl.trans(nqk), rd, input_precision=PREC) * SCALE + tl.dot(tl.trans(nak), ad, input_precision=PREC)
            db += tl.dot(tl.trans(nqb), rd, input_precision=PREC) * SCALE + tl.dot(tl.trans(nab), ad, input_precision=PREC)
        store_tokens(dk_ + part + pk, offk, dk, mtk, EVEN)
        store_tokens(db_ + part + pk, offk, db, mtk, EVEN)

        # the state that passes through
        if ANY:
            dS *= pre[None, :]
        if SEG:
            dS = tl.where(before == last, dS, 0.0)
        dg = tl.sum(Sd.to(tl.float32) * dS, 0)[None, :] + tl.zeros([16, BK], tl.float32)
        if ANY:
            dg = token_sums_f32(later, y, dg, HALF, PREC)
        else:
            dg -= y
        dg = token_sums_f32(from_here, acc, dg, HALF, PREC)
        dg = token_sums_f32(earlier, through, dg, HALF, PREC)
        if ANY:
            dg *= tl.exp2((w.to(tl.float32) - wc.to(tl.float32)) * LOG2E)
        store_tokens(dw_ + part + pk, offk, dg, mtk, EVEN)
        dS = tl.dot(dyt, q0, dS, input_precision=PREC)
        dS = tl.dot(dZ, a0, dS, input_precision=PREC)
        pk -= C * H * K
        pv -= C * H * V
    tl.store(ds0_ + head * (K * V) + sq, dS, mask=msq)


@triton.jit
def rwkv7_bwd_kernel(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, strong_, dy_, dsT_, states_, inv_, decay_, T,
    dr_, dw_, dk_, dv_, da_, db_, ds0_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, sequences). dr, dw, dk, da, db have a leading axis of value blocks, to be summed; ``strong_`` as in the forward."""
    if tl.load(strong_ + (0 if VAR else tl.program_id(2)) * H + tl.program_id(1)) != 0 if ANY else False:
        walk_backward(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, states_, inv_, decay_, T, dr_, dw_, dk_, dv_, da_, db_, ds0_,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN,
        )  # fmt: skip
    else:
        walk_backward(
            r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, dy_, dsT_, states_, inv_, decay_, T, dr_, dw_, dk_, dv_, da_, db_, ds0_,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN,
        )  # fmt: skip
