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
class Mode:
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
    splits: int
    scale: float
    operand: Any
    in_parts: bool
    any_decay: bool
    segments: bool
    packed: bool
    even: bool
    scored: bool
    gauge: int

    def replaced(self, **changes: Any) -> "Mode":
        """The same with other values."""
        return dataclasses.replace(self, **changes)


@triton.constexpr_function
def bounded(mode):
    """The mode of a program whose decays are bounded."""
    return mode.replaced(any_decay=False)


@triton.constexpr_function
def square(mode):
    """The mode of a walk with a matrix [K, K] in place of the state."""
    return mode.replaced(V=mode.K)


ANY_DECAY = tl.constexpr(-256)  # what `form_of` says of the form for any decay, at a scale of 2^0


@triton.jit
def form_of(any_decay_, number, mode: tl.constexpr):
    """Which form sequence ``number`` and the program's head take, from an array [sequences, H].

    In the bounded form it is the gauge: by how many powers of two rows are too large there, columns and the
    state too small. In the form for any decay it is below 0: ANY_DECAY, in a backward and the exponent of
    `cotangent_scale`.
    """
    if mode.any_decay:
        return tl.load(any_decay_ + number * mode.H + tl.program_id(1))
    else:
        return tl.full((), mode.gauge, tl.int32)


@triton.jit
def needs_any_decay(form, mode: tl.constexpr):
    """The choice of body. Where the mode rules the form for any decay out it is a constant, and only one body
    is compiled.
    """
    if mode.any_decay:
        return form < 0
    else:
        return False


@triton.jit
def power_of_two(n):
    """2^n, exactly, for ``n`` from -126 to 127."""
    return ((127 + n) << 23).to(tl.float32, bitcast=True)


@triton.jit
def cotangent_scale(form):
    """In the form for any decay, the powers of two that cotangents are multiplied with on their way in, and
    gradients on their way out (device/cotangents.py).
    """
    n = form - ANY_DECAY
    return power_of_two(n), power_of_two(-n)


class Ranges(NamedTuple):
    """The kernels' arguments that say where tokens are.

    Attributes:
        seg_: [B, chunks] where segments begin, as `chunk_segments` reads it; unused without segments.
        cu_: [N + 1] first token of each packed sequence; unused without.
        chunk0_: [N] first chunk of each packed sequence; unused without.
        T: tokens of a row.
        span: tokens of a stretch.
        form: see `form_of`.
    """

    seg_: Any
    cu_: Any
    chunk0_: Any
    T: Any
    span: Any
    form: Any


class Sequence(NamedTuple):
    """What a program walks: its number among packed sequences or stretches, its row, the row's first token,
    its own first token, its number of tokens, and its first chunk among all chunks.
    """

    index: Any
    row: Any
    base: Any
    first: Any
    length: Any
    chunk0: Any


@triton.jit
def sequence(ranges, mode: tl.constexpr):
    """The program's sequence: program axis 2 counts packed sequences, else the stretches of all rows."""
    return numbered_sequence(tl.program_id(2), ranges, mode)


@triton.jit
def numbered_sequence(p, ranges, mode: tl.constexpr):
    """Packed sequence or stretch ``p``."""
    if mode.packed:
        first = tl.load(ranges.cu_ + p)
        return Sequence(
            p,
            0,
            first.to(tl.int64),
            first.to(tl.int64),
            tl.load(ranges.cu_ + p + 1) - first,
            tl.load(ranges.chunk0_ + p).to(tl.int64),
        )
    else:
        row, start = p // mode.splits, (p % mode.splits) * ranges.span
        base = row.to(tl.int64) * ranges.T
        return Sequence(
            p,
            row,
            base,
            base + start,
            tl.minimum(ranges.span, ranges.T - start),
            row.to(tl.int64) * tl.cdiv(ranges.T, C) + start // C,
        )


@triton.jit
def sequence_of_program(number, owner_, mode: tl.constexpr):
    """Whose chunks program ``number`` takes: which packed sequence, or which of all stretches."""
    if mode.packed:
        return tl.load(owner_ + number)
    else:
        return tl.program_id(2)


@triton.jit
def chunks_of_program(number, owner_, ranges, EVERY: tl.constexpr, mode: tl.constexpr):
    """The sequence of program ``number``, which takes ``EVERY`` of its chunks (`ChunkedPlan.by_chunks`), and
    the first of them; there may be none.
    """
    if mode.packed:
        here = numbered_sequence(sequence_of_program(number, owner_, mode), ranges, mode)
        before = (here.chunk0 + here.index * (EVERY - 1)) // EVERY  # as `state_place` counts them
        return here, (number - before).to(tl.int32) * EVERY
    else:
        return sequence(ranges, mode), number * EVERY


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
def tile_axes(block_k, block_v, mode: tl.constexpr):
    """The axes of the block of keys ``block_k`` and of values ``block_v``."""
    token = tl.arange(0, C)
    key, value = block_k * mode.BK + tl.arange(0, mode.BK), block_v * mode.BV + tl.arange(0, mode.BV)
    return Axes(token, key, value, key < mode.K, value < mode.V)


