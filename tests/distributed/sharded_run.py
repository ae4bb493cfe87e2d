"""One implementation of one op on eight fake devices: the collectives of each sharded program and its errors
against the oracle.

For test_sharding.py. "triton" runs in Triton's interpreter; JAX cannot run host callbacks inside
automatically partitioned kernels, so there its programs are compiled and their collectives counted.
"""

import cases
import jax
import numpy as np
from collectives import sizes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

HEADS, ROWS, TIME = P("data", None, "model"), P(("data", "model")), P(None, ("data", "model"))
# name: (axis type, spec of the token arrays and cotangent, of the states, of u)
LAYOUTS = {
    "auto, rows and heads": (AxisType.Auto, HEADS, P("data", "model"), P("model")),
    "auto, rows": (AxisType.Auto, ROWS, ROWS, P()),
    "auto, segments": (AxisType.Auto, HEADS, P("data", "model"), P("model")),
    "auto, time": (AxisType.Auto, TIME, P(), P()),
    "explicit, rows and heads": (AxisType.Explicit, HEADS, P("data", "model"), P("model")),
    "explicit, rows": (AxisType.Explicit, ROWS, ROWS, P()),
    "explicit, no initial state": (AxisType.Explicit, HEADS, P("data", "model"), P("model")),
    "shard_map, rows and heads": (AxisType.Auto, HEADS, P("data", "model"), P("model")),
    "shard_map with its check, no initial state": (AxisType.Auto, HEADS, P("data", "model"), P("model")),
}


def program(op: str, implementation: str, mesh, name: str, specs):
    """Function and shardings of its arguments; for shard_map the sum of du over rows is the caller's, as for
    any replicated parameter.
    """
    run = cases.runner(op, implementation, chunk_size=8)
    if not name.startswith("shard_map"):
        return run
    arrays, do, ds = specs
    out = cases.Outputs(do, ds, arrays)
    # with it, shard_map itself sums the gradient of an input that is the same on several devices
    check = "check" in name

    def local(arrays, do, ds):
        got = run(arrays, do, ds)
        return got._replace(
            grads={n: jax.lax.psum(g, "data") if n == "u" and not check else g for n, g in got.grads.items()}
        )

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)


def report(op: str, implementation: str) -> dict:
    found = {}
    for name, (kind, token, state, u) in LAYOUTS.items():
        case = cases.Case(op, B=8, T=32, H=4, K=4, V=4, chunk_size=8)
        if "segments" in name:
            case = cases.Case(
                op, B=8, T=32, H=4, K=4, V=4, chunk_size=8, layout="segments", lengths=(5, 9, 1, 17)
            )
        x, want = cases.build(case), cases.expected(case)
        if "no initial state" in name:
            zero = {**x.arrays, "initial_state": np.zeros_like(x.ds)}
            (o, final), grads = cases.ask_oracle(op, x._replace(arrays=zero))
            x = x._replace(arrays={n: a for n, a in x.arrays.items() if n != "initial_state"})
            want = cases.Outputs(o, final, {n: grads[n] for n in x.arrays})
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        specs = (
            {n: u if n == "u" else state if n == "initial_state" else token for n in x.arrays},
            token,
            state,
        )
        try:
            with jax.set_mesh(mesh):
                put = lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec))
                args = [
                    {n: put(a, specs[0][n]) for n, a in x.arrays.items()},
                    put(x.do, token),
                    put(x.ds, state),
                ]
                if x.segment_ids is not None:
                    args.append(put(x.segment_ids, P("data")))
                run = jax.jit(program(op, implementation, mesh, name, specs))
                compiled = run.lower(*args).compile()
                if implementation != "triton" or not name.startswith("auto"):
                    cases.compare(jax.device_get(compiled(*args)), want)
            found[name] = {"collectives": sizes(compiled.as_text()), "error": None}
        except Exception as e:
            found[name] = {"collectives": None, "error": f"{type(e).__name__}: {e}"[:9000]}
    return found
