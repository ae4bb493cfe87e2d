"""Choosing the next token by the rules of the official ``rwkv`` package's PIPELINE.

In this order: penalties, bans, top-p, top-k, temperature.

Source: PyPI ``rwkv`` 0.8.32, ``rwkv/utils.py`` (``PIPELINE.generate`` and ``PIPELINE.sample_logits``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..core.arguments import as_integers, check_integer, check_number, shown

UNDEFINED = -2  # instead of a token, where there are no logits to choose from
_FLOAT32 = np.finfo(np.float32)
_LARGEST = float(_FLOAT32.max)
_NUMBERS = {
    "temperature": (0, np.inf),
    "top_p": (0, 1),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
    "penalty_decay": (0, 1),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose the next token. The default values are PIPELINE's.

    Attributes:
        temperature: divides the logits of the tokens that top-p and top-k leave, so after them; any finite
            number >= 0. 0 always takes the most probable token.
        top_k: only the ``top_k`` most probable tokens; 0 for all. Tokens as probable as the last of them stay
            in too.
        top_p: only the most probable tokens that together reach this probability; 1 for all. It is judged at
            temperature 1.
        presence_penalty: taken off the logit of every token that was generated before (PIPELINE's
            ``alpha_presence``); like the next, of a size that float32 holds.
        frequency_penalty: taken off once more for every time that it was (``alpha_frequency``); the prompt
            does not count.
        penalty_decay: factor on those counts at every step: what was said long ago is forgotten
            (``alpha_decay``).
        banned: tokens that are never chosen (``token_ban``).
        stop: tokens that end a row; they are not part of its result (``token_stop``).
        uncounted: tokens that get the presence penalty but are not counted. PIPELINE has blanks, tabs and
            digits here: `fla_jax.generation.uncounted`.

    The three last take any sequence of integers, arrays too, and hold a tuple.

    Raises:
        ValueError: a value does not fit; the message names it.

    Example:
        >>> from fla_jax.generation import Sampling
        >>> Sampling(temperature=0)  # always the most probable token # doctest: +ELLIPSIS
        Sampling(temperature=0.0, top_k=0, top_p=0.85, ...)
        >>> Sampling(top_p=2)
        Traceback (most recent call last):
        ...
        ValueError: top_p must be from 0 to 1, got 2
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.85
    presence_penalty: float = 0.2
    frequency_penalty: float = 0.2
    penalty_decay: float = 0.996
    banned: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    uncounted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # one spelling of each value: equal settings are equal
        keep = functools.partial(object.__setattr__, self)
        for name, (low, high) in _NUMBERS.items():
            keep(name, check_number(name, getattr(self, name), low, high))
        keep("top_k", check_integer("top_k", self.top_k, 0))
        for name in ("banned", "stop", "uncounted"):
            keep(name, _integers(name, getattr(self, name)))

    def arrays(self, vocab_size: int) -> SamplingParams:
        """The same for a vocabulary, as arrays.

        Raises:
            ValueError: a token is not below ``vocab_size``, or all of them are banned.
        """
        masks = {}
        for name in ("banned", "stop", "uncounted"):
            ids = getattr(self, name)
            wrong = [token for token in ids if not 0 <= token < vocab_size]
            if wrong:
                raise ValueError(f"{name} must hold tokens from 0 to {vocab_size - 1}, got {shown(wrong[0])}")
            masks[name] = np.zeros(vocab_size, bool)
            masks[name][list(ids)] = True
        if masks["banned"].all():
            raise ValueError(f"banned holds all {vocab_size} tokens: none is left to choose")
        # What float32 has no number for is hotter or colder than makes a difference, but for 0, which has a
        # meaning.
        temperature = self.temperature and min(max(self.temperature, float(_FLOAT32.tiny)), _LARGEST)
        return SamplingParams(
            temperature=np.float32(temperature),
            top_p=np.float32(self.top_p),
            presence_penalty=np.float32(self.presence_penalty),
            frequency_penalty=np.float32(self.frequency_penalty),
            penalty_decay=np.float32(self.penalty_decay),
            top_k=np.int32(min(self.top_k or vocab_size, vocab_size)),
            **masks,
        )


def _integers(name: str, values: Any) -> tuple[int, ...]:
    """A sequence of integers as a tuple; their range is checked when the vocabulary is known."""
    ids = as_integers(values)
    if ids is None:
        raise ValueError(f"{name} must be a sequence of tokens, which are integers, got {shown(values)}")
    return ids


class SamplingParams(struct.PyTreeNode):
    """`Sampling` as arrays, an argument of compiled functions: one program serves all settings. The masks are
    [V]."""

    temperature: Any
    top_p: Any
    presence_penalty: Any
    frequency_penalty: Any
    penalty_decay: Any
    top_k: Any
    banned: Any
    stop: Any
    uncounted: Any


class TokenCounts(struct.PyTreeNode):
    """What was generated so far, [B, V] each: whether a token occurred at all, and its decayed count, which
    is 0 for those that did not.
    """

    seen: jax.Array
    count: jax.Array

    @classmethod
    def none(cls, batch: int, vocab_size: int) -> TokenCounts:
        """Nothing yet."""
        return cls(jnp.zeros((batch, vocab_size), bool), jnp.zeros((batch, vocab_size), jnp.float32))

    def add(self, rules: SamplingParams, tokens: jax.Array) -> TokenCounts:
        """After one more token a row, [B]: all counts decay, and then the new one grows by 1."""
        new = jnp.arange(self.seen.shape[1]) == tokens[:, None]
        return TokenCounts(self.seen | new, self.count * rules.penalty_decay + (new & ~rules.uncounted))


def allowed(rules: SamplingParams, logits: jax.Array) -> jax.Array:
    """Which tokens top-p and top-k leave: booleans like ``logits`` [B, V], at least one a row.

    Top-p: the token at which the sum over falling probabilities reaches ``top_p`` is the least probable that
    stays. PIPELINE at ``top_p = 1`` keeps the most probable token alone whenever rounding leaves that sum
    below 1; here 1 means all. Tokens with the logit of the last that stays do so, too; logits are compared,
    for probabilities of many tokens may all be 0 in float32.
    """
    logits = _wide(logits)
    falling = -jnp.sort(-logits, axis=-1)
    reached = jnp.sum(jnp.cumsum(jax.nn.softmax(falling, -1), -1) < rules.top_p, -1, keepdims=True)
    threshold = jnp.take_along_axis(falling, jnp.minimum(reached, logits.shape[-1] - 1), -1)
    by_p = jnp.where(rules.top_p < 1, threshold, -jnp.inf)
    last = jnp.minimum(rules.top_k, logits.shape[-1]) - 1
    return (logits >= by_p) & (logits >= jnp.take(falling, last, axis=-1)[..., None])


def adjusted(rules: SamplingParams, logits: jax.Array, token_counts: TokenCounts) -> jax.Array:
    """Logits whose softmax is what the next token is drawn from.

    Args:
        rules: from `Sampling.num_buffers`.
        logits: [B, V], the model's.
        occurrences: of the tokens before.

    Returns:
        [B, V] float32 (float64 for float64 logits): 0 for the most probable token, -inf for those that cannot
        come. NaN throughout for a row with a NaN or with infinity as its largest logit.
    """
    logits = penalised(rules, logits, token_counts)
    largest = jnp.max(logits, -1, keepdims=True)

    def best(x: jax.Array) -> jax.Array:
        return jnp.arange(x.shape[-1]) == jnp.argmax(x, -1, keepdims=True)

    def some(x: jax.Array) -> jax.Array:
        # sorting is most of the work here; without top-p and top-k there is nothing to sort
        everything = (rules.top_p >= 1) & (rules.top_k >= x.shape[-1])
        return jax.lax.cond(everything, _everything, functools.partial(allowed, rules), x)

    keep = jax.lax.cond(rules.temperature == 0, best, some, logits) & (logits > -jnp.inf)
    # What may not come is masked last: -inf divided by a large temperature can be NaN on a GPU or a CPU,
    # which multiply by the reciprocal and flush that to 0.
    tempered = _tempered(rules, logits, largest)
    # asked for by itself: XLA's maximum of many numbers on a CPU passes NaN over
    defined = jnp.isfinite(largest) & ~jnp.any(jnp.isnan(logits), -1, keepdims=True)
    return jnp.where(defined, jnp.where(keep, tempered, -jnp.inf), jnp.nan)


def penalised(rules: SamplingParams, logits: jax.Array, token_counts: TokenCounts) -> jax.Array:
    """Logits [B, V], float32 at least, with penalties taken off, and -inf for what is banned."""
    logits = _wide(logits)
    penalties = token_counts.seen * rules.presence_penalty + token_counts.count * rules.frequency_penalty
    # penalties near float32's largest number must not add up to infinity, which is for what is forbidden
    logits = logits - jnp.clip(penalties, -_LARGEST, _LARGEST)
    return jnp.where(rules.banned, -jnp.inf, logits)


def _tempered(rules: SamplingParams, logits: jax.Array, largest: jax.Array) -> jax.Array:
    """The largest logit is taken off first: whatever the temperature, it stays 0, and the others at most
    overflow to -inf.
    """
    return (logits - largest) / jnp.where(rules.temperature == 0, 1, rules.temperature)


def _everything(logits: jax.Array) -> jax.Array:
    return jnp.ones(logits.shape, bool)


def _wide(logits: jax.Array) -> jax.Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def sample(
    rules: SamplingParams,
    logits: jax.Array,
    token_counts: TokenCounts,
    keys: jax.Array,
    implementation: str = "xla",
) -> tuple[jax.Array, TokenCounts]:
    """Chooses one token a row.

    Args:
        rules: from `Sampling.num_buffers`.
        logits: [B, V], the model's.
        occurrences: of the tokens before.
        keys: [B], from `row_keys`, one a row, so that a row's choice does not depend on its neighbours.
        implementation: ``"xla"``, or ``"triton"`` (NVIDIA GPUs, no float64), which sorts nothing and chooses
            the same tokens, but for scores or sums of probabilities that are equal to rounding.

    Returns:
        ``(tokens [B] int32, occurrences)``: `UNDEFINED` for rows whose logits hold NaN or have no finite
        largest one, and the occurrences with the new tokens.
    """
    if implementation == "triton":
        from ..pallas.decode.host import sample_tokens  # only where there is Triton

        raw, seen, count = jax.random.key_data(keys), token_counts.seen, token_counts.count
        tokens, seen, count = sample_tokens(rules, _wide(logits), seen, count, raw, UNDEFINED)
        return tokens, TokenCounts(seen, count)
    scores = adjusted(rules, logits, token_counts)
    with jax.threefry_partitionable(True):  # what the kernels have, whatever is configured
        tokens = jax.vmap(jax.random.categorical)(keys, scores)
    tokens = jnp.where(jnp.isnan(scores[:, 0]), UNDEFINED, tokens).astype(jnp.int32)
    return tokens, token_counts.add(rules, tokens)
