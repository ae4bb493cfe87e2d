"""Products of several batch elements on tensor cores (`gemm`)."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.decode_layers import Matrix
from ..backend.triton import Launch, triton_call
from ..common.shapes import shaped, tile
from .gemm import GemmConfig, GemmOut, PartialSums, gemm_kernel, split_k_sum_kernel
from .gemv import Epilogue, Tokens, Weights
from .gemv_host import product_facts, quantised_facts


class GemmLaunch(NamedTuple):
    """A launch of `gemm_kernel`: batch elements, rows of the matrix and channels of a tile; warps, stages."""

    BB: int
    BN: int
    BK: int
    num_warps: int
    stages: int


# By padded batch, whether rows are few (then a program has fewer of them, so that every multiprocessor has
# one), and whether scales multiply sums. Measured on an H200 up to 32 batch elements, and with such scales.
FEW_ROWS = 4224
GEMM_LAUNCHES: dict[tuple[int, bool, bool], GemmLaunch] = {
    (16, False, False): GemmLaunch(16, 32, 128, 4, 4),
    (16, True, False): GemmLaunch(16, 16, 256, 4, 4),
    (32, False, False): GemmLaunch(32, 32, 128, 4, 4),
    (32, True, False): GemmLaunch(32, 16, 256, 4, 4),
    (64, False, False): GemmLaunch(64, 32, 64, 4, 4),
    (64, True, False): GemmLaunch(64, 16, 128, 4, 4),
    (128, False, False): GemmLaunch(128, 64, 64, 8, 3),
    (128, True, False): GemmLaunch(128, 64, 64, 8, 3),
    (16, False, True): GemmLaunch(16, 32, 128, 4, 4),
    (16, True, True): GemmLaunch(16, 16, 128, 4, 4),
    (32, False, True): GemmLaunch(32, 64, 128, 4, 4),
    (32, True, True): GemmLaunch(32, 16, 128, 4, 4),
    (64, False, True): GemmLaunch(64, 64, 128, 4, 3),
    (64, True, True): GemmLaunch(64, 16, 128, 4, 3),
    (128, False, True): GemmLaunch(128, 64, 128, 4, 2),
    (128, True, True): GemmLaunch(128, 16, 128, 4, 2),
}

# Programs that share the channels of a matrix with few rows, and the fewest channels of one. 2048 x 8192 with
# 16 batch elements takes 12.1 instead of 18.0 microseconds on an H200, in int8 10.9 instead of 24.9.
SPLIT_K, MIN_SPLIT_CHANNELS = 4, 512
SUM_BLOCK = 256  # rows of a program that adds their sums
MIN_SCALED_CHANNELS = 64  # of a group in int8, so that its scale multiplies sums: a tile has one group


def split_k(matrix: Matrix, group: int) -> int:
    """Programs that share the channels of ``matrix``, whatever the batch: results do not depend on it."""
    N, K = matrix.shape
    channels = K // SPLIT_K
    is_long = K >= N and channels >= MIN_SPLIT_CHANNELS and len(matrix.segments) == 1
    return SPLIT_K if is_long and K % SPLIT_K == 0 and channels % group == 0 else 1


def gemm_launch(B: int, rows: int, scales_sums: bool) -> GemmLaunch:
    """The launch for a batch and a matrix; ``rows`` counts those of each program that shares channels.

    Raises:
        KeyError: the table lacks the batch.
    """
    return GEMM_LAUNCHES[min(tile(B), 128), rows < FEW_ROWS, scales_sums]


def gemm(matrix: Matrix, x: jax.Array, epilogue: Epilogue, gate_at: int, dtype: DTypeLike) -> jax.Array:
    """y [B, N] of planes [mixes, B, K] or [B, K], on tensor cores."""
    (N, K), B = matrix.shape, x.shape[-2]
    group = 1 if matrix.scale is None else K // matrix.scale.shape[1]
    scales_sums = group >= MIN_SCALED_CHANNELS and not matrix.has_4_bits
    splits = split_k(matrix, group)
    launch = gemm_launch(B, N * splits, scales_sums)
    BK = math.gcd(K // splits, launch.BK)
    if scales_sums:  # a tile of float32 tokens has half as many channels: it must fit in shared memory
        BK = math.gcd(group, BK // (x.dtype.itemsize // 2))
    config = GemmConfig(
        BB=launch.BB,
        BN=launch.BN,
        BK=BK,
        **quantised_facts(matrix, BK),
        stages=launch.stages,
        split_k=splits,
        scales_sums=scales_sums,
        precision="ieee" if x.dtype == jnp.float32 else "tf32",
        **product_facts(matrix, x, epilogue.gate, gate_at),
    )
    out = triton_call(
        gemm_kernel,
        Tokens(x),
        Weights(matrix.weight, matrix.scale),
        epilogue if splits == 1 else Epilogue(),
        out=GemmOut(shaped((B, N), dtype) if splits == 1 else shaped((splits, B, N), jnp.float32)),
        config=config,
        grid=(-(-N // launch.BN), -(-B // launch.BB), splits),
        launch=Launch(launch.num_warps, launch.stages),
    )
    if splits == 1:
        return out.y
    return triton_call(
        split_k_sum_kernel,
        PartialSums(out.y),
        epilogue,
        out=GemmOut(shaped((B, N), dtype)),
        config=dataclasses.replace(config, BN=SUM_BLOCK),
        grid=(-(-N // SUM_BLOCK), B, 1),
        launch=Launch(num_warps=4),
    ).y
