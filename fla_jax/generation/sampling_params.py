"""How the tokens of a request are chosen and where it ends, and the same by row as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

import jax
import numpy as np
from flax import struct

from ..core.arguments import as_integers, check_integer, check_number, shown

_FLOAT32 = np.finfo(np.float32)
LARGEST = float(_FLOAT32.max)
_NUMBERS = {
    "temperature": (0, np.inf),
    "top_p": (0, 1),
    "presence_penalty": (-LARGEST, LARGEST),
    "frequency_penalty": (-LARGEST, LARGEST),
    "penalty_decay": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
_TOKENS = ("banned", "uncounted", "stop_tokens")
_LARGEST_BIAS = 1e6
_SEEDS = -(2**63), 2**64 - 1
MAX_LOGPROBS = 20
Rows = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of a request, and where it ends. The default values are PIPELINE's.

    Rules apply in this order: bias, penalties, bans, then top-p, top-k and min-p, each judged by itself at
    temperature 1, then temperature. The defaults (top-p and penalties) are not the model's own distribution:
    for reinforcement learning use `SamplingParams.policy`.

    Attributes:
        temperature: divides the logits of the tokens that remain; any finite number >= 0. 0 always takes the
            most probable token.
        top_k: only the ``top_k`` most probable tokens; 0 for all. Ties with the last of them remain, too.
        top_p: only the most probable tokens that together reach this probability; 1 for all.
        presence_penalty: subtracted from the logit of every token that was generated before (PIPELINE's
            ``alpha_presence``); the prompt does not count.
        frequency_penalty: subtracted once more for every time that it was (``alpha_frequency``).
        penalty_decay: factor on those counts at every step (``alpha_decay``).
        min_p: only tokens with at least this share of the largest probability; 0 for all.
        repetition_penalty: positive logits of tokens generated before are divided by it, negative ones
            multiplied; 1 for none, from 0.01 to 100.
        logit_bias: added to the logits of tokens, from -1e6 to 1e6.
        banned: tokens that are never chosen (``token_ban``).
        uncounted: tokens that get the presence penalty but are not counted. PIPELINE has blanks, tabs and
            digits here: `fla_jax.generation.uncounted`.
        seed: of the random choices, from -2**63 to 2**64 - 1, all 64 bits count; None for the number
            of completions asked for before. With ``n`` the i-th completion has ``seed + i``.
        max_tokens: largest number of new tokens.
        stop_tokens: tokens that end a completion; they are not part of its tokens (``token_stop``).
        stop: texts that end a completion; they are not part of its text. They need a tokenizer.
        n: completions of the prompt, which is read once.
        logprobs: None for none; 0 for the log-probability of every chosen token; up to 20 for those of as
            many most probable tokens as well. They are the model's: before all rules here.
        ignore_eos: goes on after the tokenizer's end-of-text token.

    Tokens take any sequence of integers, arrays too, and are kept as a tuple.

    Raises:
        ValueError: a value does not fit; the message names it.

    Example:
        >>> from fla_jax.generation import SamplingParams
        >>> SamplingParams(temperature=0)  # always the most probable token # doctest: +ELLIPSIS
        SamplingParams(temperature=0.0, top_k=0, top_p=0.85, ...)
        >>> SamplingParams(top_p=2)
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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    banned: Sequence[int] = ()
    uncounted: Sequence[int] = ()
    seed: int | None = None
    max_tokens: int = 256
    stop_tokens: Sequence[int] = ()
    stop: Sequence[str] = ()
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # one spelling of each value: equal settings are equal
        kept: dict[str, object] = {
            name: check_number(name, getattr(self, name), low, high) for name, (low, high) in _NUMBERS.items()
        }
        kept |= {name: _integers(name, getattr(self, name)) for name in _TOKENS}
        for name, low in (("top_k", 0), ("max_tokens", 0), ("n", 1)):
            kept[name] = check_integer(name, getattr(self, name), low)
        if self.seed is not None:
            kept["seed"] = check_integer("seed", self.seed, *_SEEDS)
        if self.logprobs is not None:
            kept["logprobs"] = check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if type(self.ignore_eos) is not bool:
            raise ValueError(f"ignore_eos must be True or False, got {shown(self.ignore_eos)}")
        kept["logit_bias"] = _bias(self.logit_bias)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or any(not isinstance(x, str) or not x for x in stop):
            raise ValueError(f"stop must be a sequence of texts that are not empty, got {shown(self.stop)}")
        kept["stop"] = tuple(stop)
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @classmethod
    def policy(cls, temperature: float = 1.0, **rest: object) -> Self:
        """The model's own distribution: no top-p and no penalties.

        Args:
            temperature: divides the logits.
            rest: other fields, such as ``max_tokens``.

        Example:
            >>> from fla_jax.generation import SamplingParams
            >>> SamplingParams.policy(logprobs=0).top_p
            1.0
        """
        own: dict[str, object] = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return cls(temperature, **(own | rest))  # type: ignore[arg-type]

    def arrays(self, vocab_size: int) -> SamplingArrays:
        """The rules as arrays of one row, see `sampling_arrays`."""
        return sampling_arrays([self], vocab_size)


def _integers(name: str, values: object) -> tuple[int, ...]:
    """A sequence of integers as a tuple; their range is checked when the vocabulary is known."""
    ids = as_integers(values)
    if ids is None:
        raise ValueError(f"{name} must be a sequence of tokens, which are integers, got {shown(values)}")
    return ids


def _bias(bias: object) -> dict[int, float]:
    """Numbers by token."""
    tokens = as_integers(bias) if isinstance(bias, Mapping) else None
    if not isinstance(bias, Mapping) or tokens is None:
        raise ValueError(f"logit_bias must map tokens to numbers, got {shown(bias)}")
    values = bias.values()
    numbers = [check_number("logit_bias", value, -_LARGEST_BIAS, _LARGEST_BIAS) for value in values]
    return dict(zip(tokens, numbers, strict=True))


class SamplingArrays(struct.PyTreeNode):
    """`SamplingParams` as arrays with a leading row axis: an argument of compiled functions, so that one
    program serves all values. B is the batch size, or 1 for rules of all rows.

    Attributes:
        temperature, top_p, presence_penalty, frequency_penalty, penalty_decay: [B] float32.
        min_logit: [B] float32, the logarithm of ``min_p``.
        repetition, inverse_repetition: [B] float32, the factors of negative and positive logits.
        top_k: [B] int32, the vocabulary's size for all.
        stop, uncounted: [B, V] booleans.
        bias: [B, V] float32, -inf for banned tokens; None where no row has any.

    Example:
        >>> from fla_jax.generation import SamplingParams
        >>> SamplingParams(top_k=5).arrays(vocab_size=100).stop.shape
        (1, 100)
    """

    temperature: Rows
    top_p: Rows
    presence_penalty: Rows
    frequency_penalty: Rows
    penalty_decay: Rows
    min_logit: Rows
    repetition: Rows
    inverse_repetition: Rows
    top_k: Rows
    stop: Rows
    uncounted: Rows
    bias: Rows | None


def sampling_arrays(requests: Sequence[SamplingParams], vocab_size: int) -> SamplingArrays:
    """The rules of each row for a vocabulary, NumPy arrays.

    Raises:
        ValueError: a token is not below ``vocab_size``, or all of them are banned.

    Example:
        >>> from fla_jax.generation import SamplingParams, sampling_arrays
        >>> sampling_arrays([SamplingParams(), SamplingParams(top_k=5)], 100).top_k
        array([100,   5], dtype=int32)
    """
    B = len(requests)
    stop, uncounted = (np.zeros((B, vocab_size), bool) for _ in range(2))
    bias = np.zeros((B, vocab_size), np.float32) if any(x.banned or x.logit_bias for x in requests) else None
    for row, request in enumerate(requests):
        for name in (*_TOKENS, "logit_bias"):
            ids = getattr(request, name)
            wrong = [token for token in ids if not 0 <= token < vocab_size]
            if wrong:
                raise ValueError(f"{name} must hold tokens from 0 to {vocab_size - 1}, got {shown(wrong[0])}")
        stop[row, list(request.stop_tokens)] = True
        uncounted[row, list(request.uncounted)] = True
        if bias is not None:
            bias[row, list(request.logit_bias)] = list(request.logit_bias.values())
            bias[row, list(request.banned)] = -np.inf
            if np.isneginf(bias[row]).all():
                raise ValueError(f"banned holds all {vocab_size} tokens: none is left to choose")

    def floats(name: str) -> np.ndarray:
        return np.array([getattr(request, name) for request in requests], np.float64)

    # float32's limits are as hot and as cold as makes a difference; 0 has a meaning
    temperature = floats("temperature")
    temperature = np.where(temperature == 0, 0, np.clip(temperature, float(_FLOAT32.tiny), LARGEST))
    with np.errstate(divide="ignore"):
        min_logit = np.log(floats("min_p"))
    repetition = floats("repetition_penalty")
    rules = {
        "temperature": temperature,
        "min_logit": min_logit,
        "repetition": repetition,
        "inverse_repetition": 1 / repetition,
    }
    for name in ("top_p", "presence_penalty", "frequency_penalty", "penalty_decay"):
        rules[name] = floats(name)
    top_k = [min(request.top_k or vocab_size, vocab_size) for request in requests]
    return SamplingArrays(
        **{name: x.astype(np.float32) for name, x in rules.items()},
        top_k=np.array(top_k, np.int32),
        stop=stop,
        uncounted=uncounted,
        bias=bias,
    )
