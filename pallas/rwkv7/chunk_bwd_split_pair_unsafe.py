"""RWKV-7, chunked backward of large heads under an unsafe gate: gradients of two chunks that share a state,
one after the other, in the layout of `chunk_bwd_key_major`. The maths is that of `chunk_bwd_split`.
"""

import triton
import triton.language as tl

from ..common.chunk import C, chunk_segments, does_h0_reach_ht, hidden
from ..common.dots import dot
from ..common.gate import cotangent_scale
from ..common.key_major import tile2
from ..common.token_tiles import load_tokens, select_row
from .chunk_bwd_key_major_tiles import Places
from .chunk_bwd_key_major_unsafe import (
    decays_from_h0,
    key_and_decay_gradients,
    query_gradients,
    scaled_tiles,
    select_pairs,
    terms_of_state,
    unsafe_gate_decays,
    unsafe_gate_sums,
)
from .chunk_bwd_split_pair_safe import sums_over_values


@triton.jit
def load_keys(x, y, k_start, left, axes, c: tl.constexpr):
    """A chunk's ``x`` beside its ``y``, [K, 32]."""
    o = tl.arange(0, 2 * C)[None, :]
    mask = axes.has_key[:, None] & (o % C < left)
    at = (o % C) * (c.H * c.K) + axes.key[:, None]
    return load_tokens(select_row(o < C, x + k_start, y + k_start, c.K), at, mask, c.unmasked)


@triton.jit
def load_w(w, k_start, left, axes, c: tl.constexpr):
    """A chunk's log decays [K, 16]."""
    t = axes.token[None, :]
    return load_tokens(
        w + k_start, t * (c.H * c.K) + axes.key[:, None], axes.has_key[:, None] & (t < left), c.unmasked
    )


@triton.jit
def load_values(x, saved, v_start, left, axes, do_scale, c: tl.constexpr):
    """A chunk's do, scaled, above da_read, and v above v_new, [32, V]."""
    o = tl.arange(0, 2 * C)[:, None]
    mask, at = (o % C < left) & axes.has_value[None, :], (o % C) * (c.H * c.V) + axes.value[None, :]
    do = select_row(o < C, saved.do + v_start, saved.da_read + v_start, c.V)
    v = select_row(o < C, x.v + v_start, saved.v_new + v_start, c.V)
    do, v = load_tokens(do, at, mask, c.unmasked), load_tokens(v, at, mask, c.unmasked)
    return do.to(c.operand) * tl.where(o < C, do_scale, 1.0).to(c.operand), v.to(c.operand)


@triton.jit
def places_of_chunk(grads, k_start, left, gate, axes, c: tl.constexpr):
    """Where the gradients of a chunk are stored."""
    of, t = tl.arange(0, 2 * C)[None, :] % C, axes.token[None, :]
    mask_k, mask_w = axes.has_key[:, None] & (of < left), axes.has_key[:, None] & (t < left)
    at_k, at_w = of * (c.H * c.K) + axes.key[:, None], t * (c.H * c.K) + axes.key[:, None]
    _, grad_scale = cotangent_scale(gate)
    return Places(grads, grad_scale, k_start, at_k, at_w, mask_k, mask_w)


@triton.jit
def one_of_pair_gradients(w, ra, kb, dA, by_state, through, dg_pass, segments, sums, places, c: tl.constexpr):
    """Stores the gradients of one chunk.

    Args:
        w, ra, kb: its tiles, as in `ChunkTiles`.
        dA: gradients of the four A, unmasked, [32, 32].
        by_state: products of the state at the start with do and da_read, [K, 32].
        through: products of the state's gradient at the end with v and v_new, [K, 32].
        dg_pass: gradient that every decay gets through the state that passes the chunk, [K, 1].
    """
    of = tl.arange(0, 2 * C)[None, :] % C
    raf = ra.to(tl.float32)
    by_state *= decays_from_h0(w, sums, c)
    if c.segments:
        by_state = tl.where(of < segments.first, by_state, 0.0)
    state_terms = terms_of_state(raf, by_state, dg_pass, sums, c)
    decays = unsafe_gate_decays(w, sums, c)
    scaled, pairs = scaled_tiles(raf, kb, decays, c), select_pairs(dA, segments, c)
    terms = query_gradients(kb, scaled, pairs, by_state, decays, places, c)
    key_and_decay_gradients(ra, scaled, pairs, through, terms, state_terms, decays, segments, sums, places, c)


