"""Functions of the chunked kernels of RWKV-6 and RWKV-7: the index of their tokens, the tiles and masks of a
chunk.

A program takes one block of values of one head of one split: a sequence, or one of the pieces of equal length
into which sequences are cut. It scans the split's chunks of 16 tokens with the state [V, K] in registers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from .gate import inverse_state_scale, state_scale

C = tl.constexpr(16)  # tokens of a chunk


class Index(NamedTuple):
    """Where the tokens of each program are. Fields that a call does not need are None.

    Attributes:
        segment_bits: [B, chunks] int32, where segments begin (`chunk_segments`).
        cu_seqlens: [N + 1] int32, the first token of each packed sequence.
        chunk_offsets: [N + 1] int32, the first chunk of each packed sequence.
        chunk_indices: [programs] int32, the packed sequence of each program of `chunks_of_program`.
        gates: [splits, H] int32, see `load_gate`.
        split: [1] int32, the split of each batch element that a launch takes, where not all.
        T: tokens of a batch element.
        split_len: tokens of a split.
    """

    segment_bits: Tensor
    cu_seqlens: Tensor
    chunk_offsets: Tensor
    chunk_indices: Tensor
    gates: Tensor
    split: Tensor
    T: Tensor
    split_len: Tensor


class Split(NamedTuple):
    """The tokens of a program.

    Attributes:
        index: number among all splits or packed sequences.
        row: its batch element.
        base: first token of the batch element, counted through the batch.
        first: first token of the split, likewise.
        length: tokens of the split.
        first_chunk: first chunk of the split, counted through the batch or all packed sequences.
    """

    index: Tensor
    row: Tensor
    base: Tensor
    first: Tensor
    length: Tensor
    first_chunk: Tensor


@triton.jit
def split_number(index, c: tl.constexpr):
    """The number of the split of program axis 2, which counts packed sequences, the splits of all batch
    elements, or batch elements of which one split is taken.
    """
    if index.split is not None:
        return tl.program_id(2) * c.num_splits + tl.load(index.split)
    else:
        return tl.program_id(2)


@triton.jit
def program_split(index, c: tl.constexpr):
    """The split of program axis 2."""
    return nth_split(split_number(index, c), index, c)


@triton.jit
def nth_split(p, index, c: tl.constexpr):
    """Packed sequence or split ``p``."""
    if c.packed:
        first = tl.load(index.cu_seqlens + p)
        return Split(
            p,
            0,
            first.to(tl.int64),
            first.to(tl.int64),
            tl.load(index.cu_seqlens + p + 1) - first,
            tl.load(index.chunk_offsets + p).to(tl.int64),
        )
    else:
        row, start = p // c.num_splits, (p % c.num_splits) * index.split_len
        base = row.to(tl.int64) * index.T
        return Split(
            p,
            row,
            base,
            base + start,
            tl.minimum(index.split_len, index.T - start),
            row.to(tl.int64) * tl.cdiv(index.T, C) + start // C,
        )


@triton.jit
def split_of_program(number, index, c: tl.constexpr):
    """The number of the split whose chunks program ``number`` takes."""
    if c.packed:
        return tl.load(index.chunk_indices + number)
    else:
        return split_number(index, c)


@triton.jit
def chunks_of_program(number, index, c: tl.constexpr):
    """The split of program ``number`` and the first of its ``chunks_per_state`` chunks
    (`ChunkPlan.by_chunks`).

    A packed sequence may have fewer chunks than programs.
    """
    if c.packed:
        split = nth_split(split_of_program(number, index, c), index, c)
        before = (
            split.first_chunk + split.index * (c.chunks_per_state - 1)
        ) // c.chunks_per_state  # as `state_offset` counts them
        return split, (number - before).to(tl.int32) * c.chunks_per_state
    else:
        return program_split(index, c), number * c.chunks_per_state


@triton.jit
def hidden(value, otherwise, split, n):
    """``value``, behind a comparison that always holds: whether chunk ``n`` is one of the split.

    In a loop over ``n`` LLVM would keep an address for each array and thread in two registers, and ptxas
    would spill them. Of offsets that a hidden value is part of LLVM does not see that they grow evenly.
    ``otherwise`` keeps their alignment.
    """
    return tl.where(n < split.length, value, otherwise)


@triton.jit
def chunk_starts(split, n, i_h, c: tl.constexpr):
    """Offsets of the first token of the split's chunk ``n``, in arrays of keys and of values.

    For 128 keys `hidden` gains nothing.
    """
    if c.BK <= 64:
        n = hidden(n, 0, split, n)
    token = (split.first + n * C) * c.H + i_h
    return token * c.K, token * c.V


class Axes(NamedTuple):
    """The axes of a program's tiles: tokens [16], keys [BK], values [BV], and whether keys and values
    exist."""

    token: Tensor
    key: Tensor
    value: Tensor
    has_key: Tensor
    has_value: Tensor


@triton.jit
def tile_axes(block_k, block_v, c: tl.constexpr):
    """The axes of the block of keys ``block_k`` and of values ``block_v``."""
    token = tl.arange(0, C)
    key, value = block_k * c.BK + tl.arange(0, c.BK), block_v * c.BV + tl.arange(0, c.BV)
    return Axes(token, key, value, key < c.K, value < c.V)


class Offsets(NamedTuple):
    """Offsets of a chunk's tiles from its first token: keys [16, BK], keys in batches of 16 [BK / 16, 16,
    16], values [16, BV], values transposed [BV, 16].
    """

    key: Tensor
    batched16: Tensor
    value: Tensor
    transposed: Tensor


@triton.jit
def token_offsets(axes, c: tl.constexpr):
    """Offsets from a chunk's first token (kernels call that `k_start` and `v_start`), equal in all chunks."""
    key = axes.token[:, None] * (c.H * c.K) + axes.key[None, :]
    batched16 = axes.token[None, :, None] * (c.H * c.K) + batched16_keys(c)
    value = axes.token[:, None] * (c.H * c.V) + axes.value[None, :]
    return Offsets(key, batched16, value, axes.token[None, :] * (c.H * c.V) + axes.value[:, None])


