"""One decoded token of a layer, in a few large steps, which `fla_jax.generation` puts together.

Every step has a definition in plain JAX (`plain`) and a kernel with the same arguments
(`fla_jax.pallas.decode.host`). They are not `Op`s: nothing here is differentiated, mapped or sharded, and the
recurrent state is written in place.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ...core.implementation import Candidate, Registry, Unsupported
from ...pallas.backend import triton
from .weights import Layer6 as Layer6
from .weights import Layer7 as Layer7
from .weights import Matrix as Matrix
from .weights import Norm, Shifts
from .weights import quantised as quantised


class DecodeContext(NamedTuple):
    """The static facts of decoding with a model."""

    platform: str
    hidden_size: int
    head_dim: int
    intermediate_size: int


class DecodeRule(Protocol):
    """What an implementation's module offers; `plain` documents the arguments."""

    def project(
        self,
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
        """Products of one input stage."""

    def rwkv7_step(
        self,
        p: Layer7,
        made: jax.Array,
        first: jax.Array,
        state: PyTree,
        new: Shifts,
        layer: int,
        active: jax.Array,
        rate_scale: float,
        dtype: DTypeLike,
    ) -> tuple[jax.Array, PyTree]:
        """RWKV-7's second low-rank stage, gates, keys, recurrence and readout."""

    def rwkv6_mix(
        self, p: Layer6, x: jax.Array, last: jax.Array, layer: int, z: jax.Array, dtype: DTypeLike
    ) -> jax.Array:
        """RWKV-6's mixed tokens."""

    def rwkv6_step(
        self,
        p: Layer6,
        made: jax.Array,
        state: PyTree,
        new: Shifts,
        layer: int,
        active: jax.Array,
        dtype: DTypeLike,
    ) -> tuple[jax.Array, PyTree]:
        """RWKV-6's decay, recurrence and readout."""


def _triton() -> DecodeRule:
    from ...pallas.decode import host

    return host


def _plain() -> DecodeRule:
    from . import plain

    return plain


def _supports(ctx: DecodeContext) -> Unsupported | None:
    if ctx.hidden_size % 64 or ctx.intermediate_size % 32:
        return Unsupported("it takes widths that are multiples of 64, and of 32 in the feed-forward")
    if max(ctx.hidden_size, ctx.intermediate_size) > 2**15:
        return Unsupported("it takes widths of up to 32768")
    if ctx.head_dim not in (16, 32, 64, 128):
        return Unsupported(f"it takes heads of 16, 32, 64 or 128 channels, got {ctx.head_dim}")
    return None


def _triton_supports(ctx: DecodeContext) -> Unsupported | None:
    return triton.why_not(ctx.platform) or _supports(ctx)


STEPS: Registry[Candidate[DecodeContext, DecodeRule]] = Registry(
    "decode", [Candidate("triton", _triton, _triton_supports), Candidate("plain", _plain, _supports)]
)
