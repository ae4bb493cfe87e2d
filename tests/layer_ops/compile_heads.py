"""Registers, spilled bytes and shared memory of the kernels on tokens and heads, by GPU, without a GPU.

    python tests/layer_ops/compile_heads.py                             what the test checks, as a table
    python tests/layer_ops/compile_heads.py --targets 86 --heads 96 --dtypes float32

Recording and compiling are those of tests/compile/resources.py. Triton's interpreter must be off in this
process.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys

PATH = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(PATH), str(PATH / "compile")]

import jax  # noqa: E402
import resources  # noqa: E402
from heads_cases import TOKENS, VECTORS, Case, call  # noqa: E402

from fla_jax.core.gpu import lowering_for  # noqa: E402
from fla_jax.pallas.backend import triton  # noqa: E402


def gradient(case: Case):
    """Results and gradients of a call, from its arrays, which are also the cotangents' shapes."""

    def run(arrays):
        results, pull = jax.vjp(lambda arrays: call(case, arrays, "triton"), arrays)
        return results, pull(results)[0]

    return run


def abstract(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Tokens of the case's dtype and vectors of float32, by name."""
    shape = (case.B, case.T, case.H, case.N)
    arrays = {name: jax.ShapeDtypeStruct(shape, case.dtype) for name in TOKENS[case.op]}
    return arrays | {name: jax.ShapeDtypeStruct(shape[2:], "float32") for name in VECTORS[case.op]}


def record(case: Case, target: int) -> list[resources.Launch]:
    """What forward and backward launch."""
    about = resources.Call(case.op, target, case.N, case.dtype)
    launches = resources.recorded(about, gradient(case), abstract(case))
    if case.op == "rwkv7_keys":  # in a loop over layers that nothing differentiates
        traced = dataclasses.replace(case, residual="traced True")
        launches += resources.recorded(about, lambda arrays: call(traced, arrays, "triton"), abstract(case))
    return launches


def lowered(case: Case) -> int | None:
    """How many kernels the program of a gradient calls when lowered for CUDA; None where that cannot be."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    with lowering_for(90):
        if not plugin or triton.why_not("gpu") is not None:
            return None
        program = jax.jit(gradient(case)).trace(abstract(case)).lower(lowering_platforms=("cuda",))
    return program.as_text().count("stablehlo.custom_call @triton_kernel_call")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", type=int, default=(80, 90, 120))
    parser.add_argument("--heads", nargs="+", type=int, default=(64,))
    parser.add_argument("--dtypes", nargs="+", default=("bfloat16",))
    parser.add_argument("--json", action="store_true", help="for a program to read")
    args = parser.parse_args()
    cases = [
        Case(op, B=8, T=2048, H=16, N=head, dtype=dtype, residual="traced True")
        for op in TOKENS
        for head in args.heads
        for dtype in args.dtypes
    ]
    calls = {case.op: lowered(case) for case in cases} if args.json else {}
    usages = [
        resources.compile_launch(launch)
        for case in cases
        for target in args.targets
        for launch in record(case, target)
    ]
    if args.json:
        print("USAGES", json.dumps({"usages": [dataclasses.asdict(u) for u in usages], "calls": calls}))
    else:
        print(resources.table(usages))


if __name__ == "__main__":
    main()
