"""Kernels of a decoded token that see one head of one row: second low-rank stage, keys, step and readout.

The states of all layers, [layers, B, heads, K, V], stay where they are: a program reads its own state and
writes it back. It touches nothing for a row that is not alive.

``layer`` comes as 2 layer + 3, see products.py. N is the number of channels of a head, a power of two.
"""

import triton
import triton.language as tl

from ..device.tokens import extended
from .products import load, sigmoid


@triton.jit
def second_stage(w_, h_, channel, R: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr):
    """Weights of a second low-rank stage, as they are stored, and what they are multiplied with: tuples of
    [channels, BR] and [BR]. ``w_`` is [channels, R] with RANK of R used, ``h_`` [RANK]; BR divides RANK.
    """
    ws, hs = (), ()
    for at in tl.static_range(0, RANK, BR):
        r = at + tl.arange(0, BR)
        ws = extended(ws, tl.load(w_ + channel[:, None] * R + r[None, :]))
        hs = extended(hs, tl.load(h_ + r).to(tl.float32))
    return ws, hs


@triton.jit
def times(ws, hs):
    """What `second_stage` loaded, multiplied and summed up over the ranks: [channels]."""
    total = tl.sum(ws[0].to(tl.float32) * hs[0][None, :], 1)
    for i in tl.static_range(1, len(ws)):
        total += tl.sum(ws[i].to(tl.float32) * hs[i][None, :], 1)
    return total


@triton.jit
def readout(o, scale, bias, N: tl.constexpr, EPS: tl.constexpr):
    """Group norm of a head's output [N]."""
    o -= tl.sum(o, 0) / N
    return o * tl.rsqrt(tl.sum(o * o, 0) / N + EPS) * scale + bias


@triton.jit
def vector(ptr, channel):
    """Values as float32."""
    return tl.load(ptr + channel).to(tl.float32)