@triton.jit
def batched16_keys(c: tl.constexpr):
    """The keys of a tile in batches of 16, [BK / 16, 1, 16], as `token_sums` takes it."""
    return tl.arange(0, c.BK // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]


class Mask(NamedTuple):
    """Whether elements of a chunk's tiles exist: tokens [16], keys [16, BK], values [16, BV]."""

    token: Tensor
    key: Tensor
    value: Tensor


@triton.jit
def chunk_mask(left, axes):
    """The mask of a chunk, ``left`` tokens before the end of the split."""
    m = axes.token < left
    return Mask(m, m[:, None] & axes.has_key[None, :], m[:, None] & axes.has_value[None, :])


@triton.jit
def batched16_mask(mask, c: tl.constexpr):
    """Whether elements of a tile of keys in batches of 16 exist, [BK / 16, 16, 16]."""
    return mask.token[None, :, None] & (batched16_keys(c) < c.K)


@triton.jit
def transposed_mask(mask, axes):
    """Whether elements of a transposed tile of values exist, [BV, 16]."""
    return mask.token[None, :] & axes.has_value[:, None]


@triton.jit
def causal_masks(axes):
    """Pairs t, i of a chunk's tokens with i <= t, and with i < t: [16, 16]."""
    t, i = axes.token[:, None], axes.token[None, :]
    return t >= i, t > i


class Segments(NamedTuple):
    """Where segments begin in a chunk. Segments are contiguous, so all masks follow from it.

    Attributes:
        bits: a bit for each token that begins a segment; bit 16 is always set, higher bits are undefined.
        first: the first token that begins a segment, 16 if none.
        last: the last one, 0 if none.
    """

    bits: Tensor
    first: Tensor
    last: Tensor


@triton.jit
def chunk_segments(segment_bits_, split, n):
    """The segments of the split's chunk ``n``, from one integer (`chunk_plan.segment_bits`).

    One integer is copied ahead in the background; ids of all tokens would be loaded once for each layout.
    """
    word = tl.load(segment_bits_ + split.first_chunk + n)
    return Segments(word, (word >> 17) & 31, word >> 22)


@triton.jit
def has_no_restart(segments, i, t, pairs):
    """The ``pairs`` of tokens i <= t between which no segment begins: no bit of the tokens after i up to
    t is set. Other pairs test the bit that is always set.
    """
    return (segments.bits & tl.where(pairs, (2 << t) - (2 << i), 0x10000)) == 0


@triton.jit
def in_one_segment(segments, pairs):
    """The ``pairs`` t, i with i <= t in one segment, [16, 16]."""
    return has_no_restart(segments, tl.arange(0, C)[None, :], tl.arange(0, C)[:, None], pairs)


@triton.jit
def tokens_seeing_h0(segments):
    """Tokens before the first restart of the chunk, [16, 1]."""
    return tl.arange(0, C)[:, None] < segments.first


@triton.jit
def tokens_reaching_ht(segments):
    """Tokens from the last restart of the chunk on, [16, 1]."""
    return tl.arange(0, C)[:, None] >= segments.last


@triton.jit
def does_h0_reach_ht(segments):
    """Whether the chunk has no restart."""
    return segments.first == C


@triton.jit
def masked(x, mask, segments):
    """``x`` where ``mask``, else zero, behind a branch that chunks without a restart skip."""
    if segments.first < C:
        x = tl.where(mask, x, 0.0).to(x.dtype)
    return x


class StateTile(NamedTuple):
    """Offsets of the program's block of a state in an array [.., K, V], transposed to [BV, BK], and whether
    its elements exist.
    """

    offsets: Tensor
    mask: Tensor


@triton.jit
def state_tile(axes, c: tl.constexpr):
    """The tile, equal for all states."""
    offsets = axes.key[None, :] * c.V + axes.value[:, None]
    return StateTile(offsets, axes.has_key[None, :] & axes.has_value[:, None])


@triton.jit
def load_state(ptr, head, tile, gate, c: tl.constexpr, GRADIENT: tl.constexpr = False):
    """The program's block of state ``head``, or of its gradient, float32, times `state_scale`."""
    h = tl.load(ptr + head * (c.K * c.V) + tile.offsets, mask=tile.mask, other=0.0).to(tl.float32)
    return h * state_scale(gate, c, GRADIENT)


@triton.jit
def store_state(ptr, head, h, tile, gate, c: tl.constexpr, GRADIENT: tl.constexpr = False):
    """Stores what `load_state` loads."""
    if GRADIENT:
        h *= inverse_state_scale(gate, c)
    tl.store(ptr + head * (c.K * c.V) + tile.offsets, h, mask=tile.mask)


@triton.jit
def partial_sums(block, T, c: tl.constexpr):
    """Offset of value block ``block`` in an array [blocks, B, T, H, K] of partial sums."""
    before = block.to(tl.int64) * (1 if c.packed else tl.num_programs(2) // c.num_splits)
    return before * T * (c.H * c.K)
