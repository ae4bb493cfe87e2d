"""RWKV-6, token by token, in both directions.

    forward:   o = scale (S^T r + (r . u k) v),    S <- diag(exp(w)) S + k v^T
    backward:  dv = D^T k + scale (r . u k) do,    D <- diag(exp(w)) D + scale r do^T

Grid: blocks of values, heads, sequences.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.decay import token_decay
from ..common.token_scan import (
    edge_state,
    edge_token,
    has_restart,
    keys,
    load_edge_state,
    load_keys,
    load_values,
    save_state,
    scan_axes,
    sequence_tokens,
    store_values,
    sum_keys,
    values,
)


class ScanInputs(NamedTuple):
    """Arrays of a scan, ``y = S^T read + (read . u write) x``, ``S <- diag(exp(w)) S + write x^T``: forward
    (read, write, x) are r, k, v, backward k, r, do.

    Attributes:
        read, write, w: [B, T, H, K].
        x: [B, T, H, V].
        u: [H, K].
        start: the first state, see `edge_state`.
    """

    read: Tensor
    write: Tensor
    w: Tensor
    x: Tensor
    u: Tensor
    start: Tensor


class ScanOutputs(NamedTuple):
    """Results of a scan.

    Attributes:
        y: [B, T, H, V], o or dv.
        end: the last state, see `edge_state`.
        states: what `save_state` writes, states at the starts (backward: ends) of intervals; None if not
            saved.
    """

    y: Tensor
    end: Tensor
    states: Tensor


class Token(NamedTuple):
    """One token, keys [P, 16] and values [BV], as loaded or as `converted`."""

    read: Tensor
    write: Tensor
    decay: Tensor
    x: Tensor


@triton.jit
def load_token(x, at, axes, c: tl.constexpr):
    """The token and head at ``at``."""
    return Token(
        load_keys(x.read, at, axes, c),
        load_keys(x.write, at, axes, c),
        load_keys(x.w, at, axes, c),
        load_values(x.x, at, axes, c),
    )


@triton.jit
def converted(token, c: tl.constexpr):
    """The token in float32, scaled, with its decay in place of the logarithm."""
    return Token(
        token.read.to(tl.float32) * c.y_scale,
        token.write.to(tl.float32) * c.x_scale,
        token_decay(token.decay.to(tl.float32)),
        token.x.to(tl.float32),
    )


@triton.jit
def next_state(S, token, u, out, at, axes, c: tl.constexpr):
    """The state after the token; stores what the token reads."""
    own = tl.sum(token.read * u * token.write)
    store_values(out.y, at, own * token.x + sum_keys(S, keys(token.read)), axes, c)
    return S * keys(token.decay) + values(token.x) * keys(token.write)


@triton.jit
def rwkv6_scan_kernel(x, index, out, c: tl.constexpr):
    """Each token is loaded while the one before it is worked on: the compiler moves no load over a store."""
    axes = scan_axes(c)
    tokens = sequence_tokens(tl.program_id(2), index, c)
    at = tokens.first * c.H + tl.program_id(1)
    last = tokens.length - 1
    S = load_edge_state(x.start, axes, c)
    u = load_keys(x.u, tl.program_id(1), axes, c).to(tl.float32)
    token = converted(load_token(x, edge_token(tokens, index, c) * c.H + tl.program_id(1), axes, c), c)
    count = tl.cdiv(tokens.length, c.interval)
    for i in range(0, count):
        n = count - 1 - i if c.reverse else i
        first = n * c.interval
        if out.states is not None:
            save_state(out.states, S, tokens.interval + n, axes, c)
        size = c.interval if c.whole else tl.minimum(c.interval, tokens.length - first)
        for j in range(0, size):
            t = first + (size - 1 - j if c.reverse else j)
            following = tl.maximum(t - 1, 0) if c.reverse else tl.minimum(t + 1, last)
            next_token = load_token(x, at + following.to(tl.int64) * c.H, axes, c)
            here = at + t.to(tl.int64) * c.H
            if c.segments and not c.reverse:
                S = tl.where(has_restart(index, tokens.first + t), 0.0, S)
            S = next_state(S, token, u, out, here, axes, c)
            if c.segments and c.reverse:
                S = tl.where(has_restart(index, tokens.first + t), 0.0, S)
            token = converted(next_token, c)
    tl.store(edge_state(out.end, axes, c), S)
