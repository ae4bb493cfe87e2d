"""Products of a decoded token on NVIDIA GPUs: `project`, with the arguments of `fla_jax.ops.decode.plain`.

Up to `MAX_SPLIT_PROGRAMS` rows the vector units do what there is to do while the weights come from memory,
and the whole input stage is one kernel. From there on tensor cores do: mixes are made once, by a kernel of
their own, and the products are one launch for all matrices of a stage or, where one input meets one matrix
and there are more than `TILED` rows, the library's.

What is chosen here was tried on one H200 with six layers of 2048 channels, in milliseconds a token: with one
row 16 KB of weights a program 0.401, 32 KB 0.419, 8 KB 0.453, 2 warps 0.46; with 32 rows the library from 16
rows on 0.548, tiles everywhere 0.588.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..backend.triton import launch
from ..common.shapes import unused
from .projections import gemm_kernel, gemv_kernel, mix_kernel

FEW, TILED = 4, 16
_PROGRAMS = 264  # two for each multiprocessor of an H200
CODE_ROWS = 64
_NORM_EPS = 1e-5


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


# What the library's products are finished with, by kind: see `finish` in projections.py.
_FINISH = (_as_it_is, jnp.tanh, jax.nn.sigmoid, _square)


class Tile(NamedTuple):
    """Launch options of `gemm_kernel`: rows of a block, results, terms, warps, stages."""

    rows: int
    results: int
    terms: int
    warps: int
    stages: int


# By the number of rows, up to which; then for matrices of few rows: half as many a program, so that every
# multiprocessor has one, and twice as many terms, so that as many bytes are on their way. Those of 32 rows
# are measured.
TILES = {
    16: (Tile(16, 32, 128, 4, 4), Tile(16, 16, 256, 4, 4)),
    32: (Tile(32, 32, 128, 4, 4), Tile(32, 16, 256, 4, 4)),
    64: (Tile(64, 32, 64, 4, 4), Tile(64, 16, 128, 4, 4)),
    1 << 30: (Tile(128, 64, 64, 8, 3), Tile(128, 64, 64, 8, 3)),
}


def layer_code(layer: int) -> int:
    """A layer's index as the kernels take it, see `gemv_kernel`."""
    return 2 * layer + 3


