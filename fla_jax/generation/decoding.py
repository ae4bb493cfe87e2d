"""Text generation: prompts are read in the chunked form, then one token at a time in a compiled loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core.arguments import check_integer, shown
from ..layers.state import RWKVState, check_state
from ..models.causal_lm import RWKVForCausalLM
from ..models.config import check_model
from .decoder import Decoder, check_decoder
from .deleted import check_deleted, explain_deleted
from .engine import Engine
from .loop import OVER, STEPS_PER_CALL, DecodeState, Results, begin, decode, row_keys, undefined
from .prompts import check_prompts, prefill, put_like
from .sampling import UNDEFINED
from .sampling_params import SamplingArrays, SamplingParams, row_seeds, sampling_arrays

_FEW_TOKENS = 16


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
        tokens: the new tokens of each row, int32, without prompt and stop token; shorter than ``max_tokens``
            only where a stop token came.
        state: after each row's prompt and new tokens: give it, and the next prompt, to the next call. None
            where there were fewer slots than prompts.

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
    state: RWKVState | None


def generate(
    model: RWKVForCausalLM,
    params: PyTree,
    prompts: Sequence[object],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    seed: int | Sequence[int] = 0,
    state: RWKVState | None = None,
    slots: int | None = None,
    decoder: Decoder | None = None,
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
        sampling: how tokens are chosen, and which ones end a row; None for `SamplingParams`'s default values.
        seed: one for each row; a single one stands for ``seed, seed + 1, ...``. Row i of a batch equals the
            row alone with its own seed. From -2**63 to 2**64 - 1; all 64 bits count, with and without
            ``jax_enable_x64`` (a negative one is the one 2**64 above it).
        state: before the prompts, such as the state of an earlier call or
            `fla_jax.training.initial_state`; None for zeros.
        slots: how many rows are decoded at a time, None for all. With fewer slots than prompts a row that is
            over makes room for the next prompt (`fla_jax.generation.Engine`): for more prompts than memory
            has room for, and for lengths that differ.
        decoder: a `Decoder` made with this ``model`` and these very arrays ``params``, prepared once for many
            calls or with options; None to make one.

    Returns:
        The new tokens of each row, and the state after them; None in place of the state where there are fewer
        slots than prompts.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        FloatingPointError: the logits that a token is to be chosen from hold NaN, or have no finite largest
            one: the parameters or the state hold NaN, or something has overflowed. The message names the row
            and the token.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import generate
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.generation import SamplingParams
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> result = generate(model, params, [[1, 2, 3], [4]], 5, SamplingParams(temperature=0.8))
        >>> [len(row) for row in result.tokens]
        [5, 5]
    """
    max_tokens = check_integer("max_tokens", max_tokens, 0)
    _check(model, params, sampling, state)
    rows = check_prompts(prompts, model.config.vocab_size)
    if slots is not None and check_integer("slots", slots, 1) < len(rows):
        tokens = _in_slots(model, params, rows, max_tokens, sampling, seed, state, slots, decoder)
        return Generation(tokens, None)
    carry, decoder, rules = _start(model, params, rows, max_tokens, sampling, seed, state, decoder)
    # few tokens take the program that `stream` has
    fixed = decoder.step.per_call if max_tokens >= _FEW_TOKENS else None
    results, parts = Results(), [np.empty((0, len(rows)), np.int32)]
    for start in range(0, max_tokens, fixed or STEPS_PER_CALL):
        count = fixed or min(STEPS_PER_CALL, max_tokens - start)
        carry, out = decode(decoder.step, decoder.weights, rules, carry, np.int32(count), fixed)
        results.add(out, count, start)
        parts += [_checked(np.asarray(out.tokens), about) for out, about in results.ready(late=1)]
        if (parts[-1] < 0).all(1).any():  # all rows are over
            break
    parts += [_checked(np.asarray(out.tokens), about) for out, about in results.ready(late=0)]
    tokens = np.concatenate([*parts, np.full_like(parts[0], -1, shape=(1, len(rows)))])
    return Generation([row[: np.argmax(row < 0)] for row in tokens.T], carry.state)


