"""RWKV-7, token by token, in both directions.

    forward:   S <- diag(exp(w)) S + b (a^T S),   S <- S + k v^T,   o = scale S^T r
    backward:  D <- D + scale r do^T,   dv = D^T k,   D <- diag(exp(w)) D + a (b^T D)

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
    """Arrays of a scan. ``inner = S^T first``, ``S <- diag(exp(w)) S + second inner^T``;
    ``S <- S + write x^T``, ``y = S^T read``: forward (first, second, write, read, x) are a, b, k, r, v,
    backward b, a, r, k, do.

    Attributes:
        first, second, w, write, read: [B, T, H, K].
        x: [B, T, H, V].
        start: the first state, see `edge_state`.
        y: outputs of other splits, into whose array this one's are written, or None.
        after: an array that another kernel writes before this one starts, or None.
    """

    first: Tensor
    second: Tensor
    w: Tensor
    write: Tensor
    read: Tensor
    x: Tensor
    start: Tensor
    y: Tensor | None = None
    after: Tensor | None = None


class ScanOutputs(NamedTuple):
    """Results of a scan.

    Attributes:
        y: [B, T, H, V], o or dv.
        end: the last state, see `edge_state`.
        inner: [B, T, H, V] float32, a^T S or b^T D; None if not saved.
        states: what `save_state` writes, states at the starts (backward: ends) of intervals; None if not
            saved.
    """

    y: Tensor
    end: Tensor
    inner: Tensor
    states: Tensor


class Token(NamedTuple):
    """One token, keys [P, 16] and values [BV], as loaded or as `converted`."""

    first: Tensor
    second: Tensor
    decay: Tensor
    write: Tensor
    read: Tensor
    x: Tensor


@triton.jit
def load_token(x, at, axes, c: tl.constexpr):
    """The token and head at ``at``."""
    return Token(
        load_keys(x.first, at, axes, c),
        load_keys(x.second, at, axes, c),
        load_keys(x.w, at, axes, c),
        load_keys(x.write, at, axes, c),
        load_keys(x.read, at, axes, c),
        load_values(x.x, at, axes, c),
    )


@triton.jit
def converted(token):
    """The token in float32, with its decay in place of the logarithm."""
    return Token(
        token.first.to(tl.float32),
        token.second.to(tl.float32),
        token_decay(token.decay.to(tl.float32)),
        token.write.to(tl.float32),
        token.read.to(tl.float32),
        token.x.to(tl.float32),
    )


@triton.jit
def exchange(S, token, out, at, axes, c: tl.constexpr):
    """The state after the decay and the rank-one correction."""
    inner = sum_keys(S, keys(token.first))
    if out.inner is not None:
        store_values(out.inner, at, inner, axes, c)
    return S * keys(token.decay) + values(inner) * keys(token.second)


@triton.jit
def write_and_read(S, token, out, at, axes, c: tl.constexpr):
    """The state after the token's own write; stores what the token reads of it."""
    S += values(token.x) * c.x_scale * keys(token.write)
    store_values(out.y, at, sum_keys(S, keys(token.read)) * c.y_scale, axes, c)
    return S


@triton.jit
def rwkv7_scan_kernel(x, index, out, c: tl.constexpr):
    """Each token is loaded while the one before it is worked on: the compiler moves no load over a store."""
    if x.y is not None:
        out = ScanOutputs(x.y, out.end, out.inner, out.states)
    axes = scan_axes(c)
    tokens = sequence_tokens(tl.program_id(2), index, c)
    at = tokens.first * c.H + tl.program_id(1)
    last = tokens.length - 1
    S = load_edge_state(x.start, axes, c)
    token = converted(load_token(x, edge_token(tokens, index, c) * c.H + tl.program_id(1), axes, c))
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
            if c.reverse:
                S = write_and_read(S, token, out, here, axes, c)
                S = exchange(S, token, out, here, axes, c)
                if c.segments:
                    S = tl.where(has_restart(index, tokens.first + t), 0.0, S)
            else:
                if c.segments:
                    S = tl.where(has_restart(index, tokens.first + t), 0.0, S)
                S = exchange(S, token, out, here, axes, c)
                S = write_and_read(S, token, out, here, axes, c)
            token = converted(next_token)
    tl.store(edge_state(out.end, axes, c), S)
