"""The slots of an engine on the device: their states, their rules, and the calls that change them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..layers.state import RWKVState
from .decode_loop import PLAIN, Chosen, DecodeState, Scores, begin, decode, row_keys
from .decoder import Decoder
from .prompts import put_like, take_rows
from .rows import GenerationState, Row
from .sampling import TokenCounts
from .sampling_params import SamplingArrays, SamplingParams, sampling_arrays


class Slots:
    """A batch of rows, of which some are over.

    Attributes:
        number: B, how many slots there are.
        place: the parameters, beside which new arrays are put.
    """

    def __init__(self, decoder: Decoder, params: PyTree, number: int) -> None:
        config = decoder.model.config
        self.number, self._vocab_size, self.place = number, config.vocab_size, params
        # the rules of empty slots need no sorting
        empty = sampling_arrays([SamplingParams.policy()], self._vocab_size)
        rules = jax.tree.map(lambda x: np.repeat(x, number, 0), empty)
        self._rules: SamplingArrays = put_like(params, rules)
        # slots that are over, of the decoder's dtypes: rows may begin with states of others
        state = put_like(params, decoder.init_state(number))
        logits = jnp.zeros((number, config.vocab_size), jnp.promote_types(config.dtype, jnp.float32))
        self._carry = begin(params, put_like(params, logits), state, row_keys([0] * number), 0)

    def insert(
        self, rows: list[Row], slots: list[int], sources: Sequence[int], start: GenerationState, size: int
    ) -> None:
        """Puts rows into slots, filled up to ``size``, each with the state of its source in ``start``."""
        filling = size - len(rows)
        own = [row.sampling for row in rows] + [SamplingParams.policy()] * filling
        rules = sampling_arrays(own, self._vocab_size)
        if rules.bias is not None:
            self._allow_bias()
        elif self._rules.bias is not None:
            rules = rules.replace(bias=np.zeros(rules.stop.shape, np.float32))
        limits = [min(row.sampling.max_tokens, 2**30) for row in rows] + [0] * filling
        new = (
            rules,
            jax.random.key_data(row_keys([row.seed for row in rows] + [0] * filling)),
            np.array(limits, np.int32),
            np.array([*sources, *[0] * filling], np.int32),
            np.array([*slots, *[self.number] * filling], np.int32),
        )
        self._carry, self._rules = _insert(self._carry, self._rules, start, put_like(self.place, new))

    def decode(self, decoder: Decoder, count: int, fixed: int | None, scores: Scores, keep: bool) -> Chosen:
        """Starts ``count`` steps of all slots, see `fla_jax.generation.decode_loop.decode`."""
        if scores is not PLAIN:
            self._allow_bias()
        rules = self._rules.replace(bias=None) if scores is PLAIN else self._rules
        step, weights = decoder.step, decoder.weights
        self._carry, out = decode(step, weights, rules, self._carry, np.int32(count), fixed, scores, keep)
        return out

    def state(self, slot: int) -> GenerationState:
        """A copy of the state in a slot."""
        return _state_of(self._carry, np.array([slot], np.int32))

    def halt(self, slot: int) -> None:
        """Ends the row in a slot."""
        self._carry = _halt(self._carry, np.int32(slot))

    def _allow_bias(self) -> None:
        if self._rules.bias is None:
            bias = np.zeros((self.number, self._vocab_size), np.float32)
            self._rules = self._rules.replace(bias=put_like(self.place, bias))


@jax.jit
def _state_of(carry: DecodeState, slot: jax.Array) -> GenerationState:
    """The state of the row in a slot [1]."""
    counts = jax.tree.map(lambda x: x[slot], carry.token_counts)
    return GenerationState(take_rows(carry.state, slot), carry.logits[slot], counts, carry.step[slot])


@jax.jit
def state_after_prompt(logits: jax.Array, rwkv: RWKVState, row: jax.Array) -> GenerationState:
    """The state of a row [1] whose prompt was just read."""
    counts = TokenCounts.none(1, logits.shape[1])
    return GenerationState(take_rows(rwkv, row), logits[row], counts, jnp.zeros(1, jnp.int32))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _insert(
    carry: DecodeState,
    rules: SamplingArrays,
    start: GenerationState,
    new: tuple[SamplingArrays, jax.Array, jax.Array, jax.Array, jax.Array],
) -> tuple[DecodeState, SamplingArrays]:
    """Rows in ``slots`` [n], each as its ``source`` in ``start``; those beyond the last slot are left out."""
    own_rules, own_keys, limit, source, slots = new

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[slots].set(y.astype(x.dtype), mode="drop")

    def put_state(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[:, slots].set(y[:, source].astype(x.dtype), mode="drop")

    keys = put(jax.random.key_data(carry.keys), own_keys)
    counts = jax.tree.map(lambda x, y: put(x, y[source]), carry.token_counts, start.token_counts)
    carry = DecodeState(
        logits=put(carry.logits, start.logits[source]),
        state=jax.tree.map(put_state, carry.state, start.rwkv),
        token_counts=counts,
        keys=jax.random.wrap_key_data(keys, impl=jax.random.key_impl(carry.keys)),
        step=put(carry.step, start.step[source]),
        limit=put(carry.limit, start.step[source] + limit),
        done=put(carry.done, limit <= 0),
    )
    return carry, jax.tree.map(put, rules, own_rules)


@functools.partial(jax.jit, donate_argnums=0)
def _halt(carry: DecodeState, slot: jax.Array) -> DecodeState:
    """The row in a slot is over."""
    return carry.replace(done=carry.done.at[slot].set(True))