class Offsets(NamedTuple):
    """Where a chunk's tiles lie from its first token on: keys [16, BK], keys as `token_sums` divides them
    [BK / 16, 16, 16], values [16, BV], values held transposed [BV, 16].
    """

    key: Any
    spread: Any
    value: Any
    turned: Any


@triton.jit
def chunk_offsets(axes, mode: tl.constexpr):
    """The same for all chunks."""
    key = axes.token[:, None] * (mode.H * mode.K) + axes.key[None, :]
    spread = axes.token[None, :, None] * (mode.H * mode.K) + spread_keys(mode)
    value = axes.token[:, None] * (mode.H * mode.V) + axes.value[None, :]
    return Offsets(key, spread, value, axes.token[None, :] * (mode.H * mode.V) + axes.value[:, None])


@triton.jit
def spread_keys(mode: tl.constexpr):
    """The keys of a tile that is divided as `token_sums` divides it, [BK / 16, 1, 16]."""
    return tl.arange(0, mode.BK // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]


class There(NamedTuple):
    """Which elements of a chunk's tiles there are: tokens [16], keys [16, BK], values [16, BV]."""

    token: Any
    key: Any
    value: Any


@triton.jit
def chunk_elements(left, axes):
    """Of the chunk before whose first token ``left`` tokens remain."""
    m = axes.token < left
    return There(m, m[:, None] & axes.has_key[None, :], m[:, None] & axes.has_value[None, :])


@triton.jit
def spread(there, mode: tl.constexpr):
    """Which elements of a tile of keys divided as `token_sums` divides it there are, [BK / 16, 16, 16]."""
    return there.token[None, :, None] & (spread_keys(mode) < mode.K)


@triton.jit
def turned(there, axes):
    """Which elements of a tile of values held transposed there are, [BV, 16]."""
    return there.token[None, :] & axes.has_value[:, None]


@triton.jit
def causal(axes):
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
def chunk_segments(seg_, here, n):
    """Of the sequence's chunk ``n``, from the one number that says it (`plan.chunked.segment_starts`).

    Numbers of all tokens would be loaded once for each layout of a mask. One number is copied ahead in the
    background, and a mask is one operation with what is the same in all chunks.
    """
    word = tl.load(seg_ + here.chunk0 + n)
    return Segments(word, (word >> 17) & 31, word >> 22)


@triton.jit
def unbroken(segments, i, t, pairs):
    """Those of ``pairs`` of tokens i <= t between which no segment begins: bits of the tokens after i up to
    t, and the bit that is always set for other pairs.
    """
    return (segments.bits & tl.where(pairs, (2 << t) - (2 << i), 0x10000)) == 0


@triton.jit
def together(segments, pairs):
    """Those of ``pairs`` t, i with i <= t that lie in one segment, [16, 16]."""
    return unbroken(segments, tl.arange(0, C)[None, :], tl.arange(0, C)[:, None], pairs)


@triton.jit
def reached(segments):
    """Tokens that the entering state reaches, [16, 1]."""
    return tl.arange(0, C)[:, None] < segments.first


@triton.jit
def reaching(segments):
    """Tokens that reach the leaving state, [16, 1]."""
    return tl.arange(0, C)[:, None] >= segments.last


@triton.jit
def passing(segments):
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
def in_form(form, mode: tl.constexpr, GRADIENT: tl.constexpr):
    """The factor that a state, or its gradient, has while chunks are walked."""
    if not mode.any_decay:
        return power_of_two(form if GRADIENT else -form)
    elif GRADIENT:
        return cotangent_scale(form)[0]
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def out_of_form(form, mode: tl.constexpr):
    """The factor that takes the gradient of a state back."""
    if mode.any_decay:
        return cotangent_scale(form)[1]
    else:
        return power_of_two(-form)


class StateTile(NamedTuple):
    """Where the program's part of a state lies in an array [.., K, V], held transposed [BV, BK], and which of
    its elements there are.
    """

    offsets: Any
    there: Any


@triton.jit
def state_tile(axes, mode: tl.constexpr):
    """The same for all states."""
    offsets = axes.key[None, :] * mode.V + axes.value[:, None]
    return StateTile(offsets, axes.has_key[None, :] & axes.has_value[:, None])


@triton.jit
def load_state(ptr, head, tile, form, mode: tl.constexpr, GRADIENT: tl.constexpr = False):
    """The program's part of state ``head``, or of its gradient, float32, with the factor of the form."""
    S = tl.load(ptr + head * (mode.K * mode.V) + tile.offsets, mask=tile.there, other=0.0).to(tl.float32)
    return S * in_form(form, mode, GRADIENT)


@triton.jit
def store_state(ptr, head, S, tile, form, mode: tl.constexpr, GRADIENT: tl.constexpr = False):
    """Stores what `load_state` would load."""
    if GRADIENT:
        S *= out_of_form(form, mode)
    tl.store(ptr + head * (mode.K * mode.V) + tile.offsets, S, mask=tile.there)


@triton.jit
def partial_sums(block, T, mode: tl.constexpr):
    """Where the sums of value block ``block`` begin in an array [blocks, B, T, H, K]."""
    before = block.to(tl.int64) * (1 if mode.packed else tl.num_programs(2) // mode.splits)
    return before * T * (mode.H * mode.K)
