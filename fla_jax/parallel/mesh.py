"""Meshes of devices with the four axes that the library shards over, and what they must divide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "sequence", "tensor")  # the last one's devices are neighbours: it talks most
ROWS = ("data", "fsdp")  # both split the rows of a batch


def make_mesh(
    *,
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    explicit: bool = False,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh with the axes `AXES`. One size may be -1: all devices that the others leave, as in
    `numpy.reshape`.

    Args:
        data: devices, or groups of devices, that hold copies of the parameters and share the rows of a batch.
            None: -1, or 1 where another size is -1.
        fsdp: devices that share the rows and the parameters too: each stores a part of every matrix, of its
            gradient and of the optimiser's moments, and gathers a layer's matrices when it computes with
            them.
        tensor: devices that share heads and hidden channels, and so the matrices: for models whose layers are
            too large for one device, within one host. It must divide the number of heads.
        sequence: devices that share the tokens of each row: for rows too long for one device, or too few. It
            must divide T, on GPUs into whole chunks of 16 tokens. They hold copies of the parameters.
        explicit: whether the axes are explicit (`jax.sharding.AxisType.Explicit`): shardings as parts of
            types, instead of XLA's choice within the library's rules.
        devices: None for all.

    Raises:
        ValueError: a size is none, more than one is -1, or they do not multiply to the number of devices.

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
                f"{name} must be a positive integer, or -1 for all devices that are left, got {size!r}"
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


def row_parts(mesh: Mesh) -> int:
    """Between how many devices (or groups of them) the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ROWS)
