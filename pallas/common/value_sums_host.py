"""Calls the Pallas kernels that sum over V what the gradients over K need, for both ops."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..backend.pallas import pallas_call
from .recurrent_pairs import BLOCK, contract_state, contract_values
from .recurrent_plan import RecurrentPlan

KEYS = 32  # that a program of the gradients takes, in one warp
STATE_WARPS, VALUE_WARPS = 2, 1  # of programs of `contract_state` and `contract_values`


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of a float32 result."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sum_over_values(
    plan: RecurrentPlan,
    ys: Sequence[jax.Array],
    zs: Sequence[jax.Array],
    states: jax.Array,
    dstates: jax.Array,
    scale: float,
) -> tuple[jax.Array, ...]:
    """All sums over V: S0 y of each reader, D z of each writer [B * T' * H, K], S0 D by key
    [B * intervals * H, K], scores, same (see `contract_values`), and which lines `Pairs` takes for earlier
    ones, its own and the next [3, interval, interval].

    Args:
        plan: of the call.
        ys: what each reader's output meets [B * T' * H, V]: do first.
        zs: what each writer writes [B * T' * H, V].
        states: [B * intervals * H, K, V], at the starts of intervals.
        dstates: likewise, gradients of those at their ends.
        scale: factor of do.
    """
    s, tokens, (entries,) = plan.sizes, ys[0].shape[0], plan.entries
    grid = (s.K // min(s.K, BLOCK), s.heads, entries // s.heads)
    reading = functools.partial(contract_state, sizes=s, values=len(ys), scale=scale)
    reads = pallas_call(
        reading, *ys, states, out=[float32(tokens, s.K)] * len(ys), grid=grid, num_warps=STATE_WARPS
    )
    writing = functools.partial(contract_state, sizes=s, values=len(zs), scale=1.0)
    out = [float32(tokens, s.K)] * len(zs) + [float32(entries, s.K)]
    *writes, product = pallas_call(writing, *zs, dstates, states, out=out, grid=grid, num_warps=STATE_WARPS)
    kernel = functools.partial(contract_values, sizes=s, readers=len(ys), writers=len(zs), scale=scale)
    out = [
        float32(entries, len(ys), len(zs), s.interval, s.interval),
        float32(entries, len(zs), s.interval),
    ]
    scores, same = pallas_call(kernel, *ys, *zs, out=out, grid=(1, *grid[1:]), num_warps=VALUE_WARPS)
    lines = jnp.stack([jnp.tri(s.interval, k=-1), jnp.eye(s.interval), jnp.eye(s.interval, k=1)]).astype(
        jnp.float32
    )
    return *reads, *writes, product, scores, same, lines
