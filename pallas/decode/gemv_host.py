"""Products of one or two batch elements on vector units, and the facts of a product that all kernels take."""

from __future__ import annotations

import itertools
from typing import NamedTuple, TypedDict

import jax
from jax.typing import DTypeLike

from ...core.decode_layers import CODE_ROWS, NORM_EPS, Matrix
from ..backend.triton import Launch, triton_call
from ..backend.types import Tensor
from ..common.shapes import next_power_of_two, previous_power_of_two, shaped
from .gemv import Epilogue, GemvConfig, GemvOut, Tokens, Weights, gemv_kernel
from .quantised_gemv import QuantisedGemvConfig, quantised_gemv_kernel

PROGRAMS = 264  # that keep a GPU busy: two for each multiprocessor of an H200
# The fewest warps that share a product when its programs take several tiles each. A token of 12 x 2048 takes
# 0.644 ms in bfloat16 and 0.504 in int8 on an H200, with 3200 warps 0.663 and 0.517.
WARPS = 1600
# Most tiles of quantised weights that a program takes at once, and their bytes. A token of 4 x 4096 takes
# 0.467 ms in int8 and 0.381 in 4 bits on an H200; with 64 KB in int8 0.518, with 16 KB in 4 bits 0.401.
MAX_TILES, MAX_BYTES = 4, 32 << 10


class GemvLaunch(NamedTuple):
    """A launch of `gemv_kernel`: rows of a tile of the matrix, padded channels, warps."""

    BN: int
    BK: int
    num_warps: int


def gemv_launch(K: int, N: int, has_norm: bool) -> GemvLaunch:
    """Tiles with 4 KB of bfloat16 weights for each warp, 2 KB without a norm; with fewer rows where the
    matrix has few, but at least 4 KB in all.
    """
    BK = next_power_of_two(K)
    warps = warps_of(BK)
    most = warps * (2048 if has_norm else 1024) // BK
    return GemvLaunch(max(1, 2048 // BK, min(most, 16, previous_power_of_two(N // PROGRAMS))), BK, warps)


def warps_of(BK: int) -> int:
    """Warps of a program that has tokens of ``BK`` channels."""
    return 4 if BK < 2048 else 8 if BK <= 8192 else 16


def tiles_of(N: int, launch: GemvLaunch) -> int:
    """Tiles of a program, a power of two. All of its rows have one code."""
    return previous_power_of_two(min(CODE_ROWS // launch.BN, N * launch.num_warps // (launch.BN * WARPS)))


class ProductFacts(TypedDict):
    """Fields of `ProductConfig` that do not depend on the launch."""

    B: int
    K: int
    N: int
    x_stride: int
    gate_stride: int
    gate_at: int
    starts: tuple[int, ...]
    codes: tuple[int, ...]


def product_facts(matrix: Matrix, x: jax.Array, gate: jax.Array | None, gate_at: int) -> ProductFacts:
    """The facts of a product of ``x`` and ``matrix``."""
    N, K = matrix.shape
    rows = [0, *(rows for rows, _, _ in matrix.segments)]
    return ProductFacts(
        B=x.shape[-2],
        K=K,
        N=N,
        x_stride=x.shape[-1],
        gate_stride=1 if gate is None else gate.shape[-1],
        gate_at=gate_at,
        starts=tuple(itertools.accumulate(rows[:-1])),
        codes=tuple(plane + 16 * kind for _, plane, kind in matrix.segments),
    )


class QuantisedFacts(TypedDict):
    """The fields that `QuantisedConfig` adds."""

    group: int
    has_4_bits: bool


def quantised_facts(matrix: Matrix, BK: int) -> QuantisedFacts:
    """The facts of the weights of ``matrix``; without quantisation the group is the tile."""
    group = BK if matrix.scale is None else matrix.shape[1] // matrix.scale.shape[1]
    return QuantisedFacts(group=group, has_4_bits=matrix.has_4_bits)


def gemv(
    matrix: Matrix, x: Tokens, epilogue: Epilogue, gate_at: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """``(y [B, N], shift [B, K])`` from one kernel."""
    N, K = matrix.shape
    has_norm = x.scale is not None
    launch = gemv_launch(K, N, has_norm)
    # without a norm there is little to compute once: several tiles are slower
    rounds = tiles_of(N, launch) if has_norm else 1
    config = GemvConfig(
        BN=launch.BN,
        BK=launch.BK,
        has_planes=x.x.ndim == 3,
        eps=NORM_EPS,
        rounds=rounds,
        **product_facts(matrix, x.x, epilogue.gate, gate_at),
    )
    return _call(
        gemv_kernel, matrix, x, epilogue, config, rounds * launch.BN, Launch(launch.num_warps), dtype
    )


def quantised_gemv(
    matrix: Matrix, x: Tokens, epilogue: Epilogue, gate_at: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """`gemv` of one batch element, with quantised weights."""
    N, K = matrix.shape
    launch = gemv_launch(K, N, x.scale is not None)
    count = tiles_of(N, launch)
    tile_bytes = launch.BN * matrix.weight.shape[1]
    tiles = previous_power_of_two(min(count, MAX_TILES, MAX_BYTES // tile_bytes))
    config = QuantisedGemvConfig(
        BN=launch.BN,
        BK=launch.BK,
        **quantised_facts(matrix, launch.BK),
        has_planes=x.x.ndim == 3,
        eps=NORM_EPS,
        tiles=tiles,
        rounds=count // tiles,
        **product_facts(matrix, x.x, epilogue.gate, gate_at),
    )
    # so that two programs of eight warps share a multiprocessor; a float32 token needs more registers
    max_registers = 128 if launch.num_warps >= 8 and x.x.dtype.itemsize == 2 else 0
    compiled = Launch(launch.num_warps, max_registers=max_registers)
    return _call(quantised_gemv_kernel, matrix, x, epilogue, config, count * launch.BN, compiled, dtype)


def _call(
    kernel: Tensor,
    matrix: Matrix,
    x: Tokens,
    epilogue: Epilogue,
    config: GemvConfig | QuantisedGemvConfig,
    rows: int,
    launch: Launch,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array | None]:
    """A call whose programs take ``rows`` rows each."""
    (N, K), B = matrix.shape, x.x.shape[-2]
    shift = None if x.last is None else shaped((B, K), x.last.dtype)
    out = triton_call(
        kernel,
        x,
        Weights(matrix.weight, matrix.scale),
        epilogue,
        out=GemvOut(shaped((B, N), dtype), shift),
        config=config,
        grid=(-(-N // rows), 1, 1),
        launch=launch,
    )
    return out.y, out.shift
