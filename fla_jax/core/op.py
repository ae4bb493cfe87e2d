"""`Op`: a differentiable op made of implementations.

An op names its arrays and their axes and lists implementations in order of preference. Selection, gradient,
sharding, `jax.vmap`, names for rematerialisation and the checked mode follow from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import AxisType

from .checked import is_checked
from .context import Context, ContextParallel, S, X, Y, shapes_of
from .gpu import current_gpu, platform_of
from .mesh import check_mesh, devices_in_mesh, is_explicit, is_manual, mesh_axes, vary_alike
from .op_spec import TOKENS, OpSpec
from .vjp import differentiable


@dataclasses.dataclass(eq=False)
class Op(OpSpec[X, Y, S]):
    """A differentiable op of arrays: an ``OpSpec`` that can be called.

    Attributes:
        check: ``check(ctx, x, outputs)`` has the checks of `fla_jax.checked`.
        empty: the outputs of a call without tokens, for which no implementation runs; None where
            implementations take such calls.

    Example:
        >>> from fla_jax.ops import OPS
        >>> op = OPS["chunk_rwkv7"]
        >>> op.name, op.axes["w"], op.axes["initial_state"]
        ('chunk_rwkv7', 'b t h k', 'n h k v')
    """

    check: Callable[[Context[X, S], X, Y], None] | None = None
    empty: Callable[[X], Y] | None = None

    def __call__(
        self, x: X, settings: S, implementation: str | None = None, sequence_axis: str | None = None
    ) -> Y:
        """The op on ``x``.

        Args:
            x: its arrays.
            settings: its settings.
            implementation: by name; None: selected automatically.
            sequence_axis: the mesh axis whose devices split the tokens; None where there is none, or where
                explicit types name it.

        Raises:
            ValueError: ``implementation`` is unknown or cannot run this call here, an axis that must be whole
                is sharded over an explicit mesh axis, arrays lie on a mesh with explicit axes that is not in
                context, or ``sequence_axis`` does not fit.
            TypeError: the call is differentiated in forward mode.
        """
        if self.empty is not None and any(0 in array.shape for array in jax.tree.leaves(x)):
            if implementation is not None:
                self.named(implementation)
            return self.empty(x)
        _refuse_forward_mode(self.name, x)
        check_mesh(self.name, x)
        ctx = self._context(x, settings, sequence_axis)
        outputs: Y = differentiable()(self, self.select(ctx, implementation), ctx, vary_alike(x))
        if self.check is not None and is_checked():
            self.check(ctx, x, outputs)
        return outputs

    def _context(self, x: X, settings: S, sequence_axis: str | None) -> Context[X, S]:
        sequence_axis = self._sequence_axis(x, sequence_axis)
        self._refuse_sharded(x, sequence_axis)
        size = 1 if sequence_axis is None else self._cp_size(x, sequence_axis)
        shapes, num_devices = shapes_of(x), devices_in_mesh()
        if size > 1 and is_manual():  # arrays are those of one device
            shapes, num_devices = self._whole_shapes(shapes, size), size
        # an explicit axis of one device splits nothing, and is in the types all the same
        cp = ContextParallel(sequence_axis if size > 1 or is_explicit() else None, size)
        platform = platform_of(jax.tree.leaves(x))
        return Context(self.name, shapes, settings, platform, current_gpu(), num_devices, cp=cp)

    def _sequence_axis(self, x: X, named: str | None) -> str | None:
        """The mesh axis that splits the tokens: the named one, or the one in the arrays' types."""
        can_split = any(one.context_parallel for one in self.implementations)
        if named is not None or not is_explicit() or not can_split:
            return named
        for _, axes, array in self.arrays(x):
            for axis, entry in zip(axes, jax.typeof(array).sharding.spec):
                on = mesh_axes(entry)
                if axis == TOKENS and len(on) == 1:
                    return on[0]
        return None

    def _cp_size(self, x: X, sequence_axis: str) -> int:
        """Number of devices that split the tokens; raises unless they can."""
        mesh = jax.sharding.get_abstract_mesh()
        if sequence_axis not in mesh.shape:
            got = "there is no mesh in context (jax.set_mesh)" if mesh.empty else f"it has {mesh.axis_names}"
            raise ValueError(
                f"{self.name}: sequence_axis must be an axis of the mesh in context, got {sequence_axis!r}; "
                f"{got}"
            )
        size = mesh.shape[sequence_axis]
        if is_manual() and dict(zip(mesh.axis_names, mesh.axis_types))[sequence_axis] != AxisType.Manual:
            raise ValueError(
                f"{self.name}: sequence_axis={sequence_axis!r} must be one of the axes of the jax.shard_map "
                "around the call"
            )
        if size == 1:
            return 1
        if x._asdict().get("cu_seqlens") is not None:
            raise ValueError(
                f"{self.name}: cu_seqlens cannot go with tokens over mesh axis {sequence_axis!r}; "
                "segment_ids can"
            )
        for name, axes, array in self.arrays(x):
            for axis, length in zip(axes, array.shape):
                if axis == TOKENS and not is_manual() and length % size:
                    raise ValueError(
                        f"{self.name}: axis T of {name} must be a multiple of mesh axis {sequence_axis!r} = "
                        f"{size}, got T = {length}"
                    )
        return size

    def _whole_shapes(self, shapes: X, size: int) -> X:
        """Shapes of arrays with the tokens of all devices, from those of one device."""

        def whole(axes: str, x: jax.Array) -> jax.ShapeDtypeStruct:
            shape = (n * size if axis == TOKENS else n for axis, n in zip(axes.split(), x.shape))
            return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

        return jax.tree.map(whole, self.input_axes(shapes), shapes)

    def _refuse_sharded(self, x: X, sequence_axis: str | None) -> None:
        if not is_explicit():
            return
        for name, axes, array in self.arrays(x):
            for axis, entry in zip(axes, jax.typeof(array).sharding.spec):
                on = mesh_axes(entry)
                if axis == TOKENS and sequence_axis is not None and set(on) <= {sequence_axis}:
                    continue
                if on and axis not in self.shardable:
                    over = " and ".join(map(repr, on))
                    raise ValueError(
                        f"{self.name}: axis {axis.upper()} of {name} [{', '.join(axes).upper()}] must be "
                        f"whole on every device, got it sharded over mesh axis {over}; jax.sharding.reshard "
                        "gathers it"
                    )


def _refuse_forward_mode(op: str, x: X) -> None:
    """Raises JAX's refusal at once and in the op's words, where the op itself sees the tracer.

    Inside a jitted function JAX's error comes, with `jax.linearize` when the linear function is called.
    """
    # without it, reverse mode starts as jvp
    direct = getattr(jax.config, "jax_use_direct_linearize", True)
    is_forward = is_reverse = False
    for array in jax.tree.leaves(x):
        trace = getattr(array, "_trace", None)
        is_linearized = type(trace).__name__ == "LinearizeTrace"
        is_vjp = is_linearized and getattr(trace, "is_vjp", True)
        is_reverse |= is_vjp
        is_forward |= (is_linearized and not is_vjp) or (type(trace).__name__ == "JVPTrace" and direct)
    if is_forward and not is_reverse:  # both: forward mode over jax.grad, each of other arrays
        raise TypeError(
            f"{op} can be differentiated in reverse mode only (jax.grad, jax.vjp), not by "
            "forward-mode differentiation (jax.jvp, jax.linearize, jax.jacfwd)"
        )
