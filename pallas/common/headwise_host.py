"""Launches of kernels that treat every token and head separately, and the sums over their programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp

from ...core.context import Context, S, X
from ..backend.triton import Launch, triton_call
from ..backend.types import Group, Kernel
from .headwise import Dims, HeadwiseConfig
from .shapes import shaped, tile

Out = TypeVar("Out")


class HeadwiseLaunch(NamedTuple):
    """A launch option.

    Attributes:
        BT: tokens of a tile.
        BH: heads of a tile.
        num_warps: warps of a program.
        stages: depth of the load pipeline for tokens of 16 bits, 1 for no pipeline.
        stages_fp32: the same for float32 tokens: three stages of them exceed the memory of small GPUs.
        programs: number of programs to aim at when tokens are cut into blocks.
    """

    BT: int
    BH: int
    num_warps: int
    stages: int
    stages_fp32: int
    programs: int


LaunchTable = Mapping[tuple[str, int], HeadwiseLaunch]  # by pass and padded head size


class HeadwiseFields(TypedDict):
    """The fields of `HeadwiseConfig`."""

    H: int
    N: int
    BT: int
    BH: int
    BN: int
    stages: int
    unmasked: bool


class HeadwisePlan(NamedTuple):
    """One launch over tokens [B, T, H, N]."""

    dims: Dims
    grid: tuple[int, int, int]
    launch: Launch
    fields: HeadwiseFields
    sums: tuple[int, int]  # B and blocks of a sequence

    def __call__(self, kernel: Kernel, *inputs: Group, out: Out, config: HeadwiseConfig) -> Out:
        """Runs ``kernel(*inputs, dims, out, config)``."""
        return triton_call(
            kernel,
            *inputs,
            self.dims,
            out=out,
            config=config,
            grid=self.grid,
            launch=self.launch,
        )

    def sums_shape(self, count: int) -> jax.Array:
        """The shape of the blocks' sums for the gradients of ``count`` vectors."""
        return shaped((*self.sums, count, self.fields["H"], self.fields["N"]), jnp.float32)


def headwise_plan(table: LaunchTable, name: str, x: jax.Array) -> HeadwisePlan:
    """Plans the pass ``name`` over tokens [B, T, H, N]."""
    B, T, H, N = x.shape
    BN = tile(N)
    row = table[name, BN]
    stages = row.stages if x.dtype.itemsize == 2 else row.stages_fp32
    head_blocks = -(-H // row.BH)
    blocks = max(1, min(row.programs // (B * head_blocks), -(-T // row.BT)))
    block_len = -(-T // (blocks * row.BT)) * row.BT
    blocks = -(-T // block_len)
    unmasked = T % row.BT == 0 and H % row.BH == 0 and N == BN
    fields = HeadwiseFields(H=H, N=N, BT=row.BT, BH=row.BH, BN=BN, stages=stages, unmasked=unmasked)
    grid = (B * blocks * head_blocks, 1, 1)
    return HeadwisePlan(Dims(T, block_len), grid, Launch(row.num_warps, stages), fields, (B, blocks))


def sum_over_blocks(partial: jax.Array) -> list[jax.Array]:
    """Gradients of vectors for each sequence, [B, H, N] each, from what the blocks have stored."""
    total = partial[:, 0] if partial.shape[1] == 1 else jnp.sum(partial, 1)
    return [total[:, i] for i in range(total.shape[1])]


def no_residuals(ctx: Context[X, S]) -> dict[str, str]:
    """The ``residual_axes`` of ops whose backward recomputes everything."""
    return {}
