"""Splits: a sequence is cut into splits that are scanned at the same time, where sequences and heads alone
are too few programs to fill a GPU.

A split is affine in the state h0 at its start: ``ht = transition h0 + update``. A ``chunk_state`` kernel of
the op computes both, and ``q_entry`` with ``o_t = q_entry_t^T h0 + o_zero_state_t``, for all splits at once.
Then `split_h0` passes the states, and the forward kernel runs on all splits. Without residuals RWKV-7's
chunk_state kernel writes ``o_zero_state`` too, and `add_entry_output` replaces the second scan. The backward
transposes: ``dh0 = transition^T dht + sum_t q_entry_t do_t^T``. Transitions, states and their gradients are
float32. RWKV-7's first split of a sequence on one device starts from the sequence's state: its update is its
final state, its transition and q_entry are zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.context_parallel import SequenceShard
from ..backend.triton import Launch, triton_call
from .chunk_plan import ChunkPlan
from .shapes import like, tile
from .state_passing import (
    EntryOutput,
    PassedStates,
    Passing,
    PassingConfig,
    SplitGrad,
    SplitOutput,
    add_entry_output_kernel,
    state_grad_kernel,
    state_passing_kernel,
)


def _pass_states(
    transition: jax.Array, update: jax.Array, edge: jax.Array, num_splits: int, reverse: bool
) -> PassedStates:
    B, H, K, V = edge.shape
    BK, BV = tile(K), min(16, tile(V))
    return triton_call(
        state_passing_kernel,
        Passing(transition, update, edge),
        out=PassedStates(
            states=jax.ShapeDtypeStruct((B * num_splits, H, K, V), jnp.float32), last=like(edge, jnp.float32)
        ),
        config=PassingConfig(H, K, V, BK, BV, num_splits, diagonal=transition.ndim == 3, reverse=reverse),
        grid=(-(-V // BV), H, B),
        launch=Launch(num_warps=4, num_stages=3 if BK <= 64 else 2),  # fits 99 KiB at 128 keys
    )


def _composed(
    transition: jax.Array, update: jax.Array, num_splits: int, reverse: bool
) -> tuple[jax.Array, jax.Array]:
    """The map of all splits of each sequence together, as if they were one: transition [B, H, K, K] (or [B,
    H, K]) and update [B, H, K, V]; with ``reverse`` the map of gradients, its transition transposed.
    """
    if num_splits == 1:
        is_transposed = reverse and transition.ndim == 4
        return jnp.swapaxes(transition, -1, -2) if is_transposed else transition, update
    H, K, V = update.shape[1:]
    B = update.shape[0] // num_splits
    if transition.ndim == 3:
        zeros = jnp.zeros((B, H, K, V), jnp.float32)
        passed = _pass_states(transition, update, zeros, num_splits, reverse)
        return jnp.prod(transition.reshape(B, num_splits, H, K), 1), passed.last
    pad = lambda x, before, after: jnp.pad(x, ((0, 0),) * 3 + ((before, after),))
    identity = jnp.broadcast_to(pad(jnp.eye(K)[None, None], 0, V), (B, H, K, K + V))
    last = _pass_states(transition, pad(update, K, 0), identity, num_splits, reverse).last
    return last[..., :K], last[..., K:]


def split_h0(
    transition: jax.Array, update: jax.Array, initial: jax.Array, num_splits: int, shard: SequenceShard | None
) -> tuple[jax.Array, jax.Array]:
    """States at the starts of all splits, [B * splits, H, K, V], and at the ends of the sequences, [B, H, K,
    V].

    Args:
        transition: [B * splits, H, K, K] or, if diagonal, [B * splits, H, K].
        update: [B * splits, H, K, V].
        initial: [B, H, K, V], states at the starts of the sequences.
        num_splits: of each sequence, more than one, or those of one device's shard of the sequences.
        shard: that shard.
    """
    if shard is None:
        passed = _pass_states(transition, update, initial, num_splits, reverse=False)
        return passed.states, passed.last
    initial, final = shard.enter(*_composed(transition, update, num_splits, reverse=False), initial)
    if num_splits == 1:
        return initial, final
    return _pass_states(transition, update, initial, num_splits, reverse=False).states, final


def add_entry_output(
    plan: ChunkPlan, o_zero_state: jax.Array, q_entry: jax.Array, h0: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Outputs [B, T, H, V] in ``dtype``: of zero states, plus what tokens read of the states at the starts of
    their splits.
    """
    (B, _, H, K), V, c = q_entry.shape, o_zero_state.shape[-1], plan.config
    BV = min(64, tile(V))
    blocks = -(-V // BV)
    # float32 tiles of 64 tokens spill on some GPUs
    BT, num_warps = (64, 4) if plan.store_dtype == jnp.bfloat16 else (32, 8)
    return triton_call(
        add_entry_output_kernel,
        EntryOutput(q_entry, o_zero_state, h0, plan.index.T, plan.index.split_len),
        out=SplitOutput(like(o_zero_state, dtype)),
        config=c.replace(BK=tile(K), BV=BV, BT=BT, num_blocks=blocks),
        grid=(blocks * -(-plan.index.split_len // BT), H, B * c.num_splits),
        launch=Launch(num_warps),
    ).o


def split_dht(
    plan: ChunkPlan,
    transition: jax.Array,
    q_entry: jax.Array,
    do: jax.Array,
    dht: jax.Array,
    shard: SequenceShard | None,
) -> jax.Array:
    """Gradients of the states at the ends of all splits, [B * splits, H, K, V], from those at the ends of the
    sequences, [B, H, K, V].
    """
    (B, _, H, K), V, c = q_entry.shape, do.shape[-1], plan.config
    BV = min(64, tile(V))
    update = triton_call(
        state_grad_kernel,
        EntryOutput(q_entry, do, None, plan.index.T, plan.index.split_len),
        out=SplitGrad(jax.ShapeDtypeStruct((B * c.num_splits, H, K, V), jnp.float32)),
        config=c.replace(BK=tile(K), BV=BV),
        grid=(-(-V // BV), H, B * c.num_splits),
        launch=Launch(num_warps=4, num_stages=3),
    ).dh
    if shard is not None:
        composed = _composed(transition, update, c.num_splits, reverse=True)
        dht = shard.enter_backward(*composed, dht)
    if c.num_splits == 1:
        return dht
    return _pass_states(transition, update, dht, c.num_splits, reverse=True).states
