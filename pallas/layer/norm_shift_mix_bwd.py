"""Norm, token shift and mixes, backward. With o_n = h_t + d_t w_n, w_n = mu_n + mix_delta_nt,
d_t = h_{t-1} - h_t and g_n = do_n::

    dw_n = g_n d_t,   q_t = sum_n g_n w_n,   dh_t = sum_n g_n - q_t + q_{t+1}

dx is the gradient of the layer norm for dh. Tokens are scanned from the last to the first, so that q_{t+1} is
known. A program sums gradients of parameters over its tokens in float32, and host code over programs, so that
two runs give the same bits. Grid: blocks of tokens of all sequences, tiles of channels.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.sums import extended, sums
from .norm_shift_mix_tiles import MixConfig, read, starts_segment, token_block, write


class MixGrads(NamedTuple):
    """Outputs of `mix_bwd_kernel`.

    Attributes:
        x: gradients of the op's token arrays (`MixInputs`); by tiles of channels ``x.x`` is dh, float32.
        sums: [programs, M + 2, C] float32, of mixes, scale and bias.
        tile_sums: [B, T, tiles, 2] float32, the sums over channels that dx needs; None for whole tokens.
    """

    x: Tensor
    sums: Tensor
    tile_sums: Tensor


class NormBwdInputs(NamedTuple):
    """Inputs of `norm_bwd_kernel`: ``dsum`` is the cotangent of x + y, or None."""

    x: Tensor
    scale: Tensor
    stats: Tensor
    dh: Tensor
    tile_sums: Tensor
    dsum: Tensor


class NormBwdOut(NamedTuple):
    """Output of `norm_bwd_kernel`."""

    dx: Tensor


@dataclasses.dataclass(frozen=True)
class NormBwdConfig(MixConfig):
    """`MixConfig` with the number of tiles of channels of `mix_bwd_kernel`, also as the next power of two."""

    tiles: int
    padded_tiles: int


@triton.jit
def load_stats(stats, at):
    """A token's mean, and one over its standard deviation; 0 and 1 without a norm."""
    if stats is not None:
        return tl.load(stats.mean + at), tl.load(stats.rstd + at)
    else:
        return 0.0, 1.0


@triton.jit
def unit_token(x, at, mean, rstd, c: tl.constexpr):
    """A token of x with mean 0 and variance 1; x itself without a norm."""
    unit = read(x.x, at, c)
    if x.scale is not None:
        unit = (unit - mean) * rstd
    return unit


@triton.jit
def scale_and_shift(unit, scale, x, c: tl.constexpr):
    """The token after the norm, from `unit_token`."""
    if x.scale is not None:
        unit = unit * scale + read(x.bias, 0, c)
    return unit


