"""Device functions of kernels that work on each token and head by itself: tiles [tokens, heads, channels].

A program walks the tiles of its share of a row's tokens and of its heads. Channels are padded to a power
of two.
"""

import dataclasses
from typing import Any, NamedTuple

import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True)
class HeadwiseConfig:
    """What a launch is compiled for. The launcher makes it; inside a kernel it is one constant.

    Attributes:
        H: heads.
        N: channels of a head.
        BT: tokens of a tile.
        BH: heads of a tile.
        BN: channels of a tile, a power of two.
        stages: depth of the load pipeline.
        even: whether no element of any tile is missing.
    """

    H: int
    N: int
    BT: int
    BH: int
    BN: int
    stages: int
    unmasked: bool


class TokenBlock(NamedTuple):
    """The part of the work that a program has.

    Attributes:
        row: of the tokens.
        place: of its tokens among the row's shares.
        head: the first of its heads.
        start: the first of its tokens, in the row.
        end: the first token after them.
        T: tokens of a row.
        span: tokens of a share.
    """

    row: Any
    place: Any
    head: Any
    start: Any
    end: Any
    T: Any
    span: Any


@triton.jit
def token_block(T, span, tiling: tl.constexpr):
    """The program's share, of ``span`` tokens of a row.

    Programs that follow each other take the heads of the same tokens, which lie side by side in memory.
    """
    BLOCKS: tl.constexpr = (tiling.H + tiling.BH - 1) // tiling.BH
    program, shares = tl.program_id(0), tl.cdiv(T, span)
    part = program // BLOCKS
    row, place = part // shares, part % shares
    head, start, end = (program % BLOCKS) * tiling.BH, place * span, tl.minimum((place + 1) * span, T)
    return TokenBlock(row, place, head, start, end, T, span)


class Channels(NamedTuple):
    """The channels of a program's heads, [1, BH, BN]: their places in a token or vector [H, N], and which of
    them there are.
    """

    place: Any
    there: Any


@triton.jit
def channels(head, tiling: tl.constexpr):
    """The channels of the heads from ``head`` on."""
    h, n = head + tl.arange(0, tiling.BH)[None, :, None], tl.arange(0, tiling.BN)[None, None, :]
    return Channels(h * tiling.N + n, (h < tiling.H) & (n < tiling.N))


@triton.jit
def vector(ptr, channel, tiling: tl.constexpr):
    """A vector [H, N] at the program's channels, float32."""
    if tiling.unmasked:
        return tl.load(ptr + channel.place).to(tl.float32)
    else:
        return tl.load(ptr + channel.place, mask=channel.there, other=0.0).to(tl.float32)


@triton.jit
def zero_tile(tiling: tl.constexpr):
    """A tile of zeros, float32."""
    return tl.full((tiling.BT, tiling.BH, tiling.BN), 0.0, tl.float32)


@triton.jit
def partial_sum(ptr, index: tl.constexpr, count: tl.constexpr, sums, mine, channel, tiling: tl.constexpr):
    """Stores a share's sum over tokens of ``sums`` [tokens, BH, BN], vector ``index`` of ``count``.

    ``ptr`` is [B, shares, count, H, N]; a second pass sums the shares in a fixed order.
    """
    which = ((mine.row * tl.cdiv(mine.T, mine.span) + mine.place) * count + index).to(tl.int64)
    at = ptr + which * (tiling.H * tiling.N) + channel.place
    tl.store(at, tl.sum(sums, 0, keep_dims=True), mask=channel.there)


@triton.jit
def sigmoid(x):
    """Of float32."""
    return 1.0 / (1.0 + tl.exp(-x))
