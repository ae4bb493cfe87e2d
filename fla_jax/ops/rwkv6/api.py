"""RWKV-6: the public functions, and the ops with their implementations."""

from __future__ import annotations

from typing import TypeAlias, Unpack, overload

from jaxtyping import Array, Float, Int

from ...core.context import Context
from ...core.implementation import Implementation, Rule
from ...core.types import Outputs, RecurrenceConfig, RWKV6Inputs
from ...pallas.backend import pallas, triton
from ..recurrence import (
    Bonus,
    ChunkOptions,
    ChunkOptionsWithState,
    Options,
    OptionsWithState,
    Precision,
    State,
    Tokens,
    Values,
    allows_tf32,
    checked_inputs,
    recurrence_op,
)
from ..recurrence_checks import rwkv6 as rwkv6_checks
from ..recurrence_cp import ContextParallelRule
from ..recurrence_support import recurrent_supports, triton_supports

_Rule: TypeAlias = Rule[RWKV6Inputs, Outputs, RecurrenceConfig]


def _reference() -> _Rule:
    from . import reference

    return ContextParallelRule(reference.RULE)


def _xla() -> _Rule:
    from . import xla

    return ContextParallelRule(xla)


def _triton() -> _Rule:
    from ...pallas.rwkv6 import chunk_host

    return chunk_host


def _variant(ctx: Context[RWKV6Inputs, RecurrenceConfig]) -> str:
    from ...pallas.rwkv6 import chunk_host

    return chunk_host.describe(ctx)


def _scan() -> _Rule:
    from ...pallas.rwkv6 import scan_host

    return scan_host


def _pallas() -> _Rule:
    from ...pallas.rwkv6 import recurrent_host

    return recurrent_host


def _has_several_tokens(ctx: Context[RWKV6Inputs, RecurrenceConfig]) -> bool:
    """One token is as fast in plain JAX as in a kernel, as measured (docs/performance.md)."""
    return ctx.shapes.r.shape[1] > 1 and triton.preferred(ctx)


REFERENCE = Implementation("reference", _reference, context_parallel=True)
XLA = Implementation("xla", _xla, context_parallel=True)
TRITON = Implementation(
    "triton", _triton, triton_supports, triton.preferred, _variant, opaque=True, context_parallel=True
)
SCAN = Implementation("triton", _scan, recurrent_supports(triton.supports), _has_several_tokens, opaque=True)
PALLAS = Implementation("pallas", _pallas, recurrent_supports(pallas.supports), pallas.preferred, opaque=True)


# Chunked forms are parallel within a chunk, recurrent ones go token by token.
CHUNK = recurrence_op("chunk_rwkv6", RWKV6Inputs, [TRITON, XLA, REFERENCE, PALLAS], rwkv6_checks)
RECURRENT = recurrence_op("fused_recurrent_rwkv6", RWKV6Inputs, [SCAN, REFERENCE, XLA, PALLAS], rwkv6_checks)


@overload
def chunk_rwkv6(
    r: Tokens, k: Tokens, v: Values, w: Tokens, u: Bonus, **options: Unpack[ChunkOptionsWithState]
) -> tuple[Values, State]: ...
@overload
def chunk_rwkv6(
    r: Tokens, k: Tokens, v: Values, w: Tokens, u: Bonus, **options: Unpack[ChunkOptions]
) -> tuple[Values, State | None]: ...
def chunk_rwkv6(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    u: Float[Array, "H K"],
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "N H K V"] | None = None,
    output_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    chunk_size: int | None = None,
    lower_bound: float | None = None,
    precision: Precision = None,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"] | None]:
    """RWKV-6 (data-dependent decay with a bonus for the current token), parallel within chunks of tokens.

    Per sequence and head, with the state S [K, V] in float32::

        o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T r_t
        S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T

    `chunk_rwkv7` documents the other arguments, the results, the errors, derivatives and sharding, which are
    the same here; ``"triton"`` is fastest where r, k and v have 16 bits.

    Args:
        r: receptance (query) [B, T, H, K].
        k: key [B, T, H, K].
        v: value [B, T, H, V].
        w: natural log of the decay [B, T, H, K], <= 0; ``-inf`` forgets. RWKV-6 passes ``-exp(x)``.
        u: bonus [H, K].

    Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024,
    section on Finch; RWKV-LM ``RWKV-v5/cuda/wkv6_cuda.cu``; FLA's argument order.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops import chunk_rwkv6
        >>> r, k, v, x = jax.random.normal(jax.random.key(0), (4, 1, 32, 2, 16))
        >>> o, state = chunk_rwkv6(r, k, v, -jnp.exp(x), jnp.ones((2, 16)), output_final_state=True)
        >>> o.shape, state.shape
        ((1, 32, 2, 16), (1, 2, 16, 16))
    """
    arrays = {"r": r, "k": k, "v": v, "w": w, "u": u}
    x, config = checked_inputs(
        RWKV6Inputs,
        arrays,
        initial_state,
        segment_ids,
        cu_seqlens,
        scale,
        chunk_size,
        lower_bound,
        allows_tf32(precision),
    )
    o, final_state = CHUNK(x, config, implementation, sequence_axis)
    return o, final_state if output_final_state else None


@overload
def fused_recurrent_rwkv6(
    r: Tokens, k: Tokens, v: Values, w: Tokens, u: Bonus, **options: Unpack[OptionsWithState]
) -> tuple[Values, State]: ...
@overload
def fused_recurrent_rwkv6(
    r: Tokens, k: Tokens, v: Values, w: Tokens, u: Bonus, **options: Unpack[Options]
) -> tuple[Values, State | None]: ...
def fused_recurrent_rwkv6(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    u: Float[Array, "H K"],
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "N H K V"] | None = None,
    output_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"] | None]:
    """RWKV-6 token by token: for decoding, short sequences, and exact checks.

    The same op as `chunk_rwkv6`, which documents every argument, result and error; only the choice that
    ``implementation=None`` makes differs. Gradients of its kernels take at most 1,048,560 tokens a call,
    B times T.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops import fused_recurrent_rwkv6
        >>> r, k, v, x = jax.random.normal(jax.random.key(0), (4, 1, 3, 2, 16))
        >>> u, state = jnp.ones((2, 16)), jnp.zeros((1, 2, 16, 16))
        >>> for t in range(3):  # decoding: one token a call
        ...     token = (y[:, t : t + 1] for y in (r, k, v, -jnp.exp(x)))
        ...     o, state = fused_recurrent_rwkv6(*token, u, initial_state=state, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 1, 2, 16), (1, 2, 16, 16))
    """
    arrays = {"r": r, "k": k, "v": v, "w": w, "u": u}
    x, config = checked_inputs(RWKV6Inputs, arrays, initial_state, segment_ids, cu_seqlens, scale)
    o, final_state = RECURRENT(x, config, implementation, sequence_axis)
    return o, final_state if output_final_state else None
