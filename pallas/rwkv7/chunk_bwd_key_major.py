"""RWKV-7, chunked backward with tiles of keys transposed and the state as [K, V], for products of a warp
group with bfloat16 operands: `chunk_bwd` in the layout of `key_major`.

A tile [K, 32] holds r beside a, or k beside b; [V, 32] holds do beside da_read, or v beside v_new. So the
whole q side is one operand, and the whole k side. The maths is that of `chunk_bwd` and `chunk_bwd_grads`.

Triton divides small products over all warps unless it takes them for links of a chain. A product whose
operand comes only through `tl.trans` and elementwise operations is none: hence some tiles are masked or
rounded transposed.
"""

import triton
import triton.language as tl

from ..common.chunk import C, chunk_segments, chunk_starts, hidden, partial_sums, program_split, tile_axes
from ..common.gate import cotangent_scale, inverse_state_scale, state_scale
from ..common.state_buffers import state_offset, state_pointers
from ..common.token_tiles import load_tokens, select_row
from .chunk_A import NUM_A_TILES, tile_offsets
from .chunk_bwd_key_major_safe import safe_gate_chunk, safe_gate_sums
from .chunk_bwd_key_major_tiles import ChunkTiles, Places, ValuePlace
from .chunk_bwd_key_major_unsafe import unsafe_gate_chunk, unsafe_gate_sums


@triton.jit
def load_A_tiles(A, chunk, c: tl.constexpr):
    """`load_A` in this layout: A_ab_inv, A_ak, and A_qk beside A_qb."""
    A += chunk * (NUM_A_TILES * C * C)
    t, o = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    A_ab_inv, ak = tl.load(A + tile_offsets()), tl.load(A + C * C + tile_offsets())
    q = tl.load(A + (2 + o // C) * (C * C) + t * C + o % C)
    return A_ab_inv.to(c.operand), ak.to(c.operand), q.to(c.operand)


@triton.jit
def chunk_bwd_key_major(x, saved, index, gate, grads, c: tl.constexpr):
    """Scans the chunks of a split, for one head and block of values."""
    block, i_h = tl.program_id(0), tl.program_id(1)
    split = program_split(index, c)
    axes = tile_axes(0, block, c)
    if c.unsafe_gate:
        sums = unsafe_gate_sums()
        _, grad_scale = cotangent_scale(gate)
    else:
        sums, grad_scale = safe_gate_sums(), 1.0
    t, j = axes.token[:, None], axes.token[None, :]
    o = tl.arange(0, 2 * C)
    token, is_r = o % C, o[None, :] < C
    head = (tl.program_id(2) * c.H + i_h).to(tl.int64) * (c.K * c.V)
    at_state = axes.key[:, None] * c.V + axes.value[None, :]
    has_both = axes.has_key[:, None] & axes.has_value[None, :]
    dh = tl.load(saved.dht + head + at_state, mask=has_both, other=0.0).to(tl.float32) * state_scale(
        gate, c, True
    )
    at_k = token[None, :] * (c.H * c.K) + axes.key[:, None]
    at_w = j * (c.H * c.K) + axes.key[:, None]
    at_v = t * (c.H * c.V) + axes.value[None, :]
    at_vt = j * (c.H * c.V) + axes.value[:, None]
    count = tl.cdiv(split.length, C)
    k_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.K
    v_start = ((split.first + (count - 1) * C) * c.H + i_h) * c.V
    part = partial_sums(block, index.T, c)
    buffer = state_pointers(saved.states, 0, axes, c.num_buffers, c)
    mask_state = axes.has_key[None, :] & axes.has_value[:, None]
    for step in range(0, count):
        n = count - 1 - step
        left = split.length - n * C
        A_chunk = split.first_chunk + n
        if not c.unsafe_gate:
            # one spilled register costs this loop a sixth of its time
            k_start, v_start = chunk_starts(split, n, i_h, c)
            buffer = state_pointers(saved.states, hidden(0, 1, split, n), axes, c.num_buffers, c)
            A_chunk = split.first_chunk + hidden(n, 0, split, n)
        mask_k = axes.has_key[:, None] & (token < left)[None, :]
        mask_w = axes.has_key[:, None] & (axes.token < left)[None, :]
        mask_v = (axes.token < left)[:, None] & axes.has_value[None, :]
        mask_vt = (axes.token < left)[None, :] & axes.has_value[:, None]
        w = load_tokens(x.w + k_start, at_w, mask_w, c.unmasked)
        ra = load_tokens(select_row(is_r, x.r + k_start, x.a + k_start, c.K), at_k, mask_k, c.unmasked)
        kb = load_tokens(select_row(is_r, x.k + k_start, x.b + k_start, c.K), at_k, mask_k, c.unmasked)
        v = load_tokens(x.v + v_start, at_v, mask_v, c.unmasked).to(c.operand)
        do = load_tokens(saved.do + v_start, at_v, mask_v, c.unmasked).to(c.operand)
        at = state_offset(index, split, n, k_start, c.num_buffers, c)
        h = tl.trans(tl.load(buffer + at, mask=mask_state, other=0.0).to(c.operand))
        A_ab_inv, Aak, Aq = load_A_tiles(saved.A, A_chunk * c.H + i_h, c)
        tiles = ChunkTiles(w, ra, kb, v, do, h, A_ab_inv, Aak, Aq)
        segments = chunk_segments(index.segment_bits, split, n) if c.segments else None
        at_dw = at_w if c.unsafe_gate else at_w + hidden(0, 16, split, n)
        places = Places(grads, grad_scale, part + k_start, at_k, at_dw, mask_k, mask_w)
        value_place = ValuePlace(grads.v + v_start, at_vt, mask_vt)
        if c.unsafe_gate:
            dh = unsafe_gate_chunk(tiles, segments, sums, dh, gate, places, value_place, c)
            k_start -= C * c.H * c.K
            v_start -= C * c.H * c.V
        else:
            dh = safe_gate_chunk(tiles, segments, sums, dh, gate, places, value_place, c)
    tl.store(grads.initial_state + head + at_state, dh * inverse_state_scale(gate, c), mask=has_both)
