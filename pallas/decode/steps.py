"""Kernels of a decoded token that see one head of one row: second low-rank stage, keys, step and readout.

The states of all layers, [layers, B, heads, K, V], stay where they are: a program reads its own state and
writes it back. So do the shifts [layers, B, C]: nobody reads this layer's tokens before any more when these
kernels run, nor the feed-forward's of the layer before, so they put the new ones in their place. Nothing
changes for a row that is not alive.

``layer`` comes as 2 layer + 3, see projections.py. N is the number of channels of a head, a power of two.
"""

import triton
import triton.language as tl

from ..common.sums import extended, sums
from .projections import load, sigmoid


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
def store_shifts(att_, ffn_, shift, before, layer, here, B: tl.constexpr, C: tl.constexpr):
    """Puts ``shift``, of [B, C] at ``here``, into ``att_`` [layers, B, C] of this layer, and ``before`` into
    ``ffn_`` of the layer before, if there is one.

    It stands at a kernel's end: no load is moved across a store or a branch.
    """
    at = (layer - 3) // 2
    tl.store(att_ + at * (B * C) + here, shift)
    tl.store(ffn_ + (at - 1) * (B * C) + here, before, mask=(here >= 0) & (at > 0))


@triton.jit
def vector(ptr, channel):
    """Values as float32."""
    return tl.load(ptr + channel).to(tl.float32)


@triton.jit
def rwkv7_kernel(
    state_, att_, ffn_, made_, first_, second_, w2_, w0_, a0_, v0_, k_k_, k_a_, r_k_, scale_, bias_, shift_,
    before_, active_, layer, y_, new_, new_att_, new_ffn_,
    B: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, R_DECAY: tl.constexpr,
    R_RATE: tl.constexpr, R_MIX: tl.constexpr, R_GATE: tl.constexpr, BR: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, LOW_RANK: tl.constexpr, RESIDUAL: tl.constexpr,
    DECAY_SCALE: tl.constexpr, RATE_SCALE: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Grid (H, B).

    ``made_`` [B, WIDTH] float32: r, k, v (C = H N each), then the ranks of decay, rate, value and gate,
    multiples of BR; with LOW_RANK ``w2_`` [4, C, R] makes numbers of those, else they are there, ``second_``
    [4, B, C]. ``first_`` [B, FIRST] is layer 0's ``made_``. ``y_`` [B, C]. ``shift_``, ``before_``: see
    `store_shifts`. ``new_`` is ``state_``, ``new_att_`` ``att_`` and ``new_ffn_`` ``ffn_``, see `launch`.
    """
    C: tl.constexpr = H * N
    head = tl.program_id(0)
    channel = head * N + tl.arange(0, N)
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    # All loads first: they are on their way together. Sums over channels are barriers, and a load behind one
    # would be waited for by itself: most of these numbers come from memory, not from a cache.
    w0, a0, k_k = vector(w0_, channel), vector(a0_, channel), vector(k_k_, channel)
    k_a, r_k, scale = vector(k_a_, channel), vector(r_k_, channel), vector(scale_, channel)
    bias = vector(bias_, channel)
    if RESIDUAL:
        v0 = vector(v0_, channel)
    b = tl.program_id(1)
    place = ((((layer - 3) // 2) * B + b) * H + head).to(tl.int64) * (N * N)
    state = tl.load(state_ + place + tile).to(tl.float32)
    token = made_ + b * WIDTH
    r, k, v = vector(token, channel), vector(token + C, channel), vector(token + 2 * C, channel)
    if RESIDUAL:
        first = vector(first_ + b * FIRST + 2 * C, channel)
    active = tl.load(active_ + b) != 0
    here = b * C + channel
    shift, before = tl.load(shift_ + here), tl.load(before_ + here)
    if LOW_RANK:
        w_, h_, c = w2_ + head * (N * R), token + 3 * C, tl.arange(0, N)
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
    k *= 1.0 + (rate - 1.0) * k_a

    # What the token reads of the new state is what it reads of the old one, decayed, and of its own
    # writes: so that it needs not to wait for the new one.
    square, by_key, by_kk, bonus = sums((kk * kk, r * k, r * kk * rate, r * k * r_k))
    unit = tl.where(square > EPS * EPS, tl.rsqrt(square), 1.0 / EPS)
    kk *= unit
    read, o = sums((state * kk[:, None], state * (decay * r)[:, None]))
    write = kk * rate * RATE_SCALE
    state = state * decay[:, None] + (k[:, None] * v[None, :] - write[:, None] * read[None, :])
    tl.store(state_ + place + tile, state.to(state_.dtype.element_ty), mask=active)
    o += by_key * v - (by_kk * unit * RATE_SCALE) * read
    o = readout(o, scale, bias, N, NORM_EPS) + bonus * v
    tl.store(y_ + here, (o * gate).to(y_.dtype.element_ty))
    store_shifts(att_, ffn_, shift, before, layer, here, B, C)


@triton.jit
def rwkv6_kernel(
    state_, att_, ffn_, made_, second_, w2_, base_, bonus_, scale_, bias_, shift_, before_, active_, layer,
    y_, new_, new_att_, new_ffn_,
    B: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    WIDTH: tl.constexpr, LOW_RANK: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Grid (H, B): as `rwkv7_kernel`, with ``made_`` r, k, v, gate (C each), then R for the decay."""
    C: tl.constexpr = H * N
    head = tl.program_id(0)
    channel = head * N + tl.arange(0, N)
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    base, bonus = vector(base_, channel), vector(bonus_, channel)
    scale, bias = vector(scale_, channel), vector(bias_, channel)
    b = tl.program_id(1)
    place = ((((layer - 3) // 2) * B + b) * H + head).to(tl.int64) * (N * N)
    state = tl.load(state_ + place + tile).to(tl.float32)
    token = made_ + b * WIDTH
    r, k, v = vector(token, channel), vector(token + C, channel), vector(token + 2 * C, channel)
    gate = vector(token + 3 * C, channel)
    active = tl.load(active_ + b) != 0
    here = b * C + channel
    shift, before = tl.load(shift_ + here), tl.load(before_ + here)
    if LOW_RANK:
        ws, hs = second_stage(w2_ + head * (N * R), token + 4 * C, tl.arange(0, N), R, R, BR)
        decay = times(ws, hs)
    else:
        decay = vector(second_ + b * C, channel)
    # exp(-exp(20)) is 0 already
    decay = tl.exp(-tl.exp(tl.minimum(base + decay, 20.0)))
    o = tl.sum(state * r[:, None], 0) + tl.sum(r * k * bonus, 0) * v
    state = state * decay[:, None] + k[:, None] * v[None, :]
    tl.store(state_ + place + tile, state.to(state_.dtype.element_ty), mask=active)
    o = readout(o, scale, bias, N, NORM_EPS)
    tl.store(y_ + here, (o * gate * sigmoid(gate)).to(y_.dtype.element_ty))
    store_shifts(att_, ffn_, shift, before, layer, here, B, C)


@triton.jit
def mix_delta_kernel(
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
