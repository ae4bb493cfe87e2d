"""Functions of the kernels that scan token by token: the tokens of a program, the tiles of a state and of one
token.

A scan saves the state every ``interval`` tokens. A program holds its block of a state as one tile [BV, P, 16]
of keys 16 p + e. Triton orders axes by their strides in memory, equal ones by position: it puts four
neighbouring keys and all P into a thread, four lanes to 16 keys and the other eight lanes to values, so that
a sum over keys is mostly within a thread. With [P, BV, 16] it would put P to lanes, and a token of RWKV-7
would take 1230 instructions instead of 500.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..backend.versions import triton_release
from .token_tiles import load_tokens, store_tokens

# Triton orders the axes of a load by how many elements are adjacent along them. Values and P have one each;
# of such equal axes Triton gives the next lanes to the first one up to 3.6, to the last one from 3.7 on.
LAST_AXIS_FIRST = tl.constexpr(triton_release() >= (3, 7))


@dataclasses.dataclass(frozen=True)
class ScanConfig:
    """Everything that a launch is compiled for.

    Attributes:
        H: heads.
        K: keys of a head.
        V: values of a head.
        P: sixteens of keys of a program, a power of two.
        BV: values of a program, a power of two.
        interval: tokens between saved states.
        split_len: tokens that a launch takes of each sequence, a multiple of ``interval``; 0 for all.
        whole: whether every interval has all its tokens.
        unmasked: whether every key and value of every tile exists.
        reverse: whether the scan goes from the last token to the first.
        segments: whether a sequence has segments, at whose first token the state restarts.
        packed: whether sequences are packed along T.
        value_major: whether saved states are [V, K].
        x_scale: factor of what is written.
        y_scale: factor of what is read.
    """

    H: int
    K: int
    V: int
    P: int
    BV: int
    interval: int
    split_len: int
    whole: bool
    unmasked: bool
    reverse: bool
    segments: bool
    packed: bool
    value_major: bool
    x_scale: float
    y_scale: float


class TokenIndex(NamedTuple):
    """Where the tokens of each program are. Fields that a call does not need are None.

    Attributes:
        restarts: [B, T] int32, whether the state restarts from zero before a token.
        cu_seqlens: [N + 1] int32, the first token of each packed sequence.
        first_intervals: [N + 1] int32, the first interval of each packed sequence.
        sequences: [intervals] int32, the packed sequence of each interval.
        split: [1] int32, which ``split_len`` tokens of each sequence a launch takes.
        T: tokens of a batch element.
    """

    restarts: Tensor
    cu_seqlens: Tensor
    first_intervals: Tensor
    sequences: Tensor
    split: Tensor
    T: Tensor


class Tokens(NamedTuple):
    """The tokens of a sequence or an interval.

    Attributes:
        first: counted through the batch.
        length: their number.
        interval: the first interval, counted through all intervals of the launch.
    """

    first: Tensor
    length: Tensor
    interval: Tensor


@triton.jit
def sequence_tokens(p, index, c: tl.constexpr):
    """The tokens of sequence ``p``, or of its split."""
    if c.packed:
        first = tl.load(index.cu_seqlens + p)
        length = tl.load(index.cu_seqlens + p + 1) - first
        return Tokens(first.to(tl.int64), length, tl.load(index.first_intervals + p).to(tl.int64))
    elif index.split is not None:
        row, before = p.to(tl.int64), tl.load(index.split) * c.split_len
        length = tl.minimum(index.T - before, c.split_len)
        return Tokens(row * index.T + before, length, row * (c.split_len // c.interval))
    else:
        row = p.to(tl.int64)
        return Tokens(row * index.T, index.T, row * tl.cdiv(index.T, c.interval))


@triton.jit
def interval_tokens(index, c: tl.constexpr):
    """The tokens of the interval of program axis 2, which counts through the batch; perhaps none."""
    n = tl.program_id(2)
    p = tl.load(index.sequences + n) if c.packed else n // tl.cdiv(index.T, c.interval)
    all_tokens = sequence_tokens(p, index, c)
    before = (n - all_tokens.interval).to(tl.int32) * c.interval
    length = tl.maximum(tl.minimum(all_tokens.length - before, c.interval), 0)
    return Tokens(all_tokens.first + before, length, n.to(tl.int64))


@triton.jit
def has_restart(index, token):
    """Whether the state restarts before ``token``."""
    return tl.load(index.restarts + token) != 0


@triton.jit
def edge_token(tokens, index, c: tl.constexpr):
    """The token at which a scan begins; that of a sequence without tokens exists but is another's."""
    edge = tokens.first + tl.maximum(tokens.length - 1, 0) if c.reverse else tokens.first
    return tl.minimum(edge, index.T - 1) if c.packed else edge


