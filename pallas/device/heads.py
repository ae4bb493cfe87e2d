"""Device functions of kernels that work on each token and head by itself: tiles [tokens, heads, channels].

A program walks the tiles of its share of a row's tokens and of its heads. Channels are padded to a power
of two.
"""

import triton
import triton.language as tl


@triton.jit
def share(T, span, H: tl.constexpr, BH: tl.constexpr):
    """Row, place among the row's shares of ``span`` tokens, first head, first token and end of this program.

    Programs that follow each other take the heads of the same tokens, which lie side by side in memory.
    """
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    program, shares = tl.program_id(0), tl.cdiv(T, span)
    part = program // BLOCKS
    row, place = part // shares, part % shares
    return row, place, (program % BLOCKS) * BH, place * span, tl.minimum((place + 1) * span, T)


@triton.jit
def channels(head, H: tl.constexpr, N: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr):
    """[1, BH, BN]: places of the heads' channels in a token or vector [H, N], and which of them there are."""
    h, n = head + tl.arange(0, BH)[None, :, None], tl.arange(0, BN)[None, None, :]
    return h * N + n, (h < H) & (n < N)


@triton.jit
def vector(ptr, channel, there, EVEN: tl.constexpr):
    """A vector [H, N] at ``channel``, float32."""
    if EVEN:
        return tl.load(ptr + channel).to(tl.float32)
    else:
        return tl.load(ptr + channel, mask=there, other=0.0).to(tl.float32)


@triton.jit
def partial_sum(
    ptr, index: tl.constexpr, count: tl.constexpr, sums, row, place, T, span, channel, there,
    H: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Stores a share's sum over tokens of ``sums`` [tokens, BH, BN], vector ``index`` of ``count``.

    ``ptr`` is [B, shares, count, H, N]; a second pass sums the shares in a fixed order.
    """
    which = ((row * tl.cdiv(T, span) + place) * count + index).to(tl.int64)
    tl.store(ptr + which * (H * N) + channel, tl.sum(sums, 0, keep_dims=True), mask=there)


@triton.jit
def sigmoid(x):
    """Of float32."""
    return 1.0 / (1.0 + tl.exp(-x))
