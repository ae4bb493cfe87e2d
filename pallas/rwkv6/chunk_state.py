"""RWKV-6: what a split does to the state at its start, before all splits are scanned (`state_passing_host`):
``ht = diag(transition) h0 + update``, and ``q_entry``, the queries of h0. Exact for every decay.
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
    state_tile,
    tile_axes,
    token_offsets,
    tokens_reaching_ht,
    tokens_seeing_h0,
    transposed_mask,
)
from ..common.decay import LOG2E, LOG_ZERO, at_least
from ..common.dots import dot, token_sums
from ..common.forgetting import TAIL, are_decays_zero, do_decays_vanish, store_zeros, tail_start
from ..common.token_tiles import load_tokens, store_tokens, where_or_zero


class StateOut(NamedTuple):
    """Outputs: q_entry like r; transition [splits, H, K] and update [splits, H, K, V], float32."""

    q_entry: Tensor
    transition: Tensor
    update: Tensor


@triton.jit
def split_update(x, index, out, block, c: tl.constexpr):
    """Writes the update of a split, its final state from an initial state of zero."""
    i_h, split, axes = tl.program_id(1), program_split(index, c), tile_axes(0, block, c)
    t, j = axes.token[:, None], axes.token[None, :]
    up_to, later = tl.where(j <= t, 1.0, 0.0), tl.where(j > t, 1.0, 0.0)
    offsets = token_offsets(axes, c)
    first = tl.where(do_decays_vanish(x.w, split, axes, c), tail_start(split), 0)
    k_start = ((split.first + first * C) * c.H + i_h) * c.K
    v_start = ((split.first + first * C) * c.H + i_h) * c.V
    h = tl.full([c.BV, c.BK], 0.0, tl.float32)
    for n in range(first, tl.cdiv(split.length, C)):
        mask = chunk_mask(split.length - n * C, axes)
        w = load_tokens(x.w + k_start, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        w = at_least(w, LOG_ZERO)
        k = load_tokens(x.k + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32)
        vt = load_tokens(x.v + v_start, offsets.transposed, transposed_mask(mask, axes), c.unmasked).to(
            c.operand
        )
        total = chunk_total(w, up_to, c)
        kg = k * tl.exp2(token_sums(later, w, c, BATCHED16=True) * LOG2E)
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            kg = where_or_zero(kg, tokens_reaching_ht(segments))
            total = tl.where(does_h0_reach_ht(segments), total, float("-inf"))
        h = dot(vt, kg.to(c.operand), c, h * tl.exp2(total * LOG2E)[None, :])
        k_start += C * c.H * c.K
        v_start += C * c.H * c.V
    tile = state_tile(axes, c)
    head = (tl.program_id(2) * c.H + i_h).to(tl.int64)
    tl.store(out.update + head * (c.K * c.V) + tile.offsets, h, mask=tile.mask)


@triton.jit
def chunk_total(w, up_to, c: tl.constexpr):
    """Sums of a chunk's log decays, [K]. ``up_to`` is the triangle of 0 and 1 that sums up to a token."""
    last = tl.arange(0, C)[:, None] == C - 1
    return tl.sum(tl.where(last, token_sums(up_to, w, c, BATCHED16=True), 0.0), 0)


@triton.jit
def split_transition(x, index, out, c: tl.constexpr):
    """Writes the transition of a split and the queries of the state at its start."""
    split, axes = program_split(index, c), tile_axes(0, 0, c)
    num_chunks, g = tl.cdiv(split.length, C), tl.full([c.BK], 0.0, tl.float32)
    for first in range(0, num_chunks, TAIL):
        last = tl.minimum(first + TAIL, num_chunks)
        if are_decays_zero(g, axes):
            store_zeros(out.q_entry, split, first, last, axes.key, axes.has_key, c)
        else:
            g = transition_chunks(x, index, out, split, axes, g, first, last, c)
    head = (tl.program_id(2) * c.H + tl.program_id(1)).to(tl.int64)
    tl.store(out.transition + head * c.K + axes.key, tl.exp2(g * LOG2E), mask=axes.has_key)


@triton.jit
def transition_chunks(x, index, out, split, axes, g, first, last, c: tl.constexpr):
    """Log decays summed from the split's start to chunk ``last``, from those to chunk ``first``, ``g``."""
    t, j = axes.token[:, None], axes.token[None, :]
    up_to, earlier = tl.where(j <= t, 1.0, 0.0), tl.where(j < t, 1.0, 0.0)
    offsets = token_offsets(axes, c)
    k_start = ((split.first + first * C) * c.H + tl.program_id(1)) * c.K
    for n in range(first, last):
        mask = chunk_mask(split.length - n * C, axes)
        w = load_tokens(x.w + k_start, offsets.batched16, batched16_mask(mask, c), c.unmasked)
        w = at_least(w, LOG_ZERO)
        r = load_tokens(x.r + k_start, offsets.key, mask.key, c.unmasked).to(tl.float32) * c.scale
        total = chunk_total(w, up_to, c)
        qg = tl.exp2((token_sums(earlier, w, c, BATCHED16=True) + g[None, :]) * LOG2E)
        if c.segments:
            segments = chunk_segments(index.segment_bits, split, n)
            qg = where_or_zero(qg, tokens_seeing_h0(segments))
            total = tl.where(does_h0_reach_ht(segments), total, float("-inf"))
        store_tokens(out.q_entry + k_start, offsets.key, r * qg, mask.key, c.unmasked)
        g += total
        k_start += C * c.H * c.K
    return g


@triton.jit
def rwkv6_chunk_state_kernel(x, index, out, c: tl.constexpr):
    """``x`` are the op's inputs. Grid (``num_blocks`` blocks of values for the update, then one program for
    the transition; heads; splits).
    """
    block = tl.program_id(0)
    if block < c.num_blocks:
        split_update(x, index, out, block, c)
    else:
        split_transition(x, index, out, c)
