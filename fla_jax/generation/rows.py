"""Rows of an engine: completions that wait, decode or are over, and where a row continues."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import struct

from ..layers.state import RWKVState
from .decode_loop import PLAIN, RANKED, SCORED, Chosen, Scores
from .sampling import TokenCounts
from .sampling_params import SamplingParams

# How many prompts are read at a time: each number makes programs to compile. Few are filled up to the next
# number; from four on so many are read as there is a number for, for rows that fill a batch up cost as much
# as others. A free slot waits until there are a few to be filled together, a sixteenth of all.
TOGETHER = (1, 4, 16, 64)
_FILLED_UP = 4
_WAITING_SLOTS = 16
_WINDOW = 4  # prompts are chosen for similar lengths among so many times as many as are read together
FinishReason = Literal["stop", "length", "cancelled", "error"]


class GenerationState(struct.PyTreeNode):
    """Where one row of a generation continues, with a prompt or without one.

    With a prompt only the recurrent state counts. Without one the next token is chosen from ``logits``, and
    with the same seed the two parts equal one longer generation.

    Attributes:
        rwkv: the recurrent state of one row, [L, 1, ...].
        logits: [1, V], of the next token.
        token_counts: [1, V], what was generated so far.
        step: [1], number of tokens chosen so far, on which the random choices depend.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=1)
        >>> (first,) = generator.generate([[1, 2, 3]], max_tokens=4, keep_state=True)
        >>> (second,) = generator.generate([None], max_tokens=4, state=first.state)
        >>> len(second.tokens)
        4
    """

    rwkv: RWKVState
    logits: jax.Array
    token_counts: TokenCounts
    step: jax.Array


def check_start(state: GenerationState, vocab_size: int) -> None:
    """Raises ValueError unless a row can continue from ``state`` without a prompt; ignores its ``rwkv``."""
    counts = state.token_counts
    wide = {"logits": state.logits, "token_counts.seen": counts.seen, "token_counts.count": counts.count}
    wanted = [(name, x, [1, vocab_size]) for name, x in wide.items()]
    for name, x, shape in (*wanted, ("step", state.step, [1])):
        if list(np.shape(x)) != shape:
            raise ValueError(f"state.{name} must have shape {shape}, got {list(np.shape(x))}")


@dataclasses.dataclass(eq=False)
class Prompt:
    """A prompt that waits to be read, with the rows that continue it.

    Attributes:
        tokens: None where ``start`` says how the rows continue, and there is nothing to read.
        initial: state before the tokens; None for zeros.
        start: state after the tokens, once they are read.
        rows: that wait for a slot.
        all_tokens: of the prompt, if ``initial`` or ``start`` is a cached state after the first of them, else
            None.
    """

    tokens: np.ndarray | None
    initial: RWKVState | None
    start: GenerationState | None
    rows: list[Row]
    all_tokens: np.ndarray | None = None

    def forget_cached(self) -> None:
        """Reads all tokens: the cached state is of other parameters."""
        if self.all_tokens is not None:
            self.tokens, self.initial, self.start, self.all_tokens = self.all_tokens, None, None, None

    def waiting(self) -> list[Row]:
        """Rows that were not cancelled."""
        return [row for row in self.rows if row.finish_reason is None]


@dataclasses.dataclass(eq=False)
class Row:
    """One completion of a prompt.

    Attributes:
        number: of the row in its engine, from 0.
        sampling: its rules; their seed is an integer.
        seed: of its random choices.
        prompt: that it continues.
        keep_state: whether the state after its tokens is kept.
        stepwise: whether the state is kept after every token, for which calls have one step.
        finish_reason, error: None until it is over.
        state: after the tokens that have been taken.
        count: tokens that have been taken.
    """

    number: int
    sampling: SamplingParams
    seed: int
    prompt: Prompt
    keep_state: bool
    stepwise: bool
    started: int = 0  # steps that have been started for it
    count: int = 0
    state: GenerationState | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def scores(self) -> Scores:
        """The program that its rules need."""
        asks = self.sampling
        if asks.logprobs:
            return RANKED
        return SCORED if asks.logit_bias or asks.banned or asks.logprobs is not None else PLAIN

    def restart(self) -> None:
        """Forgets its tokens."""
        self.started = self.count = 0
        self.state = None


class PromptQueue(collections.deque[Prompt]):
    """Prompts in the order of their submission."""

    def take(self, free: int, slots: int) -> list[Prompt]:
        """Removes the prompts to be read next: the first, and others of similar lengths.

        Args:
            free: number of free slots.
            slots: number of all slots.
        """
        count = min(free, len(self))
        if count == 0 or count < min(slots // _WAITING_SLOTS, len(self)):
            return []
        if count >= _FILLED_UP:
            count = max(size for size in TOGETHER if size <= count)
        window = list(itertools.islice(self, _WINDOW * count))
        first = _length(window[0])
        window.sort(key=lambda prompt: (abs(_length(prompt) - first), prompt.rows[0].number))
        for prompt in window[:count]:
            self.remove(prompt)
        return window[:count]


def _length(prompt: Prompt) -> int:
    assert prompt.tokens is not None
    return len(prompt.tokens)


class RowEvent(NamedTuple):
    """New tokens of a row, or its end, or both.

    Attributes:
        row: with its ``finish_reason`` where it is over.
        tokens: [n] int32.
        logprobs: [n]; None where none were asked for.
        top_tokens, top_logprobs: [n, k]; None where none were asked for.
        state: after the tokens, of a row that decodes step by step; else None.
    """

    row: Row
    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    state: GenerationState | None = None

    def first(self, n: int) -> RowEvent:
        """The event with its first ``n`` tokens alone."""
        return self._replace(
            tokens=self.tokens[:n],
            logprobs=None if self.logprobs is None else self.logprobs[:n],
            top_tokens=None if self.top_tokens is None else self.top_tokens[:n],
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[:n],
        )


def requeued(rows: Iterable[Row]) -> list[Prompt]:
    """The prompts of rows that begin again, each with all of them."""
    rows = sorted(rows, key=lambda row: row.number)
    prompts = []
    for _, group in itertools.groupby(rows, key=lambda row: id(row.prompt)):
        own = list(group)
        for row in own:
            row.restart()
        prompts.append(dataclasses.replace(own[0].prompt, rows=own))
        for row in own:
            row.prompt = prompts[-1]
    return prompts


def row_scores(
    out: Chosen, slot: int, n: int, asked: int | None
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """The log-probabilities of a slot's n new tokens, and of the ``asked`` most probable ones."""
    if asked is None or out.logprobs is None:
        return None, None, None
    own = np.asarray(out.logprobs)[:n, slot]
    if not asked or out.top_tokens is None or out.top_logprobs is None:
        return own, None, None
    return own, np.asarray(out.top_tokens)[:n, slot, :asked], np.asarray(out.top_logprobs)[:n, slot, :asked]
