"""How kernels that work on each token and head by itself are launched: tiles, shares, sums for vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .chunked import tile


class Tile(NamedTuple):
    """One launch option.

    Attributes:
        tokens: of a tile.
        heads: of a tile.
        warps: of a program.
        stages: depth of the load pipeline; 1 loads a tile when it is needed.
        programs: how many a launch aims at, for which tokens are cut into shares.
    """

    tokens: int
    heads: int
    warps: int
    stages: int
    programs: int


TileTable = Mapping[tuple[str, int], Tile]  # by pass and padded head size


class HeadPlan(NamedTuple):
    """One launch: ``lengths`` are the kernel's arguments T, span; ``options`` go to `launch`."""

    lengths: tuple[int, int]
    options: dict[str, Any]
    rows: int
    shares: int


def head_plan(table: TileTable, which: str, x: jax.Array) -> HeadPlan:
    """Plans the pass ``which`` over tokens [B, T, H, N]."""
    B, T, H, N = x.shape
    BN = tile(N)
    one = table[which, BN]
    blocks = -(-H // one.heads)
    shares = max(1, min(one.programs // (B * blocks), -(-T // one.tokens)))
    span = -(-T // (shares * one.tokens)) * one.tokens
    shares = -(-T // span)
    options = dict(
        grid=(B * shares * blocks,), num_warps=one.warps, num_stages=one.stages,
        H=H, N=N, BT=one.tokens, BH=one.heads, BN=BN, STAGES=one.stages,
        EVEN=T % one.tokens == 0 and H % one.heads == 0 and N == BN,
    )  # fmt: skip
    return HeadPlan((T, span), options, B, shares)


def partial_sums(plan: HeadPlan, count: int) -> jax.ShapeDtypeStruct:
    """Shape of what the shares add to the gradients of ``count`` vectors."""
    H, N = plan.options["H"], plan.options["N"]
    return jax.ShapeDtypeStruct((plan.rows, plan.shares, count, H, N), jnp.float32)


def sums_by_row(partial: jax.Array) -> list[jax.Array]:
    """The vectors' gradients by row, [B, H, N] each: the second pass."""
    total = partial[:, 0] if partial.shape[1] == 1 else jnp.sum(partial, 1)
    return [total[:, i] for i in range(total.shape[1])]
