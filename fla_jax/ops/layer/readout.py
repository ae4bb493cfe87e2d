"""What the layers make of their recurrence's output: group norm by head, RWKV-7's bonus, the gate."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.op import Implementation, Op
from .headwise import check_heads, preferred, supports

EPS = 64e-5  # 1e-5 times the square of RWKV's head size divisor, 8


class ReadoutInputs(NamedTuple):
    """The arrays of one call: tokens [B, T, H, N], vectors [H, N]; r, k, v and r_k are RWKV-7's alone."""

    o: Any
    gate: Any
    r: Any
    k: Any
    v: Any
    scale: Any
    bias: Any
    r_k: Any


class Readout(NamedTuple):
    """The result."""

    y: Any  # [B, T, H, N]


@dataclasses.dataclass(frozen=True)
class ReadoutSettings:
    """Constants of a call and the name of its dtype.

    Attributes:
        eps: added to the variance of a head's channels.
        silu: whether the gate is an argument of silu, else it is the factor itself.
        compute_name: dtype of the arithmetic.
    """

    eps: float
    silu: bool
    compute_name: str


def definition(settings: ReadoutSettings, x: ReadoutInputs) -> Readout:
    """The ops in plain JAX: everything in the compute dtype, the result rounded once."""
    wide = jax.tree.map(lambda array: array.astype(settings.compute_name), x)
    centred = wide.o - jnp.mean(wide.o, -1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + settings.eps)
    y = centred * rstd * wide.scale + wide.bias
    if x.r is not None:
        y += jnp.sum(wide.r * wide.k * wide.r_k, -1, keepdims=True) * wide.v
    y *= jax.nn.silu(wide.gate) if settings.silu else wide.gate
    return Readout(y.astype(x.o.dtype))


def residual_axes(ctx: Context[ReadoutSettings]) -> dict[str, str]:
    """See `fla_jax.core.op`; nothing is kept."""
    return {}


def fwd(ctx: Context[ReadoutSettings], x: ReadoutInputs) -> tuple[Readout, dict[str, jax.Array]]:
    """See `fla_jax.core.op`; nothing is kept."""
    return definition(ctx.settings, x), {}


def bwd(
    ctx: Context[ReadoutSettings], x: ReadoutInputs, residuals: dict[str, jax.Array], cotangents: Readout
) -> ReadoutInputs:
    """See `fla_jax.core.op`."""
    _, pull = jax.vjp(lambda x: definition(ctx.settings, x), x)
    return pull(cotangents)[0]


def _xla() -> Any:
    from . import readout

    return readout


def _triton() -> Any:
    from ...pallas.layer import readout_host

    return readout_host


TOKENS, VECTORS = ("o", "gate", "r", "k", "v", "y"), ("scale", "bias", "r_k")
AXES = dict.fromkeys(TOKENS, "b t h k") | dict.fromkeys(VECTORS, "h k")
TRITON = Implementation("triton", _triton, supports, preferred, opaque=True, context_parallel=True)
XLA = Implementation("xla", _xla, context_parallel=True)
RWKV6 = Op("rwkv6_readout", ReadoutInputs, Readout, AXES, [TRITON, XLA])
RWKV7 = Op("rwkv7_readout", ReadoutInputs, Readout, AXES, [TRITON, XLA])


def rwkv7_readout(
    o: jax.Array,
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    *,
    scale: jax.Array,
    bias: jax.Array,
    r_k: jax.Array,
    eps: float = EPS,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """RWKV-7's readout in one pass over memory (on a GPU): ``(group_norm(o) + (sum_n r k r_k) v) gate``.

    The norm is over every head's N channels by itself: ``(o - mean) / sqrt(var + eps) scale + bias``. All of
    it is float32 arithmetic (float64 where an input is), whatever the arrays' dtypes; the result is rounded
    once. Differentiable in reverse mode in every array. No head sees another one: rows and heads may be
    shared by devices.

    Args:
        o: [B, T, H, N], output of the recurrence; as all token arrays here float16, bfloat16, float32 or
            float64.
        r: [B, T, H, N], receptance.
        k: [B, T, H, N], the key that the recurrence got: ``k_bonus`` of `rwkv7_keys`.
        v: [B, T, H, N], the value that it got: ``v_bonus``.
        gate: [B, T, H, N], the factor itself.
        scale: [H, N], as all vectors here of any floating-point dtype.
        bias: [H, N].
        r_k: [H, N].
        eps: Python number, added to the variance.
        implementation: ``"triton"`` (NVIDIA GPUs, heads of up to 256 channels, no float64) or ``"xla"``
            (plain JAX); None for the first, where it can run and there is more than one token, else the
            second.
        sequence_axis: the mesh axis whose devices share the tokens of each row (see
            `fla_jax.ops.chunk_rwkv7`), for automatic meshes; no token sees another one here.

    Returns:
        [B, T, H, N] in o's dtype.

    Raises:
        ValueError: a shape does not fit, or ``implementation`` is unknown or cannot run here.
        TypeError: a dtype does not fit, or the call is differentiated in forward mode.

    Source: RWKV-LM ``RWKV-v7/train_temp/src/model.py``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops.layer import rwkv7_readout
        >>> o, r, k, v, gate = jax.random.normal(jax.random.key(0), (5, 1, 8, 2, 16))
        >>> zeros, ones = jnp.zeros((2, 16)), jnp.ones((2, 16))
        >>> rwkv7_readout(o, r, k, v, gate, scale=ones, bias=zeros, r_k=zeros).shape
        (1, 8, 2, 16)
    """
    tokens = {"o": o, "r": r, "k": k, "v": v, "gate": gate}
    arrays, compute = check_heads(tokens, {"scale": scale, "bias": bias, "r_k": r_k})
    settings = ReadoutSettings(float(eps), False, compute)
    return RWKV7(ReadoutInputs(**arrays), settings, implementation, sequence_axis).y


def rwkv6_readout(
    o: jax.Array,
    gate: jax.Array,
    *,
    scale: jax.Array,
    bias: jax.Array,
    eps: float = EPS,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """RWKV-6's readout, in one pass over memory on an NVIDIA GPU: ``group_norm(o) silu(gate)``.

    `rwkv7_readout` documents the arguments, the result, the arithmetic and the errors; here ``gate`` is what
    silu is applied to.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops.layer import rwkv6_readout
        >>> o, gate = jax.random.normal(jax.random.key(0), (2, 1, 8, 2, 16))
        >>> rwkv6_readout(o, gate, scale=jnp.ones((2, 16)), bias=jnp.zeros((2, 16))).shape
        (1, 8, 2, 16)
    """
    arrays, compute = check_heads({"o": o, "gate": gate}, {"scale": scale, "bias": bias})
    absent: dict[str, Any] = dict.fromkeys(("r", "k", "v", "r_k"))
    settings = ReadoutSettings(float(eps), True, compute)
    return RWKV6(ReadoutInputs(**(absent | arrays)), settings, implementation, sequence_axis).y
