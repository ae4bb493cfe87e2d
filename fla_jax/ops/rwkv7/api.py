"""RWKV-7: the public functions, and the ops with their implementations."""

from __future__ import annotations

from typing import TypeAlias, Unpack, overload

from jaxtyping import Array, Float, Int

from ...core.context import Context
from ...core.implementation import Implementation, Rule
from ...core.types import Outputs, RecurrenceConfig, RWKV7Inputs
from ...pallas.backend import pallas, triton
from ..recurrence import (
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
from ..recurrence_checks import rwkv7 as rwkv7_checks
from ..recurrence_cp import ContextParallelRule
from ..recurrence_support import recurrent_supports, triton_supports

_Rule: TypeAlias = Rule[RWKV7Inputs, Outputs, RecurrenceConfig]


def _reference() -> _Rule:
    from . import reference

    return ContextParallelRule(reference.RULE)


def _xla() -> _Rule:
    from . import xla

    return ContextParallelRule(xla)


def _triton() -> _Rule:
    from ...pallas.rwkv7 import chunk_host

    return chunk_host


def _variant(ctx: Context[RWKV7Inputs, RecurrenceConfig]) -> str:
    from ...pallas.rwkv7 import chunk_host

    return chunk_host.describe(ctx)


def _scan() -> _Rule:
    from ...pallas.rwkv7 import scan_host

    return scan_host


def _pallas() -> _Rule:
    from ...pallas.rwkv7 import recurrent_host

    return recurrent_host


REFERENCE = Implementation("reference", _reference, context_parallel=True)
XLA = Implementation("xla", _xla, context_parallel=True)
TRITON = Implementation(
    "triton", _triton, triton_supports, triton.preferred, _variant, opaque=True, context_parallel=True
)
SCAN = Implementation(
    "triton", _scan, recurrent_supports(triton.supports, "rwkab"), triton.preferred, opaque=True
)
PALLAS = Implementation(
    "pallas", _pallas, recurrent_supports(pallas.supports, "rwkab"), pallas.preferred, opaque=True
)


# Chunked forms are parallel within a chunk, recurrent ones go token by token.
CHUNK = recurrence_op("chunk_rwkv7", RWKV7Inputs, [TRITON, XLA, REFERENCE, PALLAS], rwkv7_checks)
RECURRENT = recurrence_op("fused_recurrent_rwkv7", RWKV7Inputs, [SCAN, REFERENCE, XLA, PALLAS], rwkv7_checks)


@overload
def chunk_rwkv7(
    r: Tokens, w: Tokens, k: Tokens, v: Values, a: Tokens, b: Tokens, **options: Unpack[ChunkOptionsWithState]
) -> tuple[Values, State]: ...
@overload
def chunk_rwkv7(
    r: Tokens, w: Tokens, k: Tokens, v: Values, a: Tokens, b: Tokens, **options: Unpack[ChunkOptions]
) -> tuple[Values, State | None]: ...
def chunk_rwkv7(
    r: Float[Array, "B T H K"],
    w: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    a: Float[Array, "B T H K"],
    b: Float[Array, "B T H K"],
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
    """RWKV-7 (generalised delta rule), parallel within chunks of tokens.

    Per sequence and head, with the state S [K, V] in float32::

        S_t = diag(exp(w_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
        o_t = scale * S_t^T r_t

    The RWKV-7 layer passes ``a = -kk`` and ``b = kk * gate`` with ``|kk| = 1``; a and b drawn at random make
    the exact recurrence explode.

    Differentiable in reverse mode in every array; plain JAX implementations have second derivatives too.
    Devices may split B and H without communication, and T with one gather of two small matrices a head
    (``sequence_axis``); K and V must be whole. The page Numerics has what each implementation rounds and how
    far a NaN travels.

    Args:
        r: receptance (query) [B, T, H, K]; float16, bfloat16, float32 or float64, as for all inputs, which
            may differ in dtype.
        w: natural log of the decay [B, T, H, K], <= 0; ``-inf`` forgets. Values above 0 or NaN give undefined
            results: see `fla_jax.checked`.
        k: key [B, T, H, K].
        v: value [B, T, H, V].
        a: direction that is read from the old state [B, T, H, K].
        b: direction that it is written to [B, T, H, K].
        scale: Python number, factor on the output.
        initial_state: [B, H, K, V] ([N, H, K, V] with cu_seqlens), zeros if None. Cast to float32 (float64 if
            any input is).
        output_final_state: whether to return the last state.
        segment_ids: [B, T] integers. The state restarts from zero wherever the id changes; ``initial_state``
            belongs to each sequence's first segment and the final state is the last segment's.
        cu_seqlens: [N + 1] integers from 0 to T, FLA's packed form: B = 1 and sequence n is tokens
            ``cu_seqlens[n]:cu_seqlens[n + 1]``, possibly none.
        chunk_size: tokens per chunk, a power of two from 1 to 256; None for the implementation's choice. The
            Triton kernels always take 16.
        lower_bound: a promise that ``w >= lower_bound`` everywhere (RWKV-7's layer: -0.61), which may be
            faster. A broken promise gives undefined results outside `fla_jax.checked`.
        precision: of float32 products in the Triton kernels, a `jax.lax.Precision` or its name. None takes
            JAX's default (`jax.default_matmul_precision`) where one is set, else ``"highest"``, to float32
            accuracy. All others round operands to TF32: errors of 3e-4 to 8e-4 of an array's norm (the
            gradient of w: 1.5e-3), 1.4 to 2.3 times as fast.
        implementation: None for the best that qualifies, or by name. On any platform: ``"reference"`` (token
            by token, `jax.lax.scan`) and ``"xla"`` (chunked, plain JAX). On NVIDIA GPUs of compute capability
            8.0 and up, not for float64: ``"triton"`` (chunked, fastest where all inputs but w have 16 bits;
            of `fused_recurrent_rwkv7` token by token) and ``"pallas"`` (token by token, on a lowering that
            JAX has deprecated), each with at most 65535 sequences a call. Inside `jax.jit`, None goes by
            JAX's default device.
        sequence_axis: the mesh axis that splits T evenly over devices; None for whole sequences. Required
            inside `jax.shard_map`, where every device would otherwise start from ``initial_state``, and on
            meshes without explicit axes. States are those of whole sequences. Not with cu_seqlens.

    Returns:
        ``(o, final_state)``: o [B, T, H, V] in v's dtype; the final state like ``initial_state``, or None
        unless asked for. With T = 0 or B = 0, o is empty and the final state is the initial one.

    Raises:
        ValueError: a shape or a value does not fit, or ``implementation`` is unknown or cannot run here.
        TypeError: a dtype does not fit, or the call is differentiated in forward mode.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025, eq. of the state
    update; RWKV-LM ``RWKV-v7/rwkv_v7_demo.py`` (there the state is [V, K]); FLA's argument order.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops import chunk_rwkv7
        >>> r, k, v, kk = jax.random.normal(jax.random.key(0), (4, 1, 32, 2, 16))
        >>> kk = kk / jnp.linalg.norm(kk, axis=-1, keepdims=True)
        >>> o, state = chunk_rwkv7(r, -jnp.exp(k), k, v, -kk, 0.5 * kk, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 32, 2, 16), (1, 2, 16, 16))
    """
    arrays = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    x, config = checked_inputs(
        RWKV7Inputs,
        arrays,
        initial_state,
        segment_ids,
        cu_seqlens,
        scale,
        chunk_size,
        lower_bound,
        allows_tf32(precision),
        warn_layout=True,
    )
    o, final_state = CHUNK(x, config, implementation, sequence_axis)
    return o, final_state if output_final_state else None


@overload
def fused_recurrent_rwkv7(
    r: Tokens, w: Tokens, k: Tokens, v: Values, a: Tokens, b: Tokens, **options: Unpack[OptionsWithState]
) -> tuple[Values, State]: ...
@overload
def fused_recurrent_rwkv7(
    r: Tokens, w: Tokens, k: Tokens, v: Values, a: Tokens, b: Tokens, **options: Unpack[Options]
) -> tuple[Values, State | None]: ...
def fused_recurrent_rwkv7(
    r: Float[Array, "B T H K"],
    w: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    a: Float[Array, "B T H K"],
    b: Float[Array, "B T H K"],
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "N H K V"] | None = None,
    output_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"] | None]:
    """RWKV-7 token by token: for decoding, short sequences, and exact checks.

    The same op as `chunk_rwkv7`, which documents every argument, result and error; only the choice that
    ``implementation=None`` makes differs. Gradients of its kernels take at most 1,048,560 tokens a call,
    B times T, unless r, w, k, a and b have 16 bits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops import fused_recurrent_rwkv7
        >>> r, k, v, kk = jax.random.normal(jax.random.key(0), (4, 1, 3, 2, 16))
        >>> kk = kk / jnp.linalg.norm(kk, axis=-1, keepdims=True)
        >>> state = jnp.zeros((1, 2, 16, 16))
        >>> for t in range(3):  # decoding: one token a call
        ...     token = (y[:, t : t + 1] for y in (r, -jnp.exp(k), k, v, -kk, 0.5 * kk))
        ...     o, state = fused_recurrent_rwkv7(*token, initial_state=state, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 1, 2, 16), (1, 2, 16, 16))
    """
    arrays = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    x, config = checked_inputs(RWKV7Inputs, arrays, initial_state, segment_ids, cu_seqlens, scale)
    o, final_state = RECURRENT(x, config, implementation, sequence_axis)
    return o, final_state if output_final_state else None
