"""Meshes of devices with the four axes that the library shards over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "sequence", "tensor")  # tensor last: neighbouring devices, most communication
BATCH_AXES = ("data", "fsdp")  # both split the batch


def make_mesh(
    *,
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    explicit: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes `AXES`. One size may be -1, for all remaining devices.

    Args:
        data: number of devices, or groups of devices, with a copy of the parameters and a part of the batch
            each. None: -1, or 1 where another size is -1.
        fsdp: number of devices that split the batch and the parameters with gradients and moments; each
            gathers a layer's matrices to compute with them.
        tensor: number of devices that split heads and hidden channels, and so the matrices, within one host.
            A divisor of the number of heads.
        sequence: number of devices that split the tokens of each sequence; parameters are replicated. A
            divisor of T, on GPUs into whole chunks of 16 tokens.
        explicit: whether the axes are explicit (`jax.sharding.AxisType.Explicit`): shardings are parts of
            types, instead of XLA's choice within the library's rules.
        devices: None for all.

    Raises:
        ValueError: a size is not a positive integer or -1, several are -1, or their product is not the number
            of devices.

    Example:
        >>> from fla_jax.parallel import make_mesh
        >>> dict(make_mesh(fsdp=-1).shape)["data"]
        1
    """
    devices = jax.devices() if devices is None else list(devices)
    if data is None:
        data = 1 if -1 in (fsdp, sequence, tensor) else -1
    sizes = {"data": data, "fsdp": fsdp, "sequence": sequence, "tensor": tensor}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(
                f"{name} must be a positive integer, or -1 for all remaining devices, got {size!r}"
            )
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"only one size may be -1, got {' and '.join(free)}")
    given = {name: size for name, size in sizes.items() if size != -1}
    known = math.prod(given.values())
    product = f"{' * '.join(given)} = {' * '.join(map(str, given.values()))} = {known}"
    if free and len(devices) % known:
        raise ValueError(
            f"{product} must divide the number of devices, got {len(devices)} devices for {free[0]} = -1"
        )
    if not free and known != len(devices):
        raise ValueError(
            f"{product} must be the number of devices, got {len(devices)} devices; one size may be -1"
        )
    shape = tuple(len(devices) // known if size == -1 else size for size in sizes.values())
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(shape, AXES, axis_types=(kind,) * len(AXES), devices=devices)


def is_explicit_mesh(mesh: Mesh) -> bool:
    """Whether the mesh has explicit axes."""
    return AxisType.Explicit in mesh.axis_types


def check_axes(mesh: Mesh) -> None:
    """Raises unless the mesh has the axes of `make_mesh`."""
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != set(AXES):
        got = mesh.axis_names if isinstance(mesh, Mesh) else type(mesh).__name__
        raise ValueError(f"mesh must have the axes {', '.join(AXES)} (see make_mesh), got {got}")


def batch_parts(mesh: Mesh) -> int:
    """Number of devices (or groups of them) that the batch is split over."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def check_batch_size(mesh: Mesh, accumulate: int, size: int) -> None:
    """Raises ValueError unless a batch of ``size`` is shared evenly, in ``accumulate`` microbatches."""
    parts = batch_parts(mesh)
    if size % (parts * accumulate):
        sizes = [mesh.shape[axis] for axis in BATCH_AXES]
        what = f"mesh axes {' * '.join(BATCH_AXES)} = {' * '.join(map(str, sizes))} = {parts}"
        if accumulate > 1:
            what += f", times accumulate = {accumulate}"
        raise ValueError(f"batch must have a size B that is a multiple of {what}, got {size}")
