"""Text generation: prompts are read in the chunked form, then one token at a time in a compiled loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from .layers.state import RWKVState, check_state
from .sampling import Occurrences, Rules, Sampling, sample

# A prompt is read in pieces of these lengths, longest first: four programs serve prompts of any length, and memory stays that of the longest piece.
_PIECES = (512, 64, 8, 1)
_STEPS_PER_CALL = 32


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
        tokens: the new tokens of each row, int32, without prompt and stop token; shorter than ``max_tokens`` only where a stop token came.
        state: after each row's prompt and new tokens: give it, and the next prompt, to the next call.
    """

    tokens: list[np.ndarray]
    state: RWKVState


class _Carry(struct.PyTreeNode):
    """What the decoding loop hands on: the logits [B, V] of the next token and everything that its choice depends on."""

    logits: jax.Array
    state: RWKVState
    occurrences: Occurrences
    keys: jax.Array  # [B]
    step: jax.Array
    done: jax.Array  # [B]


@functools.partial(jax.jit, keep_unused=True)
def _beside(params: jax.Array, tree: Any) -> Any:
    """A copy of ``tree`` where the parameters are, and committed to that place if they are: results of programs that read the parameters come back the same
    way, and a program whose own results differ in this from its first arguments is compiled twice."""
    return jax.tree.map(jnp.copy, tree)


@functools.partial(jax.jit, static_argnums=0)
def _read(model: Any, params: Any, tokens: jax.Array, state: RWKVState) -> tuple[jax.Array, RWKVState]:
    """Hidden state at the last of tokens [B, T], and the new state."""
    hidden, state = model.apply({"params": params}, tokens, state, method="hidden")
    return hidden[:, -1], state


@functools.partial(jax.jit, static_argnums=0)
def _head(model: Any, params: Any, hidden: jax.Array) -> jax.Array:
    return model.apply({"params": params}, hidden, method="logits")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _decode(model: Any, params: Any, rules: Rules, carry: _Carry, count: jax.Array) -> tuple[_Carry, jax.Array]:
    """Up to ``count`` <= _STEPS_PER_CALL more tokens a row; [_STEPS_PER_CALL, B], -1 where a row is over."""

    def more(loop: Any) -> jax.Array:
        i, carry, _ = loop
        return (i < count) & ~jnp.all(carry.done)

    def step(loop: Any) -> Any:
        i, carry, out = loop
        keys = jax.vmap(jax.random.fold_in, (0, None))(carry.keys, carry.step)
        tokens = sample(rules, carry.logits, carry.occurrences, keys)
        done = carry.done | rules.stop[tokens]
        logits, state = model.apply({"params": params}, tokens[:, None], carry.state)
        # rows that are over keep the state that they stopped with
        state = jax.tree.map(lambda new, old: jnp.where(done.reshape(1, -1, *(1,) * (new.ndim - 2)), old, new.astype(old.dtype)), state, carry.state)
        carry = carry.replace(
            logits=logits[:, -1], state=state, occurrences=carry.occurrences.add(rules, tokens), step=carry.step + 1, done=done
        )  # fmt: skip
        return i + 1, carry, out.at[i].set(jnp.where(done, -1, tokens))

    out = jnp.full((_STEPS_PER_CALL, carry.done.shape[0]), -1, jnp.int32)
    _, carry, out = jax.lax.while_loop(more, step, (jnp.int32(0), carry, out))
    return carry, out


def prefill(model: Any, params: Any, prompts: Sequence[Any], state: RWKVState | None = None) -> tuple[jax.Array, RWKVState]:
    """Reads prompts of any lengths; every row's result is that of the row alone.

    The rows are aligned at their ends, and a row takes part from its own first token on: what stands in the batch before is thrown away when it enters with
    its initial state. So no padding ever reaches a result, whatever the initial states are.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        prompts: B sequences of at least one token each.
        state: before the first token of each row (it is left as it is); None for zeros.

    Returns:
        ``(logits, state)``: logits [B, V] in float32 for the token after each prompt, and the state there.

    Raises:
        ValueError, TypeError: a prompt is empty, or is not made of integers from 0 to V - 1, or ``state`` does not fit.
    """
    rows = _check_prompts(prompts, model.config.vocab_size)
    initial = model.init_state(len(rows))
    if state is not None:
        check_state(state, initial)
        initial = jax.tree.map(lambda x, zero: jnp.asarray(x, zero.dtype), state, initial)
    initial = _beside(jax.tree.leaves(params)[0], initial)
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max())
    tokens = np.stack([np.pad(row, (longest - len(row), 0)) for row in rows])
    starts, at, now = longest - lengths, 0, initial
    for entry, until in zip(sorted(set(starts)), [*sorted(set(starts))[1:], longest]):
        enters = starts == entry
        if entry > 0:
            now = jax.tree.map(lambda first, x, enters=enters: jnp.where(enters.reshape(1, -1, *(1,) * (x.ndim - 2)), first, x), initial, now)
        while at < until:
            piece = next(n for n in _PIECES if n <= until - at)
            hidden, now = _read(model, params, tokens[:, at : at + piece], now)
            at += piece
    return _head(model, params, hidden), now


