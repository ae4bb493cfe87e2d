"""RWKV-6, what a stretch of chunks makes of the state that enters it, before the forward walks all stretches
at once: ``S_out = diag(M) S_in + N``, and what each token reads of S_in (plan/stretches.py).
"""

import triton
import triton.language as tl

from ...device.chunk import (
    C,
    Ranges,
    chunk_elements,
    chunk_offsets,
    chunk_segments,
    passing,
    reached,
    reaching,
    sequence,
    spread,
    tile_axes,
    turned,
)
from ...device.decay import LOG2E, LOG_ZERO, at_least
from ...device.products import product, token_sums
from ...device.tokens import load_tokens, only, store_tokens


@triton.jit
def rwkv6_transfer_kernel(r_, k_, v_, w_, seg_, T, span, reads_, M_, N_, mode: tl.constexpr):
    """Grid (value blocks, heads, stretches): ``M_`` [B * splits, H, K], ``N_`` [B * splits, H, K, V],
    ``reads_`` like r; exact at any decay.
    """
    block, h = tl.program_id(0), tl.program_id(1)
    here = sequence(Ranges(seg_, seg_, seg_, T, span, T), mode)
    axes = tile_axes(0, block, mode)
    t, j = axes.token[:, None], axes.token[None, :]
    earlier, later = tl.where(j < t, 1.0, 0.0), tl.where(j > t, 1.0, 0.0)
    up_to = tl.where(j <= t, 1.0, 0.0)
    offsets = chunk_offsets(axes, mode)
    pk, pv = (here.first * mode.H + h) * mode.K, (here.first * mode.H + h) * mode.V
    S = tl.full([mode.BV, mode.BK], 0.0, tl.float32)
    gone = tl.full([mode.BK], 0.0, tl.float32)  # log decays summed since the stretch began
    for n in range(0, tl.cdiv(here.length, C)):
        left = here.length - n * C
        there = chunk_elements(left, axes)
        w = load_tokens(w_ + pk, offsets.spread, spread(there, mode), mode.even)
        w = at_least(w, LOG_ZERO)
        k = load_tokens(k_ + pk, offsets.key, there.key, mode.even).to(tl.float32)
        vt = load_tokens(v_ + pv, offsets.turned, turned(there, axes), mode.even).to(mode.operand)
        total = tl.sum(tl.where(t == C - 1, token_sums(up_to, w, mode, SPREAD=True), 0.0), 0)
        written = k * tl.exp2(token_sums(later, w, mode, SPREAD=True) * LOG2E)
        read = tl.exp2((token_sums(earlier, w, mode, SPREAD=True) + gone[None, :]) * LOG2E)
        if mode.segments:
            segments = chunk_segments(seg_, here, n)
            written, read = only(written, reaching(segments)), only(read, reached(segments))
            total = tl.where(passing(segments), total, float("-inf"))
        if block == 0:
            r = load_tokens(r_ + pk, offsets.key, there.key, mode.even).to(tl.float32) * mode.scale
            store_tokens(reads_ + pk, offsets.key, r * read, there.key, mode.even)
        S = product(vt, written.to(mode.operand), mode, S * tl.exp2(total * LOG2E)[None, :])
        gone += total
        pk += C * mode.H * mode.K
        pv += C * mode.H * mode.V
    head = (tl.program_id(2) * mode.H + h).to(tl.int64)
    there = axes.has_key[None, :] & axes.has_value[:, None]
    at = N_ + head * (mode.K * mode.V) + axes.key[None, :] * mode.V + axes.value[:, None]
    tl.store(at, S, mask=there)
    tl.store(M_ + head * mode.K + axes.key, tl.exp2(gone * LOG2E), mask=axes.has_key)
