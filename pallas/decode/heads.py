"""Kernels of a decoded token that see one head of one row: second low-rank stage, keys, step and readout.

The states of all layers, [layers, B, heads, K, V], stay where they are: a program reads its own state and
writes it back. It touches nothing for a row that is not alive.

``layer`` comes as 2 layer + 3, see products.py. N is the number of channels of a head, a power of two.
"""

import triton
import triton.language as tl

from .products import load, sigmoid


@triton.jit
def second_stage(w_, channel, r, R: tl.constexpr, EVEN: tl.constexpr):
    """Weights [channels, r] of a second low-rank stage, as they are stored."""
    if EVEN:
        return tl.load(w_ + channel[:, None] * R + r[None, :])
    else:
        return tl.load(w_ + channel[:, None] * R + r[None, :], mask=(r < R)[None, :], other=0.0)


@triton.jit
def times(w, h):
    """Sums over r of w [channels, r] h [r]."""
    return tl.sum(w.to(tl.float32) * h[None, :], 1)


@triton.jit
def readout(o, scale_, bias_, channel, N: tl.constexpr, EPS: tl.constexpr):
    """Group norm of a head's output [N]."""
    o -= tl.sum(o, 0) / N
    o *= tl.rsqrt(tl.sum(o * o, 0) / N + EPS)
    return o * tl.load(scale_ + channel).to(tl.float32) + tl.load(bias_ + channel).to(tl.float32)


@triton.jit
def vector(ptr, channel):
    """Values as float32."""
    return tl.load(ptr + channel).to(tl.float32)


@triton.jit
def rwkv7_kernel(
    state_, made_, first_, second_, w2_, w0_, a0_, v0_, k_k_, k_a_, r_k_, scale_, bias_, alive_, layer,
    y_, new_,
    B: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, LOW_RANK: tl.constexpr, RESIDUAL: tl.constexpr,
    DECAY_SCALE: tl.constexpr, RATE_SCALE: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Grid (H, B).

    ``made_`` [B, WIDTH] float32: r, k, v (C = H N each), then four times R for decay, rate, value and gate;
    with LOW_RANK ``w2_`` [4, C, R] makes numbers of those, else they are there, ``second_`` [4, B, C].
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
    # all loads first: they are on their way together
    state = tl.load(state_ + place + tile).to(tl.float32)
    made_ += b * WIDTH
    if LOW_RANK:
        EVEN: tl.constexpr = R % BR == 0
        decay, rate = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
        gate, mix = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
        for at in tl.static_range(0, R, BR):
            i = at + tl.arange(0, BR)
            h_ = made_ + 3 * C
            w_decay = second_stage(w2_, channel, i, R, EVEN)
            w_rate = second_stage(w2_ + C * R, channel, i, R, EVEN)
            w_gate = second_stage(w2_ + 3 * C * R, channel, i, R, EVEN)
            if RESIDUAL:
                w_mix = second_stage(w2_ + 2 * C * R, channel, i, R, EVEN)
            h_decay, h_rate = load(h_, i, i < R, EVEN), load(h_ + R, i, i < R, EVEN)
            h_mix, h_gate = load(h_ + 2 * R, i, i < R, EVEN), load(h_ + 3 * R, i, i < R, EVEN)
            decay += times(w_decay, h_decay)
            rate += times(w_rate, h_rate)
            gate += times(w_gate, h_gate)
            if RESIDUAL:
                mix += times(w_mix, h_mix)
    else:
        decay, rate = vector(second_ + b * C, channel), vector(second_ + (B + b) * C, channel)
        gate = vector(second_ + (3 * B + b) * C, channel)
        if RESIDUAL:
            mix = vector(second_ + (2 * B + b) * C, channel)
    r, k, v = vector(made_, channel), vector(made_ + C, channel), vector(made_ + 2 * C, channel)
    decay = tl.exp(DECAY_SCALE * sigmoid(vector(w0_, channel) + decay))
    rate = sigmoid(vector(a0_, channel) + rate)
    if RESIDUAL:
        v += (vector(first_ + b * FIRST + 2 * C, channel) - v) * sigmoid(vector(v0_, channel) + mix)
    kk = k * vector(k_k_, channel)
    square = tl.sum(kk * kk, 0)
    kk *= tl.where(square > EPS * EPS, tl.rsqrt(square), 1.0 / EPS)
    k *= 1.0 + (rate - 1.0) * vector(k_a_, channel)

    read = tl.sum(state * kk[:, None], 0)
    write = kk * rate * RATE_SCALE
    state = state * decay[:, None] + (k[:, None] * v[None, :] - write[:, None] * read[None, :])
    tl.store(state_ + place + tile, state.to(state_.dtype.element_ty), mask=alive)
    o = readout(tl.sum(state * r[:, None], 0), scale_, bias_, channel, N, NORM_EPS)
    o += tl.sum(r * k * vector(r_k_, channel), 0) * v
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
    state = tl.load(state_ + place + tile).to(tl.float32)
    made_ += b * WIDTH
    if LOW_RANK:
        EVEN: tl.constexpr = R % BR == 0
        decay = tl.zeros((N,), tl.float32)
        for at in tl.static_range(0, R, BR):
            i = at + tl.arange(0, BR)
            w = second_stage(w2_, channel, i, R, EVEN)
            decay += times(w, load(made_ + 4 * C, i, i < R, EVEN))
    else:
        decay = vector(second_ + b * C, channel)
    r, k, v = vector(made_, channel), vector(made_ + C, channel), vector(made_ + 2 * C, channel)
    gate = vector(made_ + 3 * C, channel)
    # exp(-exp(20)) is 0 already
    decay = tl.exp(-tl.exp(tl.minimum(vector(base_, channel) + decay, 20.0)))
    o = tl.sum(state * r[:, None], 0) + tl.sum(r * k * vector(bonus_, channel), 0) * v
    state = state * decay[:, None] + k[:, None] * v[None, :]
    tl.store(state_ + place + tile, state.to(state_.dtype.element_ty), mask=alive)
    o = readout(o, scale_, bias_, channel, N, NORM_EPS)
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
