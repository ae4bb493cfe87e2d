"""Continuous batching: a fixed number of slots decode together, and waiting prompts fill free slots."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core.arguments import check_integer, shown
from ..layers.state import RWKVState, check_state
from .array_checks import check_deleted, check_untraced, deleted, explain_deleted, is_deleted
from .decode_loop import PLAIN, STEPS_PER_CALL, Chosen, Results, stopped_by, undefined
from .decoder import Decoder
from .prompts import check_prompt, prefill_chunks
from .rows import (
    TOGETHER,
    FinishReason,
    GenerationState,
    Prompt,
    PromptQueue,
    Row,
    RowEvent,
    check_start,
    requeued,
    row_scores,
)
from .sampling import UNDEFINED, TokenCounts
from .sampling_params import SamplingParams, sampling_arrays
from .slots import Slots, state_after_prompt

# Steps of a call while prompts wait, where their number is not fixed: the slot of a row that ends stays empty
# for the rest of the call, after a stop token for one call more. A row of 500 tokens wastes 1 % with four.
_STEPS_WHILE_WAITING = 4


class Engine:
    """The scheduler of `fla_jax.generation.Generator`: tokens in, tokens out, ``slots`` rows at a time.

    Prompts are read in pieces between calls of the decoding loop. Each row gets the tokens that it would get
    alone.

    The device never waits for the host: the tokens of a call are read when the next one has been started. A
    slot is free when its row's last possible step has been started, after a stop token one call later.

    Attributes:
        params: the model's parameters, read-only; see `update`.
        decoder: made with them.
        slots: number of rows that decode together.
        steps: largest number of steps of a call, where the decoder does not fix it, up to `STEPS_PER_CALL`. A
            prompt that arrives waits for a call; each call costs the host some time.
        started: slots times decoding steps that have been started.
        chosen: tokens that came out of them. ``chosen / started`` is the share of the slots that is used.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """

    def __init__(self, params: PyTree, decoder: Decoder, slots: int) -> None:
        """Makes empty slots.

        Args:
            params: the parameters that prompts are read with.
            decoder: made with them.
            slots: number of rows that decode together.
        """
        self.slots = check_integer("slots", slots, 1)
        self.steps, self.started, self.chosen = STEPS_PER_CALL, 0, 0
        self.decoder, self._model = decoder, decoder.model
        self._params = jax.tree.map(lambda x: x, params)  # the caller may change the dictionaries
        self._slots = Slots(decoder, self._params, self.slots)
        self._waiting = PromptQueue()
        self._ready: collections.deque[Prompt] = collections.deque()  # with nothing left to read
        self._rows: list[Row | None] = [None] * self.slots
        self._reading: tuple[Iterator[tuple[jax.Array, RWKVState] | None], list[Prompt]] | None = None
        self._results = Results()
        self._events: list[RowEvent] = []
        self._next_params: tuple[PyTree, Decoder] | None = None
        self._next = 0

    @property
    def params(self) -> PyTree:
        """See the class."""
        return self._params

    @property
    def latest_params(self) -> PyTree:
        """Those of the last `update`, also while rows in flight finish with the ones before."""
        return self._params if self._next_params is None else self._next_params[0]

    @property
    def busy(self) -> bool:
        """Whether a row waits or decodes, or an event has not been returned."""
        return bool(self._waiting or self._ready or self._events or self._in_flight)

    @property
    def _in_flight(self) -> bool:
        late = (row for _, about in self._results.pending() for _, row, _ in about)
        waits = any(row.finish_reason is None for row in late)
        begun = any(prompt.tokens is not None for prompt in self._ready)
        return bool(begun or self._reading or any(self._rows) or waits)

    def submit(
        self,
        prompt: object,
        sampling: SamplingParams | None = None,
        *,
        state: RWKVState | GenerationState | None = None,
        keep_state: bool = False,
        stepwise: bool = False,
        all_tokens: np.ndarray | None = None,
    ) -> list[Row]:
        """Adds a prompt; starts nothing.

        Args:
            prompt, state: as in `Generator.submit`; tokens.
            sampling: its ``stop`` and ``ignore_eos`` are `Generator`'s. None for `SamplingParams`'s defaults.
            keep_state: whether the row has its state when it is over.
            stepwise: whether it has its state at every event; then calls have one step.
            all_tokens: all tokens of the prompt, where ``state`` is a cached one after the first of them.

        Returns:
            A row for each completion. ValueError or TypeError where an argument does not fit.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be a SamplingParams or None, got {shown(sampling)}")
        check_untraced(state)
        vocab_size = self._model.config.vocab_size
        sampling_arrays([sampling], vocab_size)
        start = state if isinstance(state, GenerationState) else None
        initial = state.rwkv if isinstance(state, GenerationState) else state
        if initial is not None:
            check_state(initial, jax.eval_shape(lambda: self._model.init_state(1)))
            check_deleted(state=state)
        tokens = None if prompt is None else check_prompt(prompt, vocab_size)
        if tokens is None:
            if start is None:
                raise ValueError("prompt must hold at least one token unless state is a GenerationState")
            check_start(start, vocab_size)
        waiting = Prompt(tokens, initial, start if tokens is None else None, [], all_tokens)
        seed = self._next if sampling.seed is None else sampling.seed
        for i in range(sampling.n):
            waiting.rows.append(
                Row(self._next + i, sampling, seed + i, waiting, keep_state or stepwise, stepwise)
            )
        self._next += sampling.n
        (self._waiting if tokens is not None else self._ready).append(waiting)
        return list(waiting.rows)

    def step(self) -> list[RowEvent]:
        """Starts a piece of a prompt and a call of the loop, and reads the call before. ValueError where
        ``params`` contains deleted arrays, which were donated to another call.
        """
        with explain_deleted(params=self._params):
            self._admit()
            decoding = any(self._rows)
            if decoding:
                self._decode()
            for out, rows in self._results.ready(late=int(decoding)):
                self._take(out, rows)
        events, self._events = self._events, []
        return events

    def finish(self, row: Row, reason: FinishReason = "cancelled", error: Exception | None = None) -> None:
        """Ends a row that is not over and frees its slot. The next `step` returns its last event."""
        if row.finish_reason is not None:
            return
        if row in self._rows:
            slot = self._rows.index(row)
            self._rows[slot] = None
            self._slots.halt(slot)
        if not row.stepwise or error is not None:
            row.state = None
        self._end(row, RowEvent(row, np.empty(0, np.int32)), reason, error)

    def update(self, params: PyTree, decoder: Decoder, *, restart: bool) -> list[Row]:
        """Continues with other parameters.

        Args:
            params: of the same shapes.
            decoder: made with them.
            restart: whether rows in flight begin again; else no row is started until they have finished.

        Returns:
            The rows that begin again.
        """
        self._next_params = params, decoder
        cached = [one for one in self._ready if one.tokens is None and one.all_tokens is not None]
        self._ready = collections.deque(prompt for prompt in self._ready if prompt not in cached)
        self._waiting.extendleft(reversed(cached))
        for prompt in self._waiting:
            prompt.forget_cached()
        if not restart:
            if not self._in_flight:
                self._replace_params()
            return []
        begun = [prompt for prompt in self._ready if prompt.tokens is not None]
        begun += self._reading[1] if self._reading else []
        rows = [row for prompt in begun for row in prompt.waiting()]
        rows += [row for row in self._rows if row is not None]
        late = [row for _, about in self._results.pending() for _, row, _ in about]
        again = {row.number: row for row in (*rows, *late) if row.finish_reason is None}
        self._ready = collections.deque(prompt for prompt in self._ready if prompt.tokens is None)
        for prompt in reversed(requeued(again.values())):
            prompt.forget_cached()
            (self._waiting if prompt.tokens is not None else self._ready).appendleft(prompt)
        self._reading, self._rows = None, [None] * self.slots
        for slot in range(self.slots):
            self._slots.halt(slot)
        self._results = Results()
        self._replace_params()
        return list(again.values())

    def _replace_params(self) -> None:
        assert self._next_params is not None
        params, self.decoder = self._next_params
        self._params, self._next_params = jax.tree.map(lambda x: x, params), None
        self._slots.place = self._params  # the old ones may have been donated

    def _admit(self) -> None:
        """Puts rows that wait into free slots, and reads a piece of the next prompts."""
        if self._next_params is not None and not self._in_flight:
            self._replace_params()
        later = [prompt for prompt in self._ready if self._next_params and prompt.tokens is None]
        self._ready = collections.deque(prompt for prompt in self._ready if prompt not in later)
        while self._ready and None in self._rows:
            prompt = self._ready.popleft()
            rows = prompt.waiting()
            if is_deleted(prompt.start):
                self._fail(prompt)
            elif rows:
                free = self._rows.count(None)
                self._join(rows[:free], [0] * len(rows[:free]), prompt.start)
                if rows[free:]:
                    prompt.rows = rows[free:]
                    self._ready.appendleft(prompt)
        self._ready += later
        if self._reading is None and self._next_params is None:
            prompts = self._waiting.take(self._rows.count(None), self.slots)
            for prompt in prompts:
                if is_deleted(prompt.initial):
                    self._fail(prompt)
            prompts = [prompt for prompt in prompts if prompt.waiting()]
            if prompts:
                self._reading = self._read(prompts), prompts
        if self._reading is not None:
            pieces, prompts = self._reading
            try:
                read = next(pieces)
            except BaseException:  # ends the iterator: the prompts are read again from their beginning
                self._reading = None
                self._waiting.extendleft(reversed(prompts))
                raise
            if read is not None:
                self._reading = None
                self._begin(prompts, *read)

    def _fail(self, prompt: Prompt) -> None:
        for row in prompt.waiting():
            self.finish(row, "error", ValueError(f"row {row.number}: {deleted('state')}"))

    def _read(self, prompts: list[Prompt]) -> Iterator[tuple[jax.Array, RWKVState] | None]:
        batch = min(next(size for size in TOGETHER if size >= len(prompts)), self.slots)
        initial = None
        if any(prompt.initial is not None for prompt in prompts):
            initial = self._model.init_state(batch)
        for i, prompt in enumerate(prompts):
            if prompt.initial is not None:
                initial = jax.tree.map(lambda x, y, i=i: x.at[:, i].set(y[:, 0]), initial, prompt.initial)
        rows = [prompt.tokens for prompt in prompts if prompt.tokens is not None]
        return prefill_chunks(self._model, self._params, rows, batch, initial)

    def _begin(self, prompts: list[Prompt], logits: jax.Array, rwkv: RWKVState) -> None:
        """Puts rows whose prompts are read into slots; those without a slot wait with the state."""
        free, rows, sources = self._rows.count(None), list[Row](), list[int]()
        for i, prompt in enumerate(prompts):
            waiting = prompt.waiting()
            now = waiting[: free - len(rows)]
            rows += now
            sources += [i] * len(now)
            if waiting[len(now) :]:
                start = state_after_prompt(logits, rwkv, np.array([i], np.int32))
                later = Prompt(prompt.tokens, prompt.initial, start, waiting[len(now) :])
                self._ready.append(later)
        if rows:
            B = logits.shape[0]
            counts, step = TokenCounts.none(B, logits.shape[1]), jnp.zeros(B, jnp.int32)
            self._join(rows, sources, GenerationState(rwkv, logits, counts, step))

    def _join(self, rows: list[Row], sources: Sequence[int], start: GenerationState | None) -> None:
        """Puts rows into free slots, each with the state of its source in ``start``."""
        assert start is not None
        free = [slot for slot, row in enumerate(self._rows) if row is None][: len(rows)]
        start = start.replace(rwkv=self.decoder.state(start.rwkv))
        most = TOGETHER[-1]
        for first in range(0, len(rows), most):
            some, slots = rows[first : first + most], free[first : first + most]
            # what fills up is put into a slot that does not exist, and so nowhere
            size = next(size for size in TOGETHER if size >= len(some))
            self._slots.insert(some, slots, sources[first : first + most], start, size)
        for slot, row in zip(free, rows, strict=True):
            self._rows[slot] = row
            if not row.sampling.max_tokens:
                self._leave(slot, row)
                self._end(row, RowEvent(row, np.empty(0, np.int32)), "length")

    def _decode(self) -> None:
        rows = [(slot, row) for slot, row in enumerate(self._rows) if row is not None]
        scores = max((row.scores for _, row in rows if row.scores is not PLAIN), default=PLAIN)
        fixed = self.decoder.step.per_call
        is_waiting = self._waiting or self._reading
        count = fixed or (min(self.steps, _STEPS_WHILE_WAITING) if is_waiting else self.steps)
        if any(row.stepwise for _, row in rows):
            count, fixed = 1, None
        out = self._slots.decode(self.decoder, count, fixed, scores, any(row.keep_state for _, row in rows))
        about = [(slot, row, self._slots.state(slot) if row.stepwise else None) for slot, row in rows]
        self._results.add(out, count, about)
        most = max(row.sampling.max_tokens - row.started for _, row in rows)
        self.started += self.slots * min(count, most)
        for slot, row in rows:
            row.started += count
            if row.started >= row.sampling.max_tokens:  # whatever its tokens are, it is over after this call
                self._leave(slot, row)

    def _leave(self, slot: int, row: Row) -> None:
        """Frees a slot; its state is as the row left it until another row joins."""
        self._rows[slot] = None
        if row.keep_state and not row.stepwise:
            row.state = self._slots.state(slot)

    def _take(self, out: Chosen, rows: list[tuple[int, Row, GenerationState | None]]) -> None:
        """What a call chose, in which ``rows`` took part."""
        tokens = np.asarray(out.tokens).T
        over = tokens < 0
        counts = np.where(over.any(1), over.argmax(1), tokens.shape[1]).tolist()  # of all slots at once
        for slot, row, snapshot in rows:
            if row.finish_reason is not None:
                continue
            own, n = tokens[slot], counts[slot]
            reason: FinishReason | None = None
            error = None
            if n < len(own) and own[n] == UNDEFINED:
                reason, error = "error", undefined(row.number, row.count + n)
            elif n < len(own) and stopped_by(int(own[n])) is not None:
                reason = "stop"
            elif row.count + n >= row.sampling.max_tokens:
                reason = "length"
            row.count += n
            self.chosen += n
            row.state = snapshot if row.stepwise else row.state
            event = RowEvent(row, own[:n], *row_scores(out, slot, n, row.sampling.logprobs), snapshot)
            if reason is None:
                self._events.append(event)
                continue
            if self._rows[slot] is row:
                self._leave(slot, row)
            row.state = None if error else row.state
            self._end(row, event, reason, error)

    def _end(self, row: Row, event: RowEvent, reason: FinishReason, error: Exception | None = None) -> None:
        row.finish_reason, row.error = reason, error
        self._events.append(event)
