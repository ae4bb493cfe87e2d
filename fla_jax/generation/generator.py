"""Text generation as one object: weights, slots, tokenizer, and requests with rules of their own."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..core.arguments import check_integer, shown
from ..models.causal_lm import RWKVForCausalLM
from .array_checks import check_deleted, check_untraced
from .decoder import Decoder
from .engine import Engine
from .prompts import check_params, check_prompt, check_texts
from .requests import (
    Collector,
    Completion,
    Event,
    Request,
    State,
    States,
    Usage,
    joined_logprobs,
    rules_of_each,
    rules_of_request,
    states_of_each,
)
from .rows import Row, RowEvent
from .sampling_params import SamplingParams
from .scoring import score
from .state_cache import Prefix, StateCache
from .streaming import Stream
from .tokenizer import Tokenizer

_WEIGHTS = (None, "bfloat16", "int8", "int4")


class Generator:
    """Generates text from a model: batches, streams, and requests that come and go.

    Create it once. Each request has its own `SamplingParams` and returns the tokens that it returns alone,
    but for nearly equal logits in 16 bits, between which rounding decides. `generate`, `stream` and `results`
    are loops over `step`. Use it from one thread.

    Attributes:
        engine: the scheduler.
        tokenizer: as given.
        cache: states after prefixes, with its ``hits`` and ``misses``.

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
        weights: Literal["bfloat16", "int8", "int4"] | None = None,
        tokenizer: Tokenizer | None = None,
        implementation: str | None = None,
        cache_bytes: int = 2**28,
        host_cache_bytes: int = 2**30,
    ) -> None:
        """Prepares the weights.

        Args:
            model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
            params: its parameters.
            slots: number of completions that decode together.
            state_dtype: float32, bfloat16 or float16, see `Decoder`; None for the model's own.
            weights: ``"bfloat16"`` computes in that dtype, ``"int8"`` and ``"int4"`` decode with weights of 8
                or 4 bits (see `Decoder` for their errors); None for the model's dtype.
            tokenizer: for prompts that are text, completions' text and stop strings.
            implementation: of the decoding step, see `Decoder`; None for the fastest.
            cache_bytes: of states after prefixes on the device, see `prefix`; 0 for none.
            host_cache_bytes: of those in the host's memory, where they go next.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it. Or this is traced by JAX.
        """
        check_untraced(params)
        check_params(model, params)
        if weights not in _WEIGHTS:
            raise ValueError(f"weights must be None, 'bfloat16', 'int8' or 'int4', got {shown(weights)}")
        if weights == "bfloat16":
            model = type(model)(dataclasses.replace(model.config, dtype="bfloat16"))
        self._model, self.tokenizer = model, tokenizer
        device_bytes = check_integer("cache_bytes", cache_bytes, 0)
        self.cache = StateCache(device_bytes, check_integer("host_cache_bytes", host_cache_bytes, 0))
        rounded = weights if weights in ("int8", "int4") else None
        self._make_decoder = functools.partial(Decoder, model, state_dtype=state_dtype, weight_dtype=rounded)
        decoder = self._make_decoder(params=params, implementation=implementation)
        self.engine = Engine(params, decoder, slots)
        self._collectors: dict[Row, Collector] = {}
        # the events of those that are not over, which their `Stream` owns
        self._streams: dict[Request, weakref.ref[collections.deque[Event]]] = {}
        self._events: collections.deque[Event] = collections.deque()  # that were not returned yet
        self._claimed = weakref.WeakSet[Request]()  # of `generate`, whose events nobody else gets
        self._number = 0
        self._params_key = object()  # another one for other parameters, see `Prefix`

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
            prompt: tokens, a list or an integer array; or text, with a tokenizer; or a `Prefix`; None to
                continue from ``state``, a `GenerationState`. Without a state, the longest known prefix of the
                prompt is not read again.
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
        sampling = rules_of_request(sampling, max_tokens, self.tokenizer)
        tokens, state, all_tokens, cached = self._cached(prompt, state)
        # a state after a stop string is that of its last token
        stepwise = stepwise or (keep_state and bool(sampling.stop))
        rows = self.engine.submit(
            tokens,
            sampling,
            state=state,
            keep_state=keep_state,
            stepwise=stepwise,
            all_tokens=all_tokens if cached else None,
        )
        request = Request(self._number, rows, self.engine.finish)
        self._number += 1
        last = [] if all_tokens is None else all_tokens[-1:].tolist()
        usage = Usage(0 if all_tokens is None else len(all_tokens), cached, 0)
        for index, row in enumerate(rows):
            self._collectors[row] = Collector(request, index, usage, self.tokenizer, last)
        return request

    def _cached(
        self, prompt: object, state: State | None
    ) -> tuple[np.ndarray | None, State | None, np.ndarray | None, int]:
        """The tokens that are to be read, None for none, and the state before them; all tokens of the prompt,
        and how many of them are in that state.
        """
        if prompt is None:
            return None, state, None, 0
        found = None
        if not isinstance(prompt, Prefix):
            tokens = self._tokens(prompt)
        elif state is not None:
            raise ValueError("state must be None with a Prefix, which has its own")
        else:
            rest = self._tokens(prompt.rest) if prompt.rest else prompt.tokens[:0]
            tokens = np.concatenate([prompt.tokens, rest])
            if prompt.params_key is self._params_key:
                found = len(prompt.tokens), prompt.state
        if found is None and state is None:
            found = self.cache.longest(tokens)
        if found is None:
            return tokens, state, tokens, 0
        n, start = found
        return tokens[n:] if n < len(tokens) else None, start, tokens, n

    def _tokens(self, prompt: object, name: str = "prompt") -> np.ndarray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError(f"{name} is text, which needs a tokenizer: Generator(..., tokenizer=)")
            try:
                prompt = self.tokenizer.encode(prompt)
            except UnicodeError as error:
                raise ValueError(f"{name} is not Unicode text: {error}") from error
        return check_prompt(prompt, self._model.config.vocab_size, name)

    def prefix(self, prompt: object) -> Prefix:
        """Reads a text that many prompts begin with, once.

        Prompts that begin with its tokens continue from its state, while the cache has room. The result is a
        prompt itself, as is ``prefix + tokens``. Completions equal those without a cache to rounding.

        Args:
            prompt: tokens, or text with a tokenizer.
        """
        tokens = self._tokens(prompt)
        rule = SamplingParams.policy(max_tokens=0)
        (read,) = self.generate([tokens], rule, keep_state=True)
        assert read.state is not None
        self.cache.put(tokens, read.state)
        return Prefix(tokens, read.state, self._params_key)

    def score(self, prompts: Sequence[object], continuations: Sequence[object]) -> list[np.ndarray]:
        """The model's log-probabilities of given continuations, with the parameters of the last
        `update_params`.

        Args:
            prompts: at least one token each, or text with a tokenizer.
            continuations: one for each prompt, likewise.

        Returns:
            [n] float32 for each: of every token of the continuation, after all tokens before it.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        texts = [
            [self._tokens(text, f"{name}[{i}]") for i, text in enumerate(check_texts(name, some))]
            for name, some in (("prompts", prompts), ("continuations", continuations))
        ]
        return score(self._model, self.engine.latest_params, *texts)

    def step(self) -> list[Event]:
        """Starts a piece of a prompt and a call of the loop, and returns what the call before chose.

        Each event is returned once, by `step`, or as a completion by `results`. Those of `generate` and of
        streams are returned there alone. ValueError where the parameters contain deleted arrays.
        """
        self._advance()
        return [self._events.popleft() for _ in range(len(self._events))]

    def _advance(self) -> None:
        for request, events in self._streams.items():
            if events() is None:  # the stream was abandoned
                request.cancel()
        for event in self.engine.step():
            self._take(event)

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
        if event.completion is not None:
            event.request.completions[event.index] = event.completion
        if event.request in self._streams:
            events = self._streams[event.request]()
            if events is not None:
                events.append(event)
            if event.request.done:
                del self._streams[event.request]
        elif event.request not in self._claimed:
            self._events.append(event)

    def results(self) -> Iterator[Completion]:
        """Runs until no request is left, and yields every completion as it ends, also those with an error."""
        while self.busy:
            self._advance()
            while self._events:
                event = self._events.popleft()
                if event.completion is not None:
                    yield event.completion

    def generate(
        self,
        prompts: Sequence[object],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        state: States = None,
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
        prompts = check_texts("prompts", prompts)
        rules = rules_of_each(sampling, len(prompts))
        states = states_of_each(self._model, state, len(prompts))
        requests: list[Request] = []
        try:
            for i, prompt in enumerate(prompts):
                try:
                    requests.append(self._submit(prompt, rules[i], max_tokens, states[i], keep_state, False))
                except (ValueError, TypeError) as error:
                    kind = TypeError if isinstance(error, TypeError) else ValueError
                    raise kind(re.sub(r"^prompt\b", f"prompts[{i}]", str(error))) from error
                self._claimed.add(requests[-1])
            while not all(request.done for request in requests):
                self._advance()
        finally:
            for request in requests:
                request.cancel()
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
        events = collections.deque[Event]()
        self._streams[request] = weakref.ref(events)
        return Stream(request, events, self._advance)

    def update_params(self, params: PyTree, *, in_flight: Literal["finish", "restart"] = "finish") -> None:
        """Replaces the parameters; nothing is compiled again. Cached prefixes are read again.

        Args:
            params: of the same shapes.
            in_flight: ``"finish"``: requests that have begun finish with the old parameters, and no other
                begins before; ``"restart"``: they begin again, and so do their events.
        """
        if in_flight not in ("finish", "restart"):
            raise ValueError(f"in_flight must be 'finish' or 'restart', got {shown(in_flight)}")
        check_untraced(params)
        check_deleted(params=params)
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (params, self.engine.params)]
        if shapes[0] != shapes[1]:
            raise ValueError("params must have the names, shapes and dtypes of those that they replace")
        name = self.engine.decoder.implementation
        self.cache.clear()
        self._params_key = object()
        again = self.engine.update(
            params, self._make_decoder(params=params, implementation=name), restart=in_flight == "restart"
        )
        for row in again:
            if row in self._collectors:
                self._collectors[row].restart()