def _pieces(K: int, N: int, norm: bool) -> tuple[int, int, int]:
    """Padded K, rows of a matrix for a program, warps: 16 KB of bfloat16 weights, less where rows are few,
    down to 4 KB.

    Half as many where no norm comes first, which every program computes again.
    """
    BK = 1 << (K - 1).bit_length()
    warps = 4 if BK <= 2048 else 8
    most = warps * (2048 if norm else 1024) // BK
    return BK, max(1, 2048 // BK, min(most, 16, 1 << max(N // _PROGRAMS, 1).bit_length() - 1)), warps


@dataclasses.dataclass(frozen=True)
class Segments:
    """Of a matrix, for `code_of`.

    Attributes:
        starts: the first row of each.
        codes: of each.
    """

    starts: tuple[int, ...]
    codes: tuple[int, ...]


def _segments(matrix: Any) -> Segments:
    rows = [0, *(rows for rows, _, _ in matrix.segments)]
    return Segments(
        tuple(itertools.accumulate(rows[:-1])), tuple(plane + 16 * kind for _, plane, kind in matrix.segments)
    )


def project(
    matrix: Any,
    x: jax.Array,
    *,
    norm: Any = None,
    mixes: Any = None,
    last: Any = None,
    layer: int = 0,
    active: Any = None,
    add: Any = None,
    gate: Any = None,
    gate_at: int = 0,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, Any]:
    """See `fla_jax.ops.decode.plain.project`."""
    options = dict(add=add, gate=gate, gate_at=gate_at, dtype=dtype)
    if x.shape[-2] <= FEW:
        return _few(matrix, x, norm, mixes, last, layer, active, **options)
    shift = None
    if norm is not None and mixes is not None:
        x, shift = _mixed(x, norm, mixes, last, layer, active, dtype)
    elif norm is not None:
        x = _layer_norm(x, norm).astype(x.dtype)
    return _many(matrix, x, **options), shift


def _few(
    matrix: Any,
    x: Any,
    norm: Any,
    mixes: Any,
    last: Any,
    layer: int,
    active: Any,
    *,
    add: Any,
    gate: Any,
    gate_at: int,
    dtype: Any,
) -> tuple[jax.Array, Any]:
    """One kernel for all of it."""
    (N, K), B = matrix.weight.shape, x.shape[-2]
    BK, BN, warps = _pieces(K, N, norm is not None)
    none = unused()
    scale, bias = (none, none) if norm is None else norm
    scaled = matrix.scale is not None
    shift = jax.ShapeDtypeStruct(
        (1,) if mixes is None else (B, K), jnp.int32 if mixes is None else last.dtype
    )
    inputs = dict(
        x_=x,
        last_=last,
        scale_=scale,
        bias_=bias,
        mixes_=mixes,
        active_=active,
        w_=matrix.weight,
        w_scale_=matrix.scale,
        add_=add,
        gate_=gate,
    )
    made = launch(
        gemv_kernel,
        {name: none if x is None else x for name, x in inputs.items()} | {"layer": layer_code(layer)},
        dict(y_=jax.ShapeDtypeStruct((B, N), dtype), shift_=shift),
        grid=(-(-N // BN),),
        num_warps=warps,
        num_stages=1,
        B=B,
        K=K,
        N=N,
        BK=BK,
        BN=BN,
        XS=x.shape[-1],
        GS=1 if gate is None else gate.shape[-1],
        G=K // matrix.scale.shape[1] if scaled else BK,
        SCALED=scaled,
        NORM=norm is not None,
        MIX=mixes is not None,
        PLANES=x.ndim == 3,
        ADD=add is not None,
        GATE=gate is not None,
        GATE_AT=gate_at,
        SEGMENTS=_segments(matrix),
        EPS=_NORM_EPS,
    )
    return made["y_"], None if mixes is None else made["shift_"]


def _mixed(x: Any, norm: Any, mixes: Any, last: Any, layer: int, active: Any, dtype: Any) -> Any:
    """Planes [M, B, K] and shift [B, K]."""
    (B, K), M = x.shape, mixes.shape[0]
    BK = 1 << (K - 1).bit_length()
    made = launch(
        mix_kernel,
        dict(
            x_=x,
            last_=last,
            scale_=norm[0],
            bias_=norm[1],
            mixes_=mixes,
            active_=active,
            layer=layer_code(layer),
        ),
        dict(
            planes_=jax.ShapeDtypeStruct((M, B, K), x.dtype), shift_=jax.ShapeDtypeStruct((B, K), last.dtype)
        ),
        grid=(B, M),
        num_warps=4 if BK <= 2048 else 8,
        num_stages=1,
        B=B,
        K=K,
        BK=BK,
        EPS=_NORM_EPS,
    )
    return made["planes_"], made["shift_"]


def _layer_norm(x: jax.Array, norm: Any) -> jax.Array:
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, -1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + _NORM_EPS)
    return x * norm[0].astype(jnp.float32) + norm[1].astype(jnp.float32)


def _many(matrix: Any, x: jax.Array, *, add: Any, gate: Any, gate_at: int, dtype: Any) -> jax.Array:
    """Products on tensor cores: planes [M, B, K] or [B, K] -> [B, N]."""
    (N, K), B = matrix.weight.shape, x.shape[-2]
    weight = matrix.dense(x.dtype)
    if x.shape[-1] != K:
        x = x[..., :K]
    if len(matrix.segments) == 1 and B > TILED:
        y = jnp.einsum("bk,nk->bn", x.reshape(B, K), weight, preferred_element_type=jnp.float32)
        y = _FINISH[matrix.segments[0][2]](y)
        y = y if gate is None else y * gate[:, gate_at : gate_at + N].astype(jnp.float32)
        y = y if add is None else y + add.astype(jnp.float32)
        return y.astype(dtype)
    many, few = next(tiles for rows, tiles in TILES.items() if rows >= B)
    one = few if N // many.results < _PROGRAMS // 2 else many
    none = unused()
    inputs = dict(x_=x, w_=weight, add_=add, gate_=gate)
    made = launch(
        gemm_kernel,
        {name: none if x is None else x for name, x in inputs.items()},
        dict(y_=jax.ShapeDtypeStruct((B, N), dtype)),
        grid=(-(-N // one.results), -(-B // one.rows)),
        num_warps=one.warps,
        num_stages=one.stages,
        B=B,
        K=K,
        N=N,
        BB=one.rows,
        BN=one.results,
        BK=math.gcd(K, one.terms),
        XS=K,
        GS=1 if gate is None else gate.shape[-1],
        STAGES=one.stages,
        ADD=add is not None,
        GATE=gate is not None,
        GATE_AT=gate_at,
        SEGMENTS=_segments(matrix),
        PRECISION="ieee" if x.dtype == jnp.float32 else "tf32",
    )
    return made["y_"]
