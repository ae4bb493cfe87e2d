"""The one place that makes an op out of implementations.

An `Op` names its arrays and their axes and lists implementations, the best first. It alone chooses one for a
call, defines the gradient, shards opaque kernels, maps them under `jax.vmap`, tags what rematerialisation may
keep and runs the checked mode's checks. An implementation is a module of plain functions on the arrays of one
device:

    forward(call, x) -> (outputs, kept)              `kept`: arrays by name that only its own backward reads
    backward(call, x, kept, cotangents) -> gradients     a tuple like x; None for integer arrays
    kept_axes(call) -> {name: axes}                  what `kept` holds, for opaque implementations

A plain implementation that has ``kept_axes`` runs on each device's own part on meshes with explicit axes,
where JAX would want to be told the sharding of every step.

``call`` is a `fla_jax.core.call.Call`, ``x``, ``outputs`` and ``cotangents`` are the op's named tuples. The
gradient of an array without rows (RWKV-6's u) may come per row, with one more axis in front; the op sums it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from ..core.call import Call, abstract
from ..core.checked import is_checked
from ..core.gpu import Mendable, platform_of
from ..core.names import name_arrays
from ..core.sharding import ROWS, devices_in_mesh, mesh_axes, reduce_like, sharded

Inputs = TypeVar("Inputs", bound=tuple)
Outputs = TypeVar("Outputs", bound=tuple)
Arrays = dict[str, jax.Array]


def always(call: Call) -> str | None:
    """`Implementation.supports` of what runs every call everywhere."""
    return None


def unasked(call: Call) -> bool:
    """`Implementation.automatic` of what the op may choose by itself for every call that it supports."""
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

    Example:
        >>> from fla_jax.ops.rwkv7.api import CHUNK
        >>> [one.name for one in CHUNK.implementations]  # what chunk_rwkv7 chooses from, the best first
        ['triton', 'xla', 'reference', 'pallas']
    """

    name: str
    load: Callable[[], Any]
    supports: Callable[[Call], str | None] = always
    automatic: Callable[[Call], bool] = unasked
    opaque: bool = False


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
    check: Callable[[Call, Inputs, Outputs], None] | None = None
    results: Callable[[Call], Outputs] | None = None

    def __call__(self, x: Inputs, settings: Any, implementation: str | None = None) -> Outputs:
        """The op on ``x``.

        Raises:
            ValueError: ``implementation`` is unknown or cannot run this call here, or an axis that must stay
                whole is sharded over an explicit mesh axis.
            TypeError: the call is differentiated in forward mode.
        """
        arrays = jax.tree.leaves(x)
        self._refuse_forward_mode(arrays)
        self._refuse_sharded(x)
        call = Call(self.name, abstract(x), settings, platform_of(arrays), devices_in_mesh())
        outputs = _run(self, self.choose(call, implementation), call, x)
        if self.check is not None and is_checked():
            self.check(call, x, outputs)
        return outputs

    def choose(self, call: Call, name: str | None) -> Implementation:
        """The implementation that serves a call: the named one, else the first that can and may."""
        if name is None:
            for one in self.implementations:
                reason = one.supports(call)
                if reason is None and one.automatic(call):
                    return one
                if isinstance(reason, Mendable):
                    warnings.warn(
                        f"{self.name} runs without {one.name!r}, much slower: {reason}", stacklevel=5
                    )
        by_name = {one.name: one for one in self.implementations}
        if name is None or name not in by_name:
            raise ValueError(
                f"{self.name}: implementation must be one of {sorted(by_name)} or None, got {name!r}"
            )
        reason = by_name[name].supports(call)
        if reason is not None:
            raise ValueError(f"{self.name}: implementation={name!r} cannot run this call: {reason}")
        return by_name[name]

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

    def axes_of_results(self, call: Call) -> Outputs:
        """The results of a call, axes in the place of arrays."""
        if self.results is not None:
            return self.results(call)
        fields = self.outputs._fields  # type: ignore[attr-defined]
        return self.outputs(*(self.axes_of(name, call.inputs) for name in fields))

    def _refuse_sharded(self, x: Inputs) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or AxisType.Explicit not in mesh.axis_types:
            return
        for (name, axes), array in zip(self.given(x), jax.tree.leaves(x)):
            for axis, entry in zip(axes.split(), jax.typeof(array).sharding.spec):
                if mesh_axes(entry) and axis not in self.shardable:
                    raise ValueError(
                        f"{self.name}: axis {axis.upper()} of {name} [{', '.join(axes.upper().split())}] "
                        "must be whole on "
                        "every device, got it sharded over mesh axis "
                        f"{' and '.join(map(repr, mesh_axes(entry)))}; "
                        "jax.sharding.reshard gathers it"
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


def _by_device(implementation: Implementation, module: Any) -> bool:
    """Whether an implementation is called on each device's own part of the arrays."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return implementation.opaque or (explicit and hasattr(module, "kept_axes"))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _forward(op: Op, implementation: Implementation, call: Call, x: Any) -> tuple[Any, Arrays]:
    """Outputs, and what the implementation keeps; jitted, so that calls outside jit find what the first
    compiled.
    """
    module = implementation.load()
    if not _by_device(implementation, module):
        return module.forward(call, x)
    kept_axes = module.kept_axes(call) if call.keep else {}
    arrays, tree = jax.tree.flatten(x)
    results, outputs_tree = jax.tree.flatten(op.axes_of_results(call))

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        outputs, kept = module.forward(call, jax.tree.unflatten(tree, arrays))
        return (*jax.tree.leaves(outputs), *(kept[name] for name in kept_axes))

    right = [*results, *kept_axes.values()]
    made = sharded(local, [axes for _, axes in op.given(x)], right, op.shardable)(*arrays)
    outputs = jax.tree.unflatten(outputs_tree, made[: len(results)])
    return outputs, dict(zip(kept_axes, made[len(results) :]))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _backward(
    op: Op, implementation: Implementation, call: Call, x: Any, kept: Arrays, cotangents: Any
) -> Any:
    """Gradients like ``x``, None for integers; those of arrays without rows may have a leading axis of
    rows.
    """
    module = implementation.load()
    if not _by_device(implementation, module):
        return module.backward(call, x, kept, cotangents)
    inputs, results = [axes for _, axes in op.given(x)], jax.tree.leaves(op.axes_of_results(call))
    kept_axes = module.kept_axes(call)
    floating = [jnp.issubdtype(array.dtype, jnp.floating) for array in jax.tree.leaves(x)]
    arrays, tree = jax.tree.flatten((x, cotangents, tuple(kept[name] for name in kept_axes)))

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        x, cotangents, kept = jax.tree.unflatten(tree, arrays)
        gradients = jax.tree.leaves(module.backward(call, x, dict(zip(kept_axes, kept)), cotangents))
        # one for all rows of a device counts as one row
        return tuple(g if g.ndim == len(axes.split()) else g[None] for g, axes in zip(gradients, right))

    left = [*inputs, *results, *kept_axes.values()]
    per_row = [axes if ROWS in axes.split() or "n" in axes.split() else f"{ROWS} {axes}" for axes in inputs]
    right = [axes for axes, is_floating in zip(per_row, floating) if is_floating]
    made = sharded(local, left, right, op.shardable)(*arrays)
    remaining = iter(made)
    return jax.tree.unflatten(jax.tree.structure(x), [next(remaining) if f else None for f in floating])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(op: Op, implementation: Implementation, call: Call, x: Any) -> Any:
    return _forward(op, implementation, dataclasses.replace(call, keep=False), x)[0]


def _run_fwd(op: Op, implementation: Implementation, call: Call, x: Any) -> tuple[Any, Any]:
    outputs, kept = _forward(op, implementation, call, x)
    # named inside the rule, so that a policy can keep them: see core/names.py
    names = op.output_names or (None,) * len(outputs)
    outputs = op.outputs(*(name_arrays(y, name) for y, name in zip(outputs, names)))
    return outputs, (x, name_arrays(kept, op.kept_name))


def _run_bwd(
    op: Op, implementation: Implementation, call: Call, residuals: Any, cotangents: Any
) -> tuple[Any]:
    x, kept = residuals
    gradients = _backward(op, implementation, call, x, kept, cotangents)

    def like(primal: jax.Array, gradient: jax.Array | None) -> jax.Array | None:
        if gradient is None:
            return None
        if gradient.ndim > primal.ndim:  # one per row
            gradient = jnp.sum(gradient, 0).astype(primal.dtype)
        return reduce_like(gradient, primal)

    return (jax.tree.map(like, x, gradients),)


_run.defvjp(_run_fwd, _run_bwd)
