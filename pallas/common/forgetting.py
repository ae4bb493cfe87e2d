"""Whether a split forgets, in its last 512 tokens (its tail), the state before them: then a scan for what it
adds to the state may begin there.

It forgets where nothing is left in float32 of any state up to `LARGEST_STATE`.
"""

import triton
import triton.language as tl

from .chunk import C
from .decay import LOG_ZERO, at_least

TAIL = tl.constexpr(32)  # chunks; half as many gain nothing where log decays are near -0.3
LARGEST_STATE = tl.constexpr(2.0**35)  # times exp(LOG_ZERO) it is below 2^-149, float32's smallest number


@triton.jit
def tail_start(split):
    """The first chunk of the tail."""
    return tl.maximum(tl.cdiv(split.length, C) - TAIL, 0)


@triton.jit
def are_decays_zero(logs, axes):
    """Whether the decays of all keys are zero in float32, from their log decays [K]."""
    return tl.max(tl.where(axes.has_key, logs, float("-inf")), 0) < LOG_ZERO


@triton.jit
def do_decays_vanish(w, split, axes, c: tl.constexpr):
    """Whether every key's decay over the tail is zero, from the log decays ``w`` [B, T, H, K]."""
    token = tail_start(split) * C + tl.arange(0, 64)[:, None]
    total = tl.full([c.BK], 0.0, tl.float32)
    for _ in range(0, TAIL * C // 64):
        at = ((split.first + token) * c.H + tl.program_id(1)) * c.K + axes.key[None, :]
        logs = tl.load(w + at, mask=(token < split.length) & axes.has_key[None, :], other=0.0)
        total += tl.sum(at_least(logs, LOG_ZERO).to(tl.float32), 0)
        token += 64
    return are_decays_zero(total, axes)


@triton.jit
def store_zeros(q_entry, split, first, last, key, has_key, c: tl.constexpr):
    """Stores zeros as the queries of the split's chunks from ``first`` to before ``last``, at the keys
    ``key``.
    """
    for n in range(first, last):
        token = n * C + tl.arange(0, C)[:, None]
        at = ((split.first + token) * c.H + tl.program_id(1)) * c.K + key[None, :]
        tl.store(q_entry + at, 0.0, mask=(token < split.length) & has_key[None, :])
