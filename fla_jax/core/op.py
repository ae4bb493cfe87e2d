"""The one place that makes an op out of implementations.

An `Op` names its arrays and their axes and lists implementations, the best first. It alone chooses one for a
call, defines the gradient, shards opaque kernels, maps them under `jax.vmap`, tags what rematerialisation may
keep and runs the checked mode's checks. An implementation is a module of plain functions on the arrays of one
device:

    forward(call, x) -> (outputs, kept)              `kept`: arrays by name that only its own backward reads
    backward(call, x, kept, cotangents) -> gradients     a tuple like x; None for integer arrays
    kept_axes(call) -> {name: axes}                  what `kept` holds, for opaque implementations
    may_be_unused                                    optional: results whose cotangents are None, not zeros,
                                                     where nothing depends on them

A plain implementation that has ``kept_axes`` runs on each device's own part on meshes with explicit axes,
where JAX would want to be told the sharding of every step.

Devices may share the tokens of rows, axis ``t``, over one mesh axis that the call names (or whose types do).
Then ``call.shards`` is their number, ``call.sequence`` the mesh axis where an implementation sees one
device's tokens, and it communicates as it has to (core/context_parallel.py): results without tokens are to
be the same on all devices, gradients of arrays without tokens are summed over them by the op. What it keeps
may have an axis ``chunk`` or ``stretch``, which are split as tokens are.

``call`` is a `fla_jax.core.context.Context`, ``x``, ``outputs`` and ``cotangents`` are the op's named
tuples. The gradient of an array without rows (RWKV-6's u) may come per row, with one more axis in front; the
op sums it, and all of one shape together.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import AxisType

from .checked import is_checked
from .context import Context, abstract
from .gpu import Fixable, platform_of
from .sharding import ROWS, TOKENS, check_mesh, devices_in_mesh, is_explicit, is_manual, mesh_axes
from .vjp import run

Inputs = TypeVar("Inputs", bound=tuple)
Outputs = TypeVar("Outputs", bound=tuple)


def always(ctx: Context) -> str | None:
    """`Implementation.supports` of what runs every call everywhere."""
    return None


def unasked(ctx: Context) -> bool:
    """`Implementation.preferred` of what the op may choose by itself for every call that it supports."""
    return True


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: what ``implementation=`` calls it.
        load: returns the module (or any object) with its functions; called when it runs first, so that
            importing the library loads no GPU package.
        supports: None where it can run a call, else the reason.
        automatic: whether the op may choose it for a call without being asked.
        opaque: whether XLA cannot look into it and so not shard it: a kernel.
        sequences: whether it follows ``call.sequence``: rows whose tokens devices share.

    Example:
        >>> from fla_jax.ops.rwkv7.api import CHUNK
        >>> [one.name for one in CHUNK.implementations]  # what chunk_rwkv7 chooses from, the best first
        ['triton', 'xla', 'reference', 'pallas']
    """

    name: str
    load: Callable[[], Any]
    supports: Callable[[Context], str | None] = always
    preferred: Callable[[Context], bool] = unasked
    opaque: bool = False
    context_parallel: bool = False


