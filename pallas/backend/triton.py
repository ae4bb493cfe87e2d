"""The one place that calls Triton kernels: through jax-triton on a GPU, through Triton's interpreter where
``TRITON_INTERPRET=1`` is set.

jax-triton 0.3 and 0.4 differ in argument names, and both bind arrays to a kernel's parameters by position,
with wrong numbers and no error where the order is another: so `launch` takes names. Kernels stay in what both
accept: arrays and Python ints in order, outputs after inputs, everything else `tl.constexpr`, no None, no
autotuning (its choice changes from run to run).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ...core.context import Context
from ...core.gpu import gpu_missing, lowering_target
from ...core.implementation import Unsupported, unfit_inputs

OURS = "fla_jax"  # the name by which lowering.py knows our kernels
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _jax_triton():
    """jax-triton and whether it is 0.3; imported late, because 0.3 refuses to import without a CUDA
    plugin.
    """
    import triton.backends.nvidia.driver as driver

    if not hasattr(driver, "TMA_TF32"):  # all that jax-triton 0.4 misses in triton 3.6
        driver.TMA_TF32 = 11
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    if cache_dir is None:  # 0.3 sets it to '', which breaks other users of Triton in the process
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = cache_dir
    old = "out_shape" in inspect.signature(jax_triton.triton_call).parameters
    if old:
        from . import lowering

        lowering.install(OURS)
    return jax_triton, old


def supports(ctx: Context) -> Unsupported | None:
    """None where Triton kernels can serve ``call``, else the reason."""
    return why_not(ctx.platform) or unfit_inputs(ctx)


def preferred(ctx: Context) -> bool:
    """Whether the op may take them unasked: an interpreter is for tests, which ask for it by name."""
    return not INTERPRET


def why_not(platform: str) -> Unsupported | None:
    """None where Triton kernels can be called on ``platform`` (``"gpu"``, ``"cpu"``, ...), else the
    reason.
    """
    if INTERPRET:
        return None
    reason = gpu_missing(platform)
    if reason is not None:
        return Unsupported(reason)
    try:
        _jax_triton()
    except Exception as error:  # whatever it raises at import where CUDA is missing or versions do not fit
        return Unsupported(f"jax-triton cannot be imported ({type(error).__name__}: {error})", fixable=True)
    return None


def launch(
    kernel: Any,
    inputs: Mapping[str, jax.Array | int],
    out: Mapping[str, jax.ShapeDtypeStruct],
    *,
    grid: Sequence[int],
    num_warps: int,
    num_stages: int,
    aliases: Mapping[str, str] | None = None,
    **constexprs: Any,
) -> dict[str, jax.Array]:
    """Calls a kernel with all its parameters by name, and returns its outputs by name.

    Args:
        kernel: a `triton.jit` function, whose parameters are inputs, then outputs, then constants.
        inputs: arrays and Python ints.
        out: shapes and dtypes of the outputs.
        grid: number of programs along up to three axes.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        aliases: inputs whose memory an output takes over. The kernel writes it through the input's pointer
            and leaves the output's alone: with jax-triton 0.4 it is none.
        constexprs: compile-time arguments.

    Raises:
        TypeError: the kernel has other parameters than those given.
    """
    positions = {name: i for i, name in enumerate(kernel.arg_names)}
    if positions.keys() != {*inputs, *out, *constexprs}:
        wrong = sorted(positions.keys() ^ {*inputs, *out, *constexprs})
        raise TypeError(f"{kernel.__name__}: parameters missing, or given without being there: {wrong}")
    outputs = sorted(out, key=positions.__getitem__)
    operands = [inputs[name] for name in sorted(inputs, key=positions.__getitem__)]
    taken = {positions[name]: outputs.index(result) for name, result in (aliases or {}).items()}
    shapes = [out[name] for name in outputs]
    if INTERPRET:
        from .interpreter import triton_call_interpreted

        results = triton_call_interpreted(kernel, operands, shapes, tuple(grid), taken, constexprs)
    else:
        options = dict(
            grid=tuple(grid), num_warps=num_warps, num_stages=num_stages, name=kernel.__name__, **constexprs
        )
        # Where an operand is a slice, or a result put into one, XLA makes one operation of all and forgets
        # that results take over memory: they would be somewhere else. Barriers keep slices apart.
        if taken:
            arrays = iter(jax.lax.optimization_barrier([x for x in operands if not isinstance(x, int)]))
            operands = [x if isinstance(x, int) else next(arrays) for x in operands]
        results = _call(kernel, operands, shapes, taken, options)
        if taken:
            results = jax.lax.optimization_barrier(list(results))
    return dict(zip(outputs, results))


def _call(
    kernel: Any,
    inputs: Sequence[jax.Array | int],
    out: list[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    options: dict[str, Any],
) -> Sequence[jax.Array]:
    """The call through either jax-triton, everything by position."""
    jax_triton, old = _jax_triton()
    options |= {"compute_capability": lowering_target()}
    if old:
        # it counts arrays only
        arrays_only = {sum(not isinstance(x, int) for x in inputs[:i]): o for i, o in aliases.items()}
        options |= {"custom_call_target_name": OURS, "input_output_aliases": arrays_only}
        return jax_triton.triton_call(*inputs, kernel=kernel, out_shape=out, **options)
    # 0.4 binds arrays to parameters in the order operands, results: a result without a parameter must be one
    # of the last. A Python 1 is a constant and no parameter.
    order = sorted(range(len(out)), key=lambda o: (o in aliases.values(), o))
    absent = {kernel.arg_names[len(inputs) + o]: 1 for o in aliases.values()}
    options |= absent | {"input_output_aliases": {i: order.index(o) for i, o in aliases.items()}}
    results = jax_triton.triton_call(*inputs, kernel=kernel, out_type=[out[o] for o in order], **options)
    return [results[order.index(o)] for o in range(len(out))]
