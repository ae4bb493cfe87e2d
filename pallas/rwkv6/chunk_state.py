"""RWKV-6: what a split does to the state at its start, before all splits are scanned (`state_passing_host`):
``ht = diag(transition) h0 + update``, and ``q_entry``, the queries of h0. Exact for every decay.

Grid: blocks of values, heads, splits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import (
    C,
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


class StateOut(NamedTuple):
    """Outputs: q_entry like r; transition [splits, H, K] and update [splits, H, K, V], float32."""

    q_entry: Tensor
    transition: Tensor
    update: Tensor


@triton.jit
def rwkv6_chunk_state_kernel(x, index, out, c: tl.constexpr):
    """``x`` are the op's inputs."""
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    t, j = axes.token[:, None], axes.token[None, :]
    earlier, later = tl.where(j < t, 1.0, 0.0), tl.where(j > t, 1.0, 0.0)
    up_to = tl.where(j <= t, 1.0, 0.0)
    offsets = token_offsets(axes, c)
    k_start, v_start = (split.first * c.H + i_h) * c.K, (split.first * c.H + i_h) * c.V
    h = tl.full([c.BV, c.BK], 0.0, tl.float32)
    g = tl.full([c.BK], 0.0, tl.float32)  # log decays summed from the split's start
    for n in range(0, tl.cdiv(split.length, C)):
        left = split.length - n * C
        mask = chunk_mask(left, axes)
        w = load_tokens(x.w + k_start, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        w = at_least(w, LOG_ZERO)
        k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32)
        vt = load_tokens(x.v + v_start, offsets.transposed, transposed_mask(mask, axes), c.unmasked).to(
            c.operand
        )
        total = tl.sum(tl.where(t == C - 1, token_sums(up_to, w, c, BATCHED16=True), 0.0), 0)
        kg = k * tl.exp2(token_sums(later, w, c, BATCHED16=True) * LOG2E)
        qg = tl.exp2((token_sums(earlier, w, c, BATCHED16=True) + g[None, :]) * LOG2E)
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            kg, qg = (
                where_or_zero(kg, tokens_reaching_ht(segments)),
                where_or_zero(qg, tokens_seeing_h0(segments)),
            )
            total = tl.where(does_h0_reach_ht(segments), total, float("-inf"))
        if block == 0:
            r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
            store_tokens(out.q_entry + k_start, offsets.key, r * qg, mask.key, c.unmasked)
        h = dot(vt, kg.to(c.operand), c, h * tl.exp2(total * LOG2E)[None, :])
        g += total
        k_start += C * c.H * c.K
        v_start += C * c.H * c.V
    head = (tl.program_id(2) * c.H + i_h).to(tl.int64)
    mask = axes.has_key[None, :] & axes.has_value[:, None]
    at = out.update + head * (c.K * c.V) + axes.key[None, :] * c.V + axes.value[:, None]
    tl.store(at, h, mask=mask)
    tl.store(out.transition + head * c.K + axes.key, tl.exp2(g * LOG2E), mask=axes.has_key)
