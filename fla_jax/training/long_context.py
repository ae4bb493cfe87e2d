"""Training on sequences longer than memory allows: chunk by chunk, with the state passed on (RWKV's "infinite
context" training).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ..core.arguments import check_integer
from ..core.mesh import is_explicit, reshard, vary_alike
from ..layers.state import RWKVState, check_state
from ..models import head_kernel
from .carry import batch_first, kept
from .losses import chunked_cross_entropy, divisor
from .next_token import check_segment_ids


class _Chunks(NamedTuple):
    """Chunks of a batch: arrays [..., B, chunk_size]; the last two are None for whole sequences."""

    tokens: jax.Array
    labels: jax.Array
    weights: jax.Array
    segment_ids: jax.Array | None
    continues: jax.Array | None  # [..., B]: the first token is of the segment of the token before


def chunked_loss(
    model: nn.Module,
    params: PyTree,
    tokens: Int[Array, "B T+1"],
    mask: Shaped[Array, "B T"] | None = None,
    state: RWKVState | None = None,
    *,
    chunk_size: int,
    l2wrap: float = 1e-4,
    segment_ids: Int[Array, "B T+1"] | None = None,
) -> tuple[Float[Array, ""], RWKVState]:
    """The next-token loss of long sequences, computed in chunks; exact in value and gradients.

    Only the states between chunks are saved for the backward pass, which recomputes one chunk's activations
    at a time: memory for one chunk and a state a chunk, at the cost of one more forward pass.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        tokens: [B, T + 1] integers: the first T are the input, the last T the labels. T is a multiple of
            ``chunk_size``. To continue a text, start the next call with the last token of this one.
        mask: [B, T] booleans, or weights of the labels, constants for the gradient; None for all.
        state: before the first token; None for zeros.
        chunk_size: tokens per chunk.
        l2wrap: strength of L2Wrap, see `fla_jax.training.cross_entropy`.
        segment_ids: [B, T + 1] integers, for packed documents: the state restarts where the number changes,
            and a document's last token predicts nothing. ``state`` is that before the first one.

    Returns:
        ``(loss, state)``: the mean over all labels, a float32 scalar (float64 for a model of that dtype), and
        the state after the last input token.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.training import chunked_loss
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=32, num_layers=1, head_dim=16))
        >>> tokens = jnp.arange(65)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> loss_of = lambda p: chunked_loss(model, p, tokens, chunk_size=16)
        >>> (loss, state), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    """
    chunks, total = _split(model, tokens, mask, chunk_size, segment_ids=segment_ids)
    return _scan_chunks(model, params, chunks, _state(model, params, tokens, state), total, l2wrap)


def truncated_value_and_grad(
    model: nn.Module, *, chunk_size: int, chunks_per_gradient: int = 1, l2wrap: float = 1e-4
) -> Callable[..., tuple[tuple[jax.Array, RWKVState], PyTree]]:
    """Value and gradient of `chunked_loss` with truncated back-propagation through time.

    Chunks form groups of ``chunks_per_gradient``. The state passes from group to group, gradients only within
    a group; memory does not depend on the number of groups. With a single group the result is exact.

    Returns:
        A function ``(params, tokens, mask=None, state=None) -> ((loss, state), gradients)`` with the
        arguments and errors of `chunked_loss`, to be compiled by `jax.jit`; T must be a multiple of
        ``chunk_size * chunks_per_gradient``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.training import truncated_value_and_grad
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=32, num_layers=1, head_dim=16))
        >>> tokens = jnp.arange(65)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> value_and_grad = truncated_value_and_grad(model, chunk_size=16, chunks_per_gradient=2)
        >>> (loss, state), grads = jax.jit(value_and_grad)(params, tokens)
    """
    chunks_per_gradient = check_integer("chunks_per_gradient", chunks_per_gradient, 1)

    def value_and_grad(
        params: PyTree, tokens: jax.Array, mask: jax.Array | None = None, state: RWKVState | None = None
    ) -> tuple[tuple[jax.Array, RWKVState], PyTree]:
        chunks, total = _split(model, tokens, mask, chunk_size, chunks_per_gradient)
        loss_fn = jax.value_and_grad(
            lambda params, group, state: _scan_chunks(model, params, group, state, total, l2wrap),
            has_aux=True,
        )

        def step(carry: PyTree, group: _Chunks) -> tuple[PyTree, None]:
            state, loss, grads = carry
            (more, state), new = loss_fn(params, group, state)
            return (
                state,
                loss + more,
                jax.tree.map(lambda sum, x: sum + x.astype(sum.dtype), grads, new),
            ), None

        groups = jax.tree.map(lambda x: x.reshape(-1, chunks_per_gradient, *x.shape[1:]), chunks)
        grads = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), params)
        # gradients vary like parameters, not like the loss, over the axes of a checked shard_map
        start = *vary_alike((_state(model, params, tokens, state), _zero(model)), params, chunks), grads
        (state, loss, grads), _ = jax.lax.scan(step, start, groups)
        return (loss, state), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    return value_and_grad


def _scan_chunks(
    model: nn.Module, params: PyTree, chunks: _Chunks, state: RWKVState, total: jax.Array, l2wrap: float
) -> tuple[jax.Array, RWKVState]:
    """Sum over the chunks of weighted losses, divided by ``total``."""

    @jax.checkpoint  # without a policy: anything saved would grow with the number of chunks
    def chunk_loss(params: PyTree, state: RWKVState, chunk: _Chunks) -> tuple[jax.Array, RWKVState]:
        tokens, labels, weights, ids, continues = chunk
        if continues is not None:
            state = batch_first(kept(batch_first(state), continues))
        found: PyTree = model.apply({"params": params}, tokens, state, ids, method="hidden")
        hidden, state = found
        mean = chunked_cross_entropy(hidden, head_kernel(params), labels, weights, l2wrap)
        return mean * (divisor(jnp.sum(weights)) / total), state

    def step(carry: tuple[jax.Array, RWKVState], chunk: _Chunks) -> tuple[tuple[jax.Array, RWKVState], None]:
        loss, state = carry
        more, state = chunk_loss(params, state, chunk)
        return (loss + more, state), None

    return jax.lax.scan(step, vary_alike((_zero(model), state), params, chunks), chunks)[0]


def _zero(model: nn.Module) -> jax.Array:
    """A zero of the dtype of the model's losses."""
    return jnp.zeros((), jnp.promote_types(model.config.dtype, jnp.float32))


