"""RWKV-7, chunked forward in Triton: one program walks the chunks of one sequence, head and block of values with the state in registers.

Formulas: with G the log decays summed from the chunk's start (inclusive; Gx exclusive) and S [V, K] the state,
``U = T (A' S + A_ak V)``, ``Y = Q S + A_qk V + A_qb U``, ``S <- (S + V^T K + U^T B) gam`` (fla_jax/ops/xla7.py has them untransposed). The state is held
as [V, K] so that it, V, U and Y are left operands or accumulators of every product and never leave the registers.

Decay factors: with ``ANY = False`` (16 * |w| <= 80) exp(G) and exp(-G) from the chunk's start serve scores and state alike. With ``ANY = True`` rows refer
to the middle of their own block of 8 tokens, columns to both middles: exponents are at most 4 * |LOG_MIN|, whatever the decay.
"""

import triton
import triton.language as tl

from .common import LOG2E, LOG_MIN, C, inverse16, load_tokens, segment_masks, sequence, store_tokens, token_sums


@triton.jit
def factors(w, ANY: tl.constexpr, PREC: tl.constexpr, SCAN: tl.constexpr):
    """Decay factors [16, K] of a chunk with log decays ``w``.

    ``SCAN`` sums with `tl.cumsum`, which is shorter with two warps; else with products. Returns: rows r and a for the scores; columns for the scores of rows
    0..7 and of rows 8..15 (also for the state); rows r and a for the state.
    """
    o = tl.arange(0, 16)
    t, j = o[:, None], o[None, :]
    if SCAN:
        g = w.to(tl.float32) * LOG2E
        G = tl.cumsum(g, 0)
        Gx = G - g
    else:
        G = token_sums(tl.where(j <= t, 1.0, 0.0), w, PREC) * LOG2E
        Gx = token_sums(tl.where(j < t, 1.0, 0.0), w, PREC) * LOG2E
    eq, ea = tl.exp2(G), tl.exp2(Gx)
    if ANY:
        if SCAN:
            g1 = tl.sum(tl.where(t < 4, g, 0.0), 0)[None, :]
            g2 = tl.sum(tl.where(t < 12, g, 0.0), 0)[None, :]
            ref = tl.where(t < 8, g1, g2)
        else:
            ref = token_sums(tl.where(j < tl.where(t < 8, 4, 12), 1.0, 0.0), w, PREC) * LOG2E
            g1 = ref
            g2 = token_sums(tl.where(j < 12, 1.0 + 0.0 * t, 0.0), w, PREC) * LOG2E
        c1 = tl.where(t < 8, tl.exp2(tl.where(t < 8, g1 - G, 0.0)), 0.0)
        return tl.exp2(G - ref), tl.exp2(Gx - ref), c1, tl.exp2(g2 - G), eq, ea
    else:
        c2 = tl.exp2(-G)
        return eq, ea, c2, c2, eq, ea


@triton.jit
def score(rows, cols1, cols2, mask, PREC: tl.constexpr, ANY: tl.constexpr):
    """Masked products [16, 16] of rows and columns, each half of the rows with its own columns."""
    A = tl.dot(rows, tl.trans(cols2), input_precision=PREC)
    if ANY:
        lo = tl.arange(0, 16)[:, None] < 8
        A = tl.where(lo, tl.dot(rows, tl.trans(cols1), input_precision=PREC), A)
    return tl.where(mask, A, 0.0)


