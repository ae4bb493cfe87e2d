"""What a program of the chunked Triton kernels knows of its work: how it was compiled, which tokens are its
own, where a chunk's tiles and its head's state lie, and which pairs of a chunk's tokens see each other.

Both ops open a chunk with these. Names that end in ``_`` are pointers.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl

C = tl.constexpr(16)  # tokens of a chunk, in all kernels and launchers


@dataclasses.dataclass(frozen=True)
class Config:
    """What a launch is compiled for. The launcher makes it; inside a kernel it is one constant.

    Attributes:
        H: heads.
        K: keys of a head.
        V: values of a head.
        BK: keys that a program holds, a power of two.
        BV: values that a program holds, a power of two.
        splits: stretches that each row is cut into; 1 where sequences are packed.
        scale: factor of r.
        operand: dtype of the large products' operands, bfloat16 for inputs of 16 bits, else float32.
        in_parts: whether products of float32 operands are made of their TF32 parts.
        any_decay: whether rows and heads may need the form for any decay; False in the bounded form.
        segments: whether rows have segments, before which the state restarts.
        packed: whether sequences are packed into one row.
        even: whether no element of any tile is missing.
        scored: whether a kernel has made the scores of all chunks beforehand (RWKV-7's scores.py).
        gauge: powers of two by which rows of the bounded form are too large, columns and the state too small.
    """

    H: int
    K: int
    V: int
    BK: int
    BV: int
    num_splits: int
    scale: float
    operand: Any
    tf32x3: bool
    unsafe_gate: bool
    segments: bool
    packed: bool
    unmasked: bool
    precomputed_A: bool
    safe_gate_exponent: int

    def replaced(self, **changes: Any) -> "Config":
        """The same with other values."""
        return dataclasses.replace(self, **changes)


@triton.constexpr_function
def with_safe_gate(c):
    """The mode of a program whose decays are bounded."""
    return c.replaced(unsafe_gate=False)


@triton.constexpr_function
def with_square_state(c):
    """The mode of a walk with a matrix [K, K] in place of the state."""
    return c.replaced(V=c.K)


UNSAFE_GATE = tl.constexpr(-256)  # what `load_gate` says of the form for any decay, at a scale of 2^0


@triton.jit
def load_gate(gate_, number, c: tl.constexpr):
    """Which form sequence ``number`` and the program's head take, from an array [sequences, H].

    In the bounded form it is the gauge: by how many powers of two rows are too large there, columns and the
    state too small. In the form for any decay it is below 0: ANY_DECAY, in a backward and the exponent of
    `cotangent_scale`.
    """
    if c.unsafe_gate:
        return tl.load(gate_ + number * c.H + tl.program_id(1))
    else:
        return tl.full((), c.safe_gate_exponent, tl.int32)


@triton.jit
def has_unsafe_gate(gate, c: tl.constexpr):
    """The choice of body. Where the mode rules the form for any decay out it is a constant, and only one body
    is compiled.
    """
    if c.unsafe_gate:
        return gate < 0
    else:
        return False


@triton.jit
def power_of_two(n):
    """2^n, exactly, for ``n`` from -126 to 127."""
    return ((127 + n) << 23).to(tl.float32, bitcast=True)


@triton.jit
def cotangent_scale(gate):
    """In the form for any decay, the powers of two that cotangents are multiplied with on their way in, and
    gradients on their way out (common/cotangent_scale.py).
    """
    n = gate - UNSAFE_GATE
    return power_of_two(n), power_of_two(-n)


class Index(NamedTuple):
    """The kernels' arguments that say where tokens are.

    Attributes:
        seg_: [B, chunks] where segments begin, as `chunk_segments` reads it; unused without segments.
        cu_: [N + 1] first token of each packed sequence; unused without.
        chunk0_: [N] first chunk of each packed sequence; unused without.
        T: tokens of a row.
        span: tokens of a stretch.
        form: see `load_gate`.
    """

    segment_bits_: Any
    cu_seqlens_: Any
    chunk_offsets_: Any
    T: Any
    split_len: Any
    gate: Any


class Split(NamedTuple):
    """What a program walks: its number among packed sequences or stretches, its row, the row's first token,
    its own first token, its number of tokens, and its first chunk among all chunks.
    """

    index: Any
    row: Any
    base: Any
    first: Any
    length: Any
    first_chunk: Any


@triton.jit
def program_split(index, c: tl.constexpr):
    """The program's sequence: program axis 2 counts packed sequences, else the stretches of all rows."""
    return nth_split(tl.program_id(2), index, c)


@triton.jit
def nth_split(p, index, c: tl.constexpr):
    """Packed sequence or stretch ``p``."""
    if c.packed:
        first = tl.load(index.cu_seqlens_ + p)
        return Split(
            p,
            0,
            first.to(tl.int64),
            first.to(tl.int64),
            tl.load(index.cu_seqlens_ + p + 1) - first,
            tl.load(index.chunk_offsets_ + p).to(tl.int64),
        )
    else:
        row, sees_h0 = p // c.num_splits, (p % c.num_splits) * index.split_len
        base = row.to(tl.int64) * index.T
        return Split(
            p,
            row,
            base,
            base + sees_h0,
            tl.minimum(index.split_len, index.T - sees_h0),
            row.to(tl.int64) * tl.cdiv(index.T, C) + sees_h0 // C,
        )


@triton.jit
def split_of_program(number, chunk_indices_, c: tl.constexpr):
    """Whose chunks program ``number`` takes: which packed sequence, or which of all stretches."""
    if c.packed:
        return tl.load(chunk_indices_ + number)
    else:
        return tl.program_id(2)


@triton.jit
def chunks_of_program(number, chunk_indices_, index, CHUNKS_PER_STATE: tl.constexpr, c: tl.constexpr):
    """The sequence of program ``number``, which takes ``EVERY`` of its chunks (`ChunkPlan.by_chunks`), and
    the first of them; there may be none.
    """
    if c.packed:
        split = nth_split(split_of_program(number, chunk_indices_, c), index, c)
        before = (
            split.first_chunk + split.index * (CHUNKS_PER_STATE - 1)
        ) // CHUNKS_PER_STATE  # as `state_offset` counts them
        return split, (number - before).to(tl.int32) * CHUNKS_PER_STATE
    else:
        return program_split(index, c), number * CHUNKS_PER_STATE


class Axes(NamedTuple):
    """The axes of a program's tiles: a chunk's tokens [16], keys [BK], values [BV], and which of the keys and
    values there are.
    """

    token: Any
    key: Any
    value: Any
    has_key: Any
    has_value: Any


@triton.jit
def tile_axes(block_k, block_v, c: tl.constexpr):
    """The axes of the block of keys ``block_k`` and of values ``block_v``."""
    token = tl.arange(0, C)
    key, value = block_k * c.BK + tl.arange(0, c.BK), block_v * c.BV + tl.arange(0, c.BV)
    return Axes(token, key, value, key < c.K, value < c.V)


class Offsets(NamedTuple):
    """Where a chunk's tiles lie from its first token on: keys [16, BK], keys as `token_sums` divides them
    [BK / 16, 16, 16], values [16, BV], values held transposed [BV, 16].
    """

    key: Any
    batched16: Any
    value: Any
    transposed: Any


@triton.jit
def token_offsets(axes, c: tl.constexpr):
    """The same for all chunks."""
    key = axes.token[:, None] * (c.H * c.K) + axes.key[None, :]
    spread = axes.token[None, :, None] * (c.H * c.K) + batched16_keys(c)
    value = axes.token[:, None] * (c.H * c.V) + axes.value[None, :]
    return Offsets(key, spread, value, axes.token[None, :] * (c.H * c.V) + axes.value[:, None])


@triton.jit
def batched16_keys(c: tl.constexpr):
    """The keys of a tile that is divided as `token_sums` divides it, [BK / 16, 1, 16]."""
    return tl.arange(0, c.BK // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]


class Mask(NamedTuple):
    """Which elements of a chunk's tiles there are: tokens [16], keys [16, BK], values [16, BV]."""

    token: Any
    key: Any
    value: Any


@triton.jit
def chunk_mask(left, axes):
    """Of the chunk before whose first token ``left`` tokens remain."""
    m = axes.token < left
    return Mask(m, m[:, None] & axes.has_key[None, :], m[:, None] & axes.has_value[None, :])


@triton.jit
def batched16_mask(mask, c: tl.constexpr):
    """Which elements of a tile of keys divided as `token_sums` divides it there are, [BK / 16, 16, 16]."""
    return mask.token[None, :, None] & (batched16_keys(c) < c.K)


@triton.jit
def transposed_mask(mask, axes):
    """Which elements of a tile of values held transposed there are, [BV, 16]."""
    return mask.token[None, :] & axes.has_value[:, None]


@triton.jit
def causal_masks(axes):
    """Pairs t, i of a chunk's tokens with i <= t, and with i < t: [16, 16]."""
    t, i = axes.token[:, None], axes.token[None, :]
    return t >= i, t > i


class Segments(NamedTuple):
    """Where segments begin in a chunk, from which all masks follow: segments are contiguous.

    Attributes:
        bits: one for each token; bit 16 is set in every chunk. Those above are of no meaning.
        first: the first token that begins a segment, 16 where none does.
        last: the last one, 0 where none does.
    """

    bits: Any
    first: Any
    last: Any


@triton.jit
def chunk_segments(segment_bits_, split, n):
    """Of the sequence's chunk ``n``, from the one number that says it (`plan.chunked.segment_bits`).

    Numbers of all tokens would be loaded once for each layout of a mask. One number is copied ahead in the
    background, and a mask is one operation with what is the same in all chunks.
    """
    word = tl.load(segment_bits_ + split.first_chunk + n)
    return Segments(word, (word >> 17) & 31, word >> 22)


@triton.jit
def has_no_restart(segments, i, t, pairs):
    """Those of ``pairs`` of tokens i <= t between which no segment begins: bits of the tokens after i up to
    t, and the bit that is always set for other pairs.
    """
    return (segments.bits & tl.where(pairs, (2 << t) - (2 << i), 0x10000)) == 0


@triton.jit
def in_one_segment(segments, pairs):
    """Those of ``pairs`` t, i with i <= t that lie in one segment, [16, 16]."""
    return has_no_restart(segments, tl.arange(0, C)[None, :], tl.arange(0, C)[:, None], pairs)


@triton.jit
def tokens_seeing_h0(segments):
    """Tokens that the entering state reaches, [16, 1]."""
    return tl.arange(0, C)[:, None] < segments.first


@triton.jit
def tokens_reaching_ht(segments):
    """Tokens that reach the leaving state, [16, 1]."""
    return tl.arange(0, C)[:, None] >= segments.last


@triton.jit
def does_h0_reach_ht(segments):
    """Whether the entering state reaches the leaving one."""
    return segments.first == C


@triton.jit
def masked(x, keep, segments):
    """``x`` where ``keep``, else zero, in x's dtype, behind a branch: for masks that keep all of ``x`` where
    no segment begins in the chunk, as in most chunks.
    """
    if segments.first < C:
        x = tl.where(keep, x, 0.0).to(x.dtype)
    return x


@triton.jit
def state_scale(gate, c: tl.constexpr, GRADIENT: tl.constexpr):
    """The factor that a state, or its gradient, has while chunks are walked."""
    if not c.unsafe_gate:
        return power_of_two(gate if GRADIENT else -gate)
    elif GRADIENT:
        return cotangent_scale(gate)[0]
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def inverse_state_scale(gate, c: tl.constexpr):
    """The factor that takes the gradient of a state back."""
    if c.unsafe_gate:
        return cotangent_scale(gate)[1]
    else:
        return power_of_two(-gate)


class StateTile(NamedTuple):
    """Where the program's part of a state lies in an array [.., K, V], held transposed [BV, BK], and which of
    its elements there are.
    """

    offsets: Any
    mask: Any


@triton.jit
def state_tile(axes, c: tl.constexpr):
    """The same for all states."""
    offsets = axes.key[None, :] * c.V + axes.value[:, None]
    return StateTile(offsets, axes.has_key[None, :] & axes.has_value[:, None])


@triton.jit
def load_state(ptr, head, tile, gate, c: tl.constexpr, GRADIENT: tl.constexpr = False):
    """The program's part of state ``head``, or of its gradient, float32, with the factor of the form."""
    h = tl.load(ptr + head * (c.K * c.V) + tile.offsets, mask=tile.mask, other=0.0).to(tl.float32)
    return h * state_scale(gate, c, GRADIENT)


@triton.jit
def store_state(ptr, head, h, tile, gate, c: tl.constexpr, GRADIENT: tl.constexpr = False):
    """Stores what `load_state` would load."""
    if GRADIENT:
        h *= inverse_state_scale(gate, c)
    tl.store(ptr + head * (c.K * c.V) + tile.offsets, h, mask=tile.mask)


@triton.jit
def partial_sums(block, T, c: tl.constexpr):
    """Where the sums of value block ``block`` begin in an array [blocks, B, T, H, K]."""
    before = block.to(tl.int64) * (1 if c.packed else tl.num_programs(2) // c.num_splits)
    return before * T * (c.H * c.K)
