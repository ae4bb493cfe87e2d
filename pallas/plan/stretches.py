"""Cutting rows into stretches that are walked at the same time, where rows and heads alone are too few
programs to fill a GPU.

A stretch is affine in the state that enters it, ``S_out = M S_in + N``. A transfer kernel of the op finds M
and N of all stretches at once, and what each token reads of S_in (``reads`` [B, T, H, K]:
``o = reads^T S_in + ...``); then `enter` gives the state that enters each stretch and the normal kernel runs
on all of them. Where nothing is kept for a backward, RWKV-7's transfer kernel writes the rest of o as well,
and `with_entering` adds what is read of S_in, in place of a second walk (not in float32 for heads over 64).
The backward is the same with M^T: ``dS_in = M^T dS_out + sum_t reads_t do_t^T``. M, the state and its
gradient are float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.sequence import Part
from ..device.stretches import combine_kernel, gather_kernel, reads_kernel
from ..run.triton import launch
from .chunked import ChunkedPlan
from .shapes import like, tile


def _combine(
    M: jax.Array, N: jax.Array, edge: jax.Array, splits: int, backward: bool
) -> tuple[jax.Array, jax.Array]:
    """The states at the near edges of all stretches, [B * splits, H, K, V], and at the last far edge."""
    B, H, K, V = edge.shape
    BK, BV = tile(K), min(16, tile(V))
    made = launch(
        combine_kernel,
        dict(M_=M, N_=N, edge_=edge),
        dict(states_=jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32), last_=like(edge, jnp.float32)),
        grid=(-(-V // BV), H, B),
        num_warps=4,
        num_stages=3 if BK <= 64 else 2,  # for M of 128 keys the smallest GPUs have no room
        H=H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        SPLITS=splits,
        DIAGONAL=M.ndim == 3,
        BACKWARD=backward,
    )
    return made["states_"], made["last_"]


def _by_row(x: jax.Array, splits: int) -> jax.Array:
    """[B * splits, ...] -> [B, splits, ...]."""
    return x.reshape(-1, splits, *x.shape[1:])


def enter(
    M: jax.Array, N: jax.Array, initial: jax.Array, splits: int, part: Part | None
) -> tuple[jax.Array, jax.Array]:
    """The states that enter all stretches, [B * splits, H, K, V], and those that leave the rows, from those
    that enter the rows, [B, H, K, V].

    ``M`` is [B * splits, H, K, K] or, where it is diagonal, [B * splits, H, K]; ``N`` [B * splits, H, K, V];
    all float32. There is more than one stretch, or these are those of one device's ``part`` of rows.
    """
    if part is None:
        return _combine(M, N, initial, splits, False)
    initial, final = part.enter(_by_row(M, splits), _by_row(N, splits), initial)
    return initial if splits == 1 else _combine(M, N, initial, splits, False)[0], final


def with_entering(
    plan: ChunkedPlan, own: jax.Array, reads: jax.Array, states: jax.Array, dtype: Any
) -> jax.Array:
    """The outputs [B, T, H, V], in ``dtype``: those from states of zero, ``own``, and what the tokens read of
    the states that enter their stretches.
    """
    (B, _, H, K), V, splits = reads.shape, own.shape[-1], plan.mode.splits
    span: Any = plan.ranges["span"]
    BV = min(64, tile(V))
    blocks = -(-V // BV)
    # 64 tokens in float32 have ptxas give up on some GPUs
    tokens, num_warps = (64, 4) if plan.store == jnp.bfloat16 else (32, 8)
    made = launch(
        reads_kernel,
        dict(own_=own, reads_=reads, states_=states, T=plan.ranges["T"], span=span),
        dict(y_=like(own, dtype)),
        grid=(blocks * -(-span // tokens), H, B * splits),
        num_warps=num_warps,
        num_stages=1,
        mode=plan.mode.replaced(BK=tile(K), BV=BV),
        TILE=tokens,
        BLOCKS=blocks,
    )
    return made["y_"]


def enter_backward(
    plan: ChunkedPlan, M: jax.Array, reads: jax.Array, do: jax.Array, ds: jax.Array, part: Part | None
) -> jax.Array:
    """The gradients of the states that leave all stretches, [B * splits, H, K, V], from those that leave the
    rows, [B, H, K, V].
    """
    (B, _, H, K), V, splits = reads.shape, do.shape[-1], plan.mode.splits
    BV = min(64, tile(V))
    made = launch(
        gather_kernel,
        dict(reads_=reads, do_=do, T=plan.ranges["T"], span=plan.ranges["span"]),
        dict(D_=jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32)),
        grid=(-(-V // BV), H, B * splits),
        num_warps=4,
        num_stages=3,
        mode=plan.mode.replaced(BK=tile(K), BV=BV),
    )
    own = made["D_"]
    if part is not None:
        ds = part.enter_backward(_by_row(M, splits), _by_row(own, splits), ds)
    return ds if splits == 1 else _combine(M, own, ds, splits, True)[0]
