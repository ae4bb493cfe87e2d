"""Log-probabilities of given tokens, for reinforcement learning, distillation and scoring."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..core.arguments import check_integer
from ..core.mesh import is_explicit, reshard, spec_of
from ..layers.base import check_lengths
from ..layers.token_blocks import token_blocks
from .losses import blocks_of_tokens
from .next_token import check_segment_ids, variables_of


def token_logprobs(
    model: nn.Module,
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    block_tokens: int = 4096,
    *,
    lora: PyTree = None,
) -> Float[Array, "B T-1"]:
    """The log-probability of every token but the first, given those before it.

    Differentiable in ``params`` and ``lora``.

    Logits are computed block by block and again in the backward pass, so that no array [B, T, V] is in
    memory. A mesh axis that splits T is gathered before the head.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        tokens: [B, T] integers, T >= 2.
        lengths: [B] integers, number of tokens of each sequence; None for T. Not together with
            ``segment_ids``.
        segment_ids: [B, T] integers, for packed documents: the state restarts where the number changes.
        block_tokens: positions whose logits a device computes at once; at least one of each sequence.
        lora: see `init_lora`; None for the parameters alone.

    Returns:
        [B, T - 1] in float32, or float64 for a model of that dtype: position t is the log-probability of
        ``tokens[:, t + 1]``. 0 where no token before it predicts a token: at or beyond ``lengths``, and for
        the first token of a document.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import token_logprobs
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(8)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> token_logprobs(model, params, tokens).shape
        (1, 7)
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens must have shape [B, T] with T >= 2, got {list(tokens.shape)}")
    check_segment_ids(tokens, segment_ids)
    check_lengths(lengths, tokens)
    block_tokens = check_integer("block_tokens", block_tokens, 1)
    variables, labels = variables_of(params, lora), tokens[:, 1:]
    ids = None if segment_ids is None else segment_ids[:, :-1]
    inputs = None if lengths is None else jnp.maximum(lengths - 1, 0)
    hidden, _ = model.apply(variables, tokens[:, :-1], segment_ids=ids, lengths=inputs, method="hidden")
    if is_explicit():
        hidden = reshard(hidden, spec_of(hidden)[0], None, None)

    @jax.checkpoint
    def of_block(x: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits: PyTree = model.apply(variables, x[0], method="logits")
        return _log_softmax_at(logits, x[1])

    T, parts = labels.shape[1], token_blocks(hidden)[0]
    block = max(1, min(T, block_tokens * parts // tokens.shape[0]))
    found = jax.lax.map(of_block, (blocks_of_tokens(hidden, block), blocks_of_tokens(labels, block)))
    found = jnp.moveaxis(found, 0, 1).reshape(tokens.shape[0], -1)[:, :T]
    if lengths is not None:
        found = jnp.where(jnp.arange(1, T + 1) < lengths[:, None], found, 0)
    if segment_ids is not None:
        found = jnp.where(segment_ids[:, 1:] == segment_ids[:, :-1], found, 0)
    return found


def _log_softmax_at(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """``log_softmax(logits)`` [..., V] at ``labels`` [...]; selected by comparison, without a scatter in the
    backward pass.
    """
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    return jnp.sum(jnp.where(is_label, logits, 0), -1) - jax.nn.logsumexp(logits, -1)
