"""Text generation: prompts are read in the chunked form, then one token at a time in a compiled loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..core.arguments import as_integer, as_integers, check_integer, check_model, shown
from ..layers.state import RWKVState
from .prompts import beside, check_prompts, of_rows, prefill
from .sampling import UNDEFINED, Occurrences, Rules, Sampling, sample

_STEPS_PER_CALL = 32
_SEEDS = -(2**63), 2**64 - 1


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
        tokens: the new tokens of each row, int32, without prompt and stop token; shorter than ``max_tokens``
            only where a stop token came.
        state: after each row's prompt and new tokens: give it, and the next prompt, to the next call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import generate
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> first = generate(model, params, [[1, 2, 3], [4]], max_tokens=5)
        >>> second = generate(model, params, [[5], [6]], max_tokens=5, state=first.state)  # goes on
        >>> [len(row) for row in second.tokens]
        [5, 5]
    """

    tokens: list[np.ndarray]
    state: RWKVState


class _Carry(struct.PyTreeNode):
    """What the decoding loop hands on: the logits [B, V] of the next token and all that its choice depends
    on."""

    logits: jax.Array
    state: RWKVState
    occurrences: Occurrences
    keys: jax.Array  # [B]
    step: jax.Array
    done: jax.Array  # [B]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _decode(
    model: Any, params: Any, rules: Rules, carry: _Carry, count: jax.Array
) -> tuple[_Carry, jax.Array]:
    """Up to ``count`` <= _STEPS_PER_CALL more tokens a row.

    [_STEPS_PER_CALL, B]: -1 where a row is over; `UNDEFINED` where it has no logits to choose from, which
    ends all.
    """

    def more(loop: Any) -> jax.Array:
        i, carry, _ = loop
        return (i < count) & ~jnp.all(carry.done)

    def step(loop: Any) -> Any:
        i, carry, out = loop
        keys = jax.vmap(jax.random.fold_in, (0, None))(carry.keys, carry.step)
        tokens = jnp.where(carry.done, 0, sample(rules, carry.logits, carry.occurrences, keys))
        lost = jnp.any(tokens == UNDEFINED)
        done = carry.done | rules.stop[tokens] | lost
        logits, state = model.apply({"params": params}, tokens[:, None], carry.state)
        # rows that are over keep the state that they stopped with
        state = jax.tree.map(
            lambda x, old: jnp.where(of_rows(done, x), old, x.astype(old.dtype)), state, carry.state
        )
        carry = carry.replace(
            logits=logits[:, -1],
            state=state,
            occurrences=carry.occurrences.add(rules, tokens),
            step=carry.step + 1,
            done=done,
        )
        return i + 1, carry, out.at[i].set(jnp.where(done & (tokens != UNDEFINED), -1, tokens))

    out = jnp.full((_STEPS_PER_CALL, carry.done.shape[0]), -1, jnp.int32)
    _, carry, out = jax.lax.while_loop(more, step, (jnp.int32(0), carry, out))
    return carry, out


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

    It runs outside of `jax.jit` and of `fla_jax.checked`: how many tokens come is known only from the tokens.
    What it runs is compiled. Parameters with NaN need no checked mode here, they are an error; to find the op
    that they come from, run ``fla_jax.checked(lambda p: model.apply({"params": p}, tokens))(params)``.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        prompts: B sequences of at least one token each, of any lengths: lists or integer arrays. A row's
            result does not depend on the other rows. How they are read: `fla_jax.generation.prefill`.
        max_tokens: largest number of new tokens a row.
        sampling: how tokens are chosen, and which ones end a row; None for `Sampling`'s default values.
        seed: one for each row; a single one stands for ``seed, seed + 1, ...``. Row i of a batch equals the
            row alone with its own seed. From -2**63 to 2**64 - 1; all 64 bits count, with and without
            ``jax_enable_x64`` (a negative one is the one 2**64 above it).
        state: before the prompts, such as the state of an earlier call or
            `fla_jax.training.initial_state`; None for zeros.

    Returns:
        The new tokens of each row, and the state after them.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        FloatingPointError: the logits that a token is to be chosen from hold NaN, or have no finite largest
            one: the parameters or the state hold NaN, or something has overflowed. The message names the row
            and the token.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import generate
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.generation import Sampling
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> result = generate(model, params, [[1, 2, 3], [4]], 5, Sampling(temperature=0.8))
        >>> [len(row) for row in result.tokens]
        [5, 5]
    """
    max_tokens = check_integer("max_tokens", max_tokens, 0)
    carry, rules = _start(model, params, prompts, sampling, seed, state)
    parts = [np.empty((0, carry.done.shape[0]), np.int32)]
    for start in range(0, max_tokens, _STEPS_PER_CALL):
        count = min(_STEPS_PER_CALL, max_tokens - start)
        carry, out = _decode(model, params, rules, carry, np.int32(count))
        parts.append(_checked(out, count, start))
        if (parts[-1] < 0).all(1).any():  # all rows are over
            break
    tokens = np.concatenate([*parts, np.full_like(parts[0], -1, shape=(1, parts[0].shape[1]))])
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

    Arguments and errors are those of `generate`. The prompts are read, and errors raised, when the first
    token is asked for.

    Yields:
        [B] int32: the next token of each row, -1 for rows that are over; ends when all are.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import stream
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> for tokens in stream(model, params, [[1, 2, 3], [4]], max_tokens=2):
        ...     print(tokens.shape)
        (2,)
        (2,)
    """
    max_tokens = check_integer("max_tokens", max_tokens, 0)
    carry, rules = _start(model, params, prompts, sampling, seed, state)
    for step in range(max_tokens):
        carry, out = _decode(model, params, rules, carry, np.int32(1))
        tokens = _checked(out, 1, step)[0]
        if (tokens < 0).all():
            return
        yield tokens


