"""The requests of `serve.py`, and rates from their times. Without JAX: clients import it, too."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

TOGETHER = (1, 4, 16)  # prompts that the engine reads at a time
COMPILED = "Finished XLA compilation"  # in JAX's log, for each program that it compiles or reads
ROUNDS = 3  # of a load at most, until nothing is compiled in one


class Timed(NamedTuple):
    """A completion: seconds of the clock, the first token's only where it is known, and its new tokens."""

    began: float
    first: float | None
    ended: float
    tokens: int


class Load(NamedTuple):
    """Random prompts, and how many new tokens each gets."""

    vocab: int
    clients: int
    each: int  # requests of a client
    lengths: Sequence[int]  # of prompts
    tokens: Sequence[int]  # fewest, most
    ramp: float  # seconds in which the clients begin

    def requests(self) -> list[tuple[list[int], int]]:
        """The same at every call."""
        rng = random.Random(0)
        sizes = [
            (rng.choice(self.lengths), rng.randint(*self.tokens)) for _ in range(self.clients * self.each)
        ]
        return [(rng.choices(range(1, self.vocab), k=length), new) for length, new in sizes]

    def short(self) -> Load:
        """A quarter of the requests."""
        return self._replace(each=max(1, self.each // 4))


def warm_up(load: Load, complete: Callable[[list[list[int]], int], Any], seconds: float) -> None:
    """Runs the programs that read prompts: every number of prompts of every length, then mixed lengths.

    Args:
        load: has the lengths.
        complete: continues prompts that are submitted together.
        seconds: after which no other program is begun.
    """
    most, until = min(TOGETHER[-1], load.clients), time.monotonic() + seconds
    batches = [[length] * number for number in TOGETHER if number <= most for length in load.lengths]
    batches.append((list(load.lengths) * most)[:most])
    pairs = [(long, short) for long in load.lengths for short in load.lengths if short < long]
    for share in (most // 4, most // 2, most - most // 4):
        batches += [[long] * share + [short] * (most - share) for long, short in pairs]
    for lengths in batches:
        if time.monotonic() < until:
            complete([[1 + i % 7 for i in range(length)] for length in lengths], 2)


def rates(load: Load, done: Sequence[Sequence[Timed]]) -> dict[str, Any]:
    """Tokens per second in all, and while every client has a request; times to the first token.

    Args:
        load: that was run.
        done: completions of each group of clients; a group shares its requests.
    """
    every = [one for some in done for one in some]
    if not every:
        raise ValueError("no request was answered")
    begin = min(one.began for one in every)
    full, end = begin + load.ramp, min(max(one.began for one in some) for some in done if some)
    took = max(one.ended for one in every) - begin
    first = sorted(one.first - one.began for one in every if one.first is not None)

    def inside(one: Timed) -> float:
        """The part of its tokens that came in that time: they come evenly."""
        since = one.first or one.began
        return one.tokens * max(0, min(one.ended, end) - max(since, full)) / max(one.ended - since, 1e-9)

    rate = sum(one.tokens for one in every) / took
    busy_tokens = sum(map(inside, every)) if end - full > took / 10 else 0.0
    return {
        "tokens_per_s": rate,
        "full_per_s": busy_tokens / (end - full) if busy_tokens else rate,
        "full_s": end - full,
        "took_s": took,
        "first_token_s": statistics.median(first) if first else None,
        "first_token_95_s": first[int(0.95 * len(first))] if first else None,
        "requests": len(every),
    }
