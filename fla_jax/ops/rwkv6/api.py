"""RWKV-6: the public functions, and the ops with their implementations."""

from __future__ import annotations

from typing import Literal, TypeAlias, Unpack, overload

from jaxtyping import Array, Float, Int

from ...core.context import Context
from ...core.implementation import Implementation, Rule
from ...core.op import Op
from ...core.types import Outputs, RecurrenceConfig, RWKV6Inputs
from ...pallas.backend import pallas, triton
from .. import recurrence_checks
from ..recurrence import (
    AXES,
    OUTPUT_NAMES,
    RESIDUAL_NAME,
    ChunkOptions,
    Options,
    checked_inputs,
    triton_supports,
    without_tokens,
)
from ..recurrence_cp import ContextParallelRule

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
SCAN = Implementation("triton", _scan, triton.supports, _has_several_tokens, opaque=True)
PALLAS = Implementation("pallas", _pallas, pallas.supports, pallas.preferred, opaque=True)


def _op(name: str, *implementations: Implementation) -> Op[RWKV6Inputs, Outputs, RecurrenceConfig]:
    return Op(
        name,
        RWKV6Inputs,
        Outputs,
        AXES,
        list(implementations),
        output_names=OUTPUT_NAMES,
        residual_name=RESIDUAL_NAME,
        check=recurrence_checks.rwkv6,
        empty=without_tokens,
    )


# In order of preference, as measured (docs/performance.md). Chunked forms are parallel within a chunk;
# recurrent ones go token by token: kernels on a GPU, `jax.lax.scan` elsewhere.
CHUNK = _op("chunk_rwkv6", TRITON, XLA, REFERENCE, PALLAS)
RECURRENT = _op("fused_recurrent_rwkv6", SCAN, REFERENCE, XLA, PALLAS)


@overload
def chunk_rwkv6(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    u: Float[Array, "H K"],
    *,
    output_final_state: Literal[True],
    **options: Unpack[ChunkOptions],
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"]]: ...
@overload
def chunk_rwkv6(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    u: Float[Array, "H K"],
    *,
    output_final_state: bool = False,
    **options: Unpack[ChunkOptions],
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"] | None]: ...
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
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"] | None]:
    r"""RWKV-6 (data-dependent decay with a bonus for the current token), parallel within chunks of tokens.

    Per batch row and head, with the state S [K, V] in float32::

        o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T r_t
        S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T

    Differentiable in reverse mode in every array, u and the initial state included, from the cotangents of
    ``o`` and of the final state. Plain JAX implementations have second derivatives, kernels do not. Forward
    mode (``jax.jvp``, ``jax.linearize``) of the op itself raises a TypeError. Devices may split batch and
    heads (B, H), in every sharding mode and without communication apart from the sum of u's gradient, and the
    tokens, T, with one gather of two small matrices a head, forward and backward (``sequence_axis``). K and V
    must be whole: XLA gathers them on automatic axes, explicit ones are refused.

    In float32, outputs and gradients agree with exact arithmetic to about 1e-6 at every decay; the page
    Numerics has the range of scales, what each implementation rounds, and how far a NaN travels.

    Args:
        r: receptance (query) [B, T, H, K]; float16, bfloat16, float32 or float64, as for all inputs, which
            may differ in dtype.
        k: key [B, T, H, K].
        v: value [B, T, H, V].
        w: natural log of the decay [B, T, H, K], <= 0; ``-inf`` forgets. RWKV-6 passes ``-exp(x)``. Values
            above 0 or NaN give undefined results: see `fla_jax.checked`.
        u: bonus [H, K].
        scale: Python number, factor on the output; 1 in every form.
        initial_state: [B, H, K, V] ([N, H, K, V] with cu_seqlens), zeros if None. Cast to float32 (float64 if
            any input is).
        output_final_state: whether to return the last state.
        segment_ids: [B, T] integers. The state restarts from zero wherever the id changes; ``initial_state``
            belongs to each row's first segment and the final state is the last segment's.
        cu_seqlens: [N + 1] integers from 0 to T, FLA's packed form: B = 1 and sequence n is tokens
            ``cu_seqlens[n]:cu_seqlens[n + 1]``, possibly none.
        chunk_size: tokens per chunk, a power of two from 1 to 256; None for the implementation's own choice.
            The Triton kernels take 16 whatever is asked.
        lower_bound: a promise that ``w >= lower_bound`` everywhere. An implementation may be faster for it
            and gives the same result; a broken promise gives undefined results outside `fla_jax.checked`.
        implementation: None for the best that qualifies, or by name. On any platform: ``"reference"`` (token
            by token, `jax.lax.scan`) and ``"xla"`` (chunked, plain JAX). On NVIDIA GPUs of compute capability
            8.0 and up, not for float64, and the defaults there: ``"triton"`` (chunked), its products with
            bfloat16 operands where r, v, k all have 16 bits, else float32 ones (in TF32 parts, seven to nine
            times slower); of `fused_recurrent_rwkv6` token by token in float32. ``"pallas"`` is the same
            token by token, on a lowering that JAX has deprecated. Inside `jax.jit`, None goes by JAX's
            default device, not by where the arrays will be.
        sequence_axis: the mesh axis whose devices share the tokens of each row, T being split evenly between
            them; None for whole rows. Inside `jax.shard_map` it must be named: arrays are then those of one
            device, and without it every device starts from ``initial_state``, silently. In `jax.jit` on a
            mesh with explicit axes the arrays' types say it; on any other mesh, name it. States are those of
            whole rows on every device. Not with cu_seqlens.

    Returns:
        ``(o, final_state)``: o [B, T, H, V] in v's dtype; the final state like ``initial_state`` in float32
        (float64), or None unless asked for. With T = 0 or B = 0, o is empty and the final state is the
        initial one.

    Raises:
        ValueError: a shape or a value does not fit, or ``implementation`` is unknown or cannot run here.
        TypeError: a dtype does not fit.

    Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024,
    section on Finch; official code RWKV-LM ``RWKV-v5/cuda/wkv6_cuda.cu``; FLA's ``chunk_rwkv6`` for the
    argument order.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops import chunk_rwkv6
        >>> r, k, v, x = jax.random.normal(jax.random.key(0), (4, 1, 32, 2, 16))
        >>> o, state = chunk_rwkv6(r, k, v, -jnp.exp(x), jnp.ones((2, 16)), output_final_state=True)
        >>> o.shape, state.shape
        ((1, 32, 2, 16), (1, 2, 16, 16))
    """
    x, config = checked_inputs(
        RWKV6Inputs,
        r=r,
        k=k,
        v=v,
        w=w,
        u=u,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        scale=scale,
        chunk_size=chunk_size,
        lower_bound=lower_bound,
    )
    o, final_state = CHUNK(x, config, implementation, sequence_axis)
    return o, final_state if output_final_state else None


@overload
def fused_recurrent_rwkv6(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    u: Float[Array, "H K"],
    *,
    output_final_state: Literal[True],
    **options: Unpack[Options],
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"]]: ...
@overload
def fused_recurrent_rwkv6(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    u: Float[Array, "H K"],
    *,
    output_final_state: bool = False,
    **options: Unpack[Options],
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"] | None]: ...
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
    ``implementation=None`` makes differs.

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
    x, config = checked_inputs(
        RWKV6Inputs,
        r=r,
        k=k,
        v=v,
        w=w,
        u=u,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        scale=scale,
    )
    o, final_state = RECURRENT(x, config, implementation, sequence_axis)
    return o, final_state if output_final_state else None
