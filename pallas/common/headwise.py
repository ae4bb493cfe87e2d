"""Functions of kernels that treat every token and head separately: tiles [tokens, heads, channels].

A program scans the tiles of a block of tokens, for some of the heads. Channels are padded to a power of two.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from .token_tiles import load_tokens, store_tokens


@dataclasses.dataclass(frozen=True)
class HeadwiseConfig:
    """Compile-time facts of a launch; a kernel's own config adds to them.

    Attributes:
        H: heads.
        N: channels of a head.
        BT: tokens of a tile.
        BH: heads of a tile.
        BN: channels of a tile, a power of two.
        stages: depth of the load pipeline.
        unmasked: whether every tile is complete.
    """

    H: int
    N: int
    BT: int
    BH: int
    BN: int
    stages: int
    unmasked: bool


class Dims(NamedTuple):
    """Lengths that are known at run time: tokens of a sequence, and tokens of a program's block."""

    T: Tensor
    block_len: Tensor


class TokenBlock(NamedTuple):
    """The work of a program: tokens ``start`` to ``end`` of sequence ``batch``, its block number ``index``,
    heads from ``head`` on.
    """

    batch: Tensor
    index: Tensor
    head: Tensor
    start: Tensor
    end: Tensor


@triton.jit
def token_block(dims, c: tl.constexpr):
    """The program's block. Consecutive programs take the heads of the same tokens, which are adjacent in
    memory.
    """
    HEAD_BLOCKS: tl.constexpr = (c.H + c.BH - 1) // c.BH
    program, count = tl.program_id(0), tl.cdiv(dims.T, dims.block_len)
    block = program // HEAD_BLOCKS
    batch, index = block // count, block % count
    head = (program % HEAD_BLOCKS) * c.BH
    start, end = index * dims.block_len, tl.minimum((index + 1) * dims.block_len, dims.T)
    return TokenBlock(batch, index, head, start, end)


class Channels(NamedTuple):
    """The channels of a program's heads, [1, BH, BN]: offsets in a token or vector [H, N], and whether they
    exist.
    """

    offsets: Tensor
    mask: Tensor


@triton.jit
def head_channels(block, c: tl.constexpr):
    """The channels of a program's heads."""
    h, n = block.head + tl.arange(0, c.BH)[None, :, None], tl.arange(0, c.BN)[None, None, :]
    return Channels(h * c.N + n, (h < c.H) & (n < c.N))


class Tile(NamedTuple):
    """A tile of tokens: offset of its first token, offsets from there, and which elements exist."""

    base: Tensor
    offsets: Tensor
    mask: Tensor


@triton.jit
def tile_offsets(channels, c: tl.constexpr):
    """Offsets of a tile's elements from its first token."""
    return tl.arange(0, c.BT)[:, None, None] * (c.H * c.N) + channels.offsets


@triton.jit
def token_tile(at, offsets, block, channels, dims, c: tl.constexpr):
    """The tile that begins at token ``at``; ``offsets``: `tile_offsets`."""
    base = (block.batch.to(tl.int64) * dims.T + at) * (c.H * c.N)
    return Tile(base, offsets, channels.mask & (at + tl.arange(0, c.BT)[:, None, None] < block.end))


@triton.jit
def load(ptr, tile, c: tl.constexpr):
    """A tile in the dtype of memory, ``ptr`` at its base."""
    return load_tokens(ptr, tile.offsets, tile.mask, c.unmasked)


@triton.jit
def store(ptr, tile, x, c: tl.constexpr):
    """Stores ``x`` in the dtype of memory, ``ptr`` at the tile's base."""
    store_tokens(ptr, tile.offsets, x, tile.mask, c.unmasked)


@triton.jit
def load_vector(ptr, channels, c: tl.constexpr):
    """A vector [H, N] at the program's channels, in float32."""
    if c.unmasked:
        return tl.load(ptr + channels.offsets).to(tl.float32)
    else:
        return tl.load(ptr + channels.offsets, mask=channels.mask, other=0.0).to(tl.float32)


@triton.jit
def zero_tile(c: tl.constexpr):
    """A float32 tile of zeros."""
    return tl.full((c.BT, c.BH, c.BN), 0.0, tl.float32)


@triton.jit
def store_sum(ptr, i: tl.constexpr, count: tl.constexpr, tile, block, channels, dims, c: tl.constexpr):
    """Stores the sum of ``tile`` over its tokens as vector ``i`` of [B, blocks, count, H, N].

    A second pass sums over blocks in a fixed order, so that two runs give the same bits.
    """
    block_of_all = block.batch * tl.cdiv(dims.T, dims.block_len) + block.index
    at = ptr + (block_of_all * count + i).to(tl.int64) * (c.H * c.N) + channels.offsets
    tl.store(at, tl.sum(tile, 0, keep_dims=True), mask=channels.mask)


@triton.jit
def sigmoid(x):
    """The sigmoid of float32 ``x``."""
    return 1.0 / (1.0 + tl.exp(-x))
