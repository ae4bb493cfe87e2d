"""The one place that calls Pallas kernels: compiled for an NVIDIA GPU, or in Pallas' interpreter where ``FLA_JAX_PALLAS_INTERPRET=1`` is set.

Kernels are lowered through Triton (`jax.experimental.pallas.triton`), which takes every GPU from Ampere on; the Mosaic GPU lowering would need a Hopper and
has no layout for states whose sums over K stay inside a thread. JAX 0.11 calls the Triton lowering deprecated, without a date: jax 0.12 still has it, and this
file is all that knows about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

OLDEST = 8.0  # compute capability of Ampere


def interpreting() -> bool:
    """Whether kernels run in the interpreter: slow, on any platform, for checking numerics. Read when a function is traced."""
    return os.environ.get("FLA_JAX_PALLAS_INTERPRET") == "1"


def _lowering_for() -> Any:
    """The GPU that an abstract mesh in context names as its target (`jax.sharding.AbstractDevice`), or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return getattr(mesh, "abstract_device", None)


def why_not() -> str | None:
    """None where Pallas kernels can be called, else the reason."""
    if interpreting() or _lowering_for() is not None:
        return None
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if not gpus:
        return "no NVIDIA GPU is visible to JAX (FLA_JAX_PALLAS_INTERPRET=1 runs Pallas' interpreter, slowly)"
    capability = str(getattr(gpus[0], "compute_capability", ""))
    try:
        too_old = float(capability) < OLDEST
    except ValueError:
        return f"Pallas kernels need an NVIDIA GPU, not {gpus[0].device_kind}"
    return f"Pallas kernels need compute capability {OLDEST} or higher, {gpus[0].device_kind} has {capability}" if too_old else None


def pallas_call(kernel: Callable[..., None], *inputs: jax.Array, out: Sequence[jax.ShapeDtypeStruct], grid: tuple[int, ...], num_warps: int) -> Any:
    """Calls ``kernel(*inputs, *outputs)``, all of them references to whole arrays in GPU memory, and returns the outputs.

    Args:
        kernel: function of references, its static arguments bound; its name names the GPU kernel.
        inputs: arrays.
        out: shapes and dtypes of the outputs.
        grid: number of programs along up to three axes, the first of which moves fastest.
        num_warps: warps per program.

    Raises:
        ValueError: no kernel can run here.
    """
    reason = why_not()
    if reason is not None:
        raise ValueError(f"implementation='pallas' cannot run here: {reason}")
    interpret = interpreting()
    params = None if interpret else pltriton.CompilerParams(num_warps=num_warps, num_stages=1)
    return pl.pallas_call(kernel, out_shape=tuple(out), grid=grid, compiler_params=params, interpret=interpret)(*inputs)
