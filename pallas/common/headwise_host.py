"""How kernels that work on each token and head by itself are launched: tiles, shares, sums for vectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.context import Context
from .headwise import HeadwiseConfig
from .shapes import given, result, tile, unused


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


class HeadwisePlan(NamedTuple):
    """One launch: ``lengths`` are the kernel's arguments T and span, ``options`` go to `launch`."""

    lengths: dict[str, int]
    options: dict[str, Any]
    rows: int
    shares: int


def headwise_plan(table: TileTable, which: str, x: jax.Array) -> HeadwisePlan:
    """Plans the pass ``which`` over tokens [B, T, H, N]."""
    B, T, H, N = x.shape
    BN = tile(N)
    one = table[which, BN]
    if x.dtype.itemsize > 2:  # three stages of numbers of four bytes do not fit every GPU
        one = one._replace(stages=min(one.stages, 2))
    blocks = -(-H // one.heads)
    shares = max(1, min(one.programs // (B * blocks), -(-T // one.tokens)))
    span = -(-T // (shares * one.tokens)) * one.tokens
    shares = -(-T // span)
    even = T % one.tokens == 0 and H % one.heads == 0 and N == BN
    tiling = HeadwiseConfig(H=H, N=N, BT=one.tokens, BH=one.heads, BN=BN, stages=one.stages, unmasked=even)
    options = dict(grid=(B * shares * blocks,), num_warps=one.warps, num_stages=one.stages, tiling=tiling)
    return HeadwisePlan(dict(T=T, span=span), options, B, shares)


def arguments(x: Any) -> dict[str, jax.Array]:
    """A named tuple's arrays as the kernels' arguments ``name_``, one number in place of each that is not
    given.
    """
    return {f"{name}_": given(array, unused()) for name, array in x._asdict().items()}


def token_gradients(x: Any, names: Sequence[str], written: Collection[str]) -> dict[str, Any]:
    """The kernels' results ``dname_`` for the token arrays ``names`` of a named tuple, the first of which has
    the shape of all; in full for those that are ``written``.
    """
    first = getattr(x, names[0])
    arrays = {name: given(getattr(x, name), first) for name in names}
    return {f"d{name}_": result(name in written, first.shape, x.dtype) for name, x in arrays.items()}


def partial_sums(plan: HeadwisePlan, count: int) -> jax.ShapeDtypeStruct:
    """Shape of what the shares add to the gradients of ``count`` vectors."""
    tiling = plan.options["tiling"]
    return jax.ShapeDtypeStruct((plan.rows, plan.shares, count, tiling.H, tiling.N), jnp.float32)


def sums_by_row(partial: jax.Array) -> list[jax.Array]:
    """The vectors' gradients by row, [B, H, N] each: the second pass."""
    total = partial[:, 0] if partial.shape[1] == 1 else jnp.sum(partial, 1)
    return [total[:, i] for i in range(total.shape[1])]


def no_residuals(ctx: Context[Any, Any]) -> dict[str, str]:
    """The ``kept_axes`` of pieces whose backward computes everything again."""
    return {}
