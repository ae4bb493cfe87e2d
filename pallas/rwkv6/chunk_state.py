"""RWKV-6, what a stretch of chunks makes of the state that enters it, before the forward walks all stretches
at once: ``S_out = diag(M) S_in + N``, and what each token reads of S_in (common/state_passing_host.py).
"""

import triton
import triton.language as tl

from ..common.chunk import (
    C,
    Index,
    batched16_mask,
    chunk_mask,
    chunk_segments,
    does_h0_reach_ht,
    program_split,
    tile_axes,
    token_offsets,
    tokens_reaching_ht,
    tokens_seeing_h0,
    transposed_mask,
)
from ..common.decay import LOG2E, LOG_ZERO, at_least
from ..common.dots import dot, token_sums
from ..common.token_tiles import load_tokens, store_tokens, where_or_zero


@triton.jit
def rwkv6_chunk_state_kernel(
    r_, k_, v_, w_, segment_bits_, T, split_len, q_entry_, transition_, update_, c: tl.constexpr
):
    """Grid (value blocks, heads, stretches): ``M_`` [B * splits, H, K], ``N_`` [B * splits, H, K, V],
    ``reads_`` like r; exact at any decay.
    """
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(Index(segment_bits_, segment_bits_, segment_bits_, T, split_len, T), c)
    axes = tile_axes(0, block, c)
    t, j = axes.token[:, None], axes.token[None, :]
    earlier, later = tl.where(j < t, 1.0, 0.0), tl.where(j > t, 1.0, 0.0)
    up_to = tl.where(j <= t, 1.0, 0.0)
    offsets = token_offsets(axes, c)
    pk, pv = (split.first * c.H + i_h) * c.K, (split.first * c.H + i_h) * c.V
    h = tl.full([c.BV, c.BK], 0.0, tl.float32)
    gone = tl.full([c.BK], 0.0, tl.float32)  # log decays summed since the stretch began
    for n in range(0, tl.cdiv(split.length, C)):
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        w = load_tokens(w_ + pk, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        w = at_least(w, LOG_ZERO)
        k = load_tokens(k_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32)
        vt = load_tokens(v_ + pv, offsets.transposed, transposed_mask(mask, axes), c.unmasked).to(c.operand)
        total = tl.sum(tl.where(t == C - 1, token_sums(up_to, w, c, BATCHED16=True), 0.0), 0)
        written = k * tl.exp2(token_sums(later, w, c, BATCHED16=True) * LOG2E)
        read = tl.exp2((token_sums(earlier, w, c, BATCHED16=True) + gone[None, :]) * LOG2E)
        if c.segments:
            segments = chunk_segments(segment_bits_, split, n)
            written, read = (
                where_or_zero(written, tokens_reaching_ht(segments)),
                where_or_zero(read, tokens_seeing_h0(segments)),
            )
            total = tl.where(does_h0_reach_ht(segments), total, float("-inf"))
        if block == 0:
            r = load_tokens(r_ + pk, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
            store_tokens(q_entry_ + pk, offsets.key, r * read, mask.key, c.unmasked)
        h = dot(vt, written.to(c.operand), c, h * tl.exp2(total * LOG2E)[None, :])
        gone += total
        pk += C * c.H * c.K
        pv += C * c.H * c.V
    head = (tl.program_id(2) * c.H + i_h).to(tl.int64)
    mask = axes.has_key[None, :] & axes.has_value[:, None]
    at = update_ + head * (c.K * c.V) + axes.key[None, :] * c.V + axes.value[:, None]
    tl.store(at, h, mask=mask)
    tl.store(transition_ + head * c.K + axes.key, tl.exp2(gone * LOG2E), mask=axes.has_key)
