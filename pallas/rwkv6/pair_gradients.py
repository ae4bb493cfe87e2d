"""RWKV-6, token by token: gradients of r, w and k, and of u by interval, from all sums over values, by pairs
of tokens.

The reader is (r, do) of the state before the token, the writer (k, v): common/token_pairs.py has the sums.

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
    """Arrays: r, w, k [B, T, H, K]; u [H, K]; ``lines`` of `load_lines`; sums over values (`StateSums`):
    ``reads`` of S0, ``writes`` of D; ``scores``.
    """

    r: Tensor
    w: Tensor
    k: Tensor
    u: Tensor
    lines: Tensor
    reads: Tensor
    writes: Tensor
    scores: Tensor


class PairGrads(NamedTuple):
    """Gradients of r, w, k; of u [intervals, H, K]."""

    r: Tensor
    w: Tensor
    k: Tensor
    u: Tensor


class Token(NamedTuple):
    """One token: keys [BK], what it reads of S0, its scores with earlier writers [interval] and its own."""

    decay: Tensor
    r: Tensor
    k: Tensor
    reads: Tensor
    scores: Tensor
    same: Tensor
    lines: Tensor


@triton.jit
def load_token(x, t, axes, c: tl.constexpr):
    """Token ``t``, but for its decay, whose logarithm is in its place."""
    return Token(
        token_keys(x.w, t, axes, c),
        token_keys(x.r, t, axes, c),
        token_keys(x.k, t, axes, c),
        summed_keys(x.reads.first, t, axes, c),
        pair_scores(x.scores, 0, 0, 1, t, axes, c),
        same_score(x.scores, 0, 1, t, axes, c),
        load_lines(x.lines, t, c),
    )


@triton.jit
def rwkv6_pair_grads_kernel(x, index, grads, c: tl.constexpr):
    """Each token is loaded while the one before it is worked on."""
    axes = pair_axes(index, c)
    u = tl.load(x.u + tl.program_id(1) * c.K + axes.key, mask=axes.has_key, other=0.0).to(tl.float32)
    zero = tl.full([c.interval, c.BK], 0.0, tl.float32)
    E = tl.where(axes.line == 0, 1.0, zero)  # decays from each writer to token t
    k_before, dk, dw = zero, zero, zero
    own_k, du = tl.full([c.BK], 0.0, tl.float32), tl.full([c.BK], 0.0, tl.float32)
    token = load_token(x, 0, axes, c)
    for t in range(0, c.interval):
        next_token = load_token(x, tl.minimum(t + 1, c.interval - 1), axes, c)
        scores, after = token.scores[:, None], token.lines.after[:, None]
        E = restarted_decays(E, index, t, axes, c)
        read = E * tl.where(axes.line == 0, token.reads[None, :], k_before * scores)
        store_token(grads.r, t, u * token.k * token.same + tl.sum(read, 0), axes, c)
        own_k = token.r * u * token.same
        du += token.r * token.k * token.same
        dw += token.lines.before[:, None] * tl.cumsum(read * token.r[None, :], 0)
        dk += token.r[None, :] * scores * E
        dk += after * own_k[None, :]
        k_before += after * token.k[None, :]
        E = E * token_decay(token.decay)[None, :] + after
        token = next_token
    to_end = writes_to_end(x.writes.first, axes, c)
    product = tl.load(x.writes.product + axes.entry * c.K + axes.key, mask=axes.has_key, other=0.0)
    pairs = tl.where(axes.line == 0, product[None, :], k_before * to_end)
    store_lines(grads.w, dw + tl.cumsum(E * pairs, 0), 0, axes, c)
    store_lines(grads.k, dk + E * to_end, 1, axes, c)
    last = c.interval - 1
    store_token(grads.k, last, own_k + summed_keys(x.writes.first, last, axes, c), axes, c)
    tl.store(grads.u + axes.entry * c.K + axes.key, du, mask=axes.has_key)