@triton.jit
def rwkv7_kernel(
    state_, made_, first_, second_, w2_, w0_, a0_, v0_, k_k_, k_a_, r_k_, scale_, bias_, alive_, layer,
    y_, new_,
    B: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, R_DECAY: tl.constexpr,
    R_RATE: tl.constexpr, R_MIX: tl.constexpr, R_GATE: tl.constexpr, BR: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, LOW_RANK: tl.constexpr, RESIDUAL: tl.constexpr,
    DECAY_SCALE: tl.constexpr, RATE_SCALE: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Grid (H, B).

    ``made_`` [B, WIDTH] float32: r, k, v (C = H N each), then the ranks of decay, rate, value and gate,
    multiples of BR; with LOW_RANK ``w2_`` [4, C, R] makes numbers of those, else they are there, ``second_``
    [4, B, C].
    ``first_`` [B, FIRST] is layer 0's ``made_``. ``y_`` [B, C]; ``new_`` is ``state_``, see `launch`.
    """
    C: tl.constexpr = H * N
    head, b = tl.program_id(0), tl.program_id(1)
    alive = tl.load(alive_ + b) != 0
    if not (LOW_RANK or alive):  # few rows would wait for this number first
        return
    channel = head * N + tl.arange(0, N)
    place = ((((layer - 3) // 2) * B + b) * H + head).to(tl.int64) * (N * N)
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    # All loads first: they are on their way together. Sums over channels are barriers, and a load behind one
    # would be waited for by itself: most of these numbers come from memory, not from a cache.
    state = tl.load(state_ + place + tile).to(tl.float32)
    made_ += b * WIDTH
    r, k, v = vector(made_, channel), vector(made_ + C, channel), vector(made_ + 2 * C, channel)
    w0, a0, k_k, k_a = (
        vector(w0_, channel),
        vector(a0_, channel),
        vector(k_k_, channel),
        vector(k_a_, channel),
    )
    r_k, scale, bias = vector(r_k_, channel), vector(scale_, channel), vector(bias_, channel)
    if RESIDUAL:
        v0, first = vector(v0_, channel), vector(first_ + b * FIRST + 2 * C, channel)
    if LOW_RANK:
        w_, h_ = w2_ + head * (N * R), made_ + 3 * C
        c = tl.arange(0, N)
        decay_w, decay_h = second_stage(w_, h_, c, R, R_DECAY, BR)
        rate_w, rate_h = second_stage(w_ + C * R, h_ + R_DECAY, c, R, R_RATE, BR)
        h_ += R_DECAY + R_RATE
        if RESIDUAL:
            mix_w, mix_h = second_stage(w_ + 2 * C * R, h_, c, R, R_MIX, BR)
        gate_w, gate_h = second_stage(w_ + 3 * C * R, h_ + R_MIX, c, R, R_GATE, BR)
        decay, rate, gate = times(decay_w, decay_h), times(rate_w, rate_h), times(gate_w, gate_h)
        if RESIDUAL:
            mix = times(mix_w, mix_h)
    else:
        decay, rate = vector(second_ + b * C, channel), vector(second_ + (B + b) * C, channel)
        gate = vector(second_ + (3 * B + b) * C, channel)
        if RESIDUAL:
            mix = vector(second_ + (2 * B + b) * C, channel)
    decay = tl.exp(DECAY_SCALE * sigmoid(w0 + decay))
    rate = sigmoid(a0 + rate)
    if RESIDUAL:
        v += (first - v) * sigmoid(v0 + mix)
    kk = k * k_k
    square = tl.sum(kk * kk, 0)
    kk *= tl.where(square > EPS * EPS, tl.rsqrt(square), 1.0 / EPS)
    k *= 1.0 + (rate - 1.0) * k_a

    read = tl.sum(state * kk[:, None], 0)
    write = kk * rate * RATE_SCALE
    state = state * decay[:, None] + (k[:, None] * v[None, :] - write[:, None] * read[None, :])
    tl.store(state_ + place + tile, state.to(state_.dtype.element_ty), mask=alive)
    o = readout(tl.sum(state * r[:, None], 0), scale, bias, N, NORM_EPS)
    o += tl.sum(r * k * r_k, 0) * v
    tl.store(y_ + b * C + channel, (o * gate).to(y_.dtype.element_ty))


@triton.jit
def rwkv6_kernel(
    state_, made_, second_, w2_, base_, bonus_, scale_, bias_, alive_, layer, y_, new_,
    B: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    WIDTH: tl.constexpr, LOW_RANK: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Grid (H, B): as `rwkv7_kernel`, with ``made_`` r, k, v, gate (C each), then R for the decay."""
    C: tl.constexpr = H * N
    head, b = tl.program_id(0), tl.program_id(1)
    alive = tl.load(alive_ + b) != 0
    if not (LOW_RANK or alive):
        return
    channel = head * N + tl.arange(0, N)
    place = ((((layer - 3) // 2) * B + b) * H + head).to(tl.int64) * (N * N)
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    # all loads first, see `rwkv7_kernel`
    state = tl.load(state_ + place + tile).to(tl.float32)
    made_ += b * WIDTH
    r, k, v = vector(made_, channel), vector(made_ + C, channel), vector(made_ + 2 * C, channel)
    gate, base, bonus = vector(made_ + 3 * C, channel), vector(base_, channel), vector(bonus_, channel)
    scale, bias = vector(scale_, channel), vector(bias_, channel)
    if LOW_RANK:
        ws, hs = second_stage(w2_ + head * (N * R), made_ + 4 * C, tl.arange(0, N), R, R, BR)
        decay = times(ws, hs)
    else:
        decay = vector(second_ + b * C, channel)
    # exp(-exp(20)) is 0 already
    decay = tl.exp(-tl.exp(tl.minimum(base + decay, 20.0)))
    o = tl.sum(state * r[:, None], 0) + tl.sum(r * k * bonus, 0) * v
    state = state * decay[:, None] + k[:, None] * v[None, :]
    tl.store(state_ + place + tile, state.to(state_.dtype.element_ty), mask=alive)
    o = readout(o, scale, bias, N, NORM_EPS)
    tl.store(y_ + b * C + channel, (o * gate * sigmoid(gate)).to(y_.dtype.element_ty))


@triton.jit
def moves_kernel(
    x_, last_, z_, w_, mixes_, layer, planes_,
    B: tl.constexpr, C: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (C / BC, 5, B): RWKV-6's inputs of its products, ``planes_`` [5, B, C].

    ``x_`` [B, C] is the normalised token and ``last_`` [layers, B, C] the one before. How far a channel moves
    towards it is the sum over r of w [plane, r, channel] z[plane, r], with ``z_`` [B, WIDTH], and ``mixes_``
    [5, C].
    """
    plane, b = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.arange(0, BR)
    inside = (r < R)[:, None] & (c < C)[None, :]
    w = tl.load(w_ + plane * (R * C) + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ + b * WIDTH + plane * R + r, mask=r < R, other=0.0)
    by = load(mixes_ + plane * C, c, c < C, False) + tl.sum(w * z[:, None], 0)
    x = load(x_ + b * C, c, c < C, False)
    last = load(last_ + (((layer - 3) // 2) * B + b) * C, c, c < C, False)
    moved = (x + (last - x) * by).to(planes_.dtype.element_ty)
    tl.store(planes_ + (plane * B + b) * C + c, moved, mask=c < C)
