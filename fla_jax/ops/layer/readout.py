"""The layers' readout of their recurrence: group norm by head, RWKV-7's bonus, the gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core.arguments import check_number
from ...core.implementation import Definition, Implementation, Rule
from ...core.op import Op
from ...core.types import Readout, ReadoutInputs, ReadoutSettings
from .headwise import HEAD_AXES, VECTOR_AXES, check_heads, preferred, supports

EPS = 64e-5  # 1e-5 times the square of RWKV's head size divisor, 8


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


def _xla() -> Rule[ReadoutInputs, Readout, ReadoutSettings]:
    return Definition(definition)


def _triton() -> Rule[ReadoutInputs, Readout, ReadoutSettings]:
    from ...pallas.layer import readout_host

    return readout_host


AXES = dict.fromkeys(("o", "gate", "r", "k", "v", "y"), HEAD_AXES)
AXES |= dict.fromkeys(("scale", "bias", "r_k"), VECTOR_AXES)
TRITON = Implementation("triton", _triton, supports, preferred, opaque=True, context_parallel=True)
XLA = Implementation("xla", _xla, context_parallel=True)
RWKV6 = Op("rwkv6_readout", ReadoutInputs, Readout, AXES, [TRITON, XLA])
RWKV7 = Op("rwkv7_readout", ReadoutInputs, Readout, AXES, [TRITON, XLA])


def rwkv7_readout(
    o: Float[Array, "B T H N"],
    r: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H N"],
    gate: Float[Array, "B T H N"],
    *,
    scale: Float[Array, "H N"],
    bias: Float[Array, "H N"],
    r_k: Float[Array, "H N"],
    eps: float = EPS,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> Float[Array, "B T H N"]:
    """RWKV-7's readout, one pass over memory on an NVIDIA GPU: ``(group_norm(o) + (sum_n r k r_k) v) gate``.

    The norm is over each head's N channels: ``(o - mean) / sqrt(var + eps) scale + bias``. Arithmetic,
    derivatives, sharding, errors, ``implementation`` and ``sequence_axis``: see `rwkv7_keys`.

    Args:
        o: [B, T, H, N], output of the recurrence.
        r: [B, T, H, N], receptance.
        k: [B, T, H, N], the recurrence's key: ``k_bonus`` of `rwkv7_keys`.
        v: [B, T, H, N], the recurrence's value: ``v_bonus``.
        gate: [B, T, H, N], the factor itself.
        scale: [H, N].
        bias: [H, N].
        r_k: [H, N].
        eps: Python number >= 0, added to the variance.

    Returns:
        [B, T, H, N] in o's dtype.

    Source: RWKV-LM ``RWKV-v7/train_temp/src/model.py``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops.layer import rwkv7_readout
        >>> o, r, k, v, gate = jax.random.normal(jax.random.key(0), (5, 1, 8, 2, 16))
        >>> zeros, ones = jnp.zeros((2, 16)), jnp.ones((2, 16))
        >>> rwkv7_readout(o, r, k, v, gate, scale=ones, bias=zeros, r_k=zeros).shape
        (1, 8, 2, 16)
    """
    x, compute = check_heads(
        ReadoutInputs,
        tokens=dict(o=o, r=r, k=k, v=v, gate=gate),
        vectors=dict(scale=scale, bias=bias, r_k=r_k),
    )
    settings = ReadoutSettings(check_number("eps", eps, 0), False, compute)
    return RWKV7(x, settings, implementation, sequence_axis).y


def rwkv6_readout(
    o: Float[Array, "B T H N"],
    gate: Float[Array, "B T H N"],
    *,
    scale: Float[Array, "H N"],
    bias: Float[Array, "H N"],
    eps: float = EPS,
    implementation: str | None = None,
    sequence_axis: str | None = None,
) -> Float[Array, "B T H N"]:
    """RWKV-6's readout: ``group_norm(o) silu(gate)``, else as `rwkv7_readout`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.ops.layer import rwkv6_readout
        >>> o, gate = jax.random.normal(jax.random.key(0), (2, 1, 8, 2, 16))
        >>> rwkv6_readout(o, gate, scale=jnp.ones((2, 16)), bias=jnp.zeros((2, 16))).shape
        (1, 8, 2, 16)
    """
    x, compute = check_heads(ReadoutInputs, tokens=dict(o=o, gate=gate), vectors=dict(scale=scale, bias=bias))
    settings = ReadoutSettings(check_number("eps", eps, 0), True, compute)
    return RWKV6(x, settings, implementation, sequence_axis).y
