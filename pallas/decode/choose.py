"""Kernels that choose the next token under penalties, top-p and top-k without sorting the vocabulary.

The token is the one with the best score of those that may come; a score is the logit over the temperature plus
random numbers. Three kernels, the first two for parts of the vocabulary, all at the same time:

* `survey_kernel` takes the penalties off the logits and sums up the parts. Few tokens have been generated, and
  only theirs are written, and only their counts touched.
* `draw_kernel` looks at the tokens that are probable enough: what has less than a certain logit cannot come
  under top-p. It keeps a list of the others, makes their random numbers, and finds the best.
* `choose_kernel`, one program for a row, puts the parts together: it takes the token with the best score and
  looks whether it may come, which is when those that are more probable have less than top-p together and are
  fewer than top-k. If not, all that are as probable or less cannot come either, and the best of the others is
  next. Most rows need one round, and a round reads the lists alone.

Which logit is enough follows from two sums over the vocabulary, of e^x and of e^(x/2). Tokens up to a logit t
have a sum of e^x of at most e^(t/2) times the second; where that is less than 1 - top_p of the first, those
above t have more than top-p. No choice depends on how many rows there are.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_at(ptr, at, lanes, V: tl.constexpr, EVEN: tl.constexpr, other: tl.constexpr):
    """Numbers of some tokens, ``other`` behind the last one."""
    if EVEN:
        return tl.load(ptr + at + lanes)
    else:
        return tl.load(ptr + at + lanes, mask=at + lanes < V, other=other)


@triton.jit
def mixed(a, b, by: tl.constexpr):
    """A round of Threefry-2x32."""
    a += b
    return a, ((b << by) | (b >> (32 - by))) ^ a


@triton.jit
def four_rounds(a, b, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr):
    """Of Threefry-2x32, which turn the second word by so many bits."""
    a, b = mixed(a, b, r0)
    a, b = mixed(a, b, r1)
    a, b = mixed(a, b, r2)
    return mixed(a, b, r3)


@triton.jit
def gumbel(keys_, row, tokens):
    """The random numbers of some tokens of a row: those of `jax.random.categorical` over the vocabulary."""
    k0 = tl.load(keys_ + 2 * row).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys_ + 2 * row + 1).to(tl.uint32, bitcast=True)
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
    """What the largest is drawn: logits below ``highest`` over the temperature, plus noise; x itself at 0."""
    greedy = temperature == 0.0
    # what may not come stays that, whatever the temperature
    tempered = tl.where(x > -float("inf"), (x - highest) / tl.where(greedy, 1.0, temperature) + noise, x)
    return tl.where(greedy, x, tempered)


@triton.jit
def survey_kernel(
    logits_, seen_, count_, banned_, presence_, frequency_, decay_,
    x_, decayed_, high_, mass_, roots_,
    V: tl.constexpr, P: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (P parts of BV tokens, rows). ``logits_`` become the penalised ones, -inf for what may not come, and
    ``count_`` decays, both in place. Of each part, [B, P]: ``high_`` the largest x, ``mass_`` and ``roots_`` the
    sums of exp(x - high) and of its square root, NaN with a NaN.
    """
    EVEN: tl.constexpr = V % BV == 0
    part, row = tl.program_id(0), tl.program_id(1)
    at, lanes, here = part * BV, tl.arange(0, BV), row * P + part
    start = row.to(tl.int64) * V
    x = tokens_at(logits_ + start, at, lanes, V, EVEN, -float("inf"))
    seen = tokens_at(seen_ + start, at, lanes, V, EVEN, 0) != 0
    banned = tokens_at(banned_, at, lanes, V, EVEN, 0) != 0
    count = tl.load(count_ + start + at + lanes, mask=seen, other=0.0)
    penalties = tl.load(presence_) + count * tl.load(frequency_)
    # they must not add up to infinity, which is for what is forbidden
    penalties = tl.clamp(penalties, -3.4028234663852886e38, 3.4028234663852886e38)
    x = tl.where(banned, -float("inf"), tl.where(seen, x - penalties, x))
    tl.store(logits_ + start + at + lanes, x, mask=seen | banned)
    tl.store(count_ + start + at + lanes, count * tl.load(decay_), mask=seen)
    high = tl.max(x, 0)
    root = tl.exp(0.5 * (x - tl.where(high > -float("inf"), high, 0.0)))
    tl.store(high_ + here, high)
    tl.store(mass_ + here, tl.sum(root * root, 0))
    tl.store(roots_ + here, tl.sum(root, 0))