@triton.jit
def mix_bwd_kernel(x, stats, do, dims, grads, c: tl.constexpr):
    """``x``: the op's inputs with x + y as x, ``do``: its cotangents (`Mixed`). Writes ``grads``."""
    TOKENS: tl.constexpr = c.tokens
    batch, base, start, end = token_block(dims)
    zero = tl.full((c.BC,), 0, tl.float32)
    mus, dmus = (), ()
    for n in tl.static_range(len(x.mixes)):
        dmus = extended(dmus, zero)
        mus = extended(mus, read(x.mixes[n], 0, c))
    dscale, dbias, after, scale = zero, zero, zero, zero
    if x.scale is not None:
        scale = read(x.scale, 0, c)
    if end < dims.T:
        for n in tl.static_range(len(x.mixes)):
            mu = read(x.mixes[n], 0, c)
            if x.mix_delta is not None:
                mu = mu + read(x.mix_delta, (n * dims.B + batch) * dims.T + end, c)
            after += read(do.mixed[n], base + end, c) * mu
        after = tl.where(starts_segment(x.segment_ids, base, end), 0.0, after)
    else:
        after = read(do.last, batch, c)
    mean, rstd = load_stats(stats, base + end - 1)
    unit = unit_token(x, base + end - 1, mean, rstd, c)
    for i in tl.range(0, (end - start) // TOKENS, num_stages=c.stages):
        newest = end - 1 - i * TOKENS
        units, rstds, dhs, terms = (unit,), (rstd,), (), ()
        for u in tl.static_range(TOKENS):
            t = newest - u
            at = base + t
            # the first token of a sequence is its own predecessor here: the difference is zero
            before = base + tl.maximum(t - 1, 0)
            mean, rstd = load_stats(stats, before)
            units = extended(units, unit_token(x, before, mean, rstd, c))
            rstds = extended(rstds, rstd)
            total, q = after, zero
            if do.normalised is not None:
                total += read(do.normalised, at, c)
            new = starts_segment(x.segment_ids, base, t)
            delta = units[u + 1] - units[u]
            if x.scale is not None:
                delta *= scale
            if x.segment_ids is not None:
                delta = tl.where(new, -scale_and_shift(units[u], scale, x, c), delta)
            grown = ()
            for n in tl.static_range(len(x.mixes)):
                mu = mus[n]
                g = read(do.mixed[n], at, c)
                dw = g * delta
                if x.mix_delta is not None:
                    mu = mu + read(x.mix_delta, (n * dims.B + batch) * dims.T + t, c)
                    write(grads.x.mix_delta, (n * dims.B + batch) * dims.T + t, dw, c)
                total += g
                q += g * mu
                grown = extended(grown, dmus[n] + dw)
            dmus = grown
            dh = total - q
            if x.scale is not None:
                dscale += dh * units[u]
                dbias += dh
                d = dh * scale
                terms = extended(extended(terms, d), d * units[u])
                dh = d if grads.tile_sums is None else dh
            dhs = extended(dhs, dh)
            after = tl.where(new, 0.0, q)
        if x.scale is not None:
            totals = sums(terms)
        for u in tl.static_range(TOKENS):
            at = base + newest - u
            dh = dhs[u]
            if x.scale is not None:
                level, slope = totals[2 * u] / c.C, totals[2 * u + 1] / c.C
                if grads.tile_sums is None:
                    dh = (dh - level - units[u] * slope) * rstds[u]
                else:
                    pair = grads.tile_sums + (at * tl.num_programs(1) + tl.program_id(1)) * 2
                    tl.store(pair, level)
                    tl.store(pair + 1, slope)
            if do.x is not None and grads.tile_sums is None:
                dh += read(do.x, at, c)
            write(grads.x.x, at, dh, c)
        unit, rstd = units[TOKENS], rstds[TOKENS]
    if start == 0:  # the difference between the given previous token and the first one
        if x.mix_delta is not None:
            tl.debug_barrier()  # other threads may have written the first token's dmix_delta in the loop
        delta = -scale_and_shift(unit, scale, x, c)
        if x.last is not None:
            delta += read(x.last, batch, c)
            write(grads.x.last, batch, after, c)
        grown = ()
        for n in tl.static_range(len(x.mixes)):
            dw = read(do.mixed[n], base, c) * delta
            if x.mix_delta is not None:
                write(grads.x.mix_delta, (n * dims.B + batch) * dims.T, dw, c)
            grown = extended(grown, dmus[n] + dw)
        dmus = grown
    NUM_SUMS: tl.constexpr = len(x.mixes) + (2 if x.scale is not None else 0)
    first_sum = tl.program_id(0).to(tl.int64) * NUM_SUMS
    for n in tl.static_range(len(x.mixes)):
        write(grads.sums, first_sum + n, dmus[n], c)
    if x.scale is not None:
        write(grads.sums, first_sum + len(x.mixes), dscale, c)
        write(grads.sums, first_sum + len(x.mixes) + 1, dbias, c)


@triton.jit
def norm_bwd_kernel(x, dims, out, c: tl.constexpr):
    """dx from dh and the sums of all tiles of channels."""
    _, base, start, end = token_block(dims)
    scale, tile = read(x.scale, 0, c), tl.arange(0, c.padded_tiles)
    for t in tl.range(start, end, num_stages=c.stages):
        at = base + t
        pairs = x.tile_sums + (at * c.tiles + tile) * 2
        s0 = tl.sum(tl.load(pairs, mask=tile < c.tiles, other=0.0), 0)
        s1 = tl.sum(tl.load(pairs + 1, mask=tile < c.tiles, other=0.0), 0)
        mean, rstd = load_stats(x.stats, at)
        dx = (read(x.dh, at, c) * scale - s0 - unit_token(x, at, mean, rstd, c) * s1) * rstd
        if x.dsum is not None:
            dx += read(x.dsum, at, c)
        write(out.dx, at, dx, c)
