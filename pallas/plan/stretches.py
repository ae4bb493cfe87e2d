"""Cutting rows into stretches that are walked at the same time, where rows and heads alone are too few programs to fill a GPU.

A stretch is affine in the state that enters it: ``S_out = M S_in + N``. A transfer kernel of the op finds M and N of all stretches at once, and what each token
reads of S_in (``reads`` [B, T, H, K]: ``o = reads^T S_in + ...``); then `enter` gives the state that enters each stretch and the normal kernel runs on all of
them. The backward is the same with M^T: ``dS_in = M^T dS_out + sum_t reads_t do_t^T``. With M, the state and its gradient in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ...core.sequence import Part
from ..run.triton import launch
from .chunked import Plan, tile


@triton.jit
def combine_kernel(
    M_, N_, edge_,
    states_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, DIAGONAL: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, rows): the state at the near edge of every stretch, from ``edge_`` [B, H, K, V] on; from the end with ``BACKWARD``."""
    iv, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ok, ov = tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    mk, mv = ok < K, ov < V
    off, mask = ok[:, None] * V + ov[None, :], mk[:, None] & mv[None, :]
    S = tl.load(edge_ + (row * H + h).to(tl.int64) * (K * V) + off, mask=mask, other=0.0)
    for i in range(0, SPLITS):
        s = SPLITS - 1 - i if BACKWARD else i
        head = ((row * SPLITS + s) * H + h).to(tl.int64)
        tl.store(states_ + head * (K * V) + off, S, mask=mask)
        N = tl.load(N_ + head * (K * V) + off, mask=mask, other=0.0)
        if DIAGONAL:
            S = S * tl.load(M_ + head * K + ok, mask=mk, other=0.0)[:, None] + N
        else:
            M = tl.load(
                M_ + head * (K * K) + ok[:, None] * K + ok[None, :], mask=mk[:, None] & mk[None, :], other=0.0
            )
            S = tl.dot(tl.trans(M) if BACKWARD else M, S, N, input_precision="tf32x3")


@triton.jit
def gather_kernel(
    reads_, do_, T, span,
    D_,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Grid (value blocks, heads, stretches): ``sum_t reads_t do_t^T`` [K, V] of each stretch."""
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    iv, h, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ot, ok, ov = tl.arange(0, 32), tl.arange(0, BK), iv * BV + tl.arange(0, BV)
    start = (p % SPLITS) * span
    left = tl.minimum(span, T - start)
    first = ((p // SPLITS).to(tl.int64) * T + start) * H + h
    acc = tl.zeros([BK, BV], tl.float32)
    for n in range(0, tl.cdiv(left, 32)):
        t = n * 32 + ot
        reads = tl.load(
            reads_ + (first + t[None, :] * H) * K + ok[:, None],
            mask=(t < left)[None, :] & (ok < K)[:, None],
            other=0.0,
        ).to(DOT)
        do = tl.load(
            do_ + (first + t[:, None] * H) * V + ov[None, :],
            mask=(t < left)[:, None] & (ov < V)[None, :],
            other=0.0,
        ).to(DOT)
        acc = tl.dot(reads, do, acc, input_precision=PREC)
    head = (p * H + h).to(tl.int64)
    tl.store(
        D_ + head * (K * V) + ok[:, None] * V + ov[None, :], acc, mask=(ok < K)[:, None] & (ov < V)[None, :]
    )


def _combine(M: jax.Array, N: jax.Array, edge: jax.Array, splits: int, backward: bool) -> jax.Array:
    B, H, K, V = edge.shape
    BK, BV = tile(K), min(16, tile(V))
    out = jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32)
    return launch(
        combine_kernel, M, N, edge, out=out, grid=(-(-V // BV), H, B), num_warps=4, num_stages=2, H=H, K=K, V=V, BK=BK, BV=BV, SPLITS=splits,
        DIAGONAL=M.ndim == 3, BACKWARD=backward,
    )  # fmt: skip


def _by_row(x: jax.Array, splits: int) -> jax.Array:
    """[B * splits, ...] -> [B, splits, ...]."""
    return x.reshape(-1, splits, *x.shape[1:])


def enter(
    M: jax.Array, N: jax.Array, initial: jax.Array, splits: int, part: Part | None
) -> tuple[jax.Array, jax.Array | None]:
    """The states that enter all stretches, [B * splits, H, K, V], from those that enter the rows, [B, H, K, V].

    ``M`` is [B * splits, H, K, K] or, where it is diagonal, [B * splits, H, K]; ``N`` [B * splits, H, K, V]; all float32. Where these are one
    device's stretches (``part``), the states that leave the rows come as well.
    """
    final = None
    if part is not None:
        initial, final = part.enter(_by_row(M, splits), _by_row(N, splits), initial)
    return initial if splits == 1 else _combine(M, N, initial, splits, False), final


def enter_backward(
    plan: Plan, M: jax.Array, reads: jax.Array, do: jax.Array, ds: jax.Array, part: Part | None
) -> jax.Array:
    """The gradients of the states that leave all stretches, [B * splits, H, K, V], from those that leave the rows, [B, H, K, V]."""
    (B, _, H, K), V, splits = reads.shape, do.shape[-1], plan.splits
    BK, BV = tile(K), min(64, tile(V))
    out = jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32)
    own = launch(
        gather_kernel, reads, do, *plan.lengths, out=out, grid=(-(-V // BV), H, B * splits), num_warps=4, num_stages=3,
        H=H, K=K, V=V, BK=BK, BV=BV, SPLITS=splits, HALF=plan.options["HALF"], PREC=plan.options["PREC"],
    )  # fmt: skip
    if part is not None:
        ds = part.enter_backward(_by_row(M, splits), _by_row(own, splits), ds)
    return ds if splits == 1 else _combine(M, own, ds, splits, True)
