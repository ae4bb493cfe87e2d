"""RWKV-6, chunked forward in Triton: one program walks the chunks of one stretch, head and block of values with the state in registers.

``Y = Q S + A V`` with ``A[t, i] = sum_c r_t k_i exp(Gx_t - G_i)`` below the diagonal and ``r_t . (u k_t)`` on it, ``S <- (S + V^T K) gam``; the state is held
as [V, K]. Decay factors as in decay.py: of rows and columns for the scores, of rows for the state.

The transfer kernel runs before the forward where rows are cut into stretches (plan/stretches.py): ``S_out = diag(M) S_in + N``.
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
    token_sums,
)
from ...device.decay import scanned_factors, score
from ...plan.kept_states import state_rows


@triton.jit
def walk_forward(
    r_, k_, v_, w_, u_, s0_, seg_, cu_, chunk0_, T, span,
    y_, sT_, states,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, KEEP: tl.constexpr, ARRAYS: tl.constexpr,
):  # fmt: skip
    """All chunks of one stretch, head and block of values."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    iv, h = tl.program_id(0), tl.program_id(1)
    row, base, first, length, chunk0 = sequence(cu_, chunk0_, T, span, SPLITS, VAR)
    oc, ok, ov = tl.arange(0, 16), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    diagonal, strict = oc[:, None] == oc[None, :], oc[:, None] > oc[None, :]
    head = (tl.program_id(2) * H + h).to(tl.int64)
    sq = ok[None, :] * V + ov[:, None]  # user's states are [K, V]
    msq = mk[None, :] & mv[:, None]
    S = tl.load(s0_ + head * (K * V) + sq, mask=msq, other=0.0).to(tl.float32)
    u = tl.load(u_ + (row * H + h) * K + ok, mask=mk, other=0.0).to(tl.float32)[None, :]
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
        v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
        if ANY:
            w = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype)
        decays, pre, post = scanned_factors(w, ANY)
        _, rx, c1, c2, _, ex = decays
        q1, k2 = (r * rx).to(DOT), (k * c2).to(DOT)
        if ANY:
            k1, q0 = (k * c1).to(DOT), (r * ex).to(DOT)
        else:
            k1, q0 = k2, q1
        below = strict
        if SEG:
            ids, before, last = segment_masks(seg_, base, first + n * C, left)
            below = strict & (ids[:, None] == ids[None, :])
        A = score(q1, k1, k2, below, PREC, ANY)
        A = tl.where(diagonal, tl.sum(r * u * k, 1)[:, None], A).to(DOT)
        if SEG:
            q0 = tl.where((ids == before)[:, None], q0, 0.0).to(DOT)
            k2 = tl.where((ids == last)[:, None], k2, 0.0).to(DOT)
        Sd = S.to(DOT)
        if KEEP:
            chunk = (chunk0 + n) * H + h
            tl.store(
                kept + (chunk * (K * V) if ARRAYS == 0 else pk), Sd.to(states[0].dtype.element_ty), mask=msq
            )
        vt = tl.trans(v)
        Y = tl.dot(Sd, tl.trans(q0), input_precision=PREC)
        Y = tl.dot(vt, tl.trans(A), Y, input_precision=PREC)
        if SEG:
            S = tl.where(before == last, S, 0.0)
        if ANY:
            S *= pre[None, :]
        S = tl.dot(vt, k2, S, input_precision=PREC) * post[None, :]
        store_tokens(y_ + pv, offy, Y, m[None, :] & mv[:, None], EVEN)
        pk += C * H * K
        pv += C * H * V
    tl.store(sT_ + head * (K * V) + sq, S, mask=msq)


