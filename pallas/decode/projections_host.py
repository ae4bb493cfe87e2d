"""Products of a decoded token on NVIDIA GPUs, with the arguments of `fla_jax.ops.decode.plain.project`.

For one or two batch elements the vector units keep up with the memory that the weights come from, and one
kernel does the whole input stage (`gemv`, `quantised_gemv`). Above, tensor cores do: mixes are computed once,
and the products are one launch for all matrices of a stage (`gemm`) or, where one input meets one matrix, the
library's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.decode_layers import NORM_EPS, Matrix, Norm, activate, layer_norm
from ..backend.triton import Launch, triton_call
from ..common.select import select
from ..common.shapes import next_power_of_two, shaped
from .gemm import MixTokensConfig, MixTokensOut, mix_kernel
from .gemm_host import gemm
from .gemv import Epilogue, Tokens
from .gemv_host import gemv, quantised_gemv, warps_of


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
# 2.39 and 1.63 with 3. One of 8 x 2048 on an H200 takes, by the library and by gemm, 0.675 and 0.661 ms with
# 32 of them, but gemm spills registers there with Triton 3.9.
MAX_GEMV, MAX_GEMM = 2, 16
VARIANTS = (
    Variant("gemv", lambda key: key.B <= MAX_GEMV and not key.quantised),
    Variant("quantised_gemv", lambda key: key.B == 1),
    Variant("library", lambda key: key.segments == 1 and key.B > MAX_GEMM and not key.quantised),
    Variant("gemm", lambda key: True),
)


def layer_code(layer: int) -> int:
    """A layer's index as the kernels take it, see `Tokens`."""
    return 2 * layer + 3


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
        return gemv(matrix, tokens, epilogue, gate_at, dtype)
    if variant == "quantised_gemv":
        return quantised_gemv(matrix, tokens, epilogue, gate_at, dtype)
    shift, (_, K) = None, matrix.shape
    if mixes is not None:
        x, shift = _mix(tokens)
    elif norm is not None:
        x = layer_norm(x, norm).astype(x.dtype)
    if x.shape[-1] != K:
        x = x[..., :K]
    product = _library if variant == "library" else gemm
    return product(matrix, x, epilogue, gate_at, dtype), shift


def _mix(x: Tokens) -> tuple[jax.Array, jax.Array]:
    """Planes [mixes, B, K] and shift [B, K]."""
    assert x.mixes is not None and x.last is not None
    (B, K), M = x.x.shape, x.mixes.shape[0]
    BK = next_power_of_two(K)
    out = triton_call(
        mix_kernel,
        x,
        out=MixTokensOut(shaped((M, B, K), x.x.dtype), shaped((B, K), x.last.dtype)),
        config=MixTokensConfig(B, K, BK, NORM_EPS),
        grid=(B, M, 1),
        launch=Launch(warps_of(BK)),
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
