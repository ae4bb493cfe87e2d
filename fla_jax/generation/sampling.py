"""Choosing the next token by the rules of the ``rwkv`` package's PIPELINE, and those of other servers.

In this order: bias, repetition, presence and frequency penalties, bans, top-p, top-k, min-p, temperature.

Source: PyPI ``rwkv`` 0.8.32, ``rwkv/utils.py`` (``PIPELINE.generate`` and ``PIPELINE.sample_logits``); the
repetition penalty is CTRL's (Keskar et al., 2019, section 4.1), min-p that of Nguyen et al., 2024.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from .sampling_params import LARGEST, Rows, SamplingArrays

UNDEFINED = -2  # instead of a token, where there are no logits to choose from
_GROUP = 64  # tokens of the vocabulary whose largest logit decides whether `_top_k` looks at them


class TokenCounts(struct.PyTreeNode):
    """What was generated so far, [B, V] each: whether a token occurred at all, and its decayed count, which
    is 0 for those that did not.

    Example:
        >>> from fla_jax.generation import TokenCounts
        >>> TokenCounts.none(batch=2, vocab_size=100).count.shape
        (2, 100)
    """

    seen: jax.Array
    count: jax.Array

    @classmethod
    def none(cls, batch: int, vocab_size: int) -> TokenCounts:
        """Nothing yet."""
        return cls(jnp.zeros((batch, vocab_size), bool), jnp.zeros((batch, vocab_size), jnp.float32))

    def add(self, rules: SamplingArrays, tokens: jax.Array) -> TokenCounts:
        """After one more token a row, [B]: all counts decay, and then the new one grows by 1."""
        new = jnp.arange(self.seen.shape[1]) == tokens[:, None]
        counted = new & ~of_tokens(rules.uncounted, tokens)[:, None]
        return TokenCounts(self.seen | new, self.count * _column(rules.penalty_decay) + counted)


def sample(
    logits: jax.Array, params: SamplingArrays, key: jax.Array, counts: TokenCounts
) -> tuple[jax.Array, jax.Array, TokenCounts]:
    """Chooses one token a row, for decoding loops of one's own; works under `jax.jit`.

    Args:
        logits: [B, V], the model's.
        params: from `sampling_arrays`, of B rows or of one row for all.
        key: [B] random keys, one a row, or a single one, which is split. A row's choice does not depend on
            its neighbours.
        counts: of the tokens before, `TokenCounts.none` at first.

    Returns:
        ``(tokens [B] int32, logprobs [B], counts)``: -2 for rows whose logits hold NaN or have no finite
        largest one; the model's log-probability of each token, before all rules; the new counts.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import SamplingParams, TokenCounts, sample
        >>> logits, greedy = jnp.array([[0.0, 2.0, 1.0]]), SamplingParams(temperature=0).arrays(3)
        >>> tokens, logprobs, counts = sample(logits, greedy, jax.random.key(0), TokenCounts.none(1, 3))
        >>> tokens.tolist(), counts.count.tolist()
        ([1], [[0.0, 1.0, 0.0]])
    """
    keys = jax.random.split(key, logits.shape[0]) if key.ndim == 0 else key
    tokens, counts = choose(params, logits, counts, keys)
    return tokens, logprobs(logits, tokens)[0], counts


def logprobs(
    logits: jax.Array, tokens: jax.Array, k: int = 0
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The model's log-probability of a token a row, [B], and the ``k`` most probable tokens of each row with
    theirs, [B, k] each; None for k = 0.
    """
    wide = _wide(logits)
    if k == 0:
        highest = jnp.max(wide, -1, keepdims=True)
    else:
        top, top_tokens = _top_k(wide, min(k, logits.shape[-1]))
        highest = top[:, :1]
    # differences first: they are exact where logits are large
    log_sum = jnp.log(jnp.sum(jnp.exp(wide - highest), -1, keepdims=True))
    own = (of_tokens(wide, tokens)[:, None] - highest - log_sum)[:, 0]
    return (own, None, None) if k == 0 else (own, top_tokens.astype(jnp.int32), top - highest - log_sum)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` of rows [B, V], which on a GPU would sort whole rows: of only the k groups of tokens
    with the largest maxima, which hold the k largest numbers.
    """
    B, V = x.shape
    if 4 * k * _GROUP > V:
        return jax.lax.top_k(x, k)
    groups = jnp.pad(x, ((0, 0), (0, -V % _GROUP)), constant_values=-jnp.inf).reshape(B, -1, _GROUP)
    # in rising order, so that the first of equal numbers comes first
    chosen = jnp.sort(jax.lax.top_k(jnp.max(groups, -1), k)[1], -1)
    candidates = jnp.take_along_axis(groups, chosen[:, :, None], 1).reshape(B, -1)
    top, at = jax.lax.top_k(candidates, k)
    return top, jnp.take_along_axis(chosen, at // _GROUP, -1) * _GROUP + at % _GROUP


def allowed(rules: SamplingArrays, logits: jax.Array) -> jax.Array:
    """Which tokens top-p and top-k leave: booleans like ``logits`` [B, V], at least one a row.

    Top-p: the token at which the sum over falling probabilities reaches ``top_p`` is the least probable that
    stays. PIPELINE at ``top_p = 1`` keeps the most probable token alone whenever rounding leaves that sum
    below 1; here 1 means all. Tokens with the logit of the last that stays do so, too; logits are compared,
    for probabilities of many tokens may all be 0 in float32.
    """
    logits, top_p = _wide(logits), _column(rules.top_p)
    falling = -jnp.sort(-logits, axis=-1)
    reached = jnp.sum(jnp.cumsum(jax.nn.softmax(falling, -1), -1) < top_p, -1, keepdims=True)
    threshold = jnp.take_along_axis(falling, jnp.minimum(reached, logits.shape[-1] - 1), -1)
    by_p = jnp.where(top_p < 1, threshold, -jnp.inf)
    last = jnp.minimum(_column(rules.top_k), logits.shape[-1]) - 1
    return (logits >= by_p) & (logits >= jnp.take_along_axis(falling, last, -1))


def adjusted(rules: SamplingArrays, logits: jax.Array, token_counts: TokenCounts) -> jax.Array:
    """Logits whose softmax is what the next token is drawn from.

    Args:
        rules: from `sampling_arrays`.
        logits: [B, V], the model's.
        token_counts: of the tokens before.

    Returns:
        [B, V] float32 (float64 for float64 logits): 0 for the most probable token, -inf for those that cannot
        come. NaN throughout for a row with a NaN or with infinity as its largest logit.
    """
    logits = penalised(rules, logits, token_counts)
    largest = jnp.max(logits, -1, keepdims=True)
    greedy = jnp.asarray(rules.temperature == 0)
    # sorting is most of the work here: only where a row needs it
    sorts = ~greedy & ((rules.top_p < 1) | (rules.top_k < logits.shape[-1]))
    everything = lambda x: jnp.ones(x.shape, bool)
    keep = jax.lax.cond(jnp.any(sorts), lambda x: allowed(rules, x), everything, logits)

    def best(x: jax.Array, keep: jax.Array) -> jax.Array:
        first = jnp.arange(x.shape[-1]) == jnp.argmax(x, -1, keepdims=True)
        return jnp.where(_column(greedy), first, keep)

    keep = jax.lax.cond(jnp.any(greedy), best, lambda x, keep: keep, logits, keep)
    keep &= (logits > -jnp.inf) & (logits >= largest + _column(rules.min_logit))
    # What may not come is masked last: -inf divided by a large temperature can be NaN on a GPU or a CPU,
    # which multiply by the reciprocal and flush that to 0.
    tempered = (logits - largest) / _column(jnp.where(greedy, 1, rules.temperature))
    # an explicit test: XLA's maximum of many numbers on a CPU ignores NaN
    defined = jnp.isfinite(largest) & ~jnp.any(jnp.isnan(logits), -1, keepdims=True)
    return jnp.where(defined, jnp.where(keep, tempered, -jnp.inf), jnp.nan)


def penalised(rules: SamplingArrays, logits: jax.Array, token_counts: TokenCounts) -> jax.Array:
    """Logits [B, V], float32 at least, with bias and penalties, and -inf for what is banned."""
    logits = _wide(logits)
    if rules.bias is not None:
        logits = jnp.where(rules.bias > -jnp.inf, logits + rules.bias, -jnp.inf)
    repeated = logits * jnp.where(logits > 0, _column(rules.inverse_repetition), _column(rules.repetition))
    logits = jnp.where(token_counts.seen, repeated, logits)
    penalties = token_counts.seen * _column(rules.presence_penalty)
    penalties += token_counts.count * _column(rules.frequency_penalty)
    # penalties near float32's largest number must not add up to infinity, which is for what is forbidden
    return logits - jnp.clip(penalties, -LARGEST, LARGEST)


def choose(
    rules: SamplingArrays,
    logits: jax.Array,
    token_counts: TokenCounts,
    keys: jax.Array,
    implementation: str = "xla",
) -> tuple[jax.Array, TokenCounts]:
    """Chooses one token a row.

    Args:
        rules: from `sampling_arrays`.
        logits: [B, V], the model's.
        token_counts: of the tokens before.
        keys: [B], from `row_keys`, one a row, so that a row's choice does not depend on its neighbours.
        implementation: ``"xla"``, or ``"triton"`` (NVIDIA GPUs, no float64), which sorts nothing and chooses
            the same tokens, but for scores or sums of probabilities that are equal to rounding.

    Returns:
        ``(tokens [B] int32, counts)``: `UNDEFINED` for rows whose logits hold NaN or have no finite largest
        one, and the counts with the new tokens.
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


def of_tokens(rows: Rows, tokens: jax.Array) -> jax.Array:
    """The entry [B] of each row of [B or 1, V] at its token; undefined for what is no token."""
    rows = jnp.broadcast_to(rows, (*tokens.shape, rows.shape[-1]))
    return jnp.take_along_axis(rows, tokens[:, None], -1, mode="clip")[:, 0]


def _column(x: Rows) -> Rows:
    return x[:, None]


def _wide(logits: jax.Array) -> jax.Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
