"""Calls the kernels that sum over values what the gradients by pairs of tokens need."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..backend.triton import INTERPRET, Launch, triton_call
from .shapes import tile
from .token_pairs import (
    PairConfig,
    Scores,
    States,
    StateSums,
    TokenValues,
    scores_kernel,
    state_sums_kernel,
)
from .token_scan_host import ScanPlan

KEYS = 32  # of a program of the gradients, in one warp
STATE_KEYS, VALUES = 32, 64  # of a state at a time
PAIR_LAUNCH, STATE_LAUNCH, SCORES_LAUNCH = Launch(num_warps=1), Launch(num_warps=2), Launch(num_warps=1)


class ValueSums(NamedTuple):
    """Inputs of gradients by pairs: which lines are before, at and after each token (`load_lines`), sums over
    values with S0 and with D, and scores.
    """

    lines: jax.Array
    reads: StateSums
    writes: StateSums
    scores: Scores


def pair_config(plan: ScanPlan, BK: int, scale: float = 1.0) -> PairConfig:
    """The config of programs that take ``BK`` keys."""
    c = plan.config
    return PairConfig(
        H=c.H,
        K=c.K,
        V=c.V,
        BK=min(BK, tile(c.K)),
        BV=min(VALUES, tile(c.V)),
        interval=c.interval,
        segments=c.segments,
        packed=c.packed,
        scale=scale,
        tf32x3=not INTERPRET,
    )


def pair_grid(plan: ScanPlan, BK: int) -> tuple[int, int, int]:
    """Blocks of ``BK`` keys, heads, intervals."""
    return -(-plan.config.K // BK), plan.config.H, plan.num_intervals


def sum_over_values(
    plan: ScanPlan,
    read: TokenValues,
    written: TokenValues,
    states: jax.Array,
    dstates: jax.Array,
    scale: float,
) -> ValueSums:
    """All sums over values.

    Args:
        plan: of the call.
        read: what each reader's output meets.
        written: what each writer writes.
        states: [.., H, K, V], at the starts of intervals.
        dstates: likewise, gradients of those at their ends.
        scale: factor of do.
    """
    C, K = plan.config.interval, plan.config.K
    two = read.second is not None
    reads, product = StateSums(plan.sums(C, K), plan.sums(C, K) if two else None, None), plan.sums(K)
    grid, N = pair_grid(plan, STATE_KEYS), 2 if two else 1

    def state_sums(values: TokenValues, states: States, out: StateSums, scale: float) -> StateSums:
        return triton_call(
            state_sums_kernel,
            values,
            states,
            plan.index,
            out=out,
            config=pair_config(plan, STATE_KEYS, scale),
            grid=grid,
            launch=STATE_LAUNCH,
        )

    scores = triton_call(
        scores_kernel,
        read,
        written,
        plan.index,
        out=Scores(plan.sums(N, N, C, C), plan.sums(N, C)),
        config=pair_config(plan, KEYS, scale),
        grid=(1, *grid[1:]),
        launch=SCORES_LAUNCH,
    )
    return ValueSums(
        jnp.stack([jnp.tri(C, k=-1), jnp.eye(C), jnp.eye(C, k=1)]).astype(jnp.float32),
        state_sums(read, States(states, None), reads, scale),
        state_sums(written, States(dstates, states), reads._replace(product=product), 1.0),
        scores,
    )