@triton.jit
def rwkv6_fwd_kernel(
    r_, k_, v_, w_, u_, s0_, seg_, cu_, chunk0_, strong_, T, span,
    y_, sT_, states0_, states1_, states2_, states3_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    ANY: tl.constexpr, SEG: tl.constexpr, VAR: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, KEEP: tl.constexpr, ARRAYS: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, stretches); ``u_`` [B, H, K]. ``KEEP`` stores what the backward needs: the states entering chunks (plan/kept_states.py).

    With ``ANY``, ``strong_`` [B, H] says which rows and heads need the form for any decay; the others take the bounded one.
    """
    states = (states0_, states1_, states2_, states3_)
    if (
        tl.load(strong_ + (0 if VAR else tl.program_id(2) // SPLITS) * H + tl.program_id(1)) != 0
        if ANY
        else False
    ):
        walk_forward(
            r_, k_, v_, w_, u_, s0_, seg_, cu_, chunk0_, T, span, y_, sT_, states,
            H, K, V, BK, BV, SCALE, HALF, PREC, ANY, SEG, VAR, EVEN, SPLITS, KEEP, ARRAYS,
        )  # fmt: skip
    else:
        walk_forward(
            r_, k_, v_, w_, u_, s0_, seg_, cu_, chunk0_, T, span, y_, sT_, states,
            H, K, V, BK, BV, SCALE, HALF, PREC, False, SEG, VAR, EVEN, SPLITS, KEEP, ARRAYS,
        )  # fmt: skip


@triton.jit
def rwkv6_transfer_kernel(
    r_, k_, v_, w_, seg_, T, span,
    reads_, M_, N_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
    SEG: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, stretches): ``M_`` [B * SPLITS, H, K], ``N_`` [B * SPLITS, H, K, V], ``reads_`` like r; exact at any decay."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    iv, h = tl.program_id(0), tl.program_id(1)
    _, base, first, length, _ = sequence(seg_, seg_, T, span, SPLITS, False)
    oc, ok, ov = tl.arange(0, 16), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    t, j = oc[:, None], oc[None, :]
    earlier, later = tl.where(j < t, 1.0, 0.0), tl.where(j > t, 1.0, 0.0)
    offk = oc[:, None] * (H * K) + ok[None, :]
    offv = oc[:, None] * (H * V) + ov[None, :]
    pk, pv = (first * H + h) * K, (first * H + h) * V
    S, gone = (
        tl.zeros([BV, BK], tl.float32),
        tl.zeros([BK], tl.float32),
    )  # gone: log decays summed since the stretch began
    for n in range(0, tl.cdiv(length, C)):
        left = length - n * C
        m = oc < left
        mtk, mtv = m[:, None] & mk[None, :], m[:, None] & mv[None, :]
        w = load_tokens(w_ + pk, offk, mtk, EVEN)
        w = tl.maximum(w.to(tl.float32), LOG_MIN).to(w.dtype)
        k = load_tokens(k_ + pk, offk, mtk, EVEN).to(tl.float32)
        v = load_tokens(v_ + pv, offv, mtv, EVEN).to(DOT)
        total = tl.sum(w.to(tl.float32), 0)
        kd = k * tl.exp2(token_sums(later, w, PREC) * LOG2E)
        reads = tl.exp2((token_sums(earlier, w, PREC) + gone[None, :]) * LOG2E)
        if SEG:
            ids, before, last = segment_masks(seg_, base, first + n * C, left)
            kd = only(kd, (ids == last)[:, None])
            reads = only(reads, (ids == before)[:, None])
            total = tl.where(before == last, total, float("-inf"))
        if iv == 0:
            r = load_tokens(r_ + pk, offk, mtk, EVEN).to(tl.float32) * SCALE
            store_tokens(reads_ + pk, offk, r * reads, mtk, EVEN)
        S = tl.dot(tl.trans(v), kd.to(DOT), S * tl.exp2(total * LOG2E)[None, :], input_precision=PREC)
        gone += total
        pk += C * H * K
        pv += C * H * V
    head = (tl.program_id(2) * H + h).to(tl.int64)
    tl.store(N_ + head * (K * V) + ok[None, :] * V + ov[:, None], S, mask=mk[None, :] & mv[:, None])
    tl.store(M_ + head * K + ok, tl.exp2(gone * LOG2E), mask=mk)
