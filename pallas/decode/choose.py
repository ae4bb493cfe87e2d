"""Kernels that choose the next token under top-p and top-k without sorting the vocabulary.

The token with the best score is looked up first, and then whether it may come: whether those that are more
probable have less than top-p together and are fewer than top-k, which is a sum over the vocabulary. If not,
all that are as probable or less cannot come either, and the best of the others is next. That is the token
which sorting gives, since scores (logits over the temperature, plus random numbers) of tokens that cannot
come would have been left out; most rows need one round, and every other round leaves few tokens.

`survey_kernel` looks at parts of the vocabulary, all at the same time: with few rows one program for a row
would leave the GPU idle. `choose_kernel` puts the parts together and has a program for a row. What is more
probable than a token lies in the few parts whose largest logit is above its own: with many rows, where memory
is what takes time, it passes over all others. With few it reads all, larger pieces of the vocabulary at a
time: what takes time is to wait for one answer after another.
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
def scores(x, noise, highest, temperature):
    """What the largest is drawn: logits below ``highest`` over the temperature, plus noise; x itself at 0."""
    greedy = temperature == 0.0
    # what may not come stays that, whatever the temperature
    tempered = tl.where(x > -float("inf"), (x - highest) / tl.where(greedy, 1.0, temperature) + noise, x)
    return tl.where(greedy, x, tempered)


@triton.jit
def holds(high_, at, x, BV: tl.constexpr, SKIP: tl.constexpr):
    """Whether to look for more than ``x`` in the part of the vocabulary that begins at ``at``."""
    if SKIP:
        return tl.load(high_ + at // BV) > x
    else:
        return True


@triton.jit
def survey_kernel(
    x_, noise_, temperature_, high_, mass_, best_, found_, place_,
    V: tl.constexpr, P: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (P parts of BV tokens, rows). Of each part, [B, P]: ``high_`` the largest x, ``mass_`` the sum of
    exp(x - high), NaN with a NaN; ``best_`` the best score (of x below ``high_``), ``place_`` its first
    token, ``found_`` the x of that.
    """
    EVEN: tl.constexpr = V % BV == 0
    part, row = tl.program_id(0), tl.program_id(1)
    at, lanes, here = part * BV, tl.arange(0, BV), row * P + part
    start = row.to(tl.int64) * V
    x, noise = tokens_at(x_ + start, at, lanes, V, EVEN), tokens_at(noise_ + start, at, lanes, V, EVEN)
    temperature = tl.load(temperature_)
    high = tl.max(x, 0)
    base = tl.where(high > -float("inf"), high, 0.0)
    score = scores(x, noise, base, temperature)
    best = tl.max(score, 0)
    place = tl.min(tl.where(score == best, at + lanes, V), 0)
    tl.store(high_ + here, high)
    tl.store(mass_ + here, tl.sum(tl.exp(x - base), 0))
    tl.store(best_ + here, best)
    tl.store(place_ + here, place)
    tl.store(found_ + here, tl.max(tl.where(at + lanes == place, x, -float("inf")), 0))


@triton.jit
def choose_kernel(
    x_, noise_, top_p_, top_k_, temperature_, high_, mass_, best_, found_, place_, token_,
    V: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    SKIP: tl.constexpr, UNDEFINED: tl.constexpr,
):  # fmt: skip
    """Grid: rows. ``x_`` [B, V], -inf for what may not come; ``noise_`` [B, V]; what `survey_kernel` found;
    ``token_`` [B].

    UNDEFINED for a row with NaN, or without a finite largest x. With ``SKIP`` parts are passed over, and BV
    is that of `survey_kernel`.
    """
    EVEN: tl.constexpr = V % BV == 0
    row = tl.program_id(0)
    x_ += row.to(tl.int64) * V
    noise_ += row.to(tl.int64) * V
    lanes, part = tl.arange(0, BV), tl.arange(0, BP)
    there, part = part < P, row * P + part
    none = -float("inf")
    high, mass = tl.load(high_ + part, there, other=none), tl.load(mass_ + part, there, other=0.0)
    best, places = tl.load(best_ + part, there, other=none), tl.load(place_ + part, there, other=V)
    found_x = tl.load(found_ + part, there, other=none)
    top_p, top_k, temperature = tl.load(top_p_), tl.load(top_k_), tl.load(temperature_)
    greedy = temperature == 0.0
    largest = tl.max(high, 0)
    total = tl.sum(tl.where(high > none, tl.exp(high - largest), 0.0) * mass, 0)
    lower = tl.where(greedy, 0.0, (high - largest) / tl.where(greedy, 1.0, temperature))
    best = tl.where(best > none, best + lower, none)
    first = tl.min(tl.where(best == tl.max(best, 0), places, V), 0)
    found = tl.max(tl.where(places == first, found_x, none), 0)
    searching = (total == total) & (largest > none) & (largest < float("inf"))
    token = tl.full((), UNDEFINED, tl.int32)
    while searching:
        above, number = tl.zeros((BV,), tl.float32), tl.zeros((BV,), tl.int32)
        for at in tl.range(0, V, BV, num_stages=STAGES):
            if holds(high_ + row * P, at, found, BV, SKIP):
                x = tokens_at(x_, at, lanes, V, EVEN)
                above += tl.where(x > found, tl.exp(x - largest), 0.0)
                number += (x > found).to(tl.int32)
        before = tl.sum(number, 0)
        by_p = (top_p >= 1.0) | (tl.sum(above, 0) < top_p * total)
        accepted = (before == 0) | (by_p & (before < top_k))
        token = tl.where(accepted, first, token)
        searching = accepted == 0
        if searching:
            bound = found
            best_of, best_x = tl.full((BV,), none, tl.float32), tl.zeros((BV,), tl.float32)
            place = tl.full((BV,), V, tl.int32)
            for at in tl.range(0, V, BV, num_stages=STAGES):
                if holds(high_ + row * P, at, bound, BV, SKIP):
                    x, noise = tokens_at(x_, at, lanes, V, EVEN), tokens_at(noise_, at, lanes, V, EVEN)
                    score = scores(x, noise, largest, temperature)
                    better = (x > bound) & (score > best_of)
                    best_of, best_x = tl.where(better, score, best_of), tl.where(better, x, best_x)
                    place = tl.where(better, at + lanes, place)
            first = tl.min(tl.where(best_of == tl.max(best_of, 0), place, V), 0)
            found = tl.max(tl.where(place == first, best_x, none), 0)
    tl.store(token_ + row, token)