@triton.jit
def walk_forward(
    r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, T,
    y_, sT_, states_, inv_, decay_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """All chunks of one sequence, head and block of values."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    iv, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, length, chunk0 = sequence(cu_, chunk0_, row, T, VAR)
    oc, ok, ov = tl.arange(0, 16), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    incl, strict = oc[:, None] >= oc[None, :], oc[:, None] > oc[None, :]
    head = (row * H + h).to(tl.int64)
    sq = ok[None, :] * V + ov[:, None]  # user's states are [K, V]
    msq = mk[None, :] & mv[:, None]
    S = tl.load(s0_ + head * (K * V) + sq, mask=msq, other=0.0).to(tl.float32)
    offk = oc[:, None] * (H * K) + ok[None, :]
    offv = oc[:, None] * (H * V) + ov[None, :]
    offy = oc[None, :] * (H * V) + ov[:, None]
    pk, pv = (first * H + h) * K, (first * H + h) * V
    for n in range(0, tl.cdiv(length, C)):
        left = length - n * C
        m = oc < left
        mtk, mtv = m[:, None] & mk[None, :], m[:, None] & mv[None, :]
        w = load_tokens(w_ + pk, offk, mtk, EVEN)
        r = load_tokens(r_ + pk, offk, mtk, EVEN).to(tl.float32) * SCALE
        k = load_tokens(k_ + pk, offk, mtk, EVEN).to(tl.float32)
        a = load_tokens(a_ + pk, offk, mtk, EVEN).to(tl.float32)
        b = load_tokens(b_ + pk, offk, mtk, EVEN).to(tl.float32)
        v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
        if ANY:
            w = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype)
        rq, ra, c1, c2, eq, ea = factors(w, ANY, PREC, True)
        wf = w.to(tl.float32)
        total = tl.sum(wf, 0)
        if ANY:
            middle = tl.sum(tl.where(oc[:, None] < 12, wf, 0.0), 0)
            pre, post = tl.exp2(middle * LOG2E), tl.exp2((total - middle) * LOG2E)
        else:
            pre, post = tl.exp2(total * LOG2E), tl.exp2(total * LOG2E)
        q1, a1 = (r * rq).to(DOT), (a * ra).to(DOT)
        k2, b2 = (k * c2).to(DOT), (b * c2).to(DOT)
        if ANY:
            k1, b1 = (k * c1).to(DOT), (b * c1).to(DOT)
            q0, a0 = (r * eq).to(DOT), (a * ea).to(DOT)
        else:
            k1, b1, q0, a0 = k2, b2, q1, a1
        seen, below = incl, strict
        if SEG:
            ids, before, last = segment_masks(seg_, first, n * C, left)
            one = ids[:, None] == ids[None, :]
            seen, below = seen & one, below & one
        inv = inverse16(score(a1, b1, b2, below, PREC, ANY), PREC).to(DOT)
        Aak = score(a1, k1, k2, below, PREC, ANY).to(DOT)
        Aqk = score(q1, k1, k2, seen, PREC, ANY).to(DOT)
        Aqb = score(q1, b1, b2, seen, PREC, ANY).to(DOT)
        if SEG:
            start, end = (ids == before)[:, None], (ids == last)[:, None]
            q0, a0 = tl.where(start, q0, 0.0).to(DOT), tl.where(start, a0, 0.0).to(DOT)
            k2, b2 = tl.where(end, k2, 0.0).to(DOT), tl.where(end, b2, 0.0).to(DOT)
        Sd = S.to(DOT)
        if KEEP:
            chunk = (chunk0 + n) * H + h
            tl.store(states_ + chunk * (K * V) + ov[:, None] * K + ok[None, :], Sd.to(states_.dtype.element_ty), mask=msq)
            if iv == 0:
                tl.store(inv_ + chunk * 256 + oc[:, None] * 16 + oc[None, :], inv.to(inv_.dtype.element_ty))
                tl.store(decay_ + chunk * (2 * K) + ok, pre, mask=mk)
                tl.store(decay_ + chunk * (2 * K) + K + ok, post, mask=mk)
        vt = tl.trans(v)
        Z = tl.dot(Sd, tl.trans(a0), input_precision=PREC)
        Z = tl.dot(vt, tl.trans(Aak), Z, input_precision=PREC)
        U = tl.dot(Z.to(DOT), tl.trans(inv), input_precision=PREC).to(DOT)
        Y = tl.dot(Sd, tl.trans(q0), input_precision=PREC)
        Y = tl.dot(vt, tl.trans(Aqk), Y, input_precision=PREC)
        Y = tl.dot(U, tl.trans(Aqb), Y, input_precision=PREC)
        if SEG:
            S = tl.where(before == last, S, 0.0)
        if ANY:
            S *= pre[None, :]
        S = tl.dot(vt, k2, S, input_precision=PREC)
        S = tl.dot(U, b2, S, input_precision=PREC) * post[None, :]
        store_tokens(y_ + pv, offy, Y, m[None, :] & mv[:, None], EVEN)
        pk += C * H * K
        pv += C * H * V
    tl.store(sT_ + head * (K * V) + sq, S, mask=msq)


@triton.jit
def rwkv7_fwd_kernel(
    r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, strong_, T,
    y_, sT_, states_, inv_, decay_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, sequences). ``KEEP`` stores what the backward needs: states entering chunks, inverses, decays.

    With ``ANY``, ``strong_`` [B, H] says which rows and heads need the form for any decay; the others take the bounded one.
    """
    if tl.load(strong_ + (0 if VAR else tl.program_id(2)) * H + tl.program_id(1)) != 0 if ANY else False:
        walk_forward(
            r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, T, y_, sT_, states_, inv_, decay_,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, KEEP,
        )  # fmt: skip
    else:
        walk_forward(
            r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, T, y_, sT_, states_, inv_, decay_,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, KEEP,
        )  # fmt: skip
