"""Cutting rows into stretches that are walked at the same time, where rows and heads alone are too few
programs to fill a GPU.

A stretch is affine in the state that enters it: ``S_out = M S_in + N``. A transfer kernel of the op finds M
and N of all stretches at once, and what each token reads of S_in (``reads`` [B, T, H, K]:
``o = reads^T S_in + ...``); then `enter` gives the state that enters each stretch and the normal kernel runs
on all of them. The backward is the same with M^T: ``dS_in = M^T dS_out + sum_t reads_t do_t^T``. M, the state
and its gradient are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.sequence import Part
from ..device.stretches import combine_kernel, gather_kernel
from ..run.triton import launch
from .chunked import ChunkedPlan
from .shapes import tile


def _combine(M: jax.Array, N: jax.Array, edge: jax.Array, splits: int, backward: bool) -> jax.Array:
    B, H, K, V = edge.shape
    BK, BV = tile(K), min(16, tile(V))
    made = launch(
        combine_kernel,
        dict(M_=M, N_=N, edge_=edge),
        dict(states_=jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32)),
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
    return made["states_"]


def _by_row(x: jax.Array, splits: int) -> jax.Array:
    """[B * splits, ...] -> [B, splits, ...]."""
    return x.reshape(-1, splits, *x.shape[1:])


def enter(
    M: jax.Array, N: jax.Array, initial: jax.Array, splits: int, part: Part | None
) -> tuple[jax.Array, jax.Array | None]:
    """The states that enter all stretches, [B * splits, H, K, V], from those that enter the rows,
    [B, H, K, V].

    ``M`` is [B * splits, H, K, K] or, where it is diagonal, [B * splits, H, K]; ``N`` [B * splits, H, K, V];
    all float32. Where these are the stretches of one device's ``part`` of rows, the states that leave the
    rows come as well.
    """
    final = None
    if part is not None:
        initial, final = part.enter(_by_row(M, splits), _by_row(N, splits), initial)
    return initial if splits == 1 else _combine(M, N, initial, splits, False), final


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
    return ds if splits == 1 else _combine(M, own, ds, splits, True)
