"""Kernels of the products of a decoded token: matrices [N, K], a row for every result, times few vectors.

A token reads every weight once and does next to nothing with it, so these kernels are about bytes: a program
takes some rows of the matrix, which lie side by side in memory, and starts to load them before it makes the
vector that they are multiplied with. Norm, token shift and mixes are computed by every program again: that
takes the time in which the weights are on their way.

Segments of a matrix, of multiples of 64 rows, have a code: the mix, or plane of the input, that they read,
plus 16 times what is done with their sums (`finish`). Codes are constants: in memory they would be one more
number to wait for, before another can be asked for. All loads stand before the first sum over channels, which
is a barrier that no load is moved across.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Of float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def finish(x, code):
    """What is done with sums: 0 nothing, 1 tanh, 2 sigmoid, 3 the square of the positive part."""
    kind = code // 16
    if kind == 1:
        x = 2.0 * sigmoid(2.0 * x) - 1.0
    elif kind == 2:
        x = sigmoid(x)
    elif kind == 3:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def code_of(first, segments: tl.constexpr):
    """The code of the segment that row ``first`` lies in; ``segments`` has starts and codes."""
    code = segments.codes[0]
    for i in tl.static_range(1, len(segments.codes)):
        code = tl.where(first >= segments.starts[i], segments.codes[i], code)
    return code


@triton.jit
def load(ptr, offsets, mask, EVEN: tl.constexpr):
    """Values as float32, zero outside of the mask."""
    if EVEN:
        return tl.load(ptr + offsets).to(tl.float32)
    else:
        return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def normed(x, mask, scale, bias, K: tl.constexpr, EPS: tl.constexpr):
    """Layer norm of a tile that holds all K channels and zeros behind them."""
    mean = tl.sum(tl.sum(x, 1), 0) / K
    x = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(tl.sum(x * x, 1), 0) / K
    return x * tl.rsqrt(variance + EPS) * scale + bias


@triton.jit
def gemv_kernel(
    x_, last_, scale_, bias_, mixes_, active_, w_, w_scale_, add_, gate_, layer, y_, shift_,
    B: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    XS: tl.constexpr, GS: tl.constexpr, G: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr,
    MIX: tl.constexpr, PLANES: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, GATE_AT: tl.constexpr,
    SEGMENTS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: N / BN. ``y_`` [B, N]; what comes of row b is the sum over k of w [n, k] x[b, k].

    ``x_`` is [B, K], or [planes, B, K] with PLANES. NORM normalises it; MIX then moves it towards ``last_``
    [layers, B, K] by ``mixes_`` [mixes, K], and the first program writes ``shift_`` [B, K], the normalised
    tokens (``last_`` itself for rows that are not alive). SCALED: weights of a row have a common factor in
    each G of them, ``w_scale_`` [N, K / G]. GATE multiplies by N channels of ``gate_`` [B, GS] from GATE_AT
    on, ADD then adds ``add_`` [B, N]. Rows of ``x_`` are XS apart and may have more than K channels.
    ``layer`` comes as 2 layer + 3: an odd number, of which the compiler makes no special case.
    """
    ROWS: tl.constexpr = N % BN != 0
    EVEN: tl.constexpr = K == BK
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK // G)[:, None] * G + tl.arange(0, G)[None, :]
    inside = k < K
    offsets = n[:, None, None] * K + k[None, :, :]
    if ROWS:
        w = tl.load(w_ + offsets, mask=(n < N)[:, None, None] & inside[None, :, :], other=0)
    elif EVEN:
        w = tl.load(w_ + offsets)
    else:
        w = tl.load(w_ + offsets, mask=inside[None, :, :], other=0)
    if SCALED:
        group = tl.arange(0, BK // G)
        factors = tl.load(
            w_scale_ + n[:, None] * (K // G) + group[None, :],
            mask=(n < N)[:, None] & (group < K // G)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
    code = code_of(first, SEGMENTS)
    plane = code % 16
    if NORM:
        scale, bias = load(scale_, k, inside, EVEN), load(bias_, k, inside, EVEN)
    if MIX:
        mu = load(mixes_ + plane * K, k, inside, EVEN)
    for b in tl.static_range(B):
        x = load(x_ + ((plane if PLANES else 0) * B + b) * XS, k, inside, EVEN)
        if MIX:
            last = load(last_ + (((layer - 3) // 2) * B + b) * K, k, inside, EVEN)
        if GATE:
            gate = load(gate_ + b * GS + GATE_AT, n, n < N, False)
        if ADD:
            add = load(add_ + b * N, n, n < N, False)
        if NORM:
            x = normed(x, inside, scale, bias, K, EPS)
        if MIX:
            if first == 0:
                kept = tl.where(tl.load(active_ + b) != 0, x, last)
                tl.store(shift_ + b * K + k, kept.to(shift_.dtype.element_ty), mask=inside)
            x += (last - x) * mu
        sums = tl.sum(w.to(tl.float32) * x[None, :, :], 2)
        if SCALED:
            sums = sums * factors
        y = finish(tl.sum(sums, 1), code)
        if GATE:
            y *= gate
        if ADD:
            y += add
        tl.store(y_ + b * N + n, y.to(y_.dtype.element_ty), mask=n < N)


@triton.jit
def mix_kernel(
    x_, last_, scale_, bias_, mixes_, active_, layer, planes_, shift_,
    B: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid (B, mixes): ``planes_`` [mixes, B, K], what `gemv_kernel` multiplies with, for more rows."""
    EVEN: tl.constexpr = K == BK
    b, plane = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BK)[None, :]
    inside = k < K
    x = load(x_ + b * K, k, inside, EVEN)
    last = load(last_ + (((layer - 3) // 2) * B + b) * K, k, inside, EVEN)
    mu = load(mixes_ + plane * K, k, inside, EVEN)
    x = normed(x, inside, load(scale_, k, inside, EVEN), load(bias_, k, inside, EVEN), K, EPS)
    if plane == 0:
        kept = tl.where(tl.load(active_ + b) != 0, x, last)
        tl.store(shift_ + b * K + k, kept.to(shift_.dtype.element_ty), mask=inside)
    x += (last - x) * mu
    tl.store(planes_ + (plane * B + b) * K + k, x.to(planes_.dtype.element_ty), mask=inside)


@triton.jit
def gemm_kernel(
    x_, w_, add_, gate_, y_,
    B: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    XS: tl.constexpr, GS: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    GATE_AT: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN, blocks of BB rows): `gemv_kernel` with PLANES on tensor cores, for more rows.

    K is a multiple of BK. Sums run over K in one order: the same rows give the same bits.
    """
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    k = tl.arange(0, BK)
    code = code_of(first, SEGMENTS)
    x_ += (code % 16) * (B * XS)
    here = (b < B)[:, None]
    there = (n < N)[None, :]
    sums = tl.zeros((BB, BN), tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ + b[:, None] * XS + (at + k)[None, :], mask=here, other=0.0)
        w = tl.load(w_ + n[None, :] * K + (at + k)[:, None], mask=there, other=0.0)
        sums = tl.dot(x, w, sums, input_precision=PRECISION)
    y = finish(sums, code)
    at = b[:, None] * N + n[None, :]
    if GATE:
        y *= tl.load(gate_ + b[:, None] * GS + (GATE_AT + n)[None, :], mask=here & there, other=0.0).to(
            tl.float32
        )
    if ADD:
        y += tl.load(add_ + at, mask=here & there, other=0.0).to(tl.float32)
    tl.store(y_ + at, y.to(y_.dtype.element_ty), mask=here & there)
