"""RWKV-7, chunked forward in Triton: one program walks the chunks of one stretch of tokens, head and block of
values with the state in registers.

Formulas: with G the log decays summed from the chunk's start (inclusive; Gx exclusive) and S [V, K] the
state, ``U = T (A' S + A_ak V)``, ``Y = Q S + A_qk V + A_qb U``, ``S <- (S + V^T K + U^T B) gam``
(fla_jax/ops/rwkv7/chunked.py has them untransposed). The state is held as [V, K] so that it, V, U and Y are
left operands or accumulators of every product and never leave the registers.

The transfer kernel runs before the forward where rows are cut into stretches (plan/stretches.py): the same
walk without v from the identity matrix gives the matrix M of ``S_out = M S_in + N`` and, as its outputs, what
each token reads of S_in; with v from zero it gives N.
"""

import triton
import triton.language as tl

from ...device.common import LOG_MIN, C, inverse16, load_tokens, segment_masks, sequence, store_tokens
from ...device.decay import scanned_factors, score
from ...plan.kept_states import state_rows


@triton.jit
def walk_forward(
    r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, T, span,
    y_, sT_, states, inv_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    KEEP: tl.constexpr, ARRAYS: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, iv, u_, KEEP_U: tl.constexpr,
):  # fmt: skip
    """All chunks of one stretch, head and block of values. Without READ no outputs; without WRITE no v, and
    the state starts as the identity.
    """
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    h = tl.program_id(1)
    _, base, first, length, chunk0 = sequence(cu_, chunk0_, T, span, SPLITS, VAR)
    oc, ok, ov = tl.arange(0, 16), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    incl, strict = oc[:, None] >= oc[None, :], oc[:, None] > oc[None, :]
    head = (tl.program_id(2) * H + h).to(tl.int64)
    sq = ok[None, :] * V + ov[:, None]  # user's states are [K, V]
    msq = mk[None, :] & mv[:, None]
    if not WRITE:
        S = tl.where(ov[:, None] == ok[None, :], 1.0, 0.0)
    elif READ:
        S = tl.load(s0_ + head * (K * V) + sq, mask=msq, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BV, BK], tl.float32)
    offk = oc[:, None] * (H * K) + ok[None, :]
    offv = oc[:, None] * (H * V) + ov[None, :]
    offy = oc[None, :] * (H * V) + ov[:, None]
    pk, pv = (first * H + h) * K, (first * H + h) * V
    if KEEP:
        kept = state_rows(states, ov, H, K, BV, ARRAYS)[:, None] + ok[None, :]
    for n in range(0, tl.cdiv(length, C)):
        left = length - n * C
        m = oc < left
        mtk, mtv = m[:, None] & mk[None, :], m[:, None] & mv[None, :]
        w = load_tokens(w_ + pk, offk, mtk, EVEN)
        r = load_tokens(r_ + pk, offk, mtk, EVEN).to(tl.float32) * SCALE
        k = load_tokens(k_ + pk, offk, mtk, EVEN).to(tl.float32)
        a = load_tokens(a_ + pk, offk, mtk, EVEN).to(tl.float32)
        b = load_tokens(b_ + pk, offk, mtk, EVEN).to(tl.float32)
        if WRITE:
            v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
        if ANY:
            w = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype)
        decays, pre, post = scanned_factors(w, ANY)
        rq, ra, c1, c2, eq, ea = decays
        q1, a1 = (r * rq).to(DOT), (a * ra).to(DOT)
        k2, b2 = (k * c2).to(DOT), (b * c2).to(DOT)
        if ANY:
            k1, b1 = (k * c1).to(DOT), (b * c1).to(DOT)
            q0, a0 = (r * eq).to(DOT), (a * ea).to(DOT)
        else:
            k1, b1, q0, a0 = k2, b2, q1, a1
        seen, below = incl, strict
        if SEG:
            ids, before, last = segment_masks(seg_, base, first + n * C, left)
            one = ids[:, None] == ids[None, :]
            seen, below = seen & one, below & one
        inv = inverse16(score(a1, b1, b2, below, PREC, ANY), PREC).to(DOT)
        if WRITE:
            Aak = score(a1, k1, k2, below, PREC, ANY).to(DOT)
            if READ:
                Aqk = score(q1, k1, k2, seen, PREC, ANY).to(DOT)
        if READ:
            Aqb = score(q1, b1, b2, seen, PREC, ANY).to(DOT)
        if SEG:
            start, end = (ids == before)[:, None], (ids == last)[:, None]
            q0, a0 = tl.where(start, q0, 0.0).to(DOT), tl.where(start, a0, 0.0).to(DOT)
            k2, b2 = tl.where(end, k2, 0.0).to(DOT), tl.where(end, b2, 0.0).to(DOT)
        Sd = S.to(DOT)
        if KEEP:
            chunk = (chunk0 + n) * H + h
            tl.store(
                kept + (chunk * (K * V) if ARRAYS == 0 else pk), Sd.to(states[0].dtype.element_ty), mask=msq
            )
            if iv == 0:
                tl.store(inv_ + chunk * 256 + oc[:, None] * 16 + oc[None, :], inv.to(inv_.dtype.element_ty))
        Z = tl.dot(Sd, tl.trans(a0), input_precision=PREC)
        if WRITE:
            vt = tl.trans(v)
            Z = tl.dot(vt, tl.trans(Aak), Z, input_precision=PREC)
        U = tl.dot(Z.to(DOT), tl.trans(inv), input_precision=PREC).to(DOT)
        if KEEP_U:
            store_tokens(u_ + pv, offy, U, m[None, :] & mv[:, None], EVEN)
        if READ:
            Y = tl.dot(Sd, tl.trans(q0), input_precision=PREC)
            if WRITE:
                Y = tl.dot(vt, tl.trans(Aqk), Y, input_precision=PREC)
            Y = tl.dot(U, tl.trans(Aqb), Y, input_precision=PREC)
            store_tokens(y_ + pv, offy, Y, m[None, :] & mv[:, None], EVEN)
        if SEG:
            S = tl.where(before == last, S, 0.0)
        if ANY:
            S *= pre[None, :]
        if WRITE:
            S = tl.dot(vt, k2, S, input_precision=PREC)
        S = tl.dot(U, b2, S, input_precision=PREC) * post[None, :]
        pk += C * H * K
        pv += C * H * V
    tl.store(sT_ + head * (K * V) + sq, S, mask=msq)


