"""`generate` and `stream`: one call of a `Generator` that is made for it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import PyTree

from ..models.causal_lm import RWKVForCausalLM
from .generator import Generator
from .prompts import check_texts
from .requests import Completion, State, States, rules_of_each
from .sampling_params import SamplingParams
from .streaming import Stream
from .tokenizer import Tokenizer


def generate(
    model: RWKVForCausalLM,
    params: PyTree,
    prompts: Sequence[object],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_tokens: int | None = None,
    state: States = None,
    tokenizer: Tokenizer | None = None,
    slots: int | None = None,
) -> list[Completion]:
    """Continues prompts; for more than one call create a `Generator`, which prepares the weights once.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        prompts: tokens, or text with a tokenizer, of any lengths; see `Generator.submit`.
        sampling: of all prompts, or one for each; see `Generator.generate`.
        max_tokens: in place of that of ``sampling``.
        state: before the prompts: of one row, for all; an `RWKVState` of as many rows, such as
            `fla_jax.training.initial_state`; or a sequence, such as the states of earlier completions.
        tokenizer: for prompts that are text, completions' text and stop strings.
        slots: number of completions that decode together; None for all.

    Returns:
        The completions of each prompt, ``n`` for each, in order, with their states.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        FloatingPointError: the logits that a token is to be chosen from hold NaN, or have no finite largest
            one. The message names the row and the token.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import SamplingParams, generate
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> first = generate(model, params, [[1, 2, 3], [4]], SamplingParams(temperature=0.8), max_tokens=5)
        >>> [len(completion.tokens) for completion in first]
        [5, 5]
        >>> states = [completion.state for completion in first]
        >>> second = generate(model, params, [[5], [6]], max_tokens=3, state=states)  # goes on
    """
    prompts = check_texts("prompts", prompts)
    rules = rules_of_each(sampling, len(prompts))
    if slots is None:
        slots = max(1, sum(1 if rule is None else rule.n for rule in rules))
    generator = Generator(model, params, slots=slots, tokenizer=tokenizer)
    return generator.generate(prompts, sampling, max_tokens=max_tokens, state=state, keep_state=True)


def stream(
    model: RWKVForCausalLM,
    params: PyTree,
    prompt: object,
    sampling: SamplingParams | None = None,
    *,
    max_tokens: int | None = None,
    state: State | None = None,
    tokenizer: Tokenizer | None = None,
) -> Stream:
    """Continues a prompt token by token; arguments and errors are those of `generate`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import stream
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> [event.tokens.size for event in stream(model, params, [1, 2, 3], max_tokens=2)]
        [1, 1]
    """
    slots = sampling.n if isinstance(sampling, SamplingParams) else 1
    generator = Generator(model, params, slots=slots, tokenizer=tokenizer)
    return generator.stream(prompt, sampling, max_tokens=max_tokens, state=state)