def stream(
    model: RWKVForCausalLM,
    params: PyTree,
    prompts: Sequence[object],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    seed: int | Sequence[int] = 0,
    state: RWKVState | None = None,
    decoder: Decoder | None = None,
) -> Iterator[np.ndarray]:
    """The tokens of `generate`, as they come.

    Arguments and errors are those of `generate`. The prompts are read, and errors raised, when the first
    token is asked for. While a token is looked at, the one after it is being computed.

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
    _check(model, params, sampling, state)
    rows = check_prompts(prompts, model.config.vocab_size)
    carry, decoder, rules = _start(model, params, rows, max_tokens, sampling, seed, state, decoder)
    results = Results()
    for i in range(max_tokens + 1):
        if i < max_tokens:
            with explain_deleted(params=params):  # the caller may donate them between two tokens
                carry, out = decode(decoder.step, decoder.weights, rules, carry, np.int32(1), None)
            results.add(out, 1, i)
        for out, start in results.ready(late=int(i < max_tokens)):
            tokens = np.maximum(_checked(np.asarray(out.tokens), start)[0], OVER)
            if (tokens < 0).all():
                return
            yield tokens


def _check(model: RWKVForCausalLM, params: PyTree, sampling: object, state: RWKVState | None) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in (jnp.zeros(()), *jax.tree.leaves((params, state)))):
        raise TypeError(
            "generate and stream run outside of jax.jit, jax.grad, jax.vmap and fla_jax.checked: how many "
            "tokens come depends on their values. What they run is compiled, and NaN is an error in any case"
        )
    check_model(model)
    if not isinstance(sampling, SamplingParams | None):
        raise TypeError(f"sampling must be a SamplingParams or None, got {shown(sampling)}")
    check_deleted(state=state)


def _start(
    model: RWKVForCausalLM,
    params: PyTree,
    rows: list[np.ndarray],
    max_tokens: int,
    sampling: SamplingParams | None,
    seed: int | Sequence[int],
    state: RWKVState | None,
    decoder: Decoder | None,
) -> tuple[DecodeState, Decoder, SamplingArrays]:
    """Reads the prompts: the loop's carry, and what else it is called with."""
    keys = row_keys(row_seeds(seed, len(rows)))
    rules = sampling_arrays([sampling or SamplingParams()] * len(rows), model.config.vocab_size)
    decoder = Decoder(model, params) if decoder is None else check_decoder(decoder, model, params)
    logits, state = prefill(model, params, rows, state)
    return begin(params, logits, decoder.state(state), keys, max_tokens), decoder, put_like(params, rules)


def _in_slots(
    model: RWKVForCausalLM,
    params: PyTree,
    rows: list[np.ndarray],
    max_tokens: int,
    sampling: SamplingParams | None,
    seed: int | Sequence[int],
    state: RWKVState | None,
    slots: int,
    decoder: Decoder | None,
) -> list[np.ndarray]:
    """The tokens of `generate` with fewer slots than rows."""
    if state is not None:
        check_state(state, jax.eval_shape(lambda: model.init_state(len(rows))))
    engine = Engine(model, params, slots, decoder=decoder)
    sampling = dataclasses.replace(sampling or SamplingParams(), max_tokens=max_tokens, n=1)
    tokens = {}
    for i, (row, own) in enumerate(zip(rows, row_seeds(seed, len(rows)), strict=True)):
        before = None if state is None else jax.tree.map(lambda x, i=i: x[:, i : i + 1], state)
        (added,) = engine.submit(row, dataclasses.replace(sampling, seed=own), state=before)
        tokens[added] = [np.empty(0, np.int32)]
    while engine.busy:
        for event in engine.step():
            tokens[event.row].append(event.tokens)
            if event.row.error is not None:
                raise event.row.error
    return [np.concatenate(own) for own in tokens.values()]


def _checked(tokens: np.ndarray, start: int) -> np.ndarray:
    """The tokens [count, B] of a call, from new token ``start`` on."""
    lost = np.argwhere(tokens == UNDEFINED)
    if lost.size:
        raise undefined(int(lost[0][1]), start + int(lost[0][0]))
    return tokens
