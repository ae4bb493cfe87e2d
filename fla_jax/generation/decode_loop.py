"""The decoding loop of `Engine`: tokens of a batch of rows, one program.

A row is over when it has chosen a stop token or has as many tokens as it may have. It then stays in the
batch: it keeps the state that it stopped with, and whatever else is computed for it is thrown away.

A call gives back arrays that are still being computed; the caller starts the next call first and reads the
tokens of the one before then (`Results`), so the device always has work. Rows that are over by themselves are
therefore noticed one call late.

How many steps a call has depends on who can tell that all rows are over. On a CPU the loop looks after every
step. On a GPU somebody would have to wait: the host starts the kernels of a step only when the device has
told it that there is one, and the call comes back when that is over. So there a call has a fixed number of
steps, none of which is asked for: `Step.per_call`.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import PyTree

from ..layers.state import RWKVState
from .prompts import put_like
from .sampling import UNDEFINED, TokenCounts, choose, logprobs, of_tokens
from .sampling_params import MAX_LOGPROBS, Rows, SamplingArrays

STEPS_PER_CALL = 32
# What a call returns beside tokens. Each is a program; `PLAIN` computes nothing that is not asked for.
PLAIN, SCORED, RANKED = None, 0, MAX_LOGPROBS
Scores = int | None
OVER = -1  # instead of a token, where a row is over
_STOPPED = -3  # minus the stop token, where a row has chosen one


class Step(Hashable, Protocol):
    """One token of every row: ``(weights, tokens [B], state, alive [B]) -> (logits [B, V], state)``.

    Rows that are not ``alive`` keep their state to the last bit; their logits mean nothing.

    Attributes:
        sampling: the implementation of `choose` that goes with it.
        per_call: how many steps a call has; None where the loop itself looks whether there is another one.
    """

    @property
    def sampling(self) -> str:
        """See the class."""

    @property
    def per_call(self) -> int | None:
        """See the class."""

    def __call__(
        self, weights: PyTree, tokens: jax.Array, state: RWKVState, active: jax.Array
    ) -> tuple[jax.Array, RWKVState]:
        """See the class."""


class DecodeState(struct.PyTreeNode):
    """What the loop hands on: the logits [B, V] of the next token and all that its choice depends on."""

    logits: jax.Array
    state: RWKVState
    token_counts: TokenCounts  # those of rows that are over mean nothing
    keys: jax.Array  # [B]
    step: jax.Array  # [B] int32, tokens that the row has chosen
    limit: jax.Array  # [B] int32, tokens that it may have
    done: jax.Array  # [B]


def begin(
    params: PyTree, logits: jax.Array, state: RWKVState, keys: jax.Array, limit: np.ndarray | int
) -> DecodeState:
    """The carry before the first new token of rows whose prompts are read, where the parameters are."""
    batch, vocab_size = logits.shape
    limit = np.broadcast_to(np.minimum(limit, 2**31 - 1).astype(np.int32), (batch,))
    step = np.zeros(batch, np.int32)
    new = (TokenCounts.none(batch, vocab_size), keys, step, limit, step >= limit)
    return DecodeState(logits, state, *put_like(params, new))


class Chosen(struct.PyTreeNode):
    """What a call of the loop chose; n steps.

    Attributes:
        tokens: [n, B]; `OVER`, `UNDEFINED` or that of `stopped_by` where there is no new token.
        logprobs: [n, B], the model's log-probabilities of the chosen tokens, stop tokens among them; None in
            `PLAIN`.
        top_tokens, top_logprobs: [n, B, k], the most probable tokens; None but in `RANKED`.
    """

    tokens: Rows
    logprobs: Rows | None = None
    top_tokens: Rows | None = None
    top_logprobs: Rows | None = None


def stopped_by(code: int) -> int | None:
    """The stop token that a number in place of a token stands for."""
    return _STOPPED - code if code <= _STOPPED else None


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7), donate_argnums=3)
def decode(
    step: Step,
    weights: PyTree,
    rules: SamplingArrays,
    carry: DecodeState,
    most: jax.Array,
    fixed: int | None,
    scores: Scores = PLAIN,
    keep: bool = False,
) -> tuple[DecodeState, Chosen]:
    """More tokens a row: as many steps as are ``fixed``, or with None up to ``most`` <= STEPS_PER_CALL, until
    all rows are over; the result has ``fixed`` or STEPS_PER_CALL steps.

    The logits and the counts of rows that are over become undefined, but with ``keep`` they remain, so that
    the row can continue.
    """
    rows = STEPS_PER_CALL if fixed is None else fixed

    def more(loop: Any) -> jax.Array:
        i, carry, _ = loop
        return (i < most) & ~jnp.all(carry.done)

    def one(loop: Any) -> Any:
        i, carry, out = loop
        # not keys[i]: that slice would be an operation of its own, or one with the kernel that reads it
        mine = jnp.sum(jnp.where((jnp.arange(rows) == i)[:, None, None], keys, 0), 0, dtype=keys.dtype)
        own = jax.random.wrap_key_data(mine, impl=jax.random.key_impl(carry.keys))
        chosen, token_counts = choose(rules, carry.logits, carry.token_counts, own, step.sampling)
        tokens = jnp.where(carry.done, 0, chosen)
        stops = of_tokens(rules.stop, tokens) & ~carry.done & (tokens != UNDEFINED)
        over = carry.done | stops | (tokens == UNDEFINED)
        logits, state = step(weights, tokens, carry.state, ~over)
        number = carry.step + 1
        done = over | (number >= carry.limit)
        found = _scored(carry.logits, tokens, scores)
        if keep:
            kept = lambda new, old: jnp.where(over.reshape(-1, *(1,) * (new.ndim - 1)), old, new)
            old = carry.logits.astype(logits.dtype), carry.token_counts, carry.step
            logits, token_counts, number = jax.tree.map(kept, (logits, token_counts, number), old)
        carry = carry.replace(logits=logits, state=state, token_counts=token_counts, step=number, done=done)
        tokens = jnp.where(over & (tokens != UNDEFINED), jnp.where(stops, _STOPPED - tokens, OVER), tokens)
        # i is one of its rows: at[i].set would look whether it is, in a kernel of its own
        put = lambda all_steps, new: jax.lax.dynamic_update_index_in_dim(all_steps, new, i, 0)
        return i + 1, carry, jax.tree.map(put, out, found.replace(tokens=tokens))

    # all at once: for one token these are many kernels that do next to nothing
    numbers = carry.step + jnp.arange(rows, dtype=jnp.int32)[:, None]
    keys = jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in), (None, 0))(carry.keys, numbers))
    empty = jax.eval_shape(lambda: _scored(carry.logits, carry.step, scores))
    out = jax.tree.map(lambda x: jnp.full((rows, *x.shape), OVER, x.dtype), empty)
    loop = jnp.int32(0), carry, out
    if fixed is None:
        _, carry, out = jax.lax.while_loop(more, one, loop)
    else:
        _, carry, out = jax.lax.fori_loop(0, fixed, lambda _, loop: one(loop), loop)
    return carry, out


def _scored(logits: jax.Array, tokens: jax.Array, scores: Scores) -> Chosen:
    """The chosen tokens with the log-probabilities that a program returns."""
    return Chosen(tokens) if scores is PLAIN else Chosen(tokens, *logprobs(logits, tokens, scores))


class Results:
    """The tokens of calls of `decode` that are under way, read in order, one call late."""

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[Chosen, int, Any]] = collections.deque()

    def pending(self) -> list[tuple[Chosen, Any]]:
        """The calls that have not been read, with what was said about them."""
        return [(out, about) for out, _, about in self._calls]

    def add(self, out: Chosen, count: int, about: Any) -> None:
        """A call for ``count`` steps; what is said ``about`` it comes back with its tokens."""
        for array in jax.tree.leaves(out):
            array.copy_to_host_async()
        self._calls.append((out, count, about))

    def ready(self, late: int) -> Iterator[tuple[Chosen, Any]]:
        """What all calls but the last ``late`` ones chose, in NumPy arrays of their steps; waits for them."""
        while len(self._calls) > late:
            out, count, about = self._calls.popleft()
            yield jax.tree.map(lambda x, n=count: np.asarray(x)[:n], out), about


def undefined(row: int, token: int) -> FloatingPointError:
    """The error for a row whose logits are not to be chosen from."""
    return FloatingPointError(
        f"row {row}: the logits for new token {token} hold NaN or no finite largest one. Either params or "
        "state hold NaN or infinity, or an activation has overflowed; fla_jax.checked around model.apply "
        "names the op"
    )


def row_keys(seeds: Sequence[int]) -> jax.Array:
    """The random key of each row, [batch]: `jax.random.key` of all 64 bits of its seed.

    Of one kind, whatever is configured: a seed stands for the same tokens everywhere. Its words are those of
    the seed; made by JAX they would be several programs for the host to start.
    """
    words = [divmod(seed % 2**64, 2**32) for seed in seeds]
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")
