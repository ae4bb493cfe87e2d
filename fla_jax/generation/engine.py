"""Rows that join and leave: a batch of slots that decode, into which prompts are put as slots become free."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arguments import check_integer, shown
from ..layers.state import RWKVState, check_state
from .decoder import Decoder, check_decoder
from .deleted import check_deleted, deleted, explain_deleted, is_deleted
from .loop import STEPS_PER_CALL, DecodeState, Results, begin, decode, row_keys, undefined
from .prompts import check_params, check_prompts, prefill_chunks, put_like, take_rows
from .sampling import UNDEFINED
from .sampling_params import SamplingArrays, SamplingParams, row_seeds, sampling_arrays

# Steps of a call while prompts wait, where their number is not fixed: a slot whose row ends inside a call
# stays empty for the rest of it, and one whose row has chosen a stop token for one call more. With four a row
# of 500 tokens wastes 1 %.
_STEPS_WHILE_WAITING = 4
# How many prompts are read at a time: each number makes programs to compile. Few are filled up to the next
# number; from four on so many are read as there is a number for, for rows that fill a batch up cost as much
# as others. A free slot waits until there are a few to be filled together, a sixteenth of all.
_TOGETHER = (1, 4, 16, 64)
_FILLED_UP = 4
_WAITING_SLOTS = 16
_WINDOW = 4  # prompts are chosen for similar lengths among so many times as many as are read together


class Finished(NamedTuple):
    """A row that is over.

    Attributes:
        number: what `Engine.put` returned for it.
        tokens: its new tokens, int32, without prompt and stop token.
        state: after them, for one row ([L, 1, ...]); None unless the engine keeps states, and after an error.
        error: None, or the reason why the row ended early: a FloatingPointError if the logits after
            ``tokens`` hold NaN or have no finite largest one, a ValueError if the row's initial state was
            donated elsewhere before the prompt was read.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Engine
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> engine = Engine(model, params, slots=1, states=True)
        >>> number = engine.put([1, 2, 3], max_tokens=4)
        >>> (finished,) = engine.results()
        >>> finished.number == number, finished.tokens.shape, finished.state.wkv.shape
        (True, (4,), (2, 1, 4, 16, 16))
    """

    number: int
    tokens: np.ndarray
    state: RWKVState | None
    error: Exception | None = None


@dataclasses.dataclass(eq=False)
class _Row:
    """A prompt that waits or a row that decodes."""

    number: int
    prompt: np.ndarray
    limit: int
    seed: int
    initial: RWKVState | None
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    started: int = 0  # steps that have been started for it
    count: int = 0  # tokens that have been read
    over: bool = False  # as far as tokens have been read
    state: RWKVState | None = None


class Engine:
    """Continues any number of prompts, ``slots`` of them at a time.

    A row that is over makes room for a prompt that waits: it is read in pieces between calls of the decoding
    loop, while the other rows go on. Prompts come in nearly the order in which they were put: those of
    similar lengths are read together. Every row gets the tokens that it would get alone from `generate` with
    its own seed, whatever the other rows are and whenever they come.

    The device never waits for the host: the tokens of a call are read when the next one has been started. A
    row's slot is given away as soon as its last possible step has been started, before its tokens are read;
    after a stop token one call later.

    A row whose logits become NaN ends with the error in its result (`Finished`); other rows are unaffected.

    Attributes:
        params: the model's parameters, read-only: create a new engine for other parameters.
        slots: number of rows that decode together.
        started: slots times decoding steps that have been started.
        chosen: tokens that came out of them. ``chosen / started`` is the share of the slots that is used.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Engine
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> engine = Engine(model, params, slots=2)
        >>> numbers = [engine.put([1, 2, 3], max_tokens=n, seed=n) for n in (4, 2, 3)]
        >>> sorted((result.number, len(result.tokens)) for result in engine.results())
        [(0, 4), (1, 2), (2, 3)]
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        slots: int,
        sampling: SamplingParams | None = None,
        *,
        states: bool = False,
        decoder: Decoder | None = None,
    ) -> None:
        """Makes empty slots.

        Args:
            model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
            params: its parameters.
            slots: number of rows that decode together.
            sampling: how tokens are chosen, of all rows; None for `SamplingParams`'s default values.
            states: whether results come with their row's state, which takes memory until they are dropped.
            decoder: made with this ``model`` and these very arrays ``params``; None to make one.
        """
        check_params(model, params)
        if not isinstance(sampling, SamplingParams | None):
            raise TypeError(f"sampling must be a SamplingParams or None, got {shown(sampling)}")
        self.slots = check_integer("slots", slots, 1)
        self.started = self.chosen = 0
        self._decoder = Decoder(model, params) if decoder is None else check_decoder(decoder, model, params)
        self._params = jax.tree.map(lambda x: x, params)  # the caller may change the dictionaries
        self._model, self._states = model, states
        rules = sampling_arrays([sampling or SamplingParams()] * self.slots, model.config.vocab_size)
        self._rules: SamplingArrays = put_like(params, rules)
        self._waiting: collections.deque[_Row] = collections.deque()
        self._rows: list[_Row | None] = [None] * self.slots
        self._reading: tuple[Iterator[Any], list[_Row]] | None = None
        self._carry: DecodeState | None = None
        self._results = Results()
        self._finished: collections.deque[Finished] = collections.deque()
        self._next = 0

    @property
    def params(self) -> Any:
        """See the class."""
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        raise AttributeError(
            "params of an Engine cannot be replaced, since its decoder and its states are made from them: "
            "create a new engine, Engine(model, params, slots)"
        )

    def put(self, prompt: Any, max_tokens: int, *, seed: int = 0, state: RWKVState | None = None) -> int:
        """Takes a prompt to be continued; starts nothing. May be called between results.

        Args:
            prompt: at least one token: a list or an integer array.
            max_tokens: largest number of new tokens.
            seed: of the row's random choices, as in `generate`.
            state: before the prompt, of one row ([L, 1, ...]); None for zeros.

        Returns:
            The row's number, counted from 0: results come in the order in which rows end.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        if isinstance(prompt, str | bytes) or np.ndim(prompt) == 0:
            raise TypeError(f"prompt must be a sequence of tokens, got {shown(prompt)}")
        try:
            (row,) = check_prompts([prompt], self._model.config.vocab_size)
        except (ValueError, TypeError) as error:
            raise type(error)(str(error).replace("prompts[0]", "prompt")) from None
        if state is not None:
            check_state(state, jax.eval_shape(lambda: self._model.init_state(1)))
            check_deleted(state=state)
        limit = check_integer("max_tokens", max_tokens, 0)
        (seed,) = row_seeds([seed], 1)
        self._waiting.append(_Row(self._next, row, limit, seed, state))
        self._next += 1
        return self._next - 1

    def results(self) -> Iterator[Finished]:
        """Runs until no row is left, and yields every row as it ends, also rows that end with an error.

        Raises:
            ValueError: ``params`` contains deleted arrays, which were donated to another call. The engine
                cannot continue.
        """
        while True:
            while self._finished:
                yield self._finished.popleft()
            if not (self._waiting or self._reading or any(self._rows) or len(self._results)):
                return
            with explain_deleted(params=self._params):
                self._advance()

    def _advance(self) -> None:
        """Starts a piece of the prompts that wait and a call of the loop, and reads the call before."""
        if self._reading is None:
            joining = self._next_rows(self._rows.count(None))
            for row in joining:
                if is_deleted(row.initial):
                    self._finish(row, ValueError(f"row {row.number}: {deleted('state')}"))
            joining = [row for row in joining if not row.over]
            if joining:
                self._reading = self._read(joining), joining
        if self._reading is not None:
            pieces, joining = self._reading
            read = next(pieces)
            if read is not None:
                self._join(joining, *read)
                self._reading = None
        decoding = any(self._rows)
        if decoding:
            self._decode()
        for out, rows in self._results.ready(late=int(decoding)):
            self._take(np.asarray(out.tokens), rows)

    def _next_rows(self, free: int) -> list[_Row]:
        """Prompts to be read next, taken from those that wait: the first, and others of similar lengths."""
        count = min(free, len(self._waiting))
        if count == 0 or count < min(self.slots // _WAITING_SLOTS, len(self._waiting)):
            return []
        if count >= _FILLED_UP:
            count = max(size for size in _TOGETHER if size <= count)
        window = list(itertools.islice(self._waiting, _WINDOW * count))
        first = len(window[0].prompt)
        window.sort(key=lambda row: (abs(len(row.prompt) - first), row.number))
        rows = window[:count]
        for row in rows:
            self._waiting.remove(row)
        return rows

    def _read(self, rows: list[_Row]) -> Iterator[Any]:
        batch = min(next(size for size in _TOGETHER if size >= len(rows)), self.slots)
        initial = None
        if any(row.initial is not None for row in rows):
            initial = self._model.init_state(batch)
        for i, row in enumerate(rows):
            if row.initial is not None:
                initial = jax.tree.map(lambda x, y, i=i: x.at[:, i].set(y[:, 0]), initial, row.initial)
                row.initial = None
        return prefill_chunks(self._model, self._params, [row.prompt for row in rows], batch, initial)

    def _join(self, rows: list[_Row], logits: jax.Array, state: RWKVState) -> None:
        """Puts rows whose prompts are read into free slots."""
        free = [slot for slot, row in enumerate(self._rows) if row is None][: len(rows)]
        # what is there beside them is put into a slot that does not exist, and so nowhere
        filling = logits.shape[0] - len(rows)
        seeds, limits = [row.seed for row in rows], [row.limit for row in rows]
        keys = row_keys([*seeds, *[0] * filling])
        new = begin(self._params, logits, state, keys, np.array([*limits, *[0] * filling]))
        if self._carry is None:
            self._carry = self._empty(new)
        slots = np.array([*free, *[self.slots] * filling], np.int32)
        self._carry = _insert(self._carry, new, slots)
        for slot, row in zip(free, rows):
            self._rows[slot] = row
            if not row.limit:
                self._leave(slot, row)
                self._finish(row)

    def _empty(self, like: DecodeState) -> DecodeState:
        """A carry of slots that are over."""
        state = put_like(self._params, self._decoder.init_state(self.slots))
        logits = jnp.zeros((self.slots, like.logits.shape[1]), like.logits.dtype)
        keys = row_keys([0] * self.slots)
        return begin(self._params, put_like(self._params, logits), state, keys, 0)

    def _decode(self) -> None:
        step, weights = self._decoder.step, self._decoder.weights
        count = step.per_call
        if count is None:
            count = _STEPS_WHILE_WAITING if self._waiting or self._reading else STEPS_PER_CALL
        self._carry, out = decode(step, weights, self._rules, self._carry, np.int32(count), step.per_call)
        rows = [(slot, row) for slot, row in enumerate(self._rows) if row is not None]
        self._results.add(out, count, rows)
        self.started += self.slots * min(count, max(row.limit - row.started for _, row in rows))
        for slot, row in rows:
            row.started += count
            if row.started >= row.limit:  # whatever its tokens are, it is over after this call
                self._leave(slot, row)

    def _leave(self, slot: int, row: _Row) -> None:
        """Frees a slot; its state is as the row left it until another row joins."""
        self._rows[slot] = None
        if self._states and self._carry is not None:
            row.state = take_rows(self._carry.state, np.array([slot], np.int32))

    def _take(self, tokens: np.ndarray, rows: list[tuple[int, _Row]]) -> None:
        """Tokens [count, slots] of a call in which ``rows`` took part."""
        for slot, row in rows:
            if row.over:
                continue
            own = tokens[:, slot]
            lost = np.flatnonzero(own == UNDEFINED)
            error = undefined(row.number, row.count + int(lost[0])) if lost.size else None
            ends = np.flatnonzero(own < 0)
            new = own[: ends[0]] if ends.size else own
            row.tokens.append(new)
            row.count += len(new)
            self.chosen += len(new)
            if ends.size or row.count == row.limit:
                if self._rows[slot] is row:
                    self._leave(slot, row)
                self._finish(row, error)

    def _finish(self, row: _Row, error: Exception | None = None) -> None:
        row.over = True
        state = None if error else row.state
        tokens = np.concatenate([np.empty(0, np.int32), *row.tokens])
        self._finished.append(Finished(row.number, tokens, state, error))


@functools.partial(jax.jit, donate_argnums=0)
def _insert(carry: DecodeState, new: DecodeState, slots: jax.Array) -> DecodeState:
    """``carry`` with the rows of ``new`` in ``slots`` [n]; those beyond the last slot are left out."""

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[slots].set(y.astype(x.dtype), mode="drop")

    def put_state(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[:, slots].set(y.astype(x.dtype), mode="drop")

    state = jax.tree.map(put_state, carry.state, new.state)
    keys = jax.random.key_data(carry.keys).at[slots].set(jax.random.key_data(new.keys), mode="drop")
    carry = carry.replace(keys=jax.random.wrap_key_data(keys, impl=jax.random.key_impl(carry.keys)))
    rest = {"state": None, "keys": None}
    return jax.tree.map(put, carry.replace(**rest), new.replace(**rest)).replace(state=state, keys=carry.keys)
