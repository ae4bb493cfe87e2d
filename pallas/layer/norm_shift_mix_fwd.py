"""Forward kernels: mixes with the token before; statistics of tokens where mixes go by tiles of channels."""

import triton
import triton.language as tl

from ..common.sums import extended
from .norm_shift_mix_tiles import begins, read, read_sum, statistics, token_block, write


@triton.jit
def normalised(
    xs,
    at,
    mean_,
    rstd_,
    scale_,
    bias_,
    C: tl.constexpr,
    BC: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """Tokens from line ``at`` on normalised, their means and one over their standard deviations: computed
    with ``WHOLE``, else loaded."""
    hs, means, rstds = (), (), ()
    if NORM:
        if WHOLE:
            means, rstds = statistics(xs, C, BC, EPS)
        else:
            for u in tl.static_range(len(xs)):
                means = extended(means, tl.load(mean_ + at + u))
                rstds = extended(rstds, tl.load(rstd_ + at + u))
        scale, bias = read(scale_, 0, C, BC), read(bias_, 0, C, BC)
        for u in tl.static_range(len(xs)):
            hs = extended(hs, (xs[u] - means[u]) * rstds[u] * scale + bias)
    else:
        hs = xs
    return hs, means, rstds


@triton.jit
def mix_fwd_kernel(
    x_,
    y_,
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
    B,
    T,
    span,
    o0_,
    o1_,
    o2_,
    o3_,
    o4_,
    o5_,
    end_,
    sum_,
    h_,
    kept_mean_,
    kept_rstd_,
    C: tl.constexpr,
    BC: tl.constexpr,
    M: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    LAST: tl.constexpr,
    SEG: tl.constexpr,
    MOVES: tl.constexpr,
    H: tl.constexpr,
    KEEP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Outputs ``h_t + (h_{t-1} - h_t) (mu_n + moves_nt)``, h being x (+ y) normalised."""
    mu_, o_ = (mu0_, mu1_, mu2_, mu3_, mu4_, mu5_), (o0_, o1_, o2_, o3_, o4_, o5_)
    row, base, start, end = token_block(T, span)
    mus, before = (), tl.zeros([BC], tl.float32)
    for n in tl.static_range(M):
        mus = extended(mus, read(mu_[n], 0, C, BC))
    if start > 0:
        at = base + start - 1
        x = read_sum(x_, y_, at, C, BC, ADD)
        hs, _, _ = normalised((x,), at, mean_, rstd_, scale_, bias_, C, BC, WHOLE, NORM, EPS)
        before = hs[0]
    elif LAST:
        before = read(last_, row, C, BC)
    for i in tl.range(0, (end - start) // TOKENS, num_stages=STAGES):
        first, xs = start + i * TOKENS, ()
        for u in tl.static_range(TOKENS):
            xs = extended(xs, read_sum(x_, y_, base + first + u, C, BC, ADD))
        hs, means, rstds = normalised(xs, base + first, mean_, rstd_, scale_, bias_, C, BC, WHOLE, NORM, EPS)
        for u in tl.static_range(TOKENS):
            t = first + u
            at, h = base + t, hs[u]
            if ADD:
                write(sum_, at, xs[u], C, BC)
            if KEEP:
                tl.store(kept_mean_ + at, means[u])
                tl.store(kept_rstd_ + at, rstds[u])
            if H:
                write(h_, at, h, C, BC)
            difference = tl.where(begins(seg_, base, t, SEG), 0.0, before) - h
            for n in tl.static_range(M):
                mu = mus[n] + read(moves_, (n * B + row) * T + t, C, BC) if MOVES else mus[n]
                write(o_[n], at, h + difference * mu, C, BC)
            before = h
    if end == T:
        write(end_, row, before, C, BC)


@triton.jit
def statistics_kernel(
    x_,
    y_,
    T,
    span,
    mean_,
    rstd_,
    sum_,
    C: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Mean and one over the standard deviation of every token of x (+ y), and the sum itself."""
    _, base, start, end = token_block(T, span)
    for t in tl.range(start, end, num_stages=STAGES):
        x = read_sum(x_, y_, base + t, C, BC, ADD)
        if ADD:
            write(sum_, base + t, x, C, BC)
        means, rstds = statistics((x,), C, BC, EPS)
        tl.store(mean_ + base + t, means[0])
        tl.store(rstd_ + base + t, rstds[0])
