"""RWKV-7, token by token: gradients of r, w, k, a and b from all sums over values, by pairs of tokens.

Readers are (r, do) of the state after the token and (a, b^T D) of the state before it, writers (k, v) and
(b, a^T S): common/token_pairs.py has the sums.

Grid: blocks of keys, heads, intervals.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.decay import token_decay
from ..common.token_pairs import (
    load_lines,
    pair_axes,
    pair_scores,
    restarted_decays,
    same_score,
    store_lines,
    store_token,
    summed_keys,
    token_keys,
    writes_to_end,
)


class PairInputs(NamedTuple):
    """Arrays: r, w, k, a, b [B, T, H, K]; ``lines`` of `load_lines`; sums over values (`StateSums`):
    ``reads`` of S0, ``writes`` of D; ``scores``.
    """

    r: Tensor
    w: Tensor
    k: Tensor
    a: Tensor
    b: Tensor
    lines: Tensor
    reads: Tensor
    writes: Tensor
    scores: Tensor


class Token(NamedTuple):
    """One token: keys [BK], what it reads of S0, its scores with earlier writers [interval] and its own."""

    decay: Tensor
    r: Tensor
    k: Tensor
    a: Tensor
    b: Tensor
    reads_r: Tensor
    reads_a: Tensor
    score_rk: Tensor
    score_rb: Tensor
    score_ak: Tensor
    score_ab: Tensor
    same_k: Tensor
    same_b: Tensor
    lines: Tensor


@triton.jit
def load_token(x, t, axes, c: tl.constexpr):
    """Token ``t``, but for its decay, whose logarithm is in its place."""
    return Token(
        token_keys(x.w, t, axes, c),
        token_keys(x.r, t, axes, c),
        token_keys(x.k, t, axes, c),
        token_keys(x.a, t, axes, c),
        token_keys(x.b, t, axes, c),
        summed_keys(x.reads.first, t, axes, c),
        summed_keys(x.reads.second, t, axes, c),
        pair_scores(x.scores, 0, 0, 2, t, axes, c),
        pair_scores(x.scores, 0, 1, 2, t, axes, c),
        pair_scores(x.scores, 1, 0, 2, t, axes, c),
        pair_scores(x.scores, 1, 1, 2, t, axes, c),
        same_score(x.scores, 0, 2, t, axes, c),
        same_score(x.scores, 1, 2, t, axes, c),
        load_lines(x.lines, t, c),
    )


@triton.jit
def rwkv7_pair_grads_kernel(x, index, grads, c: tl.constexpr):
    """Each token is loaded while the one before it is worked on."""
    axes = pair_axes(index, c)
    zero = tl.full([c.interval, c.BK], 0.0, tl.float32)
    E = tl.where(axes.line == 0, 1.0, zero)  # decays from each writer to token t
    k_before, b_before, dk, db, dw = zero, zero, zero, zero, zero
    own_k, own_b = tl.full([c.BK], 0.0, tl.float32), tl.full([c.BK], 0.0, tl.float32)
    token = load_token(x, 0, axes, c)
    for t in range(0, c.interval):
        next_token = load_token(x, tl.minimum(t + 1, c.interval - 1), axes, c)
        decay = token_decay(token.decay)
        rk, rb = token.score_rk[:, None], token.score_rb[:, None]
        ak, ab = token.score_ak[:, None], token.score_ab[:, None]
        after = token.lines.after[:, None]
        E = restarted_decays(E, index, t, axes, c)
        read_r = E * tl.where(axes.line == 0, token.reads_r[None, :], k_before * rk + b_before * rb)
        read_a = E * tl.where(axes.line == 0, token.reads_a[None, :], k_before * ak + b_before * ab)
        sum_r, sum_a = tl.sum(read_r, 0), tl.sum(read_a, 0)
        store_token(grads.r, t, decay * sum_r + token.k * token.same_k + token.b * token.same_b, axes, c)
        store_token(grads.a, t, sum_a, axes, c)
        r_now = token.r * decay
        own_k, own_b = token.r * token.same_k, token.r * token.same_b
        pairs = read_r * r_now[None, :] + read_a * token.a[None, :]
        dw += token.lines.before[:, None] * tl.cumsum(pairs, 0)
        # its own decay lies between r, which reads the state after the token, and all earlier writers
        dw += token.lines.own[:, None] * (r_now * sum_r)[None, :]
        dk += (r_now[None, :] * rk + token.a[None, :] * ak) * E
        dk += after * own_k[None, :]
        db += (r_now[None, :] * rb + token.a[None, :] * ab) * E
        db += after * own_b[None, :]
        k_before += after * token.k[None, :]
        b_before += after * token.b[None, :]
        E = E * decay[None, :] + after
        token = next_token
    to_end_k, to_end_b = writes_to_end(x.writes.first, axes, c), writes_to_end(x.writes.second, axes, c)
    product = tl.load(x.writes.product + axes.entry * c.K + axes.key, mask=axes.has_key, other=0.0)
    pairs = tl.where(axes.line == 0, product[None, :], k_before * to_end_k + b_before * to_end_b)
    store_lines(grads.w, dw + tl.cumsum(E * pairs, 0), 0, axes, c)
    store_lines(grads.k, dk + E * to_end_k, 1, axes, c)
    store_lines(grads.b, db + E * to_end_b, 1, axes, c)
    last = c.interval - 1
    store_token(grads.k, last, own_k + summed_keys(x.writes.first, last, axes, c), axes, c)
    store_token(grads.b, last, own_b + summed_keys(x.writes.second, last, axes, c), axes, c)
