"""Calls Triton kernels inside JAX programs: `triton_call`.

A kernel's parameters are records: named tuples of arrays, ints and None, in any nesting. The last but one is
the record of its outputs, the last one its config, a hashable constant. Fields that are None do not exist in
the compiled kernel, which tests them with ``is None``.

On a GPU, `lowering` compiles the kernel when the program is lowered. With ``TRITON_INTERPRET=1`` the kernel
runs on the host instead, in Triton's interpreter (`interpreter`).
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax

from ...core.context import Context
from ...core.gpu import current_gpu, gpu_missing
from ...core.implementation import Unsupported, unfit_inputs
from .call import Launch, TritonCall, check_grid
from .types import Group, Kernel
from .versions import why_not_compiled

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
Out = TypeVar("Out")


def triton_call(
    kernel: Kernel,
    *groups: Group,
    out: Out,
    config: Hashable,
    grid: tuple[int, int, int],
    launch: Launch,
    aliases: Mapping[str, str] | None = None,
    in_place: bool = False,
) -> Out:
    """Runs a kernel and returns its outputs, in the structure of ``out``.

    Args:
        kernel: a `triton.jit` function with the parameters ``(*groups, out, config)``.
        groups: named tuples (or tuples) of arrays, ints and None, or one of these.
        out: a tuple of `jax.ShapeDtypeStruct` and None.
        config: the kernel's compile-time constant.
        grid: programs along the axes 0 (moves fastest), 1 and 2.
        launch: how programs are compiled.
        aliases: outputs by the operands whose memory they may take over, both as paths:
            ``{"saved.states.0": "r"}``. In a loop that slices the operand they do not, which saves its copy.
        in_place: whether they always take it over: the kernel writes through the operand's pointer, and parts
            that it does not write stay.

    Raises:
        TypeError: the kernel has another number of parameters.
        KeyError: ``aliases`` names an operand or output that does not exist.
        ValueError: see `check_grid`.
    """
    check_grid(grid)
    names = kernel.arg_names
    if len(names) != len(groups) + 2:
        raise TypeError(f"{kernel.__name__} has {len(names)} parameters, got {len(groups) + 2}")
    leaves, tree = jax.tree.flatten(groups)
    shapes, outputs = jax.tree.flatten((out,))
    call = TritonCall(
        kernel=kernel,
        groups=tree,
        scalars=tuple(x if isinstance(x, int) else None for x in leaves),
        outputs=outputs,
        shapes=tuple(shapes),
        constants=((names[-1], config),),
        grid=grid,
        launch=launch,
        capability=current_gpu().capability,
        aliases=_positions(dict(zip(names, groups, strict=False)), out, aliases or {}),
        in_place=in_place,
    )
    results = _run(call, [x for x in leaves if not isinstance(x, int)])
    return jax.tree.unflatten(outputs, results)[0]


def _run(call: TritonCall, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Binds the call's primitive, or runs the interpreter."""
    if INTERPRET:
        from .interpreter import run_interpreted

        return run_interpreted(call, arrays)
    from .lowering import triton_call_p

    if not call.in_place:
        return triton_call_p.bind(*arrays, call=call)
    # XLA fuses a slice of an operand or into an output with the call and then loses that they share memory
    arrays = jax.lax.optimization_barrier(list(arrays))
    return jax.lax.optimization_barrier(triton_call_p.bind(*arrays, call=call))


def _positions(
    groups: Mapping[str, Group], out: Out, aliases: Mapping[str, str]
) -> tuple[tuple[int, int], ...]:
    """Pairs of positions among arrays and outputs that pairs of paths name."""
    arrays: dict[str, int] = {}
    names = list(groups)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(groups.values())):
        if not isinstance(leaf, int):
            first, *rest = _path(path).split(".")
            arrays[".".join([names[int(first)], *rest])] = len(arrays)
    results = {_path(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(out))}
    return tuple((arrays[operand], results[output]) for operand, output in aliases.items())


def _path(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def supports(ctx: Context) -> Unsupported | None:
    """None where Triton kernels can serve the call, else the reason."""
    return why_not(ctx.platform) or unfit_inputs(ctx)


def preferred(ctx: Context) -> bool:
    """Whether an op selects Triton kernels by default: not in the interpreter, which tests select by name."""
    return not INTERPRET


def why_not(platform: str) -> Unsupported | None:
    """None where Triton kernels run on ``platform`` (``"gpu"``, ``"cpu"``, ...), else the reason."""
    if INTERPRET:
        return None
    reason = gpu_missing(platform)
    if reason is not None:
        return Unsupported(reason)
    reason = why_not_compiled()
    if reason is not None:
        return Unsupported(reason, fixable=True)
    try:
        from . import lowering  # noqa: F401
    except Exception as error:  # whatever jaxlib and Triton raise at import where they are broken
        return Unsupported(f"Triton kernels cannot be compiled: {error}", fixable=True)
    return None
