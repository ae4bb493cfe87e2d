"""Runs norm, shift and mixes on four fake devices; prints, as JSON, collectives and errors of each program.

Started by test_norm_mix_sharded.py in a process of its own. The kernels run in Triton's interpreter; JAX
cannot run host callbacks inside automatically partitioned kernels, so there programs are compiled and
collectives counted.
"""

import json
import math
import re

import jax
import numpy as np
from cases import FAST_COMPILE
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_ops import norm_mix_cases as cases
from layer_ops.norm_mix_cases import Case

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)
CASE = Case(B=4, T=5, C=6, M=2, moves=True, lengths=(3, 9))
SPECS = {
    "mixes": (P(),) * CASE.M,
    "scale": P(),
    "bias": P(),
    "moves": P(None, "data"),
    "mixed": P(None, "data"),
}


def collectives(text: str) -> list[list]:
    """[kind, elements] of every array that a collective in an optimised program makes."""
    found = []
    for result, kind in re.findall(rf"= (\S+(?: \S+)*?) ({'|'.join(KINDS)})(?:-start)?\(", text):
        found += [
            [kind, math.prod(map(int, filter(None, s.split(","))))]
            for s in re.findall(r"\w+\[([\d,]*)\]", result)
        ]
    return found


def specs(names) -> dict:
    return {name: SPECS.get(name, P("data")) for name in names}


def main() -> None:
    report = {}
    arrays, cotangents = cases.build(CASE)
    floats = {name: a for name, a in arrays.items() if name != "segment_ids"}
    for implementation in ("xla", "triton"):
        for layout in ("auto", "explicit", "shard_map"):
            kind = AxisType.Explicit if layout == "explicit" else AxisType.Auto
            mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
            args, where = (
                (floats, arrays["segment_ids"], cotangents),
                (specs(floats), P("data"), specs(cotangents)),
            )
            run = cases.runner(implementation, False)
            if layout == "shard_map":
                made = specs(cotangents) | {"mixed": (P("data"),) * CASE.M}
                run = jax.shard_map(run, mesh=mesh, in_specs=where, out_specs=(made, specs(floats)))
            try:
                with jax.set_mesh(mesh):
                    put = lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec))
                    args = jax.tree.map(put, args, where)
                    compiled = jax.jit(run).lower(*args).compile(FAST_COMPILE)
                    found = {"collectives": collectives(compiled.as_text())}
                    if (implementation, layout) != ("triton", "auto"):
                        stack = lambda tree: {
                            n: np.stack(a) if isinstance(a, tuple) else np.asarray(a) for n, a in tree.items()
                        }
                        found["errors"] = cases.errors(
                            CASE, tuple(map(stack, jax.device_get(compiled(*args))))
                        )
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
            report[f"{implementation}, {layout}"] = found
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    main()
