"""Chooses the next token under penalties, top-p and top-k without sorting the vocabulary.

The token has the best score of those that are allowed; a score is the logit over the temperature plus Gumbel
noise. Three kernels, the first two with a program for each part of the vocabulary:

* `sample_survey_kernel` subtracts penalties from the logits and sums over its part. Few tokens have been
  generated: only their logits and counts are written.
* `sample_draw_kernel` lists its candidates, the tokens whose logits reach a threshold below which top-p
  allows none, with their scores, and finds the best.
* `sample_choose_kernel`, one program a batch element, takes the best candidate of all parts and accepts it
  if more probable tokens have less than top-p together and are fewer than top-k. If not, no token that is at
  most as probable is allowed either, and the best of the others is next. Most need one round.

The threshold follows from the sums of e^x and e^(x/2) over the vocabulary: tokens with logits up to t have a
sum of e^x of at most e^(t/2) times the second. Where that is less than 1 - top_p of the first, the tokens
above t have more than top-p. For top-k it is at most the k-th largest maximum of small groups of tokens,
which k tokens reach. No choice depends on the batch size.
"""

import dataclasses
from typing import NamedTuple

import jax
import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Compile-time facts.

    Attributes:
        V: tokens of the vocabulary.
        P: parts of it.
        BP: parts, padded to a power of two.
        BV: tokens of a part.
        BG: groups of a part, whose maxima give a threshold for top-k.
        BK: candidates of a part that are read at once.
        undefined: the result where the largest logit is infinite or a logit is NaN.
    """

    V: int
    P: int
    BP: int
    BV: int
    BG: int
    BK: int
    undefined: int


class SampleInputs(NamedTuple):
    """Inputs of the kernels, None where one does not read them; float32 where nothing else is said.

    Attributes:
        logits: [B, V]; the survey subtracts penalties in place.
        seen: [B, V] booleans, the tokens that have occurred, and counts: [B, V], how often; written in place.
        bias: [B, V], added to logits, -inf for forbidden tokens; uncounted: [B, V] booleans, tokens that are
            not counted.
        repetition, inverse_repetition: [B] each, factors of negative and positive logits of seen tokens.
        presence, frequency, decay: [B] each, penalties and what they decay by.
        keys: [B, 2] int32, Threefry keys.
        top_p, top_k, min_logit, temperature: [B] each; min_logit is relative to the largest logit.
    """

    logits: jax.Array | None = None
    seen: jax.Array | None = None
    counts: jax.Array | None = None
    bias: jax.Array | None = None
    uncounted: jax.Array | None = None
    repetition: jax.Array | None = None
    inverse_repetition: jax.Array | None = None
    presence: jax.Array | None = None
    frequency: jax.Array | None = None
    decay: jax.Array | None = None
    keys: jax.Array | None = None
    top_p: jax.Array | None = None
    top_k: jax.Array | None = None
    min_logit: jax.Array | None = None
    temperature: jax.Array | None = None


class PartSums(NamedTuple):
    """Sums of each part of the vocabulary, [B, P] float32: the largest logit, the sums of exp(logit - high)
    and of its square root, NaN where a logit is; [B, P BG] largest logits of groups.
    """

    high: jax.Array
    mass: jax.Array
    root_mass: jax.Array
    group_high: jax.Array


class SurveyOut(NamedTuple):
    """Outputs of the survey; logits and counts are the inputs' memory."""

    parts: PartSums
    logits: jax.Array
    counts: jax.Array


class Candidates(NamedTuple):
    """Lists [B, V]; a part's begin where the part does."""

    token: jax.Array
    logit: jax.Array
    score: jax.Array


class DrawOut(NamedTuple):
    """The candidates, and of each part, [B, P], their number and the first of the best ones."""

    candidates: Candidates
    number: jax.Array
    best_score: jax.Array
    best_logit: jax.Array
    best_token: jax.Array


class ChooseOut(NamedTuple):
    """Token [B]; seen and counts are the inputs' memory."""

    token: jax.Array
    seen: jax.Array
    counts: jax.Array


@triton.jit
def tokens_at(ptr, tokens, V: tl.constexpr, UNMASKED: tl.constexpr, other: tl.constexpr):
    """Values of some tokens, ``other`` past the last one."""
    if UNMASKED:
        return tl.load(ptr + tokens)
    else:
        return tl.load(ptr + tokens, mask=tokens < V, other=other)


