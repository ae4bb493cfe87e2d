"""Kernel that chooses the next token under top-p and top-k without sorting the vocabulary.

The token with the best score is looked up first, and then whether it may come: whether those that are more
probable have less than top-p together and are fewer than top-k, which is a sum over the vocabulary. If not,
all that are as probable or less cannot come either, and the best of the others is next. That is the token
which sorting gives, since scores (logits over the temperature, plus random numbers) of tokens that cannot
come would have been left out; most rows need one round, and every other round leaves few tokens.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_at(ptr, at, lanes, V: tl.constexpr, EVEN: tl.constexpr):
    """Numbers of some tokens, -inf behind the last one."""
    if EVEN:
        return tl.load(ptr + at + lanes)
    else:
        return tl.load(ptr + at + lanes, mask=at + lanes < V, other=-float("inf"))


@triton.jit
def choose_kernel(
    x_, score_, top_p_, top_k_, temperature_, token_,
    V: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, UNDEFINED: tl.constexpr,
):  # fmt: skip
    """Grid: rows. ``x_`` and ``score_`` [B, V], -inf in x for what may not come; ``token_`` [B].

    At temperature 0 the scores are x itself. UNDEFINED for a row with NaN, or without a finite largest x.
    """
    EVEN: tl.constexpr = V % BV == 0
    row = tl.program_id(0)
    x_ += row.to(tl.int64) * V
    score_ += row.to(tl.int64) * V
    lanes = tl.arange(0, BV)
    top_p, top_k, greedy = tl.load(top_p_), tl.load(top_k_), tl.load(temperature_) == 0.0
    high = tl.full((BV,), -float("inf"), tl.float32)
    wrong = tl.zeros((BV,), tl.int32)
    for at in tl.range(0, V, BV, num_stages=STAGES):
        x = tokens_at(x_, at, lanes, V, EVEN)
        high = tl.maximum(high, x)
        wrong = tl.maximum(wrong, (x != x).to(tl.int32))
    largest = tl.max(high, 0)
    searching = (tl.max(wrong, 0) == 0) & (largest > -float("inf")) & (largest < float("inf"))
    token = tl.full((), UNDEFINED, tl.int32)
    bound = tl.full((), -float("inf"), tl.float32)
    while searching:
        best, best_x = tl.full((BV,), -float("inf"), tl.float32), tl.zeros((BV,), tl.float32)
        place, mass = tl.full((BV,), V, tl.int32), tl.zeros((BV,), tl.float32)
        for at in tl.range(0, V, BV, num_stages=STAGES):
            x, score = tokens_at(x_, at, lanes, V, EVEN), tokens_at(score_, at, lanes, V, EVEN)
            score = tl.where(greedy, x, score)
            better = (x > bound) & (score > best)
            best, best_x = tl.where(better, score, best), tl.where(better, x, best_x)
            place = tl.where(better, at + lanes, place)
            mass += tl.exp(x - largest)
        total = tl.sum(mass, 0)
        first = tl.min(tl.where(best == tl.max(best, 0), place, V), 0)
        found = tl.max(tl.where(place == first, best_x, -float("inf")), 0)
        above, number = tl.zeros((BV,), tl.float32), tl.zeros((BV,), tl.int32)
        for at in tl.range(0, V, BV, num_stages=STAGES):
            x = tokens_at(x_, at, lanes, V, EVEN)
            above += tl.where(x > found, tl.exp(x - largest), 0.0)
            number += (x > found).to(tl.int32)
        before = tl.sum(number, 0)
        by_p = (top_p >= 1.0) | (tl.sum(above, 0) < top_p * total)
        accepted = (before == 0) | (by_p & (before < top_k))
        token = tl.where(accepted, first, token)
        bound = found
        searching = accepted == 0
    tl.store(token_ + row, token)