def _state(model: nn.Module, params: PyTree, tokens: jax.Array, state: RWKVState | None) -> RWKVState:
    zeros = model.init_state(tokens.shape[0])
    if state is None:
        state = zeros
    check_state(state, zeros)
    state = jax.tree.map(lambda x, zero: x.astype(zero.dtype), state, zeros)
    if not is_explicit():
        return state

    def read(params: PyTree, token: jax.Array, state: RWKVState) -> PyTree:
        return model.apply({"params": params}, token, state, method="hidden")[1]

    # a scan's carry has one type, so the state starts with the sharding that the model returns
    after = jax.eval_shape(read, params, tokens[:, :1], state)
    return jax.tree.map(lambda x, like: reshard(x, *like.sharding.spec), state, after)


def _split(
    model: nn.Module,
    tokens: jax.Array,
    mask: jax.Array | None,
    chunk_size: int,
    group: int = 1,
    segment_ids: jax.Array | None = None,
) -> tuple[_Chunks, jax.Array]:
    """The chunks [n, B, chunk_size], and the sum of the weights (1 where it is 0)."""
    chunk_size = check_integer("chunk_size", chunk_size, 1)
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens must have shape [B, T + 1] with T >= 1, got {list(tokens.shape)}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    B, T = tokens.shape[0], tokens.shape[1] - 1
    if T % (chunk_size * group):
        what = f"chunk_size = {chunk_size}"
        if group > 1:
            what = f"chunk_size * chunks_per_gradient = {chunk_size} * {group}"
        raise ValueError(f"tokens must have shape [B, T + 1] with T a multiple of {what}, got T = {T}")
    if mask is not None and mask.shape != (B, T):
        raise ValueError(
            f"mask must have shape [B, T] = {[B, T]}, that of tokens without the first, got "
            f"{list(mask.shape)}"
        )
    check_segment_ids(tokens, segment_ids)
    dtype = _zero(model).dtype
    weights = jax.lax.stop_gradient(jnp.ones((B, T), dtype) if mask is None else mask.astype(dtype))
    cut = lambda x: jnp.moveaxis(x.reshape(B, -1, chunk_size), 1, 0)
    ids = continues = None
    if segment_ids is not None:
        same = segment_ids[:, 1:] == segment_ids[:, :-1]
        weights, ids = jnp.where(same, weights, 0), cut(segment_ids[:, :-1])
        continues = jnp.concatenate([jnp.ones((1, B), bool), ids[1:, :, 0] == ids[:-1, :, -1]])
    chunks = _Chunks(cut(tokens[:, :-1]), cut(tokens[:, 1:]), cut(weights), ids, continues)
    return chunks, divisor(jnp.sum(weights))
