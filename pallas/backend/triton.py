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
from typing import Any, TypeVar

import jax

from ...core.context import Context
from ...core.gpu import current_gpu, gpu_missing
from ...core.implementation import Unsupported, unfit_inputs
from .call import Launch, TritonCall

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
Out = TypeVar("Out")


def triton_call(
    kernel: Any,
    *groups: Any,
    out: Out,
    config: Hashable,
    grid: tuple[int, int, int],
    launch: Launch,
    aliases: Mapping[str, str] | None = None,
) -> Out:
    """Runs a kernel and returns its outputs, in the structure of ``out``.

    Args:
        kernel: a `triton.jit` function with the parameters ``(*groups, out, config)``.
        groups: named tuples (or tuples) of arrays, ints and None, or one of these.
        out: a tuple of `jax.ShapeDtypeStruct` and None.
        config: the kernel's compile-time constant.
        grid: programs along the axes 0 (moves fastest), 1 and 2.
        launch: how programs are compiled.
        aliases: outputs by the operands whose memory they take over, both as paths:
            ``{"saved.states.0": "r"}``. The kernel writes such an output through the operand's pointer and
            leaves the output's own alone.

    Raises:
        TypeError: the kernel has another number of parameters.
        KeyError: ``aliases`` names an operand or output that does not exist.
    """
    names = kernel.arg_names
    if len(names) != len(groups) + 2:
        raise TypeError(f"{kernel.__name__} has {len(names)} parameters, got {len(groups) + 2}")
    named = dict(zip(names, groups, strict=False))
    results = {operand: f"0.{output}" for operand, output in (aliases or {}).items()}
    return _run(kernel, named, (out,), {names[-1]: config}, grid, launch, results)[0]


def _run(
    kernel: Any,
    groups: Mapping[str, Any],
    out: tuple[Any, ...],
    constants: Mapping[str, Hashable],
    grid: tuple[int, int, int],
    launch: Launch,
    aliases: Mapping[str, str],
) -> Any:
    leaves, tree = jax.tree.flatten(tuple(groups.values()))
    shapes, outputs = jax.tree.flatten(out)
    scalars = tuple(x if isinstance(x, int) else None for x in leaves)
    arrays = [x for x in leaves if not isinstance(x, int)]
    call = TritonCall(
        kernel=kernel,
        groups=tree,
        scalars=scalars,
        outputs=outputs,
        shapes=tuple(shapes),
        constants=tuple(sorted(constants.items())),
        grid=grid,
        launch=launch,
        capability=current_gpu().capability,
        aliases=_positions(groups, out, aliases),
    )
    if INTERPRET:
        from .interpreter import run_interpreted

        return jax.tree.unflatten(outputs, run_interpreted(call, arrays))
    from .lowering import triton_call_p

    # XLA fuses a slice of an operand or into an output with the call and then loses that they share memory
    if aliases:
        arrays = jax.lax.optimization_barrier(arrays)
    results = triton_call_p.bind(*arrays, call=call)
    if aliases:
        results = jax.lax.optimization_barrier(results)
    return jax.tree.unflatten(outputs, results)


def _positions(
    groups: Mapping[str, Any], out: Any, aliases: Mapping[str, str]
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


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def launch(
    kernel: Any,
    inputs: Mapping[str, jax.Array | int],
    out: Mapping[str, jax.ShapeDtypeStruct],
    *,
    grid: Sequence[int],
    num_warps: int,
    num_stages: int,
    aliases: Mapping[str, str] | None = None,
    MAX_REGISTERS: int | None = None,
    **constexprs: Any,
) -> dict[str, jax.Array]:
    """Calls a kernel with flat parameters by name: inputs, then outputs, then constants."""
    if MAX_REGISTERS is not None:
        constexprs["MAX_REGISTERS"] = MAX_REGISTERS
    names = [name for name in kernel.arg_names if name not in constexprs]
    if {*names, *constexprs} != {*inputs, *out, *constexprs}:
        wrong = sorted({*kernel.arg_names} ^ {*inputs, *out, *constexprs})
        raise TypeError(f"{kernel.__name__}: parameters missing, or given without being there: {wrong}")
    operands = {name: inputs[name] for name in names if name in inputs}
    outputs = [name for name in names if name in out]
    positions = {name: str(outputs.index(result)) for name, result in (aliases or {}).items()}
    results = _run(
        kernel,
        operands,
        tuple(out[name] for name in outputs),
        constexprs,
        tuple([*grid, 1, 1][:3]),  # type: ignore[arg-type]
        Launch(num_warps, num_stages, MAX_REGISTERS or 0),
        positions,
    )
    return dict(zip(outputs, results, strict=True))


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
    try:
        from . import lowering  # noqa: F401
    except Exception as error:  # whatever Triton and jaxlib raise at import where versions do not fit
        return Unsupported(
            f"Triton kernels cannot be compiled ({type(error).__name__}: {error})", fixable=True
        )
    return None
