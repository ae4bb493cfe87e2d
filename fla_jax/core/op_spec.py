"""The arrays of an op and their axes, by name: sharding, mapping and gradients follow from these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import jax

from .context import Context, S, X, Y
from .implementation import Axes, Implementation, Registry

BATCH, TOKENS = "b", "t"
# axes that devices split as they split tokens: chunks, saved states and splits of tokens, and "device", one
# entry a device
SEQUENCE_AXES = (TOKENS, "chunk", "state", "split", "device")

A = TypeVar("A", bound=NamedTuple)


class NamedArray(NamedTuple):
    """An array of a call."""

    name: str
    axes: tuple[str, ...]
    array: jax.Array


@dataclasses.dataclass(eq=False)
class OpSpec(Registry[Implementation[X, Y, S]], Generic[X, Y, S]):
    """The arrays and the implementations of an op.

    Attributes:
        name: of the public function, for messages.
        inputs: named tuple class of its arrays. A field is None where it was not given, or a tuple of arrays
            with the same axes.
        outputs: named tuple class of its results.
        axes: axes of every array by name, such as ``{"r": "b t h k"}``. ``b`` is batch, ``t`` tokens; ``n``,
            sequences, is ``b`` unless the input ``cu_seqlens`` is given.
        implementations: in order of preference. Add one with ``op.implementations.insert(0, ...)``.
        shardable: axes that devices may split.
        output_names: names of the outputs for `jax.checkpoint` policies, or None.
        residual_name: the same of residuals.
        results: axes of the outputs of a call, where these depend on the call; None where every call has one
            array for each field of ``outputs``.
    """

    name: str
    inputs: type[X]
    outputs: type[Y]
    axes: Axes
    implementations: list[Implementation[X, Y, S]]
    shardable: tuple[str, ...] = (BATCH, "h")
    output_names: tuple[str | None, ...] | None = None
    residual_name: str | None = None
    results: Callable[[Context[X, S]], Y] | None = None

    def axes_like(self, x: X, kind: type[A]) -> A:
        """The axes of inputs or outputs (``kind``) in a call with inputs ``x``, one string a field."""
        unpacked = x._asdict().get("cu_seqlens") is None

        def axes_of(name: str) -> str:
            return " ".join(BATCH if axis == "n" and unpacked else axis for axis in self.axes[name].split())

        return kind._make(map(axes_of, kind._fields))

    def input_axes(self, x: X) -> X:
        """A tree like ``x`` with axes in place of arrays."""
        axes = self.axes_like(x, self.inputs)
        return self.inputs._make(jax.tree.map(lambda _, a=a: a, field) for a, field in zip(axes, x))

    def output_axes(self, ctx: Context[X, S]) -> Y:
        """A tree like the outputs with axes in place of arrays."""
        return self.axes_like(ctx.shapes, self.outputs) if self.results is None else self.results(ctx)

    def arrays(self, x: X) -> Iterator[NamedArray]:
        """Every array that was given."""
        for name, axes, field in zip(self.inputs._fields, self.axes_like(x, self.inputs), x):
            for array in jax.tree.leaves(field):
                yield NamedArray(name, tuple(axes.split()), array)
