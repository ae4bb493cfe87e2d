"""Text generation as one object: weights, slots, tokenizer, and requests with rules of their own."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..core.arguments import check_integer, shown
from ..layers.state import RWKVState, check_state
from ..models.causal_lm import RWKVForCausalLM
from ..models.config import check_model
from .decoder import Decoder, int8_group_of
from .deleted import check_deleted
from .engine import Engine
from .prompts import take_rows
from .requests import Collector, Completion, Event, Request, Usage, joined_logprobs
from .rows import GenerationState, Row, RowEvent
from .sampling_params import SamplingParams
from .streaming import Stream
from .tokenizer import Tokenizer

State = RWKVState | GenerationState
_WEIGHTS = (None, "bfloat16", "int8")


class Generator:
    """Generates text from a model: batches, streams, and requests that come and go.

    It has the weights in the form that is decoded fastest, a number of slots that decode together, and the
    compiled programs; create it once. Each request has its own `SamplingParams` and returns the same tokens
    as when it runs alone. `generate`, `stream` and `results` are loops over `step`. Use it from one thread.

    Attributes:
        engine: the scheduler.
        tokenizer: as given.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, SamplingParams, load_tokenizer
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=256, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=4, tokenizer=load_tokenizer("bytes"))
        >>> first, second = generator.generate(["Once", "A"], SamplingParams(top_k=5), max_tokens=6)
        >>> len(first.tokens), first.finish_reason, first.usage.prompt_tokens
        (6, 'length', 4)
    """

    def __init__(
        self,
        model: RWKVForCausalLM,
        params: PyTree,
        *,
        slots: int = 64,
        state_dtype: DTypeLike | None = None,
        weights: Literal["bfloat16", "int8"] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Prepares the weights.

        Args:
            model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
            params: its parameters.
            slots: number of completions that decode together.
            state_dtype: float32, bfloat16 or float16, see `Decoder`; None for the model's own.
            weights: ``"bfloat16"`` computes in that dtype, ``"int8"`` decodes with weights of 8 bits (see
                `Decoder`); None for the model's dtype.
            tokenizer: for prompts that are text, completions' text and stop strings.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_model(model)
        if weights not in _WEIGHTS:
            raise ValueError(f"weights must be None, 'bfloat16' or 'int8', got {shown(weights)}")
        if weights == "bfloat16":
            model = type(model)(dataclasses.replace(model.config, dtype="bfloat16"))
        self._model, self.tokenizer = model, tokenizer
        slots = check_integer("slots", slots, 1)
        group = int8_group_of(model, params) if weights == "int8" else None
        self._make_decoder = functools.partial(Decoder, model, state_dtype=state_dtype, int8_group=group)
        decoder = self._make_decoder(params=params)
        self.engine = Engine(model, params, slots, decoder=decoder)
        self._collectors: dict[Row, Collector] = {}
        self._streams: dict[Request, collections.deque[Event]] = {}
        self._events: list[Event] = []
        self._over: collections.deque[Completion] = collections.deque()
        self._claimed: set[Request] = set()  # whose completions `results` does not return
        self._number = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._collectors or self._events or self.engine.busy)

    def submit(
        self,
        prompt: object,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        state: State | None = None,
        keep_state: bool = False,
    ) -> Request:
        """Adds a request; starts nothing. Its completions come from `step` and `results`.

        Args:
            prompt: tokens, a list or an integer array; or text, with a tokenizer; None to continue from
                ``state``, a `GenerationState`.
            sampling: its rules; None for `SamplingParams`'s default values.
            max_tokens: in place of that of ``sampling``.
            state: before the prompt, of one row, also for ``n`` completions; None for zeros.
            keep_state: whether completions have their state, which takes memory until they are dropped.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        return self._submit(prompt, sampling, max_tokens, state, keep_state, stepwise=False)

    def _submit(
        self,
        prompt: object,
        sampling: SamplingParams | None,
        max_tokens: int | None,
        state: State | None,
        keep_state: bool,
        stepwise: bool,
    ) -> Request:
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be a SamplingParams or None, got {shown(sampling)}")
        if max_tokens is not None:
            sampling = dataclasses.replace(sampling, max_tokens=max_tokens)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("sampling.stop needs a tokenizer: Generator(..., tokenizer=)")
        end = getattr(self.tokenizer, "end_of_text", None)
        if end is not None and not sampling.ignore_eos:
            sampling = dataclasses.replace(sampling, stop_tokens=(*sampling.stop_tokens, end))
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("prompt is text, which needs a tokenizer: Generator(..., tokenizer=)")
            prompt = self.tokenizer.encode(prompt)
        # a state after a stop string is that of its last token
        stepwise = stepwise or (keep_state and bool(sampling.stop))
        rows = self.engine.submit(prompt, sampling, state=state, keep_state=keep_state, stepwise=stepwise)
        request = Request(self._number, rows, self._cancel)
        self._number += 1
        usage = Usage(0 if prompt is None else len(np.asarray(prompt)), 0, 0)
        for index, row in enumerate(rows):
            self._collectors[row] = Collector(request, index, usage, self.tokenizer)
        return request

    def step(self) -> list[Event]:
        """Starts a piece of a prompt and a call of the decoding loop, and returns what the call before chose.

        Raises:
            ValueError: the parameters contain deleted arrays, which were donated to another call. The
                generator cannot continue.
        """
        for event in self.engine.step():
            self._take(event)
        events, self._events = self._events, []
        return events

    def _take(self, event: RowEvent) -> None:
        row = event.row
        collector = self._collectors.get(row)
        if collector is None:  # it is over, after a stop string
            return
        event, text, stopped = collector.add(event)
        completion = None
        if stopped or row.finish_reason is not None:
            if stopped:
                self.engine.finish(row, "stop")
                row.state = event.state
            completion = collector.completion("stop" if stopped else row.finish_reason or "stop")
            del self._collectors[row]
        logprobs = joined_logprobs([event], row.sampling.logprobs)
        request, index = collector.request, collector.index
        self._tell(Event(request, index, event.tokens, text, logprobs, completion, event.state))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        if event.request in self._streams:
            self._streams[event.request].append(event)
        if event.completion is None:
            return
        event.request.completions[event.index] = event.completion
        if event.request not in self._claimed:
            self._over.append(event.completion)

    def _cancel(self, row: Row) -> None:
        self.engine.finish(row, "cancelled")

    def results(self) -> Iterator[Completion]:
        """Runs until no request is left, and yields every completion as it ends, also those with an error."""
        while self._over or self.busy:
            while self._over:
                yield self._over.popleft()
            if self.busy:
                self.step()

    def generate(
        self,
        prompts: Sequence[object],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        state: State | Sequence[State | None] | None = None,
        keep_state: bool = False,
    ) -> list[Completion]:
        """Continues prompts.

        Args:
            prompts: see `submit`; any number of them, of any lengths.
            sampling: of all prompts, or one for each. A seed of all stands for the first prompt; the next
                prompt's is ``n`` above it.
            max_tokens: in place of that of ``sampling``.
            state: before the prompts: of one row, for all; an `RWKVState` of as many rows; or a sequence.
            keep_state: whether completions have their state.

        Returns:
            The completions of each prompt, ``n`` for each, in order.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
            Exception: the error of the first completion that failed; `submit` and `results` return it.
        """
        if isinstance(prompts, str | bytes):
            raise TypeError("prompts must be a sequence of prompts, got text: pass [text]")
        prompts = list(prompts)
        rules = _of_each(sampling, len(prompts))
        states = self._states(state, len(prompts))
        requests: list[Request] = []
        try:
            for i, prompt in enumerate(prompts):
                requests.append(self._submit(prompt, rules[i], max_tokens, states[i], keep_state, False))
                self._claimed.add(requests[-1])
            while not all(request.done for request in requests):
                self.step()
        finally:
            for request in requests:
                request.cancel()
            self._claimed -= {request for request in requests if request.done}
        found = [request.completions[i] for request in requests for i in range(len(request.rows))]
        for completion in found:
            if completion.error is not None:
                raise completion.error
        return found

    def stream(
        self,
        prompt: object,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        state: State | None = None,
    ) -> Stream:
        """Continues a prompt token by token, see `Stream` and `submit`."""
        request = self._submit(prompt, sampling, max_tokens, state, True, stepwise=True)
        self._claimed.add(request)
        events = self._streams[request] = collections.deque()
        return Stream(request, events, self.step, functools.partial(self._streams.pop, request, None))

    def update_params(self, params: PyTree, *, in_flight: Literal["finish", "restart"] = "finish") -> None:
        """Replaces the parameters; nothing is compiled again.

        Args:
            params: of the same shapes.
            in_flight: ``"finish"``: requests that have begun finish with the old parameters, and no other
                begins before; ``"restart"``: they begin again, and so do their events.

        Raises:
            ValueError: ``in_flight`` is something else, or ``params`` do not fit.
        """
        if in_flight not in ("finish", "restart"):
            raise ValueError(f"in_flight must be 'finish' or 'restart', got {shown(in_flight)}")
        check_deleted(params=params)
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (params, self.engine.params)]
        if shapes[0] != shapes[1]:
            raise ValueError("params must have the names, shapes and dtypes of those that they replace")
        name = self.engine.implementation
        again = self.engine.update(
            params, self._make_decoder(params=params, implementation=name), restart=in_flight == "restart"
        )
        for row in again:
            if row in self._collectors:
                self._collectors[row].restart()

    def _states(self, state: State | Sequence[State | None] | None, batch: int) -> list[State | None]:
        """The state before each prompt."""
        if state is None or isinstance(state, GenerationState):
            return [state] * batch
        if not isinstance(state, RWKVState):
            states = list(state)
            if len(states) != batch:
                raise ValueError(f"state must be one for each of the {batch} prompts, got {len(states)}")
            return states
        if np.ndim(state.wkv) == 5 and state.wkv.shape[1] == 1:
            return [state] * batch
        check_state(state, jax.eval_shape(lambda: self._model.init_state(batch)))
        check_deleted(state=state)
        return [take_rows(state, jnp.array([i])) for i in range(batch)]


def _of_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, batch: int
) -> list[SamplingParams | None]:
    """The rules of each prompt."""
    if sampling is None:
        return [None] * batch
    if isinstance(sampling, SamplingParams):
        if sampling.seed is None:
            return [sampling] * batch
        seeds = (sampling.seed + i * sampling.n for i in range(batch))
        return [dataclasses.replace(sampling, seed=seed) for seed in seeds]
    if not isinstance(sampling, Sequence) or len(sampling) != batch:
        raise TypeError(
            f"sampling must be a SamplingParams, one for each of the {batch} prompts or None, got "
            f"{shown(sampling)}"
        )
    return list(sampling)
