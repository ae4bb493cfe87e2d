"""RWKV-6, chunked forward in Triton: one program walks the chunks of one stretch, head and block of values
with the state in registers.

``Y = Q S + A V`` with ``A[t, i] = sum_c r_t k_i exp(Gx_t - G_i)`` below the diagonal and ``r_t . (u k_t)`` on
it, ``S <- (S pre + V^T K) post``; the state is held as [V, K]. docs/maths.md, section 2, derives it;
device/decay.py has the decay factors.
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
    form_of,
    in_form,
    load_state,
    masked,
    needs_any_decay,
    passing,
    reached,
    reaching,
    sequence,
    spread,
    state_tile,
    store_state,
    tile_axes,
    together,
    turned,
)
from ...device.decay import factors, scanned_factors, score
from ...device.kept_states import state_place, state_rows
from ...device.products import product
from ...device.tokens import load_tokens, store_tokens
from .tokens import Tokens, scaled_tokens


@triton.jit
def walk_forward(
    tokens, s0_, ranges, y_, sT_, states, mode: tl.constexpr, KEEP: tl.constexpr, ARRAYS: tl.constexpr
):
    """All chunks of one stretch, head and block of values."""
    block, h = tl.program_id(0), tl.program_id(1)
    here = sequence(ranges, mode)
    axes = tile_axes(0, block, mode)
    diagonal = axes.token[:, None] == axes.token[None, :]
    strict = axes.token[:, None] > axes.token[None, :]
    head, tile = (tl.program_id(2) * mode.H + h).to(tl.int64), state_tile(axes, mode)
    S, count = load_state(s0_, head, tile, ranges.form, mode), tl.cdiv(here.length, C)
    S = tl.where(count > 0, S, S * in_form(ranges.form, mode, True))
    u = tl.load(tokens.u_ + (here.row * mode.H + h) * mode.K + axes.key, mask=axes.has_key, other=0.0)
    u = u.to(tl.float32)[None, :]
    offsets = chunk_offsets(axes, mode)
    pk, pv = (here.first * mode.H + h) * mode.K, (here.first * mode.H + h) * mode.V
    if KEEP:
        kept = state_rows(states, 0, axes, mode, ARRAYS)
    for n in range(0, count):
        left = here.length - n * C
        there = chunk_elements(left, axes)
        if mode.any_decay:
            w = load_tokens(tokens.w_ + pk, offsets.spread, spread(there, mode), mode.even)
        else:
            w = load_tokens(tokens.w_ + pk, offsets.key, there.key, mode.even)
        r = load_tokens(tokens.r_ + pk, offsets.key, there.key, mode.even).to(tl.float32) * mode.scale
        k = load_tokens(tokens.k_ + pk, offsets.key, there.key, mode.even).to(tl.float32)
        vt = load_tokens(tokens.v_ + pv, offsets.turned, turned(there, axes), mode.even).to(mode.operand)
        last = n + 1 == count
        decays = (
            factors(w, ranges.form, mode, DELTA=False, SPREAD=True)
            if mode.any_decay
            else scanned_factors(w, ranges.form, last)
        )
        scaled = scaled_tokens(r, k, decays, mode)
        below = strict
        if mode.segments:
            segments = chunk_segments(ranges.seg_, here, n)
            below = together(segments, strict)
        A = score(scaled.r, scaled.k, below, mode, EXCL=1)
        A = tl.where(diagonal, tl.sum(r * u * k, 1)[:, None], A).to(mode.operand)
        read, written = scaled.r.state, scaled.k.high
        if mode.segments:
            written = masked(written, reaching(segments), segments)
        state = S.to(mode.operand)
        if KEEP:
            place = state_place(ranges, here, n, pk, mode, ARRAYS, 1)
            tl.store(kept + place, state.to(states[0].dtype.element_ty), mask=tile.there)
        Y = product(state, tl.trans(read), mode)
        if mode.segments:
            Y = masked(Y, tl.trans(reached(segments)), segments)
        Y = product(vt, tl.trans(A), mode, Y)
        if mode.segments:
            S = masked(S, passing(segments), segments)
        if mode.any_decay:
            S *= decays.pre[None, :]
        S = product(vt, written, mode, S) * decays.post[None, :]
        store_tokens(y_ + pv, offsets.turned, Y, turned(there, axes), mode.even)
        pk += C * mode.H * mode.K
        pv += C * mode.H * mode.V
    store_state(sT_, head, S, tile, ranges.form, mode)


@triton.jit
def rwkv6_fwd_kernel(
    r_,
    k_,
    v_,
    w_,
    u_,
    s0_,
    seg_,
    cu_,
    chunk0_,
    any_decay_,
    T,
    span,
    y_,
    sT_,
    states0_,
    states1_,
    states2_,
    states3_,
    mode: tl.constexpr,
    KEEP: tl.constexpr,
    ARRAYS: tl.constexpr,
):
    """Grid (value blocks, heads, stretches or packed sequences).

    ``KEEP`` stores what the backward needs: the states that enter chunks, in ``ARRAYS`` arrays
    (plan/kept_states.py). Where the mode allows any decay, ``any_decay_`` [B, H] says which rows and heads
    need that form; the others take the bounded one.
    """
    form = form_of(any_decay_, tl.program_id(2), mode)
    tokens, ranges = Tokens(r_, k_, v_, w_, u_), Ranges(seg_, cu_, chunk0_, T, span, form)
    states = (states0_, states1_, states2_, states3_)
    if needs_any_decay(form, mode):
        walk_forward(tokens, s0_, ranges, y_, sT_, states, mode=mode, KEEP=KEEP, ARRAYS=ARRAYS)
    else:
        walk_forward(tokens, s0_, ranges, y_, sT_, states, mode=bounded(mode), KEEP=KEEP, ARRAYS=ARRAYS)
