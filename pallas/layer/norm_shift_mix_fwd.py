"""Norm, token shift and mixes, forward. With h = norm(x + y) and the previous token h_{t-1}::

    o_n = h_t + (h_{t-1} - h_t) (mu_n + mix_delta_nt)

Grid: blocks of tokens of all sequences, tiles of channels.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.sums import extended
from .norm_shift_mix_tiles import read, read_sum, starts_segment, statistics, token_block, write


class FwdOut(NamedTuple):
    """Outputs of `mix_fwd_kernel`: the op's results (`Mixed`), and statistics that the backward needs."""

    results: Tensor
    stats: Tensor


class StatisticsOut(NamedTuple):
    """Outputs of `statistics_kernel`: `Stats`, and x + y, None without y."""

    stats: Tensor
    x: Tensor


@triton.jit
def normalise(xs, at, x, stats, c: tl.constexpr):
    """The norm of tokens ``xs``, of which the first is token ``at``, and their statistics, loaded from
    ``stats`` or computed.
    """
    hs, means, rstds = (), (), ()
    if x.scale is not None:
        if stats is None:
            means, rstds = statistics(xs, c)
        else:
            for u in tl.static_range(len(xs)):
                means = extended(means, tl.load(stats.mean + at + u))
                rstds = extended(rstds, tl.load(stats.rstd + at + u))
        scale, bias = read(x.scale, 0, c), read(x.bias, 0, c)
        for u in tl.static_range(len(xs)):
            hs = extended(hs, (xs[u] - means[u]) * rstds[u] * scale + bias)
    else:
        hs = xs
    return hs, means, rstds


@triton.jit
def mix_fwd_kernel(x, stats, dims, out, c: tl.constexpr):
    """``x``: the op's inputs (`MixInputs`); ``stats``: of the norm, None where a program has whole tokens."""
    TOKENS: tl.constexpr = c.tokens
    batch, base, start, end = token_block(dims)
    mus, before = (), tl.full((c.BC,), 0, tl.float32)
    for n in tl.static_range(len(x.mixes)):
        mus = extended(mus, read(x.mixes[n], 0, c))
    if start > 0:
        at = base + start - 1
        total = read_sum(x, at, c)
        hs, _, _ = normalise((total,), at, x, stats, c)
        before = hs[0]
    elif x.last is not None:
        before = read(x.last, batch, c)
    for i in tl.range(0, (end - start) // TOKENS, num_stages=c.stages):
        first, xs = start + i * TOKENS, ()
        for u in tl.static_range(TOKENS):
            xs = extended(xs, read_sum(x, base + first + u, c))
        hs, means, rstds = normalise(xs, base + first, x, stats, c)
        for u in tl.static_range(TOKENS):
            t = first + u
            at, h = base + t, hs[u]
            if out.results.x is not None:
                write(out.results.x, at, xs[u], c)
            if out.stats is not None:
                tl.store(out.stats.mean + at, means[u])
                tl.store(out.stats.rstd + at, rstds[u])
            if out.results.normalised is not None:
                write(out.results.normalised, at, h, c)
            delta = tl.where(starts_segment(x.segment_ids, base, t), 0.0, before) - h
            for n in tl.static_range(len(x.mixes)):
                offset = (n * dims.B + batch) * dims.T + t
                mu = mus[n] if x.mix_delta is None else mus[n] + read(x.mix_delta, offset, c)
                write(out.results.mixed[n], at, h + delta * mu, c)
            before = h
    if end == dims.T:
        write(out.results.last, batch, before, c)


@triton.jit
def statistics_kernel(x, dims, out, c: tl.constexpr):
    """Statistics of every token of x (+ y), and the sum itself."""
    _, base, start, end = token_block(dims)
    for t in tl.range(start, end, num_stages=c.stages):
        total = read_sum(x, base + t, c)
        if out.x is not None:
            write(out.x, base + t, total, c)
        means, rstds = statistics((total,), c)
        tl.store(out.stats.mean + base + t, means[0])
        tl.store(out.stats.rstd + base + t, rstds[0])
