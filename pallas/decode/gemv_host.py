"""Products of one or two batch elements on vector units, and the facts of a product that all kernels take."""

from __future__ import annotations

import itertools
from typing import NamedTuple, TypedDict

import jax
from jax.typing import DTypeLike

from ...core.decode_layers import CODE_ROWS, NORM_EPS, Matrix
from ..backend.triton import Launch, triton_call
from ..backend.types import Tensor
from ..common.shapes import shaped
from .gemv import Epilogue, GemvConfig, GemvOut, Tokens, Weights, gemv_kernel
from .quantised_gemv import QuantisedGemvConfig, quantised_gemv_kernel

PROGRAMS = 264  # that keep a GPU busy: two for each multiprocessor of an H200
# The fewest programs of a quantised product that take several tiles, and the most tiles and bytes of a
# program. A token of 8 x 2048 in int8 and int4 takes 0.354 and 0.310 ms on an H200; with 800 programs 0.356
# and 0.349, with 200 0.382 and 0.316. The head had eight tiles of int4 there, but they spill registers with
# Triton 3.7.
TILED_PROGRAMS, MAX_TILES, MAX_BYTES = 400, 4, 32 << 10


class GemvLaunch(NamedTuple):
    """A launch of `gemv_kernel`: rows of the matrix for a program, padded channels, warps."""

    BN: int
    BK: int
    num_warps: int


def gemv_launch(K: int, N: int, has_norm: bool) -> GemvLaunch:
    """16 KB of bfloat16 weights for a program, half of it without a norm, which every program recomputes, and
    less where rows are few, down to 4 KB. Of 8, 16 and 32 KB, 16 are fastest on an H200.
    """
    BK = 1 << (K - 1).bit_length()
    warps = warps_of(BK)
    most = warps * (2048 if has_norm else 1024) // BK
    return GemvLaunch(
        max(1, 2048 // BK, min(most, 16, 1 << max(N // PROGRAMS, 1).bit_length() - 1)), BK, warps
    )


def warps_of(BK: int) -> int:
    """Warps of a program that has tokens of ``BK`` channels."""
    return 4 if BK <= 2048 else 8


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
    launch = gemv_launch(matrix.shape[1], matrix.shape[0], x.scale is not None)
    config = GemvConfig(
        BN=launch.BN,
        BK=launch.BK,
        has_planes=x.x.ndim == 3,
        eps=NORM_EPS,
        **product_facts(matrix, x.x, epilogue.gate, gate_at),
    )
    return _call(gemv_kernel, matrix, x, epilogue, config, launch.BN, launch.num_warps, dtype)


def tiles_of(matrix: Matrix, BN: int) -> int:
    """Tiles of a program of `quantised_gemv`, of BN rows each. All of its rows have one code."""
    stored = BN * matrix.weight.shape[1]
    most = min(MAX_TILES, CODE_ROWS // BN, MAX_BYTES // stored, matrix.shape[0] // (BN * TILED_PROGRAMS))
    return 1 << (max(most, 1).bit_length() - 1)


def quantised_gemv(
    matrix: Matrix, x: Tokens, epilogue: Epilogue, gate_at: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """`gemv` of one batch element, with quantised weights."""
    launch = gemv_launch(matrix.shape[1], matrix.shape[0], x.scale is not None)
    tiles = tiles_of(matrix, launch.BN)
    config = QuantisedGemvConfig(
        BN=launch.BN,
        BK=launch.BK,
        **quantised_facts(matrix, launch.BK),
        has_planes=x.x.ndim == 3,
        eps=NORM_EPS,
        tiles=tiles,
        **product_facts(matrix, x.x, epilogue.gate, gate_at),
    )
    return _call(
        quantised_gemv_kernel, matrix, x, epilogue, config, tiles * launch.BN, launch.num_warps, dtype
    )


def _call(
    kernel: Tensor,
    matrix: Matrix,
    x: Tokens,
    epilogue: Epilogue,
    config: GemvConfig | QuantisedGemvConfig,
    rows: int,
    num_warps: int,
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
        launch=Launch(num_warps),
    )
    return out.y, out.shift
