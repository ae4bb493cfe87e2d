"""Log-probabilities of given texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from ..models.causal_lm import RWKVForCausalLM
from ..training import token_logprobs
from .array_checks import explain_deleted

_BATCH = 8  # texts that are read together, each padded to a power of two of tokens
_BLOCK = 128  # tokens whose logits exist at a time


def score(
    model: RWKVForCausalLM, params: PyTree, prompts: Sequence[np.ndarray], continuations: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The log-probability of every token of each continuation, see `Generator.score`; checked tokens."""
    if len(prompts) != len(continuations):
        raise ValueError(
            f"continuations must be one for each of the {len(prompts)} prompts, got {len(continuations)}"
        )
    texts, starts = [], []
    for before, after in zip(prompts, continuations, strict=True):
        texts.append(np.concatenate([before, after]))
        starts.append(len(before) - 1)
    found = [np.empty(0, np.float32)] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for first in range(0, len(order), _BATCH):
        rows = order[first : first + _BATCH]
        longest = max(len(texts[i]) for i in rows)
        tokens = np.zeros((_BATCH, max(16, 1 << (longest - 1).bit_length())), np.int32)
        lengths = np.ones(_BATCH, np.int32)
        for row, i in enumerate(rows):
            lengths[row] = len(texts[i])
            tokens[row, : len(texts[i])] = texts[i]
        with explain_deleted(params=params):
            scores = np.asarray(_score(model, params, tokens, lengths))
        for row, i in enumerate(rows):
            found[i] = scores[row, starts[i] : len(texts[i]) - 1]
    return found


@functools.partial(jax.jit, static_argnums=0)
def _score(model: RWKVForCausalLM, params: PyTree, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return token_logprobs(model, params, tokens, lengths, block_tokens=_BLOCK)
