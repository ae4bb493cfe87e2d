"""Inputs of RWKV-7's recurrence from the projections: log decays, keys, values, two directions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ...core.arguments import check_number
from ...core.implementation import Definition, Implementation, Rule
from ...core.op import Op
from ...core.types import Keys, KeysInputs, KeysSettings
from .headwise import HEAD_AXES, VECTOR_AXES, check_heads, preferred, supports


def normalise(x: jax.Array, eps: float = 1e-12) -> jax.Array:
    """``x / max(|x|, eps)`` over the last axis.

    Where ``|x| <= eps`` the gradient is zero: the slope there, 1 / eps, is no information and would drown
    every other.
    """
    square = jnp.sum(x * x, -1, keepdims=True)
    has_direction = square > eps**2
    scale = jnp.where(has_direction, jax.lax.rsqrt(jnp.where(has_direction, square, 1)), 1 / eps)
    return jnp.where(has_direction, x, jax.lax.stop_gradient(x)) * scale


@jax.custom_jvp
def gate(x: jax.Array) -> jax.Array:
    """The sigmoid of x. Its slope is ``gate(x) gate(-x)``: of the usual ``gate(x) (1 - gate(x))`` float32
    has lost all digits at x = 17.
    """
    return jax.nn.sigmoid(x)


@jax.custom_jvp
def value_mix(x: jax.Array, local: jax.Array, first: jax.Array) -> jax.Array:
    """``local + (first - local) sigmoid(x)`` with a difference in the slope alone."""
    return gate(-x) * local + gate(x) * first


@jax.custom_jvp
def key_factor(x: jax.Array, k_a: jax.Array) -> jax.Array:
    """``1 + (sigmoid(x) - 1) k_a`` without the difference, which loses small sigmoids where k_a is about 1;
    nor has a derivative one.
    """
    return gate(x) + gate(-x) * (1 - k_a)


@gate.defjvp
def _gate_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return gate(x), gate(x) * gate(-x) * dx


@value_mix.defjvp
def _value_mix_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    (x, local, first), (dx, dlocal, dfirst) = primals, tangents
    slope = gate(x) * gate(-x) * (first - local)
    return value_mix(x, local, first), slope * dx + gate(-x) * dlocal + gate(x) * dfirst


@key_factor.defjvp
def _key_factor_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    (x, k_a), (dx, dk_a) = primals, tangents
    return key_factor(x, k_a), gate(x) * gate(-x) * k_a * dx - gate(-x) * dk_a


def definition(settings: KeysSettings, x: KeysInputs) -> Keys:
    """The op in plain JAX: everything in the compute dtype, every result rounded once."""
    wide = jnp.dtype(settings.compute_name)
    decay, rate, k, w0, a0, k_k, k_a = (
        array.astype(wide) for array in (x.decay, x.rate, x.k, x.w0, x.a0, x.k_k, x.k_a)
    )
    w = settings.decay_scale * gate(w0 + decay)
    rate = a0 + rate
    kk = normalise(k * k_k, settings.eps)
    v, first = x.v, x.v
    if x.v_first is not None:
        assert x.v0 is not None and x.mix is not None
        first, v = x.v_first.astype(wide), v.astype(wide)
        mixed = value_mix(x.v0.astype(wide) + x.mix.astype(wide), v, first)
        if x.residual is not None:
            mixed, first = (jnp.where(x.residual != 0, array, v) for array in (mixed, first))
        v = mixed
    a, b = (array.astype(settings.transition_name) for array in (-kk, kk * gate(rate) * settings.rate_scale))
    k, v = (k * key_factor(rate, k_a)).astype(x.k.dtype), v.astype(x.v.dtype)
    return Keys(w.astype(settings.decay_name), k, v, a, b, first.astype(x.v.dtype), k, v)


def _xla() -> Rule[KeysInputs, Keys, KeysSettings]:
    return Definition(definition)


def _triton() -> Rule[KeysInputs, Keys, KeysSettings]:
    from ...pallas.layer import keys_host

    return keys_host


_TOKENS = ("decay", "rate", "mix", "k", "v", "v_first", "w", "a", "b", "k_bonus", "v_bonus")
KEYS = Op(
    "rwkv7_keys",
    KeysInputs,
    Keys,
    {"residual": "m"}
    | dict.fromkeys(_TOKENS, HEAD_AXES)
    | dict.fromkeys(("w0", "a0", "v0", "k_k", "k_a"), VECTOR_AXES),
    [
        Implementation("triton", _triton, supports, preferred, opaque=True, context_parallel=True),
        Implementation("xla", _xla, context_parallel=True),
    ],
)


def rwkv7_keys(
    decay: Float[Array, "B T H N"],
    rate: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H N"],
    *,
    w0: Float[Array, "H N"],
    a0: Float[Array, "H N"],
    k_k: Float[Array, "H N"],
    k_a: Float[Array, "H N"],
    mix: Float[Array, "B T H N"] | None = None,
    v_first: Float[Array, "B T H N"] | None = None,
    v0: Float[Array, "H N"] | None = None,
    residual: Bool[Array, ""] | bool = True,
    rate_scale: float = 1.0,
    decay_dtype: DTypeLike | None = None,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> Keys:
    """Inputs of RWKV-7's recurrence from a layer's projections, in one pass over memory on an NVIDIA GPU.

    For every token and channel, |.| the length of a head's N channels::

        w = -exp(-1/2) sigmoid(w0 + decay)
        rate' = sigmoid(a0 + rate)
        kk = k k_k / max(|k k_k|, 1e-12)
        k' = k (1 + (rate' - 1) k_a),   a = -kk,   b = kk rate' rate_scale
        v' = v + (v_first - v) sigmoid(v0 + mix)

    in float32 (float64 where an input is) for every dtype of the arrays; each result is rounded once.
    Differentiable in reverse mode in every floating-point array. Devices may split B, T and H.

    Args:
        decay: [B, T, H, N], low-rank part of the decay; as all arrays here of any floating-point dtype.
        rate: [B, T, H, N], low-rank part of the in-context rate.
        k: [B, T, H, N], projected key.
        v: [B, T, H, N], projected value.
        w0: [H, N].
        a0: [H, N].
        k_k: [H, N].
        k_a: [H, N].
        mix: [B, T, H, N], low-rank part of the weight of ``v_first``; None, with ``v_first`` and ``v0``, for
            a layer without value residual: ``v' = v``.
        v_first: [B, T, H, N], value of layer 0.
        v0: [H, N].
        residual: whether this layer has a value residual: False makes ``v' = v`` and ``v_first = v``. A
            Python bool, or a traced boolean where the layer's index is traced.
        rate_scale: Python number >= 0, factor on the rate in the transition; above 1, a and b are float32.
        decay_dtype: dtype of ``w``: bfloat16, float16 or float32; None for float32 (float64).
        implementation: ``"triton"`` (NVIDIA GPUs, heads of up to 256 channels, no float64) or ``"xla"``
            (plain JAX); None for the first that qualifies, ``"xla"`` for a single token.
        sequence_axis: see `fla_jax.ops.chunk_rwkv7`.

    Returns:
        `Keys`: ``w`` in ``decay_dtype``, ``k`` in k's dtype, ``v`` and ``v_first`` in v's, ``a`` and ``b`` in
        k's. ``k_bonus`` and ``v_bonus`` are ``k`` and ``v`` again, for `rwkv7_readout`.

    Raises:
        ValueError: a shape or value does not fit, or ``implementation`` is unknown or cannot run here.
        TypeError: a dtype does not fit, or the call is differentiated in forward mode.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025; RWKV-LM
    ``RWKV-v7/train_temp/src/model.py``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops.layer import rwkv7_keys
        >>> decay, rate, k, v = jax.random.normal(jax.random.key(0), (4, 1, 8, 2, 16))
        >>> zeros, ones = jnp.zeros((2, 16)), jnp.ones((2, 16))
        >>> keys = rwkv7_keys(decay, rate, k, v, w0=zeros, a0=zeros, k_k=ones, k_a=ones)
        >>> keys.w.shape, bool(keys.w.max() <= 0)
        ((1, 8, 2, 16), True)
    """
    trio = {"mix": mix, "v_first": v_first, "v0": v0}
    absent = [name for name, array in trio.items() if array is None]
    if absent and len(absent) < 3:
        raise ValueError(
            f"mix, v_first and v0 belong together: give all or none of them, got {absent[0]} = None"
        )
    if isinstance(rate_scale, jax.core.Tracer):
        raise ValueError(f"rate_scale must be a Python number >= 0, got {rate_scale!r}")
    rate_scale = check_number("rate_scale", rate_scale, 0)
    more_tokens: dict[str, object] = dict(mix=mix, v_first=v_first)
    more_vectors: dict[str, object] = dict(v0=v0)
    if absent or residual is False:
        more_tokens, more_vectors, residual = {}, {}, True
    x, compute = check_heads(
        KeysInputs,
        tokens={"k": k, "v": v, "decay": decay, "rate": rate, **more_tokens},
        vectors={"w0": w0, "a0": a0, "k_k": k_k, "k_a": k_a, **more_vectors},
    )
    if x.v_first is not None:
        x = x._replace(v_first=x.v_first.astype(x.v.dtype))
    if residual is not True:
        if jnp.shape(residual) or getattr(residual, "dtype", None) is None:
            raise ValueError(f"residual must be a bool, or an array of one without axes, got {residual!r}")
        x = x._replace(residual=jnp.asarray(residual).astype(jnp.int32).reshape(1))
    try:
        decay_name = compute if decay_dtype is None else jnp.dtype(decay_dtype).name
    except TypeError:
        decay_name = repr(decay_dtype)
    if decay_name not in ("bfloat16", "float16", "float32", compute):
        raise ValueError(f"decay_dtype must be bfloat16, float16, float32 or None, got {decay_name}")
    settings = KeysSettings(
        rate_scale,
        decay_name,
        jnp.dtype(x.k.dtype).name if rate_scale <= 1 else compute,
        compute,
    )
    return KEYS(x, settings, implementation, sequence_axis)
