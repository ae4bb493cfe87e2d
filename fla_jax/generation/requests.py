"""Requests of a generator: rules and states of each, events on the way, completions."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arguments import shown
from ..layers.state import RWKVState, check_state
from ..models.causal_lm import RWKVForCausalLM
from .array_checks import check_deleted
from .prompts import take_rows
from .rows import FinishReason, GenerationState, Row, RowEvent
from .sampling_params import SamplingParams
from .text import StopStrings, TextDecoder
from .tokenizer import Tokenizer

State = RWKVState | GenerationState
States = State | Sequence[State | None] | None


class Logprobs(NamedTuple):
    """The model's log-probabilities of n tokens, before all sampling rules.

    Attributes:
        chosen: [n], of the tokens themselves.
        top_tokens, top: [n, k], the k = ``logprobs`` most probable tokens and theirs, at most the whole
            vocabulary; None for ``logprobs=0``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, SamplingParams
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=2)
        >>> (completion,) = generator.generate([[1, 2]], SamplingParams(logprobs=3), max_tokens=5)
        >>> completion.logprobs.chosen.shape, completion.logprobs.top.shape
        ((5,), (5, 3))
    """

    chosen: np.ndarray
    top_tokens: np.ndarray | None
    top: np.ndarray | None


class Usage(NamedTuple):
    """Numbers of tokens.

    Attributes:
        prompt_tokens: of the prompt.
        cached_tokens: of those, read from a cache.
        completion_tokens: that were generated.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, SamplingParams
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=2)
        >>> generator.generate([[1, 2]], max_tokens=5)[0].usage
        Usage(prompt_tokens=2, cached_tokens=0, completion_tokens=5)
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """One completion of a prompt.

    Attributes:
        request: number of its request.
        index: among the ``n`` completions of the request, from 0.
        tokens: [n] int32, without prompt and stop token, up to the one that completed a stop string.
        text: of the tokens, up to a stop string; None without a tokenizer.
        logprobs: of the tokens; None unless ``logprobs`` was asked for.
        finish_reason: ``"stop"`` (token or text), ``"length"``, ``"cancelled"`` or ``"error"``.
        error: None, or a FloatingPointError if the logits after ``tokens`` hold NaN or have no finite largest
            one, or a ValueError if the initial state was donated elsewhere before the prompt was read.
        usage: numbers of tokens.
        state: after the tokens; None unless it was asked for, and after an error. A cancelled completion has
            it only in a stream or with stop strings: otherwise the device is ahead of the tokens.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, SamplingParams
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=2)
        >>> (completion,) = generator.generate([[1, 2]], max_tokens=5)
        >>> completion.tokens.shape, completion.finish_reason
        ((5,), 'length')
    """

    request: int
    index: int
    tokens: np.ndarray
    text: str | None
    logprobs: Logprobs | None
    finish_reason: FinishReason
    error: Exception | None
    usage: Usage
    state: GenerationState | None


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """New tokens of a completion, or its end, or both.

    Attributes:
        request: whose completion it is.
        index: of the completion among the request's.
        tokens: [n] int32, new ones.
        text: new text, never part of a stop string; None without a tokenizer.
        logprobs: of the new tokens; None unless asked for.
        completion: None until it is over.
        state: after the tokens, in a stream; else None.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, SamplingParams
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=2)
        >>> request = generator.submit([1, 2], max_tokens=5)
        >>> tokens = []
        >>> while not request.done:
        ...     for event in generator.step():
        ...         tokens += event.tokens.tolist()
        >>> tokens == event.completion.tokens.tolist()
        True
    """

    request: Request
    index: int
    tokens: np.ndarray
    text: str | None
    logprobs: Logprobs | None
    completion: Completion | None
    state: GenerationState | None = None


class Request:
    """A prompt that is being continued, from `fla_jax.generation.Generator.submit`.

    Attributes:
        number: counted from 0.
        completions: those that are over, by index.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, SamplingParams
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=2)
        >>> first, second = (generator.submit([1, 2], max_tokens=5) for _ in range(2))
        >>> first.cancel()
        >>> sorted(completion.finish_reason for completion in generator.results())
        ['cancelled', 'length']
    """

    def __init__(self, number: int, rows: list[Row], cancel: Callable[[Row], object]) -> None:
        self.number, self.rows = number, rows
        self.completions: dict[int, Completion] = {}
        self._cancel = cancel

    @property
    def done(self) -> bool:
        """Whether all completions are over."""
        return len(self.completions) == len(self.rows)

    @property
    def completion(self) -> Completion | None:
        """The first completion; None until it is over."""
        return self.completions.get(0)

    def cancel(self) -> None:
        """Ends all completions that are not over; their slots are free at the next step."""
        for row in self.rows:
            self._cancel(row)

    def __repr__(self) -> str:
        return f"Request(number={self.number}, done={self.done})"


