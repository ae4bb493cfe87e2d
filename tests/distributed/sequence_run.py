"""One implementation of one op with the tokens of rows on four of eight fake devices: the collectives of each
program and its error against the oracle.

For test_sequences.py. "triton" runs in Triton's interpreter; JAX cannot run host callbacks inside
automatically partitioned kernels, so there its program is compiled and collectives counted.
"""

from unittest import mock

import cases
import jax
import jax.numpy as jnp
from collectives import sizes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MODES = {
    "xla": ("explicit, segments", "auto, segments", "shard_map, segments", "shard_map with its check"),
    "triton": ("explicit, segments", "auto, segments", "shard_map with its check"),
}
TOKENS, STATE = P("data", "sequence"), P("data")


def program(op, implementation, mode, specs):
    """Function and, for shard_map, what a user does there: the final state's cotangent belongs to one device,
    and gradients of what is the same on several devices are summed (by shard_map itself where it checks).
    """
    named = {} if mode.startswith("explicit") else {"sequence_axis": "sequence"}
    run = cases.runner(op, implementation, chunk_size=4, **named)
    if not mode.startswith("shard_map"):
        return run
    check = "check" in mode

    def local(arrays, do, ds, *ids):
        first = jax.lax.axis_index("sequence") == 0
        got = run(arrays, do, jnp.where(first, ds, 0), *ids)
        if check:
            return got._replace(final=jax.lax.pmean(got.final, "sequence"))
        summed = {"u": ("data", "sequence"), "initial_state": ("sequence",)}
        return got._replace(
            grads={n: jax.lax.psum(g, summed[n]) if n in summed else g for n, g in got.grads.items()}
        )

    arrays, do, ds, *_ = specs
    out = cases.Outputs(do, ds, arrays)
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=check)


def refusals(op):
    """Messages of calls that cannot be."""
    arrays = {
        n: jnp.asarray(a) for n, a in cases.build(cases.Case(op, B=1, T=64, H=1, K=2, V=2)).arrays.items()
    }
    found = []

    def refused(arrays, **options):
        try:
            jax.jit(lambda x: cases.call(op, x, **options)).lower(arrays).compile()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            found.append(str(error))

    refused(arrays, sequence_axis="sequence")
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        refused(arrays, sequence_axis="tokens")
        short = {n: a[:, :20] if a.ndim == 4 and a.shape[1] == 64 else a for n, a in arrays.items()}
        refused(short, sequence_axis="sequence")
        refused(arrays, sequence_axis="sequence", cu_seqlens=jnp.array([0, 64]))
        refused(arrays, sequence_axis="sequence", implementation="triton")  # 8 tokens a device
        refused(arrays, sequence_axis="sequence", implementation="pallas")
        split = NamedSharding(mesh, P(None, "sequence"))
        put = {n: jax.device_put(a, split) if a.shape[1:2] == (64,) else a for n, a in arrays.items()}
        refused(put, implementation="triton")  # nobody said so
    return found


def report(op, implementation):
    if implementation == "triton":  # two stretches a device, of one chunk each
        with mock.patch("fla_jax.pallas.common.chunk_host.MIN_SPLIT_LEN", 16):
            return programs(op, implementation, T=128) | {"errors": refusals(op)}
    return programs(op, implementation, T=64)


def programs(op, implementation, T):
    found = {}
    for mode in MODES[implementation]:
        extra = dict(layout="segments", lengths=(5, 11, 16, 8, 24, 64)) if "segments" in mode else {}
        # segments begin inside shards, and at their borders
        case = cases.Case(op, B=2, T=T, H=2, K=4, V=3, chunk_size=4, **extra)
        x, want = cases.build(case), cases.expected(case)
        kind = AxisType.Explicit if mode.startswith("explicit") else AxisType.Auto
        mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(kind,) * 2)
        named = {"u": P(), "initial_state": STATE}
        specs = ({n: named.get(n, TOKENS) for n in x.arrays}, TOKENS, STATE)
        args = (x.arrays, x.do, x.ds)
        if x.segment_ids is not None:
            specs, args = (*specs, TOKENS), (*args, x.segment_ids)
        try:
            with jax.set_mesh(mesh):
                run = program(op, implementation, mode, specs)
                args = jax.tree.map(
                    lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec)), args, specs
                )
                compiled = jax.jit(run).lower(*args).compile()
                found[mode] = {"collectives": sizes(compiled.as_text()), "error": None}
                if implementation != "triton" or not mode.startswith("auto"):
                    cases.compare(jax.device_get(compiled(*args)), want)
                if mode.startswith("explicit"):  # without a backward the program is another one
                    options = dict(implementation=implementation, chunk_size=4)
                    alone = jax.jit(
                        lambda arrays, ids, options=options: cases.call(
                            op, arrays, segment_ids=ids, **options
                        )
                    )
                    o, final = jax.device_get(alone(args[0], args[3]))
                    cases.assert_close("o alone", o, want.o, cases.EXACT.o)
                    cases.assert_close("final state alone", final, want.final, cases.EXACT.state)
        except Exception as e:
            found[mode] = {"collectives": None, "error": f"{type(e).__name__}: {e}"[:2000]}
    return found
