"""Products of a decoded token on NVIDIA GPUs, with the arguments of `fla_jax.ops.decode.plain.project`.

For one or two batch elements the vector units keep up with the memory that the weights come from, and one
kernel does the whole input stage (`gemv`). Above, tensor cores do: mixes are computed once, and the products
are one launch for all matrices of a stage (`gemm`) or, where one input meets one matrix, the library's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.decode_layers import NORM_EPS, Matrix, Norm, activate, layer_norm
from ..backend.triton import Launch, triton_call
from ..common.select import select
from ..common.shapes import shaped, tile
from .gemm import GemmConfig, GemmOut, MixTokensConfig, MixTokensOut, gemm_kernel, mix_kernel
from .gemv import Epilogue, GemvConfig, GemvOut, Tokens, Weights, gemv_kernel

PROGRAMS = 264  # that keep a GPU busy: two for each multiprocessor of an H200


class ProductKey(NamedTuple):
    """The facts that select the kernel of a product: batch elements, segments of the matrix, and whether its
    weights are quantised: the library cannot multiply these.
    """

    B: int
    segments: int
    quantised: bool


class Variant(NamedTuple):
    """One way to compute a product, and whether it serves a call."""

    name: str
    when: Callable[[ProductKey], bool]


# Batch elements. A token of 24 x 2048 on an H100 takes, by gemv and by gemm, 1.67 and 1.77 ms with 2 of them,
# 2.39 and 1.63 with 3, 1.93 and 1.62 with 2 and int8 weights. With 32 the library saves 7 % of a token.
MAX_GEMV, MAX_GEMM = 2, 16
VARIANTS = (
    Variant("gemv", lambda key: key.B == 1 or (key.B <= MAX_GEMV and not key.quantised)),
    Variant("library", lambda key: key.segments == 1 and key.B > MAX_GEMM and not key.quantised),
    Variant("gemm", lambda key: True),
)


class GemmLaunch(NamedTuple):
    """A launch of `gemm_kernel`: batch elements, rows of the matrix and channels of a tile; warps, stages."""

    BB: int
    BN: int
    BK: int
    num_warps: int
    stages: int


# By padded batch, and whether the matrix has few rows: then half as many a program, so that every
# multiprocessor has one, and twice as many channels, so that as many bytes are loaded at once. 32 is measured
# on an H200.
GEMM_LAUNCHES: dict[tuple[int, bool], GemmLaunch] = {
    (16, False): GemmLaunch(16, 32, 128, 4, 4),
    (16, True): GemmLaunch(16, 16, 256, 4, 4),
    (32, False): GemmLaunch(32, 32, 128, 4, 4),
    (32, True): GemmLaunch(32, 16, 256, 4, 4),
    (64, False): GemmLaunch(64, 32, 64, 4, 4),
    (64, True): GemmLaunch(64, 16, 128, 4, 4),
    (128, False): GemmLaunch(128, 64, 64, 8, 3),
    (128, True): GemmLaunch(128, 64, 64, 8, 3),
}


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
    warps = _warps(BK)
    most = warps * (2048 if has_norm else 1024) // BK
    return GemvLaunch(
        max(1, 2048 // BK, min(most, 16, 1 << max(N // PROGRAMS, 1).bit_length() - 1)), BK, warps
    )


def _warps(BK: int) -> int:
    return 4 if BK <= 2048 else 8


def gemm_launch(B: int, N: int) -> GemmLaunch:
    """The launch for a batch and a matrix.

    Raises:
        KeyError: the table lacks the row.
    """
    padded = min(tile(B), 128)
    has_few_rows = N // GEMM_LAUNCHES[padded, False].BN < PROGRAMS // 2
    return GEMM_LAUNCHES[padded, has_few_rows]


def layer_code(layer: int) -> int:
    """A layer's index as the kernels take it, see `Tokens`."""
    return 2 * layer + 3


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


def _product_facts(matrix: Matrix, x: jax.Array, gate: jax.Array | None, gate_at: int) -> ProductFacts:
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


def _quantised_facts(matrix: Matrix, BK: int) -> QuantisedFacts:
    """Without quantisation the group is the tile."""
    group = BK if matrix.scale is None else matrix.shape[1] // matrix.scale.shape[1]
    return QuantisedFacts(group=group, has_4_bits=matrix.has_4_bits)