@triton.jit
def unsafe_gate_pair_gradients(x, saved, index, gate, split, n, axes, h_, dh_, grads, c: tl.constexpr):
    """`pair_gradients` under an unsafe gate. Arrays that share a tile have one dtype."""
    left = split.length - n * C
    k_start = ((split.first + n * C) * c.H + tl.program_id(1)) * c.K
    v_start = ((split.first + n * C) * c.H + tl.program_id(1)) * c.V
    k_next, v_next = k_start + C * c.H * c.K, v_start + C * c.H * c.V
    do_scale, _ = cotangent_scale(gate)
    sums = unsafe_gate_sums()
    of = tl.arange(0, 2 * C)[None, :] % C
    mask = axes.has_value[:, None] & axes.has_key[None, :]
    h, dh = tl.load(h_, mask=mask, other=0.0), tl.load(dh_, mask=mask, other=0.0)
    h, dh = h.to(c.operand), dh.to(c.operand)
    dg_pass = sums_over_values(h, dh, c)

    do2, v2 = load_values(x, saved, v_next, left - C, axes, do_scale, c)
    _, v1 = load_values(x, saved, v_start, left, axes, do_scale, c)
    across = dot(v1, tl.trans(do2), c).to(c.operand)
    dA2 = dot(v2, tl.trans(do2), c)

    # the first chunk's k side and the second's q side; a second chunk beyond the end has zeros
    w1, w2 = load_w(x.w, k_start, left, axes, c), load_w(x.w, k_next, left - C, axes, c)
    kb1 = load_keys(x.k, x.b, k_start, left, axes, c)
    ra2 = load_keys(x.r, x.a, k_next, left - C, axes, c)
    decays1, decays2 = unsafe_gate_decays(w1, sums, c), unsafe_gate_decays(w2, sums, c)
    written = kb1.to(tl.float32) * tile2(decays1.second_half)
    read = ra2.to(tl.float32) * decays_from_h0(w2, sums, c)
    pre1, pre2 = decays1.pre, decays2.pre
    if c.segments:
        first = chunk_segments(index.segment_bits, split, n)
        second = chunk_segments(index.segment_bits, split, tl.where(left > C, n + 1, n))
        written = tl.where(of >= first.last, written, 0.0)
        read = tl.where(of < second.first, read, 0.0)
        pre1 = tl.where(does_h0_reach_ht(first), pre1, 0.0)
        pre2 = tl.where(does_h0_reach_ht(second) | (left <= C), pre2, 0.0)
    else:
        first, second = None, None
    written, read = written.to(c.operand), read.to(c.operand)
    # the decay between the two; without a second chunk dh has it already
    between = tl.where(left > C, decays1.post, 1.0)

    by_state2 = dot(tl.trans(h), tl.trans(do2), c)
    pass1 = pre2 * dg_pass + tl.sum(read.to(tl.float32) * by_state2, 1)[:, None]
    by_state2 = dot(written, across, c, by_state2 * pre1) * between
    through1 = dot(tl.trans(dh), tl.trans(v1), c)
    pass2 = pre1 * dg_pass + tl.sum(written.to(tl.float32) * through1, 1)[:, None]
    through1 = dot(read, tl.trans(across), c, through1 * pre2) * between
    through2 = dot(tl.trans(dh), tl.trans(v2), c)
    pass1, pass2 = pre1 * between * pass1, pre2 * between * pass2

    kb2 = load_keys(x.k, x.b, k_next, left - C, axes, c)
    places = places_of_chunk(grads, k_next, left - C, gate, axes, c)
    one_of_pair_gradients(w2, ra2, kb2, dA2, by_state2, through2, pass2, second, sums, places, c)
    # loaded again, so that they take no registers meanwhile, nor do their addresses
    k_start += hidden(0, 16, split, n)
    v_start += hidden(0, 16, split, n)
    do1, v1 = load_values(x, saved, v_start, left, axes, do_scale, c)
    w1 = load_w(x.w, k_start, left, axes, c)
    kb1, ra1 = load_keys(x.k, x.b, k_start, left, axes, c), load_keys(x.r, x.a, k_start, left, axes, c)
    dA1 = dot(v1, tl.trans(do1), c)
    by_state1 = dot(tl.trans(h), tl.trans(do1), c)
    places = places_of_chunk(grads, k_start, left, gate, axes, c)
    one_of_pair_gradients(w1, ra1, kb1, dA1, by_state1, through1, pass1, first, sums, places, c)