@dataclasses.dataclass(eq=False)
class Op(Generic[Inputs, Outputs]):
    """A differentiable op of arrays.

    Attributes:
        name: the public function's name, for messages.
        inputs: named tuple class of its arrays; None stands for one that was not given, and a tuple for any
            number of arrays with the same axes.
        outputs: named tuple class of its results, likewise.
        axes: the axes of every array by name, such as ``{"r": "b t h k"}``. ``b`` are rows. ``n``, packed
            sequences, is ``b`` unless the input ``cu_seqlens`` is given.
        implementations: open, in order of preference. Add one with ``op.implementations.insert(0, ...)``.
        shardable: axes that devices may share.
        output_names: names of the results for `jax.checkpoint` policies, or None.
        kept_name: the same of what forwards keep.
        check: ``check(call, x, outputs)`` holds the checks of `fla_jax.checked`.
        results: ``results(call)`` says, as ``outputs`` with axes for arrays, which results a call has, where
            that depends on the call; None where every call has one array for each of ``outputs``.

    Example:
        >>> from fla_jax.ops.rwkv7.api import CHUNK
        >>> CHUNK.name, CHUNK.axes["w"], CHUNK.axes["initial_state"]
        ('chunk_rwkv7', 'b t h k', 'n h k v')
    """

    name: str
    inputs: type[Inputs]
    outputs: type[Outputs]
    axes: Mapping[str, str]
    implementations: list[Implementation]
    shardable: tuple[str, ...] = (ROWS, "h")
    output_names: tuple[str | None, ...] | None = None
    kept_name: str | None = None
    check: Callable[[Context, Inputs, Outputs], None] | None = None
    results: Callable[[Context], Outputs] | None = None

    def __call__(
        self,
        x: Inputs,
        settings: Any,
        implementation: str | None = None,
        sequence_axis: str | None = None,
    ) -> Outputs:
        """The op on ``x``.

        Args:
            x: its arrays.
            settings: its own settings.
            implementation: by name; None for the best that qualifies.
            sequence_axis: the mesh axis whose devices share the tokens of rows; None where there is none, or
                where explicit types say it.

        Raises:
            ValueError: ``implementation`` is unknown or cannot run this call here, an axis that must stay
                whole is sharded over an explicit mesh axis, arrays lie on a mesh with explicit axes that is
                not in context, or ``sequence_axis`` does not fit.
            TypeError: the call is differentiated in forward mode.
        """
        arrays = jax.tree.leaves(x)
        self._refuse_forward_mode(arrays)
        check_mesh(self.name, x)
        sequence_axis = self._sequence_axis(x, sequence_axis)
        self._refuse_sharded(x, sequence_axis)
        shards = 1 if sequence_axis is None else self._shards(x, sequence_axis)
        inputs, devices = abstract(x), devices_in_mesh()
        if shards > 1 and is_manual():  # arrays are those of one device
            inputs, devices = self._whole_rows(inputs, shards), shards
        ctx = Context(
            self.name,
            inputs,
            settings,
            platform_of(arrays),
            devices,
            cp_size=shards,
            # an explicit axis of one device splits nothing, and stays in the types all the same
            sequence=sequence_axis if shards > 1 or is_explicit() else None,
        )
        outputs = run(self, self.choose(ctx, implementation), ctx, x)
        if self.check is not None and is_checked():
            self.check(ctx, x, outputs)
        return outputs

    def choose(self, ctx: Context, name: str | None) -> Implementation:
        """The implementation that serves a call: the named one, else the first that can and may."""
        if name is None:
            for one in self.implementations:
                reason = _reason(one, ctx)
                if reason is None and one.preferred(ctx):
                    return one
                if isinstance(reason, Fixable):
                    warnings.warn(
                        f"{self.name} runs without {one.name!r}, much slower: {reason}", stacklevel=5
                    )
        found = self.named(name)
        reason = _reason(found, ctx)
        if reason is not None:
            raise ValueError(f"{self.name}: implementation={name!r} cannot run this call: {reason}")
        return found

    def named(self, name: Any) -> Implementation:
        """The implementation with a name."""
        for one in self.implementations:
            if isinstance(name, str) and one.name == name:
                return one
        names = sorted(one.name for one in self.implementations)
        raise ValueError(f"{self.name}: implementation must be one of {names} or None, got {name!r}")

    def axes_of(self, name: str, x: Any) -> str:
        """The axes of an input or result in a call with inputs ``x``."""
        packed = getattr(x, "cu_seqlens", None) is not None
        return " ".join(ROWS if axis == "n" and not packed else axis for axis in self.axes[name].split())

    def given(self, x: Inputs) -> list[tuple[str, str]]:
        """Name and axes of every array that was given."""
        fields: tuple[str, ...] = self.inputs._fields  # type: ignore[attr-defined]
        return [
            (name, self.axes_of(name, x)) for name, field in zip(fields, x) for _ in jax.tree.leaves(field)
        ]

    def axes_of_results(self, ctx: Context) -> Outputs:
        """The results of a call, axes in the place of arrays."""
        if self.results is not None:
            return self.results(ctx)
        fields = self.outputs._fields  # type: ignore[attr-defined]
        return self.outputs(*(self.axes_of(name, ctx.inputs) for name in fields))

    def _sequence_axis(self, x: Inputs, named: str | None) -> str | None:
        """The mesh axis that splits the rows of this call: the named one, or the one that types name."""
        if (
            named is not None
            or not is_explicit()
            or not any(one.context_parallel for one in self.implementations)
        ):
            return named
        for (_, axes), array in zip(self.given(x), jax.tree.leaves(x)):
            for axis, entry in zip(axes.split(), jax.typeof(array).sharding.spec):
                on = mesh_axes(entry)
                if axis == TOKENS and len(on) == 1:
                    return on[0]
        return None

    def _shards(self, x: Inputs, sequence_axis: str) -> int:
        """Between how many devices the tokens of a row are split; raises unless they can be."""
        mesh = jax.sharding.get_abstract_mesh()
        if sequence_axis not in mesh.shape:
            got = "there is no mesh in context (jax.set_mesh)" if mesh.empty else f"it has {mesh.axis_names}"
            raise ValueError(
                f"{self.name}: sequence_axis must be an axis of the mesh in context, got {sequence_axis!r}; "
                f"{got}"
            )
        shards = mesh.shape[sequence_axis]
        if is_manual() and dict(zip(mesh.axis_names, mesh.axis_types))[sequence_axis] != AxisType.Manual:
            raise ValueError(
                f"{self.name}: sequence_axis={sequence_axis!r} must be one of the axes of the jax.shard_map "
                "around the call"
            )
        if shards == 1:
            return 1
        if getattr(x, "cu_seqlens", None) is not None:
            raise ValueError(
                f"{self.name}: cu_seqlens cannot go with tokens over mesh axis {sequence_axis!r}; "
                "segment_ids can"
            )
        for (name, axes), array in zip(self.given(x), jax.tree.leaves(x)):
            for axis, size in zip(axes.split(), array.shape):
                if axis == TOKENS and not is_manual() and size % shards:
                    raise ValueError(
                        f"{self.name}: axis T of {name} must be a multiple of mesh axis {sequence_axis!r} = "
                        f"{shards}, got T = {size}"
                    )
        return shards

    def _whole_rows(self, inputs: Inputs, shards: int) -> Inputs:
        """Shapes of arrays with the tokens of all devices, from those of one device."""
        leaves, tree = jax.tree.flatten(inputs)
        wholes = []
        for (_, axes), x in zip(self.given(inputs), leaves):
            shape = (n * shards if axis == TOKENS else n for axis, n in zip(axes.split(), x.shape))
            wholes.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype))
        return jax.tree.unflatten(tree, wholes)

    def _refuse_sharded(self, x: Inputs, sequence_axis: str | None) -> None:
        if not is_explicit():
            return
        for (name, axes), array in zip(self.given(x), jax.tree.leaves(x)):
            for axis, entry in zip(axes.split(), jax.typeof(array).sharding.spec):
                if axis == TOKENS and sequence_axis is not None and set(mesh_axes(entry)) <= {sequence_axis}:
                    continue
                if mesh_axes(entry) and axis not in self.shardable:
                    raise ValueError(
                        f"{self.name}: axis {axis.upper()} of {name} [{', '.join(axes.upper().split())}] "
                        "must be whole on every device, got it sharded over mesh axis "
                        f"{' and '.join(map(repr, mesh_axes(entry)))}; jax.sharding.reshard gathers it"
                    )

    def _refuse_forward_mode(self, arrays: list[jax.Array]) -> None:
        """Raises JAX's refusal at once and in the op's words, where the op itself sees the tracer.

        Inside a jitted function JAX's own error comes, with `jax.linearize` when the linear function is
        called.
        """
        for x in arrays:
            trace = getattr(x, "_trace", None)
            linearize = type(trace).__name__ == "LinearizeTrace" and not getattr(trace, "is_vjp", True)
            # without it, reverse mode starts as jvp
            direct = getattr(jax.config, "jax_use_direct_linearize", True)
            if linearize or (type(trace).__name__ == "JVPTrace" and direct):
                raise TypeError(
                    f"{self.name} can be differentiated in reverse mode only (jax.grad, jax.vjp), not by "
                    "forward-mode differentiation (jax.jvp, jax.linearize, jax.jacfwd)"
                )


def _reason(implementation: Implementation, ctx: Context) -> str | None:
    """None where an implementation can run a call, else why not."""
    if ctx.cp_size > 1 and not implementation.context_parallel:
        return f"it takes whole rows, and T is split over mesh axis {ctx.sequence!r}"
    return implementation.supports(ctx)
