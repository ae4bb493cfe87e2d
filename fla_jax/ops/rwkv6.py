"""RWKV-6: public ops and their custom_vjp core."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..core import checked, dispatch
from . import reference, xla6
from .validate import check
from .vjp import Implementation, lazy, make_core

TABLE: dict[str, Implementation] = {
    "reference": (reference.rwkv6_fwd, reference.rwkv6_bwd),
    "xla": (xla6.forward, xla6.backward),
    "triton": lazy("..pallas.rwkv6_chunk"),
    "pallas": lazy("..pallas.rwkv6_recurrent"),
}
_core = make_core(TABLE)


def _run(op: str, form: str, r, k, v, w, u, *, output_final_state: bool, implementation: str | None, **options: Any):
    tokens = dict(r=r, k=k, v=v, w=w)
    call = check(tokens, u=u, warn_layout=form == "chunk", **options)
    if checked.is_checked():
        assert call.u is not None
        checked.check_inputs(op, dict(zip(tokens, call.arrays)) | dict(u=call.u, initial_state=call.state), call.cfg.lower_bound, call.cu_seqlens)
    if not call.arrays[2].size:
        return jnp.zeros_like(call.arrays[2]), (call.state if output_final_state else None)
    cfg = dataclasses.replace(call.cfg, implementation=dispatch.choose(op, form, implementation, TABLE, call))
    o, final = _core(cfg, *call.arrays, call.u, call.state, call.segment_ids, call.cu_seqlens)
    return o, (final if output_final_state else None)


def chunk_rwkv6(
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    u: jax.Array,
    *,
    scale: float = 1.0,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int | None = None,
    lower_bound: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    r"""RWKV-6 (data-dependent decay with a bonus for the current token), parallel within chunks of tokens.

    Per batch row and head, with the state S [K, V] in float32::

        o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T r_t
        S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T

    Differentiable in reverse mode in every array, u and the initial state included, from the cotangents of ``o`` and of the final state; the rule is
    written by hand, keeps a state and the scores of each chunk, and loses no accuracy at strong decay (``w = -exp(x)``). Forward mode (``jax.jvp``) raises
    a TypeError.

    Args:
        r: receptance (query) [B, T, H, K]; float16, bfloat16, float32 or float64, as for all inputs, which may differ in dtype.
        k: key [B, T, H, K].
        v: value [B, T, H, V].
        w: natural log of the decay [B, T, H, K], <= 0; ``-inf`` forgets. RWKV-6 passes ``-exp(x)``. Values above 0 or NaN give undefined results: see
            `fla_jax.checked`.
        u: bonus [H, K].
        scale: Python number, factor on the output; 1 in every form.
        initial_state: [B, H, K, V] ([N, H, K, V] with cu_seqlens), zeros if None. Cast to float32 (float64 if any input is).
        output_final_state: whether to return the last state.
        segment_ids: [B, T] integers. The state restarts from zero wherever the id changes; ``initial_state`` belongs to each row's first segment and the
            final state is the last segment's.
        cu_seqlens: [N + 1] integers from 0 to T, FLA's packed form: B = 1 and sequence n is tokens ``cu_seqlens[n]:cu_seqlens[n + 1]``, possibly none.
        chunk_size: tokens per chunk, a power of two from 1 to 256; None for the implementation's own choice. The Triton kernels take 16 whatever is asked.
        lower_bound: a promise that ``w >= lower_bound`` everywhere. An implementation may be faster for it and gives the same result; a broken promise
            gives undefined results outside `fla_jax.checked`.
        implementation: None for the best that qualifies, or by name. On any platform: ``"reference"`` (token by token, `jax.lax.scan`) and ``"xla"`` (chunked,
            plain JAX). On NVIDIA GPUs of compute capability 8.0 and up, not for float64, and the defaults there: ``"triton"`` (chunked), its products with
            bfloat16 operands where r, v, k all have 16 bits, else float32 ones (three TF32 passes, about three times slower), and ``"pallas"`` (token by
            token in float32). Inside `jax.jit`, None goes by JAX's default device, not by where the arrays will be.

    Returns:
        ``(o, final_state)``: o [B, T, H, V] in v's dtype; the final state like ``initial_state`` in float32 (float64), or None unless asked for. With
        T = 0 or B = 0, o is empty and the final state is the initial one.

    Raises:
        ValueError: a shape or a value does not fit, or ``implementation`` is unknown or cannot run here.
        TypeError: a dtype does not fit.

    Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024, section on Finch; official code RWKV-LM
    ``RWKV-v5/cuda/wkv6_cuda.cu``; FLA's ``chunk_rwkv6`` for the argument order.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops import chunk_rwkv6
        >>> r, k, v, x = jax.random.normal(jax.random.key(0), (4, 1, 32, 2, 16))
        >>> o, state = chunk_rwkv6(r, k, v, -jnp.exp(x), jnp.ones((2, 16)), output_final_state=True)
        >>> o.shape, state.shape
        ((1, 32, 2, 16), (1, 2, 16, 16))
    """
    return _run(
        "chunk_rwkv6", "chunk", r, k, v, w, u, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        segment_ids=segment_ids, cu_seqlens=cu_seqlens, chunk_size=chunk_size, lower_bound=lower_bound, implementation=implementation,
    )  # fmt: skip


def fused_recurrent_rwkv6(
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    u: jax.Array,
    *,
    scale: float = 1.0,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """RWKV-6 token by token: for decoding, short sequences, and exact checks.

    The same op as `chunk_rwkv6`, which documents every argument, result and error; only the choice that ``implementation=None`` makes differs.
    """
    return _run(
        "fused_recurrent_rwkv6", "recurrent", r, k, v, w, u, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        segment_ids=segment_ids, cu_seqlens=cu_seqlens, implementation=implementation,
    )  # fmt: skip