def project(
    matrix: Matrix,
    x: jax.Array,
    *,
    norm: Norm | None = None,
    mixes: jax.Array | None = None,
    last: jax.Array | None = None,
    layer: int = 0,
    active: jax.Array | None = None,
    add: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_at: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array | None]:
    """See `fla_jax.ops.decode.plain.project`."""
    variant = select(VARIANTS, ProductKey(x.shape[-2], len(matrix.segments), matrix.scale is not None)).name
    tokens = Tokens(x, *(norm or (None, None)))
    if mixes is not None:
        tokens = tokens._replace(mixes=mixes, last=last, active=active, layer=layer_code(layer))
    epilogue = Epilogue(gate, add)
    if variant == "gemv":
        return _gemv(matrix, tokens, epilogue, gate_at, dtype)
    shift, (_, K) = None, matrix.shape
    if mixes is not None:
        x, shift = _mix(tokens)
    elif norm is not None:
        x = layer_norm(x, norm).astype(x.dtype)
    if x.shape[-1] != K:
        x = x[..., :K]
    product = _library if variant == "library" else _gemm
    return product(matrix, x, epilogue, gate_at, dtype), shift


def _gemv(
    matrix: Matrix, x: Tokens, epilogue: Epilogue, gate_at: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """``(y [B, N], shift [B, K])`` from one kernel."""
    (N, K), B = matrix.shape, x.x.shape[-2]
    launch = gemv_launch(K, N, x.scale is not None)
    config = GemvConfig(
        BN=launch.BN,
        BK=launch.BK,
        **_quantised_facts(matrix, launch.BK),
        has_planes=x.x.ndim == 3,
        eps=NORM_EPS,
        **_product_facts(matrix, x.x, epilogue.gate, gate_at),
    )
    shift = None if x.last is None else shaped((B, K), x.last.dtype)
    out = triton_call(
        gemv_kernel,
        x,
        Weights(matrix.weight, matrix.scale),
        epilogue,
        out=GemvOut(shaped((B, N), dtype), shift),
        config=config,
        grid=(-(-N // launch.BN), 1, 1),
        launch=Launch(launch.num_warps),
    )
    return out.y, out.shift


def _mix(x: Tokens) -> tuple[jax.Array, jax.Array]:
    """Planes [mixes, B, K] and shift [B, K]."""
    assert x.mixes is not None and x.last is not None
    (B, K), M = x.x.shape, x.mixes.shape[0]
    BK = 1 << (K - 1).bit_length()
    out = triton_call(
        mix_kernel,
        x,
        out=MixTokensOut(shaped((M, B, K), x.x.dtype), shaped((B, K), x.last.dtype)),
        config=MixTokensConfig(B, K, BK, NORM_EPS),
        grid=(B, M, 1),
        launch=Launch(_warps(BK)),
    )
    return out.planes, out.shift


def _library(matrix: Matrix, x: jax.Array, epilogue: Epilogue, gate_at: int, dtype: DTypeLike) -> jax.Array:
    """y [B, N] of one input and one matrix."""
    (N, K), B = matrix.shape, x.shape[-2]
    weight = matrix.dense(x.dtype)
    y = jnp.einsum("bk,nk->bn", x.reshape(B, K), weight, preferred_element_type=jnp.float32)
    y = activate(y, matrix.segments[0][2])
    if epilogue.gate is not None:
        y = y * epilogue.gate[:, gate_at : gate_at + N].astype(jnp.float32)
    if epilogue.add is not None:
        y = y + epilogue.add.astype(jnp.float32)
    return y.astype(dtype)


def _gemm(matrix: Matrix, x: jax.Array, epilogue: Epilogue, gate_at: int, dtype: DTypeLike) -> jax.Array:
    """y [B, N] of planes [mixes, B, K] or [B, K], on tensor cores."""
    (N, K), B = matrix.shape, x.shape[-2]
    launch = gemm_launch(B, N)
    config = GemmConfig(
        BB=launch.BB,
        BN=launch.BN,
        BK=math.gcd(K, launch.BK),
        **_quantised_facts(matrix, launch.BK),
        stages=launch.stages,
        precision="ieee" if x.dtype == jnp.float32 else "tf32",
        **_product_facts(matrix, x, epilogue.gate, gate_at),
    )
    out = triton_call(
        gemm_kernel,
        Tokens(x),
        Weights(matrix.weight, matrix.scale),
        epilogue,
        out=GemmOut(shaped((B, N), dtype)),
        config=config,
        grid=(-(-N // launch.BN), -(-B // launch.BB), 1),
        launch=Launch(launch.num_warps, launch.stages),
    )
    return out.y
