"""Choosing the next token as the official ``rwkv`` package's PIPELINE does: penalties, bans, top-p, top-k, temperature, in this order.

Source: PyPI ``rwkv`` 0.8.32, ``rwkv/utils.py`` (``PIPELINE.generate`` and ``PIPELINE.sample_logits``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose the next token. The default values are PIPELINE's.

    Attributes:
        temperature: divides the logits of the tokens that top-p and top-k leave, so after them; 0 always takes the most probable token.
        top_k: only the ``top_k`` most probable tokens; 0 for all. Tokens as probable as the last of them stay in as well.
        top_p: only the most probable tokens that together reach this probability; 1 for all. It is judged at temperature 1.
        presence_penalty: taken off the logit of every token that was generated before (PIPELINE's ``alpha_presence``).
        frequency_penalty: taken off once more for every time that it was (``alpha_frequency``); the prompt does not count.
        penalty_decay: factor on those counts at every step: what was said long ago is forgotten (``alpha_decay``).
        banned: tokens that are never chosen (``token_ban``).
        stop: tokens that end a row; they are not part of its result (``token_stop``).
        uncounted: tokens that get the presence penalty but are not counted. PIPELINE has blanks, tabs and digits here: `fla_jax.tokenizer.uncounted`.

    Raises:
        ValueError: a value does not fit; the message names it.
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
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "penalty_decay"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k != int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer >= 0, got {self.top_k}")
        for name in ("top_p", "penalty_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    def arrays(self, vocab_size: int) -> Rules:
        """The same for a vocabulary, as arrays.

        Raises:
            ValueError: a token is not below ``vocab_size``, or all of them are banned.
        """
        masks = {}
        for name in ("banned", "stop", "uncounted"):
            ids = np.asarray(getattr(self, name), dtype=np.int64).reshape(-1)
            if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
                raise ValueError(f"{name} must hold tokens from 0 to {vocab_size - 1}, got {ids[(ids < 0) | (ids >= vocab_size)][0]}")
            masks[name] = np.zeros(vocab_size, bool)
            masks[name][ids] = True
        if masks["banned"].all():
            raise ValueError(f"banned holds all {vocab_size} tokens: none is left to choose")
        return Rules(
            temperature=np.float32(self.temperature),
            top_p=np.float32(self.top_p),
            presence_penalty=np.float32(self.presence_penalty),
            frequency_penalty=np.float32(self.frequency_penalty),
            penalty_decay=np.float32(self.penalty_decay),
            top_k=np.int32(self.top_k or vocab_size),
            **masks,
        )


class Rules(struct.PyTreeNode):
    """`Sampling` as arrays, an argument of compiled functions: one program serves all settings. The masks are [V]."""

    temperature: Any
    top_p: Any
    presence_penalty: Any
    frequency_penalty: Any
    penalty_decay: Any
    top_k: Any
    banned: Any
    stop: Any
    uncounted: Any


class Occurrences(struct.PyTreeNode):
    """What was generated so far, [B, V] each: whether a token occurred at all, and its decayed count."""

    seen: jax.Array
    count: jax.Array

    @classmethod
    def none(cls, batch: int, vocab_size: int) -> Occurrences:
        """Nothing yet."""
        return cls(jnp.zeros((batch, vocab_size), bool), jnp.zeros((batch, vocab_size), jnp.float32))

    def add(self, rules: Rules, tokens: jax.Array) -> Occurrences:
        """After one more token a row, [B]: all counts decay, and then the new one grows by 1."""
        new = jnp.arange(self.seen.shape[1]) == tokens[:, None]
        return Occurrences(self.seen | new, self.count * rules.penalty_decay + (new & ~rules.uncounted))


def allowed(rules: Rules, logits: jax.Array) -> jax.Array:
    """Which tokens top-p and top-k leave: booleans like ``logits`` [B, V], at least one a row.

    Top-p: the probability at which the sum over falling probabilities reaches ``top_p`` is the smallest that stays. PIPELINE at ``top_p = 1`` keeps the
    most probable token alone whenever rounding leaves that sum below 1; here 1 means all.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), -1)
    falling = -jnp.sort(-probabilities, axis=-1)
    reached = jnp.sum(jnp.cumsum(falling, -1) < rules.top_p, -1, keepdims=True)
    by_p = jnp.where(rules.top_p < 1, jnp.take_along_axis(falling, jnp.minimum(reached, logits.shape[-1] - 1), -1), 0)
    last = jnp.minimum(rules.top_k, logits.shape[-1]) - 1
    return (probabilities >= by_p) & (probabilities >= jnp.take(falling, last, axis=-1)[..., None])


def adjusted(rules: Rules, logits: jax.Array, occurrences: Occurrences) -> jax.Array:
    """Logits whose softmax is what the next token is drawn from.

    Args:
        rules: from `Sampling.arrays`.
        logits: [B, V], the model's.
        occurrences: of the tokens before.

    Returns:
        [B, V] float32, -inf where a token cannot come.
    """
    penalties = occurrences.seen * rules.presence_penalty + occurrences.count * rules.frequency_penalty
    logits = jnp.where(rules.banned, -jnp.inf, logits.astype(jnp.float32) - penalties)

    def best(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(x.shape[-1]) == jnp.argmax(x, -1, keepdims=True), 0.0, -jnp.inf)

    def tempered(x: jax.Array) -> jax.Array:
        # sorting is most of the work here; without top-p and top-k there is nothing to sort
        everything = (rules.top_p >= 1) & (rules.top_k >= x.shape[-1])
        keep = jax.lax.cond(everything, lambda x: jnp.ones(x.shape, bool), lambda x: allowed(rules, x), x)
        return jnp.where(keep, x, -jnp.inf) / rules.temperature

    return jax.lax.cond(rules.temperature == 0, best, tempered, logits)


def sample(rules: Rules, logits: jax.Array, occurrences: Occurrences, keys: jax.Array) -> jax.Array:
    """One token a row, [B] int32; ``keys`` [B] is one key a row, so that a row's choice does not depend on its neighbours. The rest: `adjusted`."""
    return jax.vmap(jax.random.categorical)(keys, adjusted(rules, logits, occurrences)).astype(jnp.int32)
