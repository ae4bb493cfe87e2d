"""The static half of a call of a kernel: what lowering and the interpreter read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
from jaxtyping import PyTree

from .types import Kernel

Leaf = TypeVar("Leaf")
MAX_GRID = 65535  # programs along the second and third axis of a CUDA grid


def check_grid(grid: Sequence[int]) -> None:
    """Raises ValueError: more programs than a CUDA grid has."""
    if max(grid[1:], default=0) > MAX_GRID:
        most = f"kernels take at most {MAX_GRID} heads, and as many sequences (times the axes of jax.vmap)"
        raise ValueError(f"{most}, got a grid of {tuple(grid)}: split the batch")


class Launch(NamedTuple):
    """How a kernel's programs are compiled.

    Attributes:
        num_warps: warps of a program.
        num_stages: depth of the pipeline that loads ahead in loops.
        max_registers: registers of a thread, 0 for as many as ptxas wants.
    """

    num_warps: int
    num_stages: int = 1
    max_registers: int = 0


class TritonCall(NamedTuple):
    """The static half of a call.

    Attributes:
        kernel: a `triton.jit` function.
        groups: tree of the kernel's input parameters.
        scalars: the ints among the leaves of ``groups``; None where the leaf is an array.
        outputs: tree of the kernel's output parameters.
        shapes: of the leaves of ``outputs``.
        constants: names and values of the parameters that are compile-time constants.
        grid: programs along three axes.
        launch: how programs are compiled.
        capability: of the GPU, 90 for 9.0.
        aliases: pairs of an array among the operands and an output that may take over its memory.
        in_place: whether the output must.
    """

    kernel: Kernel
    groups: jax.tree_util.PyTreeDef
    scalars: tuple[int | None, ...]
    outputs: jax.tree_util.PyTreeDef
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    constants: tuple[tuple[str, Hashable], ...]
    grid: tuple[int, int, int]
    launch: Launch
    capability: int
    aliases: tuple[tuple[int, int], ...]
    in_place: bool

    def parameters(self, arrays: Iterable[Leaf], outputs: Iterable[Leaf]) -> dict[str, PyTree[Leaf | int]]:
        """The kernel's parameters but its constants, by name, with these leaves: arrays, or values in their
        place.
        """
        rest = iter(arrays)
        leaves = [next(rest) if scalar is None else scalar for scalar in self.scalars]
        groups = (*jax.tree.unflatten(self.groups, leaves), *jax.tree.unflatten(self.outputs, outputs))
        return dict(zip(self.kernel.arg_names, groups, strict=False))
