"""Backward kernels. With o_n = h_t + d_t w_n, w_n = mu_n + moves_nt, d_t = h_{t-1} - h_t, g_n = do_n::

    dw_n = g_n d_t,   q_t = sum_n g_n w_n,   dh_t = sum_n g_n - q_t + q_{t+1}

and dx is the layer norm's usual gradient of dh. Tokens are walked from the last to the first, so that q_{t+1}
is at hand. Gradients of parameters are summed in float32 over the tokens that a program walks; the launcher
sums over programs, so that two runs give the same bits.
"""

import triton
import triton.language as tl

from ..common.sums import extended, sums
from .norm_shift_mix_tiles import begins, read, token_block, write


@triton.jit
def statistic(mean_, rstd_, at, NORM: tl.constexpr):
    """A token's mean, and one over its standard deviation; without ``NORM`` what changes nothing."""
    if NORM:
        return tl.load(mean_ + at), tl.load(rstd_ + at)
    else:
        return 0.0, 1.0


@triton.jit
def unit_line(x_, at, mean, rstd, C: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr):
    """A token of x with mean 0 and variance 1; without ``NORM`` as it is."""
    x = read(x_, at, C, BC)
    if NORM:
        x = (x - mean) * rstd
    return x


@triton.jit
def affine(unit, scale, bias_, C: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr):
    """The token that `unit_line` made ``unit`` of, as the norm gives it."""
    if NORM:
        unit = unit * scale + read(bias_, 0, C, BC)
    return unit


