"""The GPUs that kernels are compiled for, and where a call runs. No other file names GPU generations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager

import jax


@dataclasses.dataclass(frozen=True)
class GPU:
    """The facts of a GPU that select and launch kernels. A new generation is a row of `GPUS`.

    Attributes:
        capability: compute capability, 90 for 9.0.
        smem: bytes of shared memory that one block can use.
        wgmma: whether it has matrix products of a warp group.
        large_tiles: whether ptxas holds the state tiles of the chunked kernels without spilling.
    """

    capability: int
    smem: int
    wgmma: bool = False
    large_tiles: bool = False


_SMEM_KIB = {80: 163, 86: 99, 87: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
GPUS = {c: GPU(c, kib << 10, c == 90, c in (90, 100, 103)) for c, kib in _SMEM_KIB.items()}
_OLDEST = min(GPUS)

_target = jax.make_user_context(default_value=None)


def lowering_for(compute_capability: int) -> AbstractContextManager[None]:
    """Context in which kernels are lowered for a GPU that need not be here, such as 90 for compute capability
    9.0.

    For `jax.export` and tests. Pallas kernels also need an abstract mesh whose ``abstract_device`` is that
    GPU.
    """
    return _target(compute_capability)


def current_gpu() -> GPU:
    """The GPU that kernels are made for.

    It is the one named by `lowering_for`, else this process's first GPU, else (in an interpreter) an H200. An
    unknown generation gets the smallest tiles, which fit every GPU.
    """
    capability = _target.value
    if capability is None:
        found = (getattr(device, "compute_capability", None) for device in jax.local_devices())
        capability = next((round(10 * float(x)) for x in found if x is not None), 90)
    return GPUS.get(capability) or GPU(capability, 99 << 10)


def platform_of(arrays: Iterable[jax.Array]) -> str:
    """The platform that a call on ``arrays`` runs on, ``"gpu"`` for every name that JAX has for GPUs.

    Concrete arrays lie on a device. While a function is traced it is the platform of the mesh in context,
    where `jax.set_mesh` has put devices into it, else that of JAX's default device.
    """
    if _target.value is not None:
        return "gpu"
    concrete = next(
        (x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)), None
    )
    if concrete is not None:
        return _canonical(next(iter(concrete.devices())).platform)
    in_mesh = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = getattr(in_mesh, "platform", None)
    if platform:
        return _canonical(platform)
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return _canonical(jax.default_backend())
    return _canonical(device if isinstance(device, str) else device.platform)


def _canonical(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def gpu_missing(platform: str) -> str | None:
    """None where ``platform`` is an NVIDIA GPU that this library's kernels run on, else what it lacks."""
    if _target.value is not None:
        return None
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, and the call runs on {platform!r}"
    try:
        capability = getattr(jax.local_devices(backend=platform)[0], "compute_capability", None)
    except RuntimeError:  # a mesh in context names a GPU that this process does not have
        return "it needs an NVIDIA GPU, and this process has none"
    try:
        is_new_enough = round(10 * float(str(capability))) >= _OLDEST
    except ValueError:  # AMD's are called gfx90a and the like
        is_new_enough = False
    if is_new_enough:
        return None
    return (
        f"it needs an NVIDIA GPU of compute capability {_OLDEST / 10} or newer, and this one has {capability}"
    )
