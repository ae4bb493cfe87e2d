"""Kernels that choose the next token under penalties, top-p and top-k without sorting the vocabulary.

The token is the one with the best score of those that may come; a score is the logit over the temperature
plus random numbers. Three kernels, the first two for parts of the vocabulary, all at the same time:

* `sample_survey_kernel` takes the penalties off the logits and sums up the parts. Few tokens have been
  generated: only their logits are written, and only their counts touched.
* `sample_draw_kernel` looks at the tokens that are probable enough: what has less than a certain logit
  cannot come under top-p. It makes lists of the others and their random numbers, and finds the best.
* `sample_choose_kernel`, one program for a row, puts the parts together: it takes the token with the best
  score and looks whether it may come, which is when those that are more probable have less than top-p
  together and are fewer than top-k. If not, all that are as probable or less cannot come either, and the
  best of the others is next. Most rows need one round, and a round reads the lists alone.

Which logit is enough follows from two sums over the vocabulary, of e^x and of e^(x/2). Tokens up to a logit
t have a sum of e^x of at most e^(t/2) times the second; where that is less than 1 - top_p of the first, those
above t have more than top-p. No choice depends on how many rows there are.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_at(ptr, tokens, V: tl.constexpr, EVEN: tl.constexpr, other: tl.constexpr):
    """Numbers of some tokens, ``other`` behind the last one."""
    if EVEN:
        return tl.load(ptr + tokens)
    else:
        return tl.load(ptr + tokens, mask=tokens < V, other=other)


@triton.jit
def largest_of(x):
    """Of all in two dimensions."""
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def sum_of(x):
    """Of all in two dimensions."""
    return tl.sum(tl.sum(x, 1), 0)


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
def sample_survey_kernel(
    logits_, seen_, count_, banned_, presence_, frequency_, decay_,
    high_, mass_, roots_, x_, decayed_,
    V: tl.constexpr, P: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (P parts of BV tokens, rows). ``logits_`` become x, with penalties, -inf for what may not come,
    and ``count_`` decays, both in place. Of each part, [B, P]: ``high_`` the largest x, ``mass_`` and
    ``roots_`` the sums of exp(x - high) and of its square root, NaN with a NaN.
    """
    EVEN: tl.constexpr = V % BV == 0
    part, row = tl.program_id(0), tl.program_id(1)
    # four tokens for a thread, of whatever dtype
    tokens = part * BV + 4 * tl.arange(0, BV // 4)[:, None] + tl.arange(0, 4)[None, :]
    here, start = row * P + part, row.to(tl.int64) * V
    x = tokens_at(logits_ + start, tokens, V, EVEN, -float("inf"))
    seen = tokens_at(seen_ + start, tokens, V, EVEN, 0) != 0
    banned = tokens_at(banned_, tokens, V, EVEN, 0) != 0
    count = tl.load(count_ + start + tokens, mask=seen, other=0.0)
    penalties = tl.load(presence_) + count * tl.load(frequency_)
    # they must not add up to infinity, which is for what is forbidden
    penalties = tl.clamp(penalties, -3.4028234663852886e38, 3.4028234663852886e38)
    x = tl.where(banned, -float("inf"), tl.where(seen, x - penalties, x))
    tl.store(logits_ + start + tokens, x, mask=seen | banned)
    tl.store(count_ + start + tokens, count * tl.load(decay_), mask=seen)
    high = largest_of(x)
    root = tl.exp2(0.7213475204444817 * (x - tl.where(high > -float("inf"), high, 0.0)))  # e^((x - high) / 2)
    tl.store(high_ + here, high)
    tl.store(mass_ + here, sum_of(root * root))
    tl.store(roots_ + here, sum_of(root))


@triton.jit
def sample_draw_kernel(
    x_, keys_, top_p_, temperature_, high_, mass_, roots_,
    token_, kept_, score_, number_, best_, found_, place_,
    V: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (P parts, rows). Of each part, [B, P]: the ``number_`` of tokens that may be probable enough,
    ``best_`` the best score, ``place_`` its first token, ``found_`` the x of that. Lists of those tokens,
    which begin where the part does in [B, V]: ``token_``, ``kept_`` with their x, ``score_``.
    """
    EVEN: tl.constexpr = V % BV == 0
    # what the survey has read last is still in the cache
    part, row = P - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    here, start, none = row * P + part, row.to(tl.int64) * V, -float("inf")
    parts = tl.arange(0, BP)
    there, parts = parts < P, row * P + parts
    high = tl.load(high_ + parts, there, other=none)
    mass, roots = tl.load(mass_ + parts, there, other=0.0), tl.load(roots_ + parts, there, other=0.0)
    temperature = tl.load(temperature_)
    largest = tl.max(high, 0)
    root = tl.where(high > none, tl.exp(0.5 * (high - largest)), 0.0)
    share = tl.sum(mass * root * root, 0) / tl.sum(roots * root, 0)
    # a little less than it is: sums are rounded
    enough = largest + 2.0 * tl.log((1.0 - tl.load(top_p_)) * share * 0.999)
    enough = tl.maximum(tl.where(temperature == 0.0, largest, enough), -3.4028234663852886e38)
    best_of, best_x = tl.full((BK,), none, tl.float32), tl.full((BK,), none, tl.float32)
    place, number = tl.full((BK,), V, tl.int32), tl.full((), 0, tl.int32)
    if tl.load(high_ + here) >= enough:
        tokens = part * BV + tl.arange(0, 4)[:, None] * (BV // 4) + tl.arange(0, BV // 4)[None, :]
        x = tokens_at(x_ + start, tokens, V, EVEN, none)
        keep = x >= enough
        # those of a column follow each other: that is how they lie in the registers of a thread
        column = tl.sum(keep.to(tl.int32), 0)
        at = (tl.cumsum(column, 0) - column)[None, :] + tl.cumsum(keep.to(tl.int32), 0) - 1
        number = tl.sum(column, 0)
        token_ += start + part * BV
        kept_ += start + part * BV
        score_ += start + part * BV
        tl.store(token_ + at, tokens, mask=keep)
        tl.debug_barrier()  # threads read what others have written
        for i in range(0, number, BK):
            lane = i + tl.arange(0, BK)
            token = tl.load(token_ + lane, mask=lane < number, other=V)
            kept = tl.load(x_ + start + token, mask=lane < number, other=none)
            score = scores(kept, gumbel(keys_, row, token), largest, temperature)
            tl.store(kept_ + lane, kept, mask=lane < number)
            tl.store(score_ + lane, score, mask=lane < number)
            better = (score > best_of) | ((score == best_of) & (token < place))
            best_of, best_x = tl.where(better, score, best_of), tl.where(better, kept, best_x)
            place = tl.where(better, token, place)
    best = tl.max(best_of, 0)
    first = tl.min(tl.where(best_of == best, place, V), 0)
    tl.store(number_ + here, number)
    tl.store(best_ + here, best)
    tl.store(place_ + here, first)
    tl.store(found_ + here, tl.max(tl.where(place == first, best_x, none), 0))


@triton.jit
def sample_choose_kernel(
    token_, kept_, score_, number_, best_, found_, place_, high_, mass_, top_p_, top_k_, uncounted_,
    seen_, count_,
    chosen_, new_seen_, new_count_,
    V: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    UNDEFINED: tl.constexpr,
):  # fmt: skip
    """Grid: rows. What the other kernels found, -> ``chosen_`` [B], which is put into ``seen_`` and
    ``count_`` [B, V]. UNDEFINED for a row with NaN, or without a finite largest x.
    """
    row = tl.program_id(0)
    none, part, start = -float("inf"), tl.arange(0, BP), row.to(tl.int64) * V
    lists = start + part[:, None] * BV
    known, part = part < P, row * P + part
    high, mass = tl.load(high_ + part, known, other=none), tl.load(mass_ + part, known, other=0.0)
    best, places = tl.load(best_ + part, known, other=none), tl.load(place_ + part, known, other=V)
    found_x, numbers = tl.load(found_ + part, known, other=none), tl.load(number_ + part, known, other=0)
    top_p, top_k = tl.load(top_p_), tl.load(top_k_)
    largest, longest = tl.max(high, 0), tl.max(numbers, 0)
    total = tl.sum(tl.where(high > none, tl.exp(high - largest), 0.0) * mass, 0)
    first = tl.min(tl.where(best == tl.max(best, 0), places, V), 0)
    found = tl.max(tl.where(places == first, found_x, none), 0)
    searching = (total == total) & (largest > none) & (largest < float("inf"))
    chosen = tl.full((), UNDEFINED, tl.int32)
    while searching:
        above, number = tl.zeros((BP, BK), tl.float32), tl.zeros((BP, BK), tl.int32)
        for i in range(0, longest, BK):
            lane = i + tl.arange(0, BK)[None, :]
            x = tl.load(kept_ + lists + lane, mask=lane < numbers[:, None], other=none)
            above += tl.where(x > found, tl.exp(x - largest), 0.0)
            number += (x > found).to(tl.int32)
        before = sum_of(number)
        by_p = (top_p >= 1.0) | (sum_of(above) < top_p * total)
        accepted = (before == 0) | (by_p & (before < top_k))
        chosen = tl.where(accepted, first, chosen)
        searching = accepted == 0
        if searching:
            bound = found
            best_of, best_x = tl.full((BP, BK), none, tl.float32), tl.full((BP, BK), none, tl.float32)
            place = tl.full((BP, BK), V, tl.int32)
            for i in range(0, longest, BK):
                lane = i + tl.arange(0, BK)[None, :]
                there = lane < numbers[:, None]
                x = tl.load(kept_ + lists + lane, mask=there, other=none)
                score = tl.load(score_ + lists + lane, mask=there, other=none)
                token = tl.load(token_ + lists + lane, mask=there, other=V)
                better = (x > bound) & ((score > best_of) | ((score == best_of) & (token < place)))
                best_of, best_x = tl.where(better, score, best_of), tl.where(better, x, best_x)
                place = tl.where(better, token, place)
            first = -largest_of(tl.where(best_of == largest_of(best_of), -place, -V))
            found = largest_of(tl.where(place == first, best_x, none))
    tl.store(chosen_ + row, chosen)
    if chosen >= 0:
        counted = tl.where(tl.load(uncounted_ + chosen) != 0, 0.0, 1.0)
        tl.store(count_ + start + chosen, tl.load(count_ + start + chosen) + counted)
        tl.store(seen_ + start + chosen, 1)
