"""Cutting rows into stretches that are walked at the same time, where rows and heads alone are too few
programs to fill a GPU.

A stretch is affine in the state that enters it, ``S_out = M S_in + N``. A transfer kernel of the op finds M
and N of all stretches at once, and what each token reads of S_in (``reads`` [B, T, H, K]:
``o = reads^T S_in + ...``); then `split_h0` gives the state that enters each stretch and the normal kernel
runs on all of them. Where nothing is kept for a backward, RWKV-7's transfer kernel writes the rest of o as
well, and `add_entry_output` adds what is read of S_in, in place of a second walk (not in float32 for heads
over 64). The backward is the same with M^T: ``dS_in = M^T dS_out + sum_t reads_t do_t^T``. M, the state and
its gradient are float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.context_parallel import SequenceShard
from ..backend.triton import launch
from .chunk_host import ChunkPlan
from .shapes import like, tile
from .state_passing import add_entry_output_kernel, state_grad_kernel, state_passing_kernel


def _pass_states(
    transition: jax.Array, update: jax.Array, edge: jax.Array, num_splits: int, backward: bool
) -> tuple[jax.Array, jax.Array]:
    """The states at the near edges of all stretches, [B * splits, H, K, V], and at the last far edge."""
    B, H, K, V = edge.shape
    BK, BV = tile(K), min(16, tile(V))
    made = launch(
        state_passing_kernel,
        dict(transition_=transition, update_=update, edge_=edge),
        dict(
            states_=jax.ShapeDtypeStruct((B * num_splits, H, K, V), jnp.float32),
            last_=like(edge, jnp.float32),
        ),
        grid=(-(-V // BV), H, B),
        num_warps=4,
        num_stages=3 if BK <= 64 else 2,  # for M of 128 keys the smallest GPUs have no room
        H=H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        NUM_SPLITS=num_splits,
        DIAGONAL=transition.ndim == 3,
        REVERSE=backward,
    )
    return made["states_"], made["last_"]


def _by_row(x: jax.Array, num_splits: int) -> jax.Array:
    """[B * splits, ...] -> [B, splits, ...]."""
    return x.reshape(-1, num_splits, *x.shape[1:])


def split_h0(
    transition: jax.Array, update: jax.Array, initial: jax.Array, num_splits: int, shard: SequenceShard | None
) -> tuple[jax.Array, jax.Array]:
    """The states that enter all stretches, [B * splits, H, K, V], and those that leave the rows, from those
    that enter the rows, [B, H, K, V].

    ``M`` is [B * splits, H, K, K] or, where it is diagonal, [B * splits, H, K]; ``N`` [B * splits, H, K, V];
    all float32. There is more than one stretch, or these are those of one device's ``part`` of rows.
    """
    if shard is None:
        return _pass_states(transition, update, initial, num_splits, False)
    initial, final = shard.enter(_by_row(transition, num_splits), _by_row(update, num_splits), initial)
    return initial if num_splits == 1 else _pass_states(transition, update, initial, num_splits, False)[
        0
    ], final


def add_entry_output(
    plan: ChunkPlan, o_zero_state: jax.Array, q_entry: jax.Array, buffers: jax.Array, dtype: Any
) -> jax.Array:
    """The outputs [B, T, H, V], in ``dtype``: those from states of zero, ``own``, and what the tokens read of
    the states that enter their stretches.
    """
    (B, _, H, K), V, num_splits = q_entry.shape, o_zero_state.shape[-1], plan.config.num_splits
    split_len: Any = plan.ranges["split_len"]
    BV = min(64, tile(V))
    blocks = -(-V // BV)
    # 64 tokens in float32 have ptxas give up on some GPUs
    tokens, num_warps = (64, 4) if plan.store == jnp.bfloat16 else (32, 8)
    made = launch(
        add_entry_output_kernel,
        dict(
            o_zero_state_=o_zero_state,
            q_entry_=q_entry,
            states_=buffers,
            T=plan.ranges["T"],
            split_len=split_len,
        ),
        dict(o_=like(o_zero_state, dtype)),
        grid=(blocks * -(-split_len // tokens), H, B * num_splits),
        num_warps=num_warps,
        num_stages=1,
        c=plan.config.replaced(BK=tile(K), BV=BV),
        BT=tokens,
        NV=blocks,
    )
    return made["o_"]


def split_dht(
    plan: ChunkPlan,
    transition: jax.Array,
    q_entry: jax.Array,
    do: jax.Array,
    ds: jax.Array,
    shard: SequenceShard | None,
) -> jax.Array:
    """The gradients of the states that leave all stretches, [B * splits, H, K, V], from those that leave the
    rows, [B, H, K, V].
    """
    (B, _, H, K), V, num_splits = q_entry.shape, do.shape[-1], plan.config.num_splits
    BV = min(64, tile(V))
    made = launch(
        state_grad_kernel,
        dict(q_entry_=q_entry, do_=do, T=plan.ranges["T"], split_len=plan.ranges["split_len"]),
        dict(dh_=jax.ShapeDtypeStruct((B * num_splits, H, K, V), jnp.float32)),
        grid=(-(-V // BV), H, B * num_splits),
        num_warps=4,
        num_stages=3,
        c=plan.config.replaced(BK=tile(K), BV=BV),
    )
    o_zero_state = made["dh_"]
    if shard is not None:
        ds = shard.enter_backward(_by_row(transition, num_splits), _by_row(o_zero_state, num_splits), ds)
    return ds if num_splits == 1 else _pass_states(transition, o_zero_state, ds, num_splits, True)[0]
