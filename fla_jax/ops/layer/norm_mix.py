"""Norm, token shift and mixes: the public function, and the op with its implementations."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ...core.arguments import check_number
from ...core.context import Context
from ...core.implementation import Definition, Implementation, Rule, Unsupported
from ...core.op import Op
from ...core.types import Mix, Mixed, MixInputs
from ...pallas.backend import triton
from ..array_checks import check_shape, floating, integers
from .norm_mix_cp import ContextParallelRule
from .norm_mix_xla import definition

MOST_CHANNELS, MOST_MIXES = 16384, 6  # that a kernel takes

AXES = {
    **dict.fromkeys(("x", "y", "mixed", "normalised"), "b t c"),
    **dict.fromkeys(("mixes", "scale", "bias"), "c"),
    "last": "b c",
    "mix_delta": "m b t c",
    "segment_ids": "b t",
}


def _xla() -> Rule[MixInputs, Mixed, Mix]:
    return ContextParallelRule(Definition(definition))


def _triton() -> Rule[MixInputs, Mixed, Mix]:
    from ...pallas.layer import norm_shift_mix_host

    return ContextParallelRule(norm_shift_mix_host)


def _supports(ctx: Context[MixInputs, Mix]) -> Unsupported | None:
    """None where the Triton kernels can run a call, else the reason."""
    (B, T, C), M = ctx.shapes.x.shape, len(ctx.shapes.mixes)
    if not isinstance(B, int) or not isinstance(T, int):
        return Unsupported(f"its grid must be known, and x has a symbolic shape [{B}, {T}, {C}]")
    if B == 0:
        return Unsupported("the batch is empty (B = 0)")
    if not 1 <= M <= MOST_MIXES:
        return Unsupported(f"it takes 1 to {MOST_MIXES} mixes, got {M}")
    if C > MOST_CHANNELS:
        return Unsupported(f"it takes up to {MOST_CHANNELS} channels, got C = {C}")
    return triton.supports(ctx)


def _results(ctx: Context[MixInputs, Mix]) -> Mixed:
    x, tokens = ctx.shapes, AXES["mixed"]
    total = None if x.y is None and x.scale is None else tokens
    return Mixed._make(
        ((tokens,) * len(x.mixes), AXES["last"], total, tokens if ctx.settings.normalised else None)
    )


def _describe(ctx: Context[MixInputs, Mix]) -> str:
    from ...pallas.layer.norm_shift_mix_variants import describe

    return describe(ctx)


TRITON = Implementation(
    "triton",
    _triton,
    _supports,
    triton.preferred,
    opaque=True,
    context_parallel=True,
    describe=_describe,
    unused_cotangents=("x", "normalised"),  # layers that end or begin a residual stream use no sum
)
XLA = Implementation("xla", _xla, context_parallel=True)
NORM_SHIFT_MIX = Op(
    "norm_shift_mix", MixInputs, Mixed, AXES, [TRITON, XLA], shardable=("b",), results=_results
)


def norm_shift_mix(
    x: jax.Array,
    mixes: Sequence[jax.Array],
    last: jax.Array | None = None,
    *,
    y: jax.Array | None = None,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    mix_delta: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    normalised: bool = False,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> Mixed:
    """Layer norm, token shift and mixes before the projections of a layer, in one pass over memory.

    With h the layer norm of ``x + y`` over channels (h = x + y without ``scale``)::

        mixed[n]_t = h_t + (h_{t-1} - h_t) * (mixes[n] + mix_delta[n]_t)

    Before a sequence's first token comes ``last``, before the first token of a later segment zeros.
    Arithmetic is float32 (float64 if an input is); each result is rounded once. Differentiable in reverse
    mode in every floating-point array.

    RWKV-7's attention has six mixes, its feed-forward one. RWKV-6's feed-forward has two; its attention
    makes two calls: one mix with ``normalised=True``, and on that result five mixes with ``mix_delta``.

    Args:
        x: [B, T, C], T >= 1; float16, bfloat16, float32 or float64.
        mixes: M arrays [C], floating-point like all others below.
        last: [B, C], the result ``last`` of the call before; None for zeros.
        y: [B, T, C] in x's dtype, added to x first: the output of the layer before. None for nothing.
        scale: [C], of the layer norm; None where x is normalised already.
        bias: [C], given where ``scale`` is.
        eps: Python number >= 0, added to the variance.
        mix_delta: [M, B, T, C], added to the mixes by token; None for nothing.
        segment_ids: [B, T] integers: a segment begins wherever the id changes.
        normalised: whether to return h.
        implementation: ``"triton"`` (NVIDIA GPUs, not for float64) or ``"xla"`` (plain JAX); None for the
            first that qualifies.
        sequence_axis: see `fla_jax.ops.chunk_rwkv7`; ``last`` is that of whole sequences.

    Returns:
        ``Mixed(mixed, last, x, normalised)`` in x's dtype: ``mixed`` M arrays [B, T, C]; ``last`` h at the
        last token [B, C]; ``x`` the sum x + y [B, T, C], to continue the residual stream with, None with
        neither y nor a norm; ``normalised`` h [B, T, C], or None.

    Raises:
        ValueError: a shape or a value does not fit, or ``implementation`` is unknown or cannot run here.
        TypeError: a dtype does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops.layer import norm_shift_mix
        >>> x, y = jax.random.normal(jax.random.key(0), (2, 1, 8, 16))
        >>> scale, bias, mu = jnp.ones(16), jnp.zeros(16), jnp.full(16, 0.5)
        >>> (key, value), last, x, _ = norm_shift_mix(x, (mu, mu / 2), y=y, scale=scale, bias=bias)
        >>> key.shape, last.shape, x.shape
        ((1, 8, 16), (1, 16), (1, 8, 16))
    """
    inputs = _check(MixInputs(x, tuple(mixes), y, scale, bias, last, mix_delta, segment_ids))
    double = any(array.dtype == jnp.float64 for array in jax.tree.leaves(inputs))
    settings = Mix(check_number("eps", eps, 0), normalised, "float64" if double else "float32")
    return NORM_SHIFT_MIX(inputs, settings, implementation, sequence_axis)


def _check(x: MixInputs) -> MixInputs:
    """The inputs as JAX arrays.

    Raises:
        ValueError, TypeError: one does not fit; the message names it.
    """
    tokens = floating("x", x.x)
    if tokens.ndim != 3:
        raise ValueError(f"x must have shape [B, T, C], got {list(tokens.shape)}")
    B, T, C = tokens.shape
    if T == 0 or C == 0:
        raise ValueError(
            f"x must have at least one token and one channel, got shape [B, T, C] = {list(tokens.shape)}"
        )
    if not x.mixes:
        raise ValueError("mixes must have at least one array [C], got none")
    if (x.scale is None) != (x.bias is None):
        raise ValueError("scale and bias of the norm must be given together, got one of them")

    def array(name: str, given: object, shape: tuple[int, ...], axes: str) -> jax.Array:
        checked = floating(name, given)
        check_shape(name, checked, shape, axes)
        return checked

    def optional(name: str, given: object, shape: tuple[int, ...], axes: str) -> jax.Array | None:
        return None if given is None else array(name, given, shape, axes)

    checked = MixInputs(
        x=tokens,
        mixes=tuple(array(f"mixes[{n}]", mu, (C,), "[C]") for n, mu in enumerate(x.mixes)),
        y=optional("y", x.y, (B, T, C), "[B, T, C]"),
        scale=optional("scale", x.scale, (C,), "[C]"),
        bias=optional("bias", x.bias, (C,), "[C]"),
        last=optional("last", x.last, (B, C), "[B, C]"),
        mix_delta=optional("mix_delta", x.mix_delta, (len(x.mixes), B, T, C), "[M, B, T, C]"),
        segment_ids=None if x.segment_ids is None else integers("segment_ids", x.segment_ids),
    )
    if checked.y is not None and checked.y.dtype != tokens.dtype:
        raise TypeError(f"y must have the dtype of x, {tokens.dtype}, got {checked.y.dtype}")
    if checked.segment_ids is not None:
        check_shape("segment_ids", checked.segment_ids, (B, T), "[B, T]")
    return checked
