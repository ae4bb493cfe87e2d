"""What a report about this library should say of the machine that it happened on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import jax
import jax.numpy as jnp

from .core.context import Context
from .core.gpu import current_gpu, platform_of
from .core.op import Op
from .core.types import RecurrenceConfig
from .ops import OPS
from .pallas.backend.versions import why_not_compiled

_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "chex", "numpy", "ml_dtypes", "safetensors", "triton"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "huggingface_hub", "tokenizers"),
)
_VARIABLES = (
    *("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"),
    *("FLA_JAX_PALLAS_INTERPRET", "TRITON_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR"),
)
_SIZES = {"b": 1, "t": 32, "h": 1, "k": 64, "v": 64, "n": 1, "c": 64, "m": 1}
_WIDTH = 22


def show_versions() -> None:
    """Prints what an issue needs: versions, devices, and which implementations can run here and why not.

    It never fails: what cannot be found out is printed as the error that came of it.

    Example:
        >>> import fla_jax
        >>> fla_jax.show_versions()  # doctest: +ELLIPSIS
        fla_jax ...
        Python ...
        chunk_rwkv7 ...
    """
    lines = [
        ("fla_jax", sys.modules["fla_jax"].__version__),
        ("Python", f"{sys.version.split()[0]}, {platform.platform()}"),
    ]
    for package in _PACKAGES:
        try:
            lines.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        lines.append(("devices", _devices()))
    except RuntimeError as error:  # a driver that does not fit its plugin, say
        lines.append(("devices", f"none: {error}"))
    lines.append(("Triton kernels", why_not_compiled() or "can be compiled with these versions"))
    lines += [(name, os.environ[name]) for name in _VARIABLES if name in os.environ]
    for op in OPS.values():
        try:
            lines.append((op.name, _implementations(op)))
        except RuntimeError as error:
            lines.append((op.name, f"cannot run: {error}"))
    for name, value in lines:
        print(f"{name:{_WIDTH}} {value}".replace("\n", " "))


def _devices() -> str:
    found: dict[str, int] = {}
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        kind = device.device_kind + (f" (compute capability {capability})" if capability else "")
        found[kind] = found.get(kind, 0) + 1
    kinds = ", ".join(f"{count} x {kind}" for kind, count in found.items())
    version = getattr(jax.local_devices()[0].client, "platform_version", "")
    return f"{kinds}; {version}; process {jax.process_index() + 1} of {jax.process_count()}"


def _implementations(op: Op) -> str:
    """What an op selects for an ordinary call in bfloat16, what else can run it, and what cannot and why."""
    shapes = {
        name: jax.ShapeDtypeStruct([_SIZES[axis] for axis in op.axes[name].split()], jnp.bfloat16)
        for name in op.inputs._fields
        if name not in ("segment_ids", "cu_seqlens", "mixes")
    }
    mixes = (jax.ShapeDtypeStruct([_SIZES["c"]], jnp.bfloat16),)
    x = op.inputs._make(mixes if name == "mixes" else shapes.get(name) for name in op.inputs._fields)
    settings = RecurrenceConfig() if "initial_state" in op.inputs._fields else None
    return op.explain(Context(op.name, x, settings, platform_of([]), current_gpu()))
