"""Registers, spilled bytes and shared memory of the kernels of a decoded token, without a GPU.

    python tests/generation/compile_decode.py                          what the test checks, as a table
    python tests/generation/compile_decode.py --all                    every kind of launch
    python tests/generation/compile_decode.py --widths 4096 --batches 1 8

Recording and compiling are those of tests/compile/resources.py. Triton's interpreter must be off in this
process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys

PATH = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(PATH), str(PATH / "compile")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import resources  # noqa: E402

from fla_jax.core.gpu import lowering_for  # noqa: E402
from fla_jax.generation.decode_weights import prepare_decode_weights  # noqa: E402
from fla_jax.generation.sampling import Sampling, TokenCounts, sample  # noqa: E402
from fla_jax.generation.steps import FastStep  # noqa: E402
from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM  # noqa: E402

MODELS = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of two layers, and how it decodes."""

    version: int
    width: int
    batch: int
    dtype: str = "bfloat16"
    group: int | None = None
    target: int = 90
    state: str = "float32"


CI = [Case(7, 2048, 1), Case(6, 2048, 1), Case(7, 2048, 32), Case(7, 1024, 256, target=120)]
ALL = [
    *(Case(version, width, batch) for version in (7, 6) for width in (1024, 2048) for batch in (1, 32)),
    *(Case(7, width, 1) for width in (768, 4096)),
    Case(7, 2048, 256), Case(7, 2048, 4), Case(7, 2048, 1, group=128), Case(7, 1024, 1, target=80),
    Case(7, 1024, 8, state="bfloat16"), Case(7, 1024, 1, "float32"), Case(7, 1024, 32, target=120),
    Case(6, 4096, 4, group=64), Case(7, 4096, 2, "float32"),
]  # fmt: skip


def choose(batch: int, logits: jax.Array) -> jax.Array:
    """Chooses tokens from logits [B, V]."""
    keys = jax.random.split(jax.random.key(0), batch)
    rules, none = Sampling().arrays(logits.shape[1]), TokenCounts.none(*logits.shape)
    return sample(rules, logits, none, keys, "triton")[0]


def record(case: Case) -> list[resources.Launch]:
    """What a decoded token launches."""
    config, kind = MODELS[case.version]
    model = kind(config(65536, case.width, 2, dtype=case.dtype))
    tokens = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))
    weights = jax.eval_shape(
        lambda params: prepare_decode_weights(model, params, case.group), params["params"]
    )
    state = jax.eval_shape(lambda: model.init_state(case.batch))
    state = state.replace(wkv=jax.ShapeDtypeStruct(state.wkv.shape, case.state))
    about = resources.Call(f"rwkv{case.version} {case.batch}", case.target, case.width, case.dtype)
    active = jax.ShapeDtypeStruct((case.batch,), bool)
    step = FastStep(model, "triton")
    launches = resources.recorded(about, step, weights, tokens, state, active)
    if case.version == 7:
        with lowering_for(case.target):
            logits, _ = jax.eval_shape(step, weights, tokens, state, active)
        launches += resources.recorded(about, functools.partial(choose, case.batch), logits)
    return launches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every kind of launch")
    parser.add_argument("--versions", nargs="+", type=int, default=(7, 6))
    parser.add_argument("--widths", nargs="+", type=int)
    parser.add_argument("--batches", nargs="+", type=int, default=(1,))
    parser.add_argument("--group", type=int)
    parser.add_argument("--json", action="store_true", help="for a program to read")
    args = parser.parse_args()
    cases = ALL if args.all else CI
    if args.widths:
        sizes = ((v, w, b) for v in args.versions for w in args.widths for b in args.batches)
        cases = [Case(*size, group=args.group) for size in sizes]
    launches, counts = {}, {}
    for case in cases:
        recorded = record(case)
        counts[f"{case.version} {case.width} {case.batch}"] = len(recorded)
        for launch in recorded:
            plain = dataclasses.replace(launch, call=resources.Call("", case.target))
            launches.setdefault(plain, launch)
    usages = [resources.compile_launch(launch) for launch in launches.values()]
    if args.json:
        found = [dataclasses.asdict(usage) for usage in usages]
        print("USAGES", json.dumps({"usages": found, "launches": counts}))
    else:
        print(resources.table(usages))
        print(counts)


if __name__ == "__main__":
    main()
