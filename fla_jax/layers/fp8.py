"""FP8 products: a dense projection multiplies 8-bit floats, as `flax.linen.fp8_ops` does it.

Operands are rounded to e4m3 and the gradient of the result to e5m2, each divided by a scale that follows from
the largest values of earlier steps (their amax history). Scales and histories are the collection
`FP8_SCALES`: the gradient of a loss in it is its next value.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax.typing import DTypeLike

from .sharding import ActivationSharding, Dot, save_all_but_unsharded

FP8_SCALES: str = fp8_ops.OVERWRITE_WITH_GRADIENT
_DTYPES = ("bfloat16", "float32")


def check_fp8(dtype: DTypeLike) -> None:
    """Raises ValueError unless FP8 products have results of ``dtype``."""
    # the scale of a gradient is far below the least float16
    if jnp.dtype(dtype).name not in _DTYPES:
        raise ValueError(f"dtype must be {' or '.join(_DTYPES)} with fp8=True, got {jnp.dtype(dtype).name}")


def fp8_dot_of(layer: nn.Module, name: str, sharding: ActivationSharding) -> Dot | None:
    """The product of the layer's submodule ``name``, to be called inside of it; None for an ordinary one.

    Raises:
        ValueError: inside `jax.shard_map` or on a mesh with explicit axes.
    """
    if not (layer.is_initializing() or layer.has_variable(FP8_SCALES, name)):
        return None
    if sharding.mode != "auto":
        where = "inside jax.shard_map" if sharding.mode == "manual" else "on a mesh with explicit axes"
        raise ValueError(f"fp8 must be False {where}: the largest value of a whole array decides its scale")
    return lambda *args, **_: fp8_ops.Fp8DirectDotGeneralOp()(*args)


def save_all_but_rounded(
    primitive: jax.extend.core.Primitive,
    *_: object,
    new_dtype: object = None,
    name: str | None = None,
    **__: object,
) -> bool:
    """`save_all_but_unsharded` that also recomputes the operands in e4m3, with the scaling before.

    `jax.checkpoint` reduces the precision of what it saves as if e4m3 had infinities, which turns 256 to 448
    into NaN. Saved after the scaling, gathered weights would be the whole model on every device.
    """
    is_rounding = primitive.name in ("div", "max", "min") or new_dtype == jnp.float8_e4m3fn
    return not is_rounding and save_all_but_unsharded(primitive, name=name)