def _start(
    model: Any, params: Any, prompts: Any, sampling: Sampling | None, seed: Any, state: Any
) -> tuple[_Carry, Rules]:
    if any(isinstance(x, jax.core.Tracer) for x in (jnp.zeros(()), *jax.tree.leaves((params, state)))):
        raise TypeError(
            "generate and stream run outside of jax.jit, jax.grad, jax.vmap and fla_jax.checked: how many "
            "tokens come depends on their values. What they run is compiled, and NaN is an error in any case"
        )
    check_model(model)
    if not isinstance(sampling, Sampling | None):
        raise TypeError(f"sampling must be a Sampling or None, got {shown(sampling)}")
    vocab_size = model.config.vocab_size
    rules = (sampling or Sampling()).arrays(vocab_size)
    prompts = check_prompts(prompts, vocab_size)
    keys = _keys(seed, len(prompts))
    logits, state = prefill(model, params, prompts, state)
    done = jnp.zeros(len(prompts), bool)
    rest = beside(params, (Occurrences.none(len(prompts), vocab_size), keys, jnp.int32(0), done))
    return _Carry(logits, state, *rest), rules


def _keys(seed: Any, batch: int) -> jax.Array:
    """The random key of each row, [batch]."""
    first = as_integer(seed)
    seeds = as_integers(seed) if first is None else tuple(range(first, first + batch))
    if seeds is None or len(seeds) != batch:
        raise ValueError(f"seed must be an integer or one for each of the {batch} prompts, got {shown(seed)}")
    wrong = [row for row in seeds if not _SEEDS[0] <= row <= _SEEDS[1]]
    if wrong:
        raise ValueError(f"seed must be from -2**63 to 2**64 - 1 for every row, got {shown(wrong[0])}")
    with jax.enable_x64(True):  # without it JAX takes the lower 32 bits
        return jax.vmap(jax.random.key)(np.array([row % 2**64 for row in seeds], np.uint64))


def _checked(out: jax.Array, count: int, start: int) -> np.ndarray:
    """The first ``count`` rows of what `_decode` gave, from new token ``start`` on."""
    tokens = np.asarray(out)[:count]
    lost = np.argwhere(tokens == UNDEFINED)
    if lost.size:
        raise FloatingPointError(
            f"row {lost[0][1]}: the logits for new token {start + lost[0][0]} hold NaN or no finite largest "
            "one. Either params or state hold NaN or infinity, or an activation has overflowed; "
            "fla_jax.checked around model.apply names the op"
        )
    return tokens