class ScanAxes(NamedTuple):
    """The axes of a program's state tile: keys [P, 16], values [BV], and whether they exist."""

    key: Tensor
    value: Tensor
    has_key: Tensor
    has_value: Tensor


@triton.jit
def scan_axes(c: tl.constexpr):
    """The axes of the block of values of program axis 0."""
    key = tl.arange(0, c.P)[:, None] * 16 + tl.arange(0, 16)[None, :]
    value = tl.program_id(0) * c.BV + tl.arange(0, c.BV)
    return ScanAxes(key, value, key < c.K, value < c.V)


@triton.jit
def load_keys(ptr, at, axes, c: tl.constexpr):
    """A token's keys as stored, [P, 16]. ``at`` counts tokens and heads."""
    return load_tokens(ptr + at * c.K, axes.key, axes.has_key, c.unmasked)


@triton.jit
def load_values(ptr, at, axes, c: tl.constexpr):
    """A token's values as stored, [BV]."""
    return load_tokens(ptr + at * c.V, axes.value, axes.has_value, c.unmasked)


@triton.jit
def store_values(ptr, at, x, axes, c: tl.constexpr):
    """Stores a token's values [BV]."""
    store_tokens(ptr + at * c.V, axes.value, x, axes.has_value, c.unmasked)


@triton.jit
def keys(x):
    """A token's keys [P, 16], to combine with a state tile."""
    return x[None, :, :]


@triton.jit
def values(x):
    """A token's values [BV], to combine with a state tile."""
    return x[:, None, None]


@triton.jit
def sum_keys(state, x):
    """[BV], the state tile's product with keys."""
    return tl.sum(tl.sum(state * x, 1), 1)


@triton.jit
def edge_state(ptr, axes, c: tl.constexpr):
    """Pointers to the program's tile of the initial or final state, in an array [N, H, V', K'] of whole
    tiles.
    """
    head = (tl.program_id(2).to(tl.int64) * c.H + tl.program_id(1)) * (tl.num_programs(0) * c.BV)
    return ptr + (head + axes.value[:, None, None]) * (c.P * 16) + axes.key[None, :, :]


@triton.jit
def load_edge_state(ptr, axes, c: tl.constexpr):
    """The program's tile [BV, P, 16] of the initial state, whose layout all later tiles have."""
    if LAST_AXIS_FIRST:
        return tl.permute(tl.load(tl.permute(edge_state(ptr, axes, c), (1, 0, 2))), (1, 0, 2))
    else:
        return tl.load(edge_state(ptr, axes, c))


@triton.jit
def save_state(states, S, interval, axes, c: tl.constexpr):
    """Saves the state at an end of ``interval``."""
    key, value = axes.key[None, :, :], axes.value[:, None, None]
    mask = axes.has_key[None, :, :] & axes.has_value[:, None, None]
    head = (interval * c.H + tl.program_id(1)) * (c.K * c.V)
    at = value * c.K + key if c.value_major else key * c.V + value
    store_tokens(states + head, at, S, mask, c.unmasked)