@triton.jit
def mix_bwd_kernel(
    x_,
    scale_,
    bias_,
    last_,
    seg_,
    moves_,
    mean_,
    rstd_,
    mu0_,
    mu1_,
    mu2_,
    mu3_,
    mu4_,
    mu5_,
    g0_,
    g1_,
    g2_,
    g3_,
    g4_,
    g5_,
    dend_,
    dsum_,
    dnormalised_,
    B,
    T,
    span,
    dx_,
    dlast_,
    dmoves_,
    parts_,
    sums_,
    C: tl.constexpr,
    BC: tl.constexpr,
    M: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    LAST: tl.constexpr,
    SEG: tl.constexpr,
    MOVES: tl.constexpr,
    SUM: tl.constexpr,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Writes dx; by tiles of channels dh instead, and for every token and tile the two sums that dx needs."""
    mu_, g_ = (mu0_, mu1_, mu2_, mu3_, mu4_, mu5_), (g0_, g1_, g2_, g3_, g4_, g5_)
    row, base, start, end = token_block(T, span)
    zero = tl.zeros([BC], tl.float32)
    mus, dmus = (), ()
    for n in tl.static_range(M):
        dmus = extended(dmus, zero)
        mus = extended(mus, read(mu_[n], 0, C, BC))
    dscale, dbias, after, scale = zero, zero, zero, zero
    if NORM:
        scale = read(scale_, 0, C, BC)
    if end < T:
        for n in tl.static_range(M):
            mu = read(mu_[n], 0, C, BC)
            if MOVES:
                mu = mu + read(moves_, (n * B + row) * T + end, C, BC)
            after += read(g_[n], base + end, C, BC) * mu
        after = tl.where(begins(seg_, base, end, SEG), 0.0, after)
    else:
        after = read(dend_, row, C, BC)
    mean, rstd = statistic(mean_, rstd_, base + end - 1, NORM)
    unit = unit_line(x_, base + end - 1, mean, rstd, C, BC, NORM)
    for i in tl.range(0, (end - start) // TOKENS, num_stages=STAGES):
        newest = end - 1 - i * TOKENS
        units, rstds, dhs, terms = (unit,), (rstd,), (), ()
        for u in tl.static_range(TOKENS):
            t = newest - u
            at = base + t
            # a row's first token is taken for its own predecessor, which it differs from by nothing
            before = base + tl.maximum(t - 1, 0)
            mean, rstd = statistic(mean_, rstd_, before, NORM)
            units = extended(units, unit_line(x_, before, mean, rstd, C, BC, NORM))
            rstds = extended(rstds, rstd)
            total, q = after, zero
            if H:
                total += read(dnormalised_, at, C, BC)
            new = begins(seg_, base, t, SEG)
            difference = units[u + 1] - units[u]
            if NORM:
                difference *= scale
            if SEG:
                difference = tl.where(new, -affine(units[u], scale, bias_, C, BC, NORM), difference)
            grown = ()
            for n in tl.static_range(M):
                mu = mus[n]
                g = read(g_[n], at, C, BC)
                dw = g * difference
                if MOVES:
                    mu = mu + read(moves_, (n * B + row) * T + t, C, BC)
                    write(dmoves_, (n * B + row) * T + t, dw, C, BC)
                total += g
                q += g * mu
                grown = extended(grown, dmus[n] + dw)
            dmus = grown
            dh = total - q
            if NORM:
                dscale += dh * units[u]
                dbias += dh
                d = dh * scale
                terms = extended(extended(terms, d), d * units[u])
                dh = d if WHOLE else dh
            dhs = extended(dhs, dh)
            after = tl.where(new, 0.0, q)
        if NORM:
            found = sums(terms)
        for u in tl.static_range(TOKENS):
            at = base + newest - u
            dh = dhs[u]
            if NORM:
                level, slope = found[2 * u] / C, found[2 * u + 1] / C
                if WHOLE:
                    dh = (dh - level - units[u] * slope) * rstds[u]
                else:
                    place = sums_ + (at * tl.num_programs(1) + tl.program_id(1)) * 2
                    tl.store(place, level)
                    tl.store(place + 1, slope)
            if SUM and (WHOLE or not NORM):
                dh += read(dsum_, at, C, BC)
            write(dx_, at, dh, C, BC)
        unit, rstd = units[TOKENS], rstds[TOKENS]
    if start == 0:
        # what a row's first token sees
        if MOVES:
            tl.debug_barrier()  # other threads may have written its line of dmoves, in the loop
        difference = -affine(unit, scale, bias_, C, BC, NORM)
        if LAST:
            difference += read(last_, row, C, BC)
            write(dlast_, row, after, C, BC)
        grown = ()
        for n in tl.static_range(M):
            dw = read(g_[n], base, C, BC) * difference
            if MOVES:
                write(dmoves_, (n * B + row) * T, dw, C, BC)
            grown = extended(grown, dmus[n] + dw)
        dmus = grown
    line = tl.program_id(0).to(tl.int64) * (M + 2 * NORM)
    for n in tl.static_range(M):
        write(parts_, line + n, dmus[n], C, BC)
    if NORM:
        write(parts_, line + M, dscale, C, BC)
        write(parts_, line + M + 1, dbias, C, BC)


@triton.jit
def norm_bwd_kernel(
    x_,
    scale_,
    mean_,
    rstd_,
    dh_,
    sums_,
    dsum_,
    T,
    span,
    dx_,
    C: tl.constexpr,
    BC: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
    SUM: tl.constexpr,
):
    """dx from dh and the sums over each of ``TILES`` tiles of channels (``PADDED``: next power of two)."""
    _, base, start, end = token_block(T, span)
    scale, tile = read(scale_, 0, C, BC), tl.arange(0, PADDED)
    for t in tl.range(start, end, num_stages=STAGES):
        at = base + t
        sums = sums_ + (at * TILES + tile) * 2
        s0 = tl.sum(tl.load(sums, mask=tile < TILES, other=0.0), 0)
        s1 = tl.sum(tl.load(sums + 1, mask=tile < TILES, other=0.0), 0)
        mean, rstd = statistic(mean_, rstd_, at, True)
        dx = (read(dh_, at, C, BC) * scale - s0 - unit_line(x_, at, mean, rstd, C, BC, True) * s1) * rstd
        if SUM:
            dx += read(dsum_, at, C, BC)
        write(dx_, at, dx, C, BC)
