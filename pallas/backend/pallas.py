"""The one place that calls Pallas kernels: compiled for an NVIDIA GPU, or in Pallas' interpreter where
``FLA_JAX_PALLAS_INTERPRET=1`` is set.

Kernels are lowered through Triton (`jax.experimental.pallas.triton`), which takes every NVIDIA GPU from
Ampere on and needs nothing but JAX. Pallas' other GPU lowering, Mosaic GPU, takes Hopper and newer only and
gives a state to a group of four warps, where sums over K cross warps for each token; the scans here stay in
one warp. JAX 0.11 calls the Triton lowering deprecated, without a date (a DeprecationWarning when a kernel
is lowered); JAX 0.12 still has it. Only this file and `fma` in common/recurrent_scan.py depend on
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import jax

from ...core.context import Context
from ...core.gpu import gpu_missing
from ...core.implementation import Unsupported, unfit_inputs
from ...core.mesh import vary, varying_axes
from .call import check_grid


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter: slow, on any platform, for checking numerics. Read when a
    function is traced.
    """
    return os.environ.get("FLA_JAX_PALLAS_INTERPRET") == "1"


def supports(ctx: Context) -> Unsupported | None:
    """None where Pallas kernels can serve the call, else the reason."""
    return why_not(ctx.platform) or unfit_inputs(ctx)


def preferred(ctx: Context) -> bool:
    """Whether an op selects Pallas kernels by default: not in the interpreter, which tests select by name."""
    return not is_interpreting()


def why_not(platform: str) -> Unsupported | None:
    """None where Pallas kernels can be called on ``platform`` (``"gpu"``, ``"cpu"``, ...), else the
    reason.
    """
    if is_interpreting():
        return None
    reason = gpu_missing(platform)
    if reason is not None and platform != "gpu":
        reason += " (FLA_JAX_PALLAS_INTERPRET=1 runs Pallas' interpreter, slowly)"
    return None if reason is None else Unsupported(reason)


def pallas_call(
    kernel: Callable[..., None],
    *inputs: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int,
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Calls ``kernel(*inputs, *outputs)``, all of them references to whole arrays in GPU memory, and returns
    the outputs.

    Args:
        kernel: function of references, its static arguments bound; its name names the GPU kernel.
        inputs: arrays.
        out: shapes and dtypes of the outputs.
        grid: number of programs along up to three axes, the first of which moves fastest.
        num_warps: warps per program.
        aliases: inputs, by position, whose memory an output takes over.

    Raises:
        ValueError: see `check_grid`.
    """
    check_grid(grid)
    from jax.experimental import pallas as pl  # half a second that only a call of a kernel should cost
    from jax.experimental.pallas import triton as pltriton

    axes = varying_axes(*inputs)
    if axes:  # inside a checked `jax.shard_map`: everything is said to vary over what any input varies over
        inputs = tuple(vary(x, axes) for x in inputs)
        out = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=jax.typeof(inputs[0]).manual_axis_type)
            for s in out
        ]
    interpret = is_interpreting()
    params = None if interpret else pltriton.CompilerParams(num_warps=num_warps, num_stages=1)
    ctx = pl.pallas_call(
        kernel,
        out_shape=tuple(out),
        grid=grid,
        compiler_params=params,
        interpret=interpret,
        input_output_aliases=dict(aliases or {}),
    )
    return ctx(*inputs)