def generate(
    model: Any,
    params: Any,
    prompts: Sequence[Any],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int | Sequence[int] = 0,
    state: RWKVState | None = None,
) -> Generation:
    """Continues prompts.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        prompts: B sequences of at least one token each, of any lengths. A row's result does not depend on the other rows.
        max_tokens: largest number of new tokens a row.
        sampling: how tokens are chosen, and which ones end a row; None for `Sampling`'s default values.
        seed: one for each row; a single one stands for ``seed, seed + 1, ...``. Row i of a batch equals the row alone with its own seed.
        state: before the prompts, such as the state of an earlier call or `fla_jax.state_tuning.initial_state`; None for zeros.

    Returns:
        The new tokens of each row, and the state after them.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generate import generate
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.sampling import Sampling
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> [len(row) for row in generate(model, params, [[1, 2, 3], [4]], 5, Sampling(temperature=0.8)).tokens]
        [5, 5]
    """
    carry, rules = _start(model, params, prompts, max_tokens, sampling, seed, state)
    parts = []
    for start in range(0, max_tokens, _STEPS_PER_CALL):
        count = min(_STEPS_PER_CALL, max_tokens - start)
        carry, out = _decode(model, params, rules, carry, np.int32(count))
        parts.append(np.asarray(out)[:count])
        if (parts[-1] < 0).all(1).any():  # all rows are over
            break
    tokens = np.concatenate([*parts, np.full((1, len(prompts)), -1, np.int32)])
    return Generation([row[: np.argmax(row < 0)] for row in tokens.T], carry.state)


def stream(
    model: Any,
    params: Any,
    prompts: Sequence[Any],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int | Sequence[int] = 0,
    state: RWKVState | None = None,
) -> Iterator[np.ndarray]:
    """The tokens of `generate`, as they come.

    Arguments and errors are those of `generate`. The prompts are read, and errors raised, when the first token is asked for.

    Yields:
        [B] int32: the next token of each row, -1 for rows that are over; ends when all are.
    """
    carry, rules = _start(model, params, prompts, max_tokens, sampling, seed, state)
    for _ in range(max_tokens):
        carry, out = _decode(model, params, rules, carry, np.int32(1))
        tokens = np.asarray(out[0])
        if (tokens < 0).all():
            return
        yield tokens


def _start(model: Any, params: Any, prompts: Any, max_tokens: int, sampling: Sampling | None, seed: Any, state: Any) -> tuple[_Carry, Rules]:
    if not isinstance(max_tokens, int | np.integer) or max_tokens < 0:
        raise ValueError(f"max_tokens must be an integer >= 0, got {max_tokens!r}")
    vocab_size = model.config.vocab_size
    rules = (sampling or Sampling()).arrays(vocab_size)
    B = len(prompts)
    seeds = np.arange(seed, seed + B) if isinstance(seed, int | np.integer) else np.asarray(seed)
    if seeds.shape != (B,) or not np.issubdtype(seeds.dtype, np.integer):
        raise ValueError(f"seed must be an integer or one for each of the {B} prompts, got {seed!r}")
    logits, state = prefill(model, params, prompts, state)
    keys = jax.vmap(jax.random.key)(seeds.astype(np.uint32))
    rest = _beside(jax.tree.leaves(params)[0], (Occurrences.none(B, vocab_size), keys, jnp.int32(0), jnp.zeros(B, bool)))
    return _Carry(logits, state, *rest), rules


def _check_prompts(prompts: Any, vocab_size: int) -> list[np.ndarray]:
    if isinstance(prompts, str | bytes):
        raise TypeError("prompts must be sequences of tokens, got text: a tokenizer turns it into tokens (fla_jax.tokenizer)")
    rows = [np.asarray(row) for row in prompts]
    if not rows:
        raise ValueError("prompts must hold at least one row")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"prompts[{i}] must be a sequence of at least one token, got shape {list(row.shape)}")
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"prompts[{i}] must be integers, got {row.dtype}")
        if row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(f"prompts[{i}] must hold tokens from 0 to {vocab_size - 1}, got {row.min() if row.min() < 0 else row.max()}")
    return [row.astype(np.int32) for row in rows]