@triton.jit
def draw_kernel(
    x_, keys_, top_p_, temperature_, high_, mass_, roots_,
    kept_, token_, number_, best_, found_, place_,
    V: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (P parts, rows). Of each part: ``kept_`` [B, P BV] the x of the ``number_`` tokens ``token_`` that
    may be probable enough, ``best_`` the best score, ``place_`` its first token, ``found_`` the x of that.
    """
    EVEN: tl.constexpr = V % BV == 0
    # what the survey has read last is still in the cache
    part, row = P - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    at, lanes, here = part * BV, tl.arange(0, BV), row * P + part
    none, parts = -float("inf"), tl.arange(0, BP)
    there, parts = parts < P, row * P + parts
    high = tl.load(high_ + parts, there, other=none)
    mass, roots = tl.load(mass_ + parts, there, other=0.0), tl.load(roots_ + parts, there, other=0.0)
    temperature = tl.load(temperature_)
    largest = tl.max(high, 0)
    root = tl.where(high > none, tl.exp(0.5 * (high - largest)), 0.0)
    share = tl.sum(mass * root * root, 0) / tl.sum(roots * root, 0)
    # a little less than it is: sums are rounded
    enough = largest + 2.0 * tl.log((1.0 - tl.load(top_p_)) * share * 0.999)
    enough = tl.where(temperature == 0.0, largest, enough)
    number, place = tl.full((), 0, tl.int32), tl.full((), V, tl.int32)
    best, found = tl.full((), none, tl.float32), tl.full((), none, tl.float32)
    if tl.load(high_ + here) >= enough:
        x = tokens_at(x_ + row.to(tl.int64) * V, at, lanes, V, EVEN, none)
        keep = (x >= enough) & (x > none)
        start = row.to(tl.int64) * (P * BV) + at
        to = start + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(kept_ + to, x, mask=keep)
        tl.store(token_ + to, at + lanes, mask=keep)
        number = tl.sum(keep.to(tl.int32), 0)
        tl.debug_barrier()  # threads read what others have written
        for i in range(0, number, BK):
            lane = i + tl.arange(0, BK)
            kept = tl.load(kept_ + start + lane, mask=lane < number, other=none)
            tokens = tl.load(token_ + start + lane, mask=lane < number, other=V)
            score = scores(kept, gumbel(keys_, row, tokens), largest, temperature)
            most = tl.max(score, 0)
            if most > best:
                best = most
                place = tl.min(tl.where(score == best, tokens, V), 0)
                found = tl.max(tl.where(tokens == place, kept, none), 0)
    tl.store(number_ + here, number)
    tl.store(best_ + here, best)
    tl.store(place_ + here, place)
    tl.store(found_ + here, found)


@triton.jit
def choose_kernel(
    keys_, uncounted_, top_p_, top_k_, temperature_, high_, mass_, kept_, token_, number_, best_, found_, place_,
    seen_, count_,
    chosen_, new_seen_, new_count_,
    V: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    UNDEFINED: tl.constexpr,
):  # fmt: skip
    """Grid: rows. What the other kernels found, -> ``chosen_`` [B], which is written into ``seen_`` and
    ``count_`` [B, V]. UNDEFINED for a row with NaN, or without a finite largest x.
    """
    row = tl.program_id(0)
    none, part = -float("inf"), tl.arange(0, BP)
    lists = row.to(tl.int64) * (P * BV) + part[:, None] * BV
    there, part = part < P, row * P + part
    high, mass = tl.load(high_ + part, there, other=none), tl.load(mass_ + part, there, other=0.0)
    best, places = tl.load(best_ + part, there, other=none), tl.load(place_ + part, there, other=V)
    found_x, numbers = tl.load(found_ + part, there, other=none), tl.load(number_ + part, there, other=0)
    top_p, top_k, temperature = tl.load(top_p_), tl.load(top_k_), tl.load(temperature_)
    largest, longest = tl.max(high, 0), tl.max(numbers, 0)
    total = tl.sum(tl.where(high > none, tl.exp(high - largest), 0.0) * mass, 0)
    first = tl.min(tl.where(best == tl.max(best, 0), places, V), 0)
    found = tl.max(tl.where(places == first, found_x, none), 0)
    searching = (total == total) & (largest > none) & (largest < float("inf"))
    token = tl.full((), UNDEFINED, tl.int32)
    while searching:
        above, number = tl.zeros((BP, BK), tl.float32), tl.zeros((BP, BK), tl.int32)
        for i in range(0, longest, BK):
            lane = i + tl.arange(0, BK)[None, :]
            x = tl.load(kept_ + lists + lane, mask=lane < numbers[:, None], other=none)
            above += tl.where(x > found, tl.exp(x - largest), 0.0)
            number += (x > found).to(tl.int32)
        before = tl.sum(tl.sum(number, 1), 0)
        by_p = (top_p >= 1.0) | (tl.sum(tl.sum(above, 1), 0) < top_p * total)
        accepted = (before == 0) | (by_p & (before < top_k))
        token = tl.where(accepted, first, token)
        searching = accepted == 0
        if searching:
            bound = found
            best_of, best_x = tl.full((BP, BK), none, tl.float32), tl.zeros((BP, BK), tl.float32)
            place = tl.full((BP, BK), V, tl.int32)
            for i in range(0, longest, BK):
                lane = i + tl.arange(0, BK)[None, :]
                inside = lane < numbers[:, None]
                x = tl.load(kept_ + lists + lane, mask=inside, other=none)
                tokens = tl.load(token_ + lists + lane, mask=inside & (x > bound), other=V)
                score = scores(x, gumbel(keys_, row, tokens), largest, temperature)
                better = (x > bound) & (score > best_of)
                best_of, best_x = tl.where(better, score, best_of), tl.where(better, x, best_x)
                place = tl.where(better, tokens, place)
            most = tl.max(tl.max(best_of, 1), 0)
            first = tl.min(tl.min(tl.where(best_of == most, place, V), 1), 0)
            found = tl.max(tl.max(tl.where(place == first, best_x, none), 1), 0)
    tl.store(chosen_ + row, token)
    if token >= 0:
        here = row.to(tl.int64) * V + token
        tl.store(count_ + here, tl.load(count_ + here) + tl.where(tl.load(uncounted_ + token) != 0, 0.0, 1.0))
        tl.store(seen_ + here, 1)