@triton.jit
def max_of(x):
    """The maximum over both axes."""
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def sum_of(x):
    """The sum over both axes."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def threefry_round(a, b, by: tl.constexpr):
    """A round of Threefry-2x32."""
    a += b
    return a, ((b << by) | (b >> (32 - by))) ^ a


@triton.jit
def four_rounds(a, b, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr):
    """Four rounds of Threefry-2x32, with the rotations of the second word in bits."""
    a, b = threefry_round(a, b, r0)
    a, b = threefry_round(a, b, r1)
    a, b = threefry_round(a, b, r2)
    return threefry_round(a, b, r3)


@triton.jit
def gumbel(keys, b_index, tokens):
    """Gumbel noise of some tokens of a batch element: that of `jax.random.categorical`."""
    k0 = tl.load(keys + 2 * b_index).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys + 2 * b_index + 1).to(tl.uint32, bitcast=True)
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    a, b = tl.zeros_like(tokens).to(tl.uint32) + k0, tokens.to(tl.uint32) + k1
    a, b = four_rounds(a, b, 13, 15, 26, 6)
    a, b = four_rounds(a + k1, b + k2 + 1, 17, 29, 16, 24)
    a, b = four_rounds(a + k2, b + k0 + 2, 13, 15, 26, 6)
    a, b = four_rounds(a + k0, b + k1 + 3, 17, 29, 16, 24)
    a, b = four_rounds(a + k1, b + k2 + 4, 13, 15, 26, 6)
    bits = (a + k2) ^ (b + k0 + 5)
    uniform = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return -tl.log(-tl.log(tl.maximum(uniform, 1.1754943508222875e-38)))


@triton.jit
def scores(x, noise, highest, temperature):
    """Scores, whose largest is drawn: (x - highest) / temperature + noise, and x at temperature 0."""
    greedy = temperature == 0.0
    # a forbidden token stays forbidden at every temperature
    tempered = tl.where(x > -float("inf"), (x - highest) / tl.where(greedy, 1.0, temperature) + noise, x)
    return tl.where(greedy, x, tempered)


@triton.jit
def sample_survey_kernel(x, out, c: tl.constexpr):
    """Grid: parts, batch elements. Subtracts penalties, decays counts and sums over the part."""
    V: tl.constexpr = c.V
    BV: tl.constexpr = c.BV
    UNMASKED: tl.constexpr = V % BV == 0
    part, b = tl.program_id(0), tl.program_id(1)
    # four tokens a thread, for every dtype
    tokens = part * BV + 4 * tl.arange(0, BV // 4)[:, None] + tl.arange(0, 4)[None, :]
    here, start = b * c.P + part, b.to(tl.int64) * V
    logits = tokens_at(x.logits + start, tokens, V, UNMASKED, -float("inf"))
    seen = tokens_at(x.seen + start, tokens, V, UNMASKED, 0) != 0
    changed = seen
    if x.bias is not None:
        bias = tokens_at(x.bias + start, tokens, V, UNMASKED, 0.0)
        logits = tl.where(bias > -float("inf"), logits + bias, -float("inf"))
        changed = seen | (bias != 0.0)
    count = tl.load(x.counts + start + tokens, mask=seen, other=0.0)
    factor = tl.where(logits > 0.0, tl.load(x.inverse_repetition + b), tl.load(x.repetition + b))
    penalties = tl.load(x.presence + b) + count * tl.load(x.frequency + b)
    # -inf is for forbidden tokens, so penalties stay finite
    penalties = tl.clamp(penalties, -3.4028234663852886e38, 3.4028234663852886e38)
    logits = tl.where(seen, logits * factor - penalties, logits)
    tl.store(x.logits + start + tokens, logits, mask=changed)
    tl.store(x.counts + start + tokens, count * tl.load(x.decay + b), mask=seen)
    group_high = tl.max(tl.reshape(tl.max(logits, 1), (c.BG, BV // 4 // c.BG)), 1)
    tl.store(out.parts.group_high + here * c.BG + tl.arange(0, c.BG), group_high)
    high = tl.max(group_high, 0)
    # e^((logit - high) / 2)
    root = tl.exp2(0.7213475204444817 * (logits - tl.where(high > -float("inf"), high, 0.0)))
    tl.store(out.parts.high + here, high)
    tl.store(out.parts.mass + here, sum_of(root * root))
    tl.store(out.parts.root_mass + here, sum_of(root))


@triton.jit
def reached_by(group_high, top_k, largest):
    """A logit that at least ``top_k`` groups reach, the highest to within 1/64; -inf if there is none."""
    low, high = largest - 64.0, largest
    enough = tl.sum((group_high >= low).to(tl.int32), 0) >= top_k
    for _ in range(12):
        middle = 0.5 * (low + high)
        is_reached = tl.sum((group_high >= middle).to(tl.int32), 0) >= top_k
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
    return tl.where(enough, low, -float("inf"))


@triton.jit
def sample_draw_kernel(x, sums, out, c: tl.constexpr):
    """Grid: parts, batch elements. ``sums``: `PartSums`. Lists candidates and finds the best of each part."""
    V: tl.constexpr = c.V
    P: tl.constexpr = c.P
    BV: tl.constexpr = c.BV
    BK: tl.constexpr = c.BK
    UNMASKED: tl.constexpr = V % BV == 0
    # in reverse, because the survey's last loads are still in the cache
    part, b = P - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    here, start, none = b * P + part, b.to(tl.int64) * V, -float("inf")
    parts = tl.arange(0, c.BP)
    exists, parts = parts < P, b * P + parts
    high = tl.load(sums.high + parts, exists, other=none)
    mass = tl.load(sums.mass + parts, exists, other=0.0)
    root_mass = tl.load(sums.root_mass + parts, exists, other=0.0)
    temperature = tl.load(x.temperature + b)
    largest = tl.max(high, 0)
    root = tl.where(high > none, tl.exp(0.5 * (high - largest)), 0.0)
    ratio = tl.sum(mass * root * root, 0) / tl.sum(root_mass * root, 0)
    # 0.999 covers the rounding of the sums
    threshold = largest + 2.0 * tl.log((1.0 - tl.load(x.top_p + b)) * ratio * 0.999)
    threshold = tl.maximum(threshold, largest + tl.load(x.min_logit + b))
    top_k = tl.load(x.top_k + b)
    if top_k <= P * c.BG:
        groups = tl.arange(0, c.BP * c.BG)
        group_high = tl.load(sums.group_high + b * P * c.BG + groups, groups < P * c.BG, other=none)
        threshold = tl.maximum(threshold, reached_by(group_high, top_k, largest))
    threshold = tl.maximum(tl.where(temperature == 0.0, largest, threshold), -3.4028234663852886e38)
    best_score, best_logit = tl.full((BK,), none, tl.float32), tl.full((BK,), none, tl.float32)
    best_token, number = tl.full((BK,), V, tl.int32), tl.full((), 0, tl.int32)
    if tl.load(sums.high + here) >= threshold:
        tokens = part * BV + tl.arange(0, 4)[:, None] * (BV // 4) + tl.arange(0, BV // 4)[None, :]
        logits = tokens_at(x.logits + start, tokens, V, UNMASKED, none)
        is_candidate = logits >= threshold
        # candidates of a column, which one thread has in registers, are adjacent in the list
        column = tl.sum(is_candidate.to(tl.int32), 0)
        at = (tl.cumsum(column, 0) - column)[None, :] + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        number = tl.sum(column, 0)
        list_token = out.candidates.token + (start + part * BV)
        list_logit = out.candidates.logit + (start + part * BV)
        list_score = out.candidates.score + (start + part * BV)
        tl.store(list_token + at, tokens, mask=is_candidate)
        tl.debug_barrier()  # threads read what others have written
        for i in range(0, number, BK):
            lane = i + tl.arange(0, BK)
            token = tl.load(list_token + lane, mask=lane < number, other=V)
            logit = tl.load(x.logits + start + token, mask=lane < number, other=none)
            score = scores(logit, gumbel(x.keys, b, token), largest, temperature)
            tl.store(list_logit + lane, logit, mask=lane < number)
            tl.store(list_score + lane, score, mask=lane < number)
            better = (score > best_score) | ((score == best_score) & (token < best_token))
            best_score, best_logit = tl.where(better, score, best_score), tl.where(better, logit, best_logit)
            best_token = tl.where(better, token, best_token)
    best = tl.max(best_score, 0)
    first = tl.min(tl.where(best_score == best, best_token, V), 0)
    tl.store(out.number + here, number)
    tl.store(out.best_score + here, best)
    tl.store(out.best_token + here, first)
    tl.store(out.best_logit + here, tl.max(tl.where(best_token == first, best_logit, none), 0))


@triton.jit
def sample_choose_kernel(x, drawn, sums, out, c: tl.constexpr):
    """Grid: batch elements. ``drawn``: `DrawOut`, ``sums``: `PartSums`. Chooses, and counts the token."""
    V: tl.constexpr = c.V
    BP: tl.constexpr = c.BP
    BK: tl.constexpr = c.BK
    b = tl.program_id(0)
    none, part, start = -float("inf"), tl.arange(0, BP), b.to(tl.int64) * V
    lists = start + part[:, None] * c.BV
    exists, part = part < c.P, b * c.P + part
    high, mass = tl.load(sums.high + part, exists, other=none), tl.load(sums.mass + part, exists, other=0.0)
    best = tl.load(drawn.best_score + part, exists, other=none)
    best_tokens = tl.load(drawn.best_token + part, exists, other=V)
    best_logits = tl.load(drawn.best_logit + part, exists, other=none)
    numbers = tl.load(drawn.number + part, exists, other=0)
    top_p, top_k = tl.load(x.top_p + b), tl.load(x.top_k + b)
    largest, longest = tl.max(high, 0), tl.max(numbers, 0)
    total = tl.sum(tl.where(high > none, tl.exp(high - largest), 0.0) * mass, 0)
    first = tl.min(tl.where(best == tl.max(best, 0), best_tokens, V), 0)
    found = tl.max(tl.where(best_tokens == first, best_logits, none), 0)
    searching = (total == total) & (largest > none) & (largest < float("inf"))
    chosen = tl.full((), c.undefined, tl.int32)
    while searching:
        above, number = tl.zeros((BP, BK), tl.float32), tl.zeros((BP, BK), tl.int32)
        for i in range(0, longest, BK):
            lane = i + tl.arange(0, BK)[None, :]
            logits = tl.load(drawn.candidates.logit + lists + lane, mask=lane < numbers[:, None], other=none)
            above += tl.where(logits > found, tl.exp(logits - largest), 0.0)
            number += (logits > found).to(tl.int32)
        before = sum_of(number)
        by_p = (top_p >= 1.0) | (sum_of(above) < top_p * total)
        accepted = (before == 0) | (by_p & (before < top_k))
        chosen = tl.where(accepted, first, chosen)
        searching = accepted == 0
        if searching:
            bound = found
            best_score = tl.full((BP, BK), none, tl.float32)
            best_logit = tl.full((BP, BK), none, tl.float32)
            best_token = tl.full((BP, BK), V, tl.int32)
            for i in range(0, longest, BK):
                lane = i + tl.arange(0, BK)[None, :]
                is_listed = lane < numbers[:, None]
                logits = tl.load(drawn.candidates.logit + lists + lane, mask=is_listed, other=none)
                score = tl.load(drawn.candidates.score + lists + lane, mask=is_listed, other=none)
                token = tl.load(drawn.candidates.token + lists + lane, mask=is_listed, other=V)
                is_left = logits > bound
                better = (score > best_score) | ((score == best_score) & (token < best_token))
                better = is_left & better
                best_score = tl.where(better, score, best_score)
                best_logit = tl.where(better, logits, best_logit)
                best_token = tl.where(better, token, best_token)
            first = -max_of(tl.where(best_score == max_of(best_score), -best_token, -V))
            found = max_of(tl.where(best_token == first, best_logit, none))
    tl.store(out.token + b, chosen)
    if chosen >= 0:
        counted = tl.where(tl.load(x.uncounted + start + chosen) != 0, 0.0, 1.0)
        tl.store(x.counts + start + chosen, tl.load(x.counts + start + chosen) + counted)
        tl.store(x.seen + start + chosen, 1)