@triton.jit
def rwkv7_fwd_kernel(
    r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, strong_, T, span,
    y_, sT_, states0_, states1_, states2_, states3_, inv_, u_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, KEEP: tl.constexpr, ARRAYS: tl.constexpr,
    KEEP_U: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, stretches). ``KEEP`` stores what the backward needs: states
    (plan/kept_states.py) and inverses; ``KEEP_U`` U, like v.

    With ``ANY``, ``strong_`` [B, H] says which rows and heads need the form for any decay; the others take
    the bounded one.
    """
    iv = tl.program_id(0)
    states = (states0_, states1_, states2_, states3_)
    if (
        tl.load(strong_ + (0 if VAR else tl.program_id(2) // SPLITS) * H + tl.program_id(1)) != 0
        if ANY
        else False
    ):
        walk_forward(
            r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, T, span, y_, sT_, states, inv_,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, KEEP, ARRAYS, True, True, iv, u_, KEEP_U,
        )  # fmt: skip
    else:
        walk_forward(
            r_, w_, k_, v_, a_, b_, s0_, seg_, cu_, chunk0_, T, span, y_, sT_, states, inv_,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, KEEP, ARRAYS, True, True, iv, u_, KEEP_U,
        )  # fmt: skip


@triton.jit
def rwkv7_transfer_kernel(
    r_, w_, k_, v_, a_, b_, seg_, cu_, chunk0_, strong_, T, span,
    reads_, M_, N_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (PARTS blocks of values for N, then blocks of keys for M; heads; stretches): ``M_``
    [B * SPLITS, H, K, K], ``N_`` [.., K, V], ``reads_`` like r.
    """
    iv = tl.program_id(0)
    strong = tl.load(strong_ + (tl.program_id(2) // SPLITS) * H + tl.program_id(1)) != 0 if ANY else False
    if iv < PARTS:
        if strong:
            walk_forward(
                r_, w_, k_, v_, a_, b_, N_, seg_, cu_, chunk0_, T, span, reads_, N_, (N_,), N_,
                H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, False, 0, False, True, iv, N_, False,
            )  # fmt: skip
        else:
            walk_forward(
                r_, w_, k_, v_, a_, b_, N_, seg_, cu_, chunk0_, T, span, reads_, N_, (N_,), N_,
                H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, False, 0, False, True, iv, N_, False,
            )  # fmt: skip
    else:
        if strong:
            walk_forward(
                r_, w_, k_, v_, a_, b_, M_, seg_, cu_, chunk0_, T, span, reads_, M_, (M_,), M_,
                H, K, K, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, False, 0, True, False, iv - PARTS, M_, False,
            )  # fmt: skip
        else:
            walk_forward(
                r_, w_, k_, v_, a_, b_, M_, seg_, cu_, chunk0_, T, span, reads_, M_, (M_,), M_,
                H, K, K, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, False, 0, True, False, iv - PARTS, M_, False,
            )  # fmt: skip