class Collector:
    """Collects tokens, text and log-probabilities of one row."""

    def __init__(
        self,
        request: Request,
        index: int,
        usage: Usage,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.request, self.index, self._usage, self._tokenizer = request, index, usage, tokenizer
        self._prompt = prompt[-1:]
        self.restart()

    @property
    def row(self) -> Row:
        """The engine's row."""
        return self.request.rows[self.index]

    def restart(self) -> None:
        """Forgets everything."""
        self._events: list[RowEvent] = []
        self._text = [""]
        self._decoder = None if self._tokenizer is None else TextDecoder(self._tokenizer, self._prompt)
        self._stop = StopStrings(self.row.sampling.stop)

    def add(self, event: RowEvent) -> tuple[RowEvent, str | None, bool]:
        """The event up to a stop string, its text, and whether one came."""
        if self._decoder is None:
            self._events.append(event)
            return event, None, False
        tokens = event.tokens.tolist()
        # stop strings end a text at a token: where one comes, the tokens are read again one by one
        before = (copy.copy(self._decoder), copy.copy(self._stop)) if self.row.sampling.stop else None
        text = self._stop.push(self._decoder.push(tokens))
        if self._stop.found and before is not None:
            self._decoder, self._stop = before
            text = ""
            for used, token in enumerate(tokens, 1):
                text += self._stop.push(self._decoder.push([token]))
                if self._stop.found:
                    event = event.first(used)
                    break
        elif event.row.finish_reason is not None:
            text += self._stop.push(self._decoder.finish()) + self._stop.finish()
        self._events.append(event)
        self._text.append(text)
        return event, text, self._stop.found

    def completion(self, reason: FinishReason) -> Completion:
        """Everything so far."""
        tokens = np.concatenate([np.empty(0, np.int32), *(event.tokens for event in self._events)])
        return Completion(
            request=self.request.number,
            index=self.index,
            tokens=tokens,
            text=None if self._decoder is None else "".join(self._text),
            logprobs=joined_logprobs(self._events, self.row.sampling.logprobs),
            finish_reason=reason,
            error=self.row.error,
            usage=self._usage._replace(
                cached_tokens=0 if self.row.prompt.all_tokens is None else self._usage.cached_tokens,
                completion_tokens=len(tokens),
            ),
            state=self.row.state if self.row.keep_state else None,
        )


def joined_logprobs(events: list[RowEvent], asked: int | None) -> Logprobs | None:
    """Those of all events; None where none were asked for."""
    if asked is None:
        return None
    own = [event for event in events if event.logprobs is not None]
    chosen = np.concatenate([np.empty(0, np.float32), *(event.logprobs for event in own)])
    if not asked:
        return Logprobs(chosen, None, None)
    tokens = [event.top_tokens for event in own if event.top_tokens is not None]
    values = [event.top_logprobs for event in own if event.top_logprobs is not None]
    if not tokens:
        return Logprobs(chosen, np.empty((0, asked), np.int32), np.empty((0, asked), np.float32))
    return Logprobs(chosen, np.concatenate(tokens), np.concatenate(values))


def states_of_each(model: RWKVForCausalLM, state: States, batch: int) -> list[State | None]:
    """The state before each prompt."""
    if state is None or isinstance(state, GenerationState):
        return [state] * batch
    if not isinstance(state, RWKVState):
        try:
            states = list(state)
        except TypeError:
            raise TypeError(f"state must be a state, or a sequence of them, got {shown(state)}") from None
        if len(states) != batch:
            raise ValueError(f"state must be one for each of the {batch} prompts, got {len(states)}")
        return states
    if np.ndim(state.wkv) == 5 and state.wkv.shape[1] == 1:
        return [state] * batch
    check_state(state, jax.eval_shape(lambda: model.init_state(batch)))
    check_deleted(state=state)
    return [take_rows(state, jnp.array([i])) for i in range(batch)]


def rules_of_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, batch: int
) -> list[SamplingParams | None]:
    """The rules of each prompt."""
    if sampling is None:
        return [None] * batch
    if isinstance(sampling, SamplingParams):
        if sampling.seed is None:
            return [sampling] * batch
        seeds = ((sampling.seed + i * sampling.n) % 2**64 for i in range(batch))
        return [dataclasses.replace(sampling, seed=seed) for seed in seeds]
    if not isinstance(sampling, Sequence) or len(sampling) != batch:
        raise TypeError(
            f"sampling must be a SamplingParams, one for each of the {batch} prompts or None, got "
            f"{shown(sampling)}"
        )
    return list(sampling)


def rules_of_request(
    sampling: SamplingParams | None, max_tokens: int | None, tokenizer: Tokenizer | None
) -> SamplingParams:
    """The rules of a request, with its own ``max_tokens`` and the tokenizer's end of text."""
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be a SamplingParams or None, got {shown(sampling)}")
    if max_tokens is not None:
        sampling = dataclasses.replace(sampling, max_tokens=max_tokens)
    if sampling.stop and tokenizer is None:
        raise ValueError("sampling.stop needs a tokenizer: Generator(..., tokenizer=)")
    end = getattr(tokenizer, "end_of_text", None)
    if end is not None and not sampling.ignore_eos:
        sampling = dataclasses.replace(sampling, stop_tokens=(*sampling.stop_tokens, end))
    return sampling
