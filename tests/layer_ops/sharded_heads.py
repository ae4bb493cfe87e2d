"""One implementation of the ops on tokens and heads on eight fake devices: the collectives of each sharded
program and what went wrong.

For test_keys_sharding.py. "triton" runs in Triton's interpreter; JAX cannot run host callbacks inside
automatically partitioned kernels, so there its programs are compiled and their collectives counted.
"""

import heads_cases
import jax
from collectives import sizes
from heads_cases import TOKENS, Case, build, call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

BOTH, ROWS, TIME = P("data", None, "model"), P(("data", "model")), P("data", "model")
# name: (axis type, spec of tokens and cotangents, of vectors)
LAYOUTS = {
    "auto, rows and heads": (AxisType.Auto, BOTH, P("model")),
    "auto, rows": (AxisType.Auto, ROWS, P()),
    "auto, time": (AxisType.Auto, TIME, P()),
    "explicit, time": (AxisType.Explicit, TIME, P()),
    "explicit, rows and heads": (AxisType.Explicit, BOTH, P("model")),
    "explicit, rows": (AxisType.Explicit, ROWS, P()),
    "shard_map": (AxisType.Auto, BOTH, P("model")),
    "shard_map with its check": (AxisType.Auto, BOTH, P("model")),
}


def program(case: Case, implementation: str, mesh, name: str, specs):
    """Results and gradients; in shard_map without its check the caller sums vectors' gradients over rows."""

    named = {"sequence_axis": "model"} if name == "auto, time" else {}

    def run(arrays, cotangents):
        results, pull = jax.vjp(lambda arrays: call(case, arrays, implementation, **named), arrays)
        return results, pull(cotangents)[0]

    def local(arrays, cotangents):
        results, gradients = run(arrays, cotangents)
        if "check" not in name:
            for vector in gradients.keys() - set(TOKENS[case.op]):
                gradients[vector] = jax.lax.psum(gradients[vector], "data")
        return results, gradients

    if not name.startswith("shard_map"):
        return run
    out = (specs[1], specs[0])
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma="check" in name)


def one(case: Case, implementation: str, name: str) -> list[tuple[str, int]]:
    """The collectives of a layout's program, its results compared where it can run."""
    kind, token, vector = LAYOUTS[name]
    arrays, cotangents = build(case)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    specs = ({n: token if n in TOKENS[case.op] else vector for n in arrays}, dict.fromkeys(cotangents, token))
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        args = jax.tree.map(put, (arrays, cotangents), specs)
        run = jax.jit(program(case, implementation, mesh, name, specs))
        compiled = run.lower(*args).compile()
        if implementation != "triton" or not name.startswith("auto"):
            for got, want in zip(jax.device_get(compiled(*args)), heads_cases.expected(case)):
                wrong = {n: e for n, e in heads_cases.errors(got, want).items() if not e < 1e-6}
                assert not wrong, wrong
    return sizes(compiled.as_text())


def report(implementation: str) -> dict:
    found = {}
    for case in (
        Case("rwkv7_keys", B=8, T=8, H=4, N=4, residual="traced True"),
        Case("rwkv7_readout", B=8, T=8, H=4, N=4),
    ):
        for name in LAYOUTS:
            try:
                result = {"collectives": one(case, implementation, name), "error": None}
            except Exception as e:
                result = {"collectives": None, "error": f"{type(e).__name__}: {e}"[:2000]}
            found[f"{case.op}: {name}"] = result
    return found
