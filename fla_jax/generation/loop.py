"""The decoding loop that `generate`, `stream` and `Engine` share: tokens of a batch of rows, one program.

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

from ..core.arguments import as_integer, as_integers, shown
from ..layers.state import RWKVState
from .prompts import put_like
from .sampling import UNDEFINED, SamplingParams, TokenCounts, sample

STEPS_PER_CALL = 32
_SEEDS = -(2**63), 2**64 - 1


class Step(Hashable, Protocol):
    """One token of every row: ``(weights, tokens [B], state, alive [B]) -> (logits [B, V], state)``.

    Rows that are not ``alive`` keep their state to the last bit; their logits mean nothing.

    Attributes:
        sampling: the implementation of `sample` that goes with it.
        per_call: how many steps a call has; None where the loop itself looks whether there is another one.
    """

    @property
    def sampling(self) -> str:
        """See the class."""

    @property
    def per_call(self) -> int | None:
        """See the class."""

    def __call__(
        self, weights: Any, tokens: jax.Array, state: RWKVState, active: jax.Array
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


def begin(params: Any, logits: jax.Array, state: RWKVState, keys: jax.Array, limit: Any) -> DecodeState:
    """The carry before the first new token of rows whose prompts are read, where the parameters are."""
    batch, vocab_size = logits.shape
    limit = np.broadcast_to(np.minimum(limit, 2**31 - 1).astype(np.int32), (batch,))
    step = np.zeros(batch, np.int32)
    new = (TokenCounts.none(batch, vocab_size), keys, step, limit, step >= limit)
    return DecodeState(logits, state, *put_like(params, new))


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=3)
def decode(
    step: Step, weights: Any, rules: SamplingParams, carry: DecodeState, most: jax.Array, fixed: int | None
) -> tuple[DecodeState, jax.Array]:
    """More tokens a row: as many steps as are ``fixed``, or with None up to ``most`` <= STEPS_PER_CALL, until
    all rows are over.

    [``fixed`` or STEPS_PER_CALL, B]: -1 where a row is over, and after the last step; `UNDEFINED` where a row
    has no logits to choose from, which ends that row.
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
        tokens, token_counts = sample(rules, carry.logits, carry.token_counts, own, step.sampling)
        tokens = jnp.where(carry.done, 0, tokens)
        over = carry.done | rules.stop[tokens] | (tokens == UNDEFINED)
        logits, state = step(weights, tokens, carry.state, ~over)
        new = carry.step + 1
        carry = carry.replace(
            logits=logits,
            state=state,
            token_counts=token_counts,
            step=new,
            done=over | (new >= carry.limit),
        )
        tokens = jnp.where(over & (tokens != UNDEFINED), -1, tokens)
        # i is one of its rows: at[i].set would look whether it is, in a kernel of its own
        return i + 1, carry, jax.lax.dynamic_update_index_in_dim(out, tokens, i, 0)

    # all at once: for one token these are many kernels that do next to nothing
    numbers = carry.step + jnp.arange(rows, dtype=jnp.int32)[:, None]
    keys = jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in), (None, 0))(carry.keys, numbers))
    loop = jnp.int32(0), carry, jnp.full((rows, carry.done.shape[0]), -1, jnp.int32)
    if fixed is None:
        _, carry, out = jax.lax.while_loop(more, one, loop)
    else:
        _, carry, out = jax.lax.fori_loop(0, fixed, lambda _, loop: one(loop), loop)
    return carry, out


class Results:
    """The tokens of calls of `decode` that are under way, read in order, one call late."""

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[jax.Array, int, Any]] = collections.deque()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, out: jax.Array, count: int, about: Any) -> None:
        """A call for ``count`` steps; what is said ``about`` it comes back with its tokens."""
        out.copy_to_host_async()
        self._calls.append((out, count, about))

    def ready(self, late: int) -> Iterator[tuple[np.ndarray, Any]]:
        """The tokens [count, B] of all calls but the last ``late`` ones; waits for them."""
        while len(self._calls) > late:
            out, count, about = self._calls.popleft()
            yield np.asarray(out)[:count], about


def undefined(row: int, token: int) -> FloatingPointError:
    """The error for a row whose logits are not to be chosen from."""
    return FloatingPointError(
        f"row {row}: the logits for new token {token} hold NaN or no finite largest one. Either params or "
        "state hold NaN or infinity, or an activation has overflowed; fla_jax.checked around model.apply "
        "names the op"
    )


def row_seeds(seed: Any, batch: int) -> tuple[int, ...]:
    """The seed of each row.

    Raises:
        ValueError: ``seed`` is neither an integer nor one for each row, or not from -2**63 to 2**64 - 1.
    """
    first = as_integer(seed)
    seeds = as_integers(seed) if first is None else tuple(range(first, first + batch))
    if seeds is None or len(seeds) != batch:
        raise ValueError(f"seed must be an integer or one for each of the {batch} prompts, got {shown(seed)}")
    wrong = [row for row in seeds if not _SEEDS[0] <= row <= _SEEDS[1]]
    if wrong:
        raise ValueError(f"seed must be from -2**63 to 2**64 - 1 for every row, got {shown(wrong[0])}")
    return seeds


def row_keys(seeds: Sequence[int]) -> jax.Array:
    """The random key of each row, [batch]: `jax.random.key` of all 64 bits of its seed.

    Of one kind, whatever is configured: a seed stands for the same tokens everywhere. Its words are those of
    the seed; made by JAX they would be several programs for the host to start.
    """
    words = [divmod(seed % 2**64, 2**32) for seed in seeds]
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")
