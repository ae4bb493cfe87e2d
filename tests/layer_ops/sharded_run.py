"""Norm, shift and mixes on four fake devices: collectives and errors of each program.

For test_norm_mix_sharded.py. The kernels run in Triton's interpreter; JAX cannot run host callbacks inside
automatically partitioned kernels, so there programs are compiled and collectives counted.
"""

import jax
import numpy as np
from collectives import sizes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_ops import norm_mix_cases as cases
from layer_ops.norm_mix_cases import Case

CASE = Case(B=4, T=5, C=6, M=2, moves=True, lengths=(3, 9))
# rows over devices, or the tokens of each row
LONG = Case(B=2, T=8, C=6, M=2, moves=True, lengths=(3, 1, 9))
SPECS = {
    "mixes": (P(),) * CASE.M,
    "scale": P(),
    "bias": P(),
    "moves": P(None, "data"),
    "mixed": P(None, "data"),
}
OVER_TOKENS = SPECS | {"last": P(), "moves": P(None, None, "data"), "mixed": P(None, None, "data")}


def specs(names, over_tokens=False) -> dict:
    if over_tokens:
        return {name: OVER_TOKENS.get(name, P(None, "data")) for name in names}
    return {name: SPECS.get(name, P("data")) for name in names}


def one_device(run):
    """``run``, inside `jax.shard_map`: the cotangent of ``last`` is one device's, and ``last`` the same on
    all.
    """

    def local(floats, segment_ids, cotangents):
        first = jax.lax.axis_index("data") == 0
        made, grads = run(floats, segment_ids, cotangents | {"last": cotangents["last"] * first})
        return made | {"last": jax.lax.pmean(made["last"], "data")}, grads

    return local


def mapped() -> dict:
    """What goes wrong with examples that share parameters, on a mesh with explicit axes."""
    mesh, found = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,)), {}
    with jax.set_mesh(mesh):
        for implementation in ("xla", "triton"):
            for shared in (("mixes", "scale", "bias"), ()):
                try:
                    cases.check_vmap(implementation, shared)
                except Exception as error:
                    found[f"{implementation}, {shared}"] = f"{type(error).__name__}: {error}"[:2000]
    return found


def report(kind: str = "sharded") -> dict:
    if kind == "mapped":
        return mapped()
    programs = {}
    rows = ("auto", "explicit", "shard_map")
    for implementation in ("xla", "triton"):
        for layout in (*rows, *(f"{layout}, tokens" for layout in rows)):
            long = "tokens" in layout
            case = LONG if long else CASE
            arrays, cotangents = cases.build(case)
            floats = {name: a for name, a in arrays.items() if name != "segment_ids"}
            kind = AxisType.Explicit if "explicit" in layout else AxisType.Auto
            mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
            args, where = (
                (floats, arrays["segment_ids"], cotangents),
                (specs(floats, long), P(None, "data") if long else P("data"), specs(cotangents, long)),
            )
            named = {"sequence_axis": "data"} if long and "explicit" not in layout else {}
            run = cases.runner(implementation, False, **named)
            if "shard_map" in layout:
                over = P(None, "data") if long else P("data")
                made = specs(cotangents, long) | {"mixed": (over,) * case.M}
                run = jax.shard_map(
                    one_device(run) if long else run, in_specs=where, out_specs=(made, specs(floats, long))
                )
            try:
                with jax.set_mesh(mesh):
                    put = lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec))
                    args = jax.tree.map(put, args, where)
                    compiled = jax.jit(run).lower(*args).compile()
                    found = {"collectives": sizes(compiled.as_text())}
                    if implementation != "triton" or not layout.startswith("auto"):
                        stack = lambda tree: {
                            n: np.stack(a) if isinstance(a, tuple) else np.asarray(a) for n, a in tree.items()
                        }
                        found["errors"] = cases.errors(
                            case, tuple(map(stack, jax.device_get(compiled(*args))))
                        )
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
            programs[f"{implementation}, {layout}"] = found
    return programs
