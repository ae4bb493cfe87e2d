"""One runner of a sharded call: of any op, on a mesh of fake devices, in every mode.

Modes: "auto", "explicit" (types of axes), "shard_map" (with its check), "shard_map, unchecked". ``cp`` is
the axis of context parallelism.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from . import cases, variants
from .cases import AnyCase, Inputs
from .collectives import sizes

# axes of arrays and outputs: batch b, tokens t, heads h, one letter an axis
RECURRENCE = {"u": "h", "initial_state": "bh", "ht": "bh", "segment_ids": "bt", "cu_seqlens": "."}
MIX = {"mixes": "..", "scale": ".", "bias": ".", "last": "b", "mix_delta": ".bt", "mixed": ".bt"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A call and its gradients on a mesh.

    Attributes:
        case: the call.
        implementation: by name.
        mode: see above.
        mesh: sizes of the mesh axes by name.
        over: mesh axes, separated by commas, of the call's axes b, t and h.
        cp: ``sequence_axis`` of the call.
        without: an array that is not given (zeros for the oracle).
        variants: of kernels, see variants.py.
    """

    case: AnyCase
    implementation: str
    mode: str
    mesh: tuple[tuple[str, int], ...]
    over: tuple[tuple[str, str], ...]
    cp: str | None = None
    without: str | None = None
    variants: tuple[str, ...] = ()

    @property
    def can_run(self) -> bool:
        """JAX cannot run host callbacks, which interpreters are, inside automatically partitioned kernels."""
        return self.implementation == "xla" or self.mode != "auto"


def axes_of(case: AnyCase, name: str) -> str:
    if isinstance(case, cases.MixCase):
        return MIX.get(name, "bt")
    if isinstance(case, cases.HeadCase):
        return "h" if name in cases.VECTORS[case.op] else "bth"
    if isinstance(case, cases.Case):
        return RECURRENCE.get(name, "bth")
    return case.axes(name)


def specs_of(program: Program, x: Inputs) -> Inputs:
    over = {axis: tuple(names.split(",")) for axis, names in program.over}
    spec = lambda name: P(*(over.get(axis) for axis in axes_of(program.case, name)))
    return Inputs(*({name: spec(name) for name in part} for part in x))


def _missing(mesh: Any, spec: P) -> tuple[str, ...]:
    used = {name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)}
    return tuple(name for name in mesh.axis_names if name not in used)


def _function(program: Program, mesh: Any, specs: Inputs) -> Any:
    """``(arrays, cotangents, layout) -> Results``. In shard_map one device has the cotangent of a shared
    output, and without the check gradients of shared arrays are summed by hand.
    """
    options = {"sequence_axis": program.cp} if program.cp and program.mode != "explicit" else {}
    run = cases.runner(program.case.op, program.implementation, **program.case.options(**options))
    if not program.mode.startswith("shard_map"):
        return run
    checked = program.mode == "shard_map"

    def local(arrays, cotangents, layout):
        for name, c in cotangents.items():
            for axis in _missing(mesh, specs.cotangents[name]):
                cotangents = cotangents | {name: jnp.where(jax.lax.axis_index(axis) == 0, c, 0)}
        outputs, grads = run(arrays, cotangents, layout)
        for name, spec in specs.cotangents.items():
            if checked and (axes := _missing(mesh, spec)):
                outputs = outputs | {name: jax.lax.pmean(outputs[name], axes)}
        for name, spec in specs.arrays.items():
            if not checked and (axes := _missing(mesh, spec)):
                grads = grads | {name: jax.lax.psum(grads[name], axes)}
        return cases.Results(outputs, grads)

    out = cases.Results(specs.cotangents, specs.arrays)
    return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=out, check_vma=checked)


def run(program: Program) -> tuple[list[tuple[str, int]] | None, str | None]:
    """The collectives of the compiled program, its results compared where it can run; or the error."""
    try:
        with variants.forced(*program.variants):
            return _run(program), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:3000]


def _run(program: Program) -> list[tuple[str, int]]:
    case, x = program.case, cases.build(program.case)
    want = cases.expected(case)
    if program.without:
        zero = np.zeros_like(x.arrays[program.without])
        want = case.oracle(x._replace(arrays=x.arrays | {program.without: zero}))
        x = x._replace(arrays={name: a for name, a in x.arrays.items() if name != program.without})
        want = want._replace(grads={name: want.grads[name] for name in x.arrays})
    names, counts = zip(*program.mesh)
    kind = AxisType.Explicit if program.mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(counts, names, axis_types=(kind,) * len(names))
    specs = specs_of(program, x)
    with jax.set_mesh(mesh):
        args = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), x, specs)
        compiled = jax.jit(_function(program, mesh, specs)).lower(*args).compile()
        if program.can_run:
            cases.compare(case, jax.device_get(compiled(*args)), want)
        if program.cp and program.mode == "explicit":  # without a backward the program is another one
            options = case.options() | {"implementation": program.implementation}
            alone = jax.jit(lambda arrays, layout: cases.call(case.op, arrays, layout, **options))
            got = jax.device_get(alone(args.arrays, args.layout))
            cases.compare(case, cases.Results(got, {}), cases.Results(want.outputs, {}))
    return sizes(compiled.as_text())
