"""Registers, spilled bytes and shared memory of every launch of the chunked Triton kernels, by GPU
generation, without a GPU: by the chunked forms, and by the recurrent one.

    python tests/compile/resources.py                      the full sweep, as a table
    python tests/compile/resources.py --ci                 what CI checks
    python tests/compile/resources.py --ci --record        the same, and writes its spills into spills.json
    python tests/compile/resources.py --targets 86 --heads 128 --dtypes bfloat16

What is compiled is what the ops launch: they are traced with abstract inputs, and the Triton calls read from
the traced program, so that kernels, types, constants and launch options cannot drift from the code.
Triton brings ptxas and cuobjdump along. On a GPU jaxlib assembles the same PTX with a ptxas of its own;
those of CUDA 12.8 to 13.5 make nearly the same of it. Triton's interpreter must be off in this process.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

# compute capability: shared memory that one block can have, in bytes (CUDA C++ Programming Guide, technical
# specifications)
TARGETS = (80, 86, 89, 90, 100, 120)  # compute capabilities that spills are recorded for
OPS = ("rwkv6", "rwkv7")
HEADS, DTYPES, DECAYS, LAYOUTS = (
    (64, 128, 256),
    ("bfloat16", "float32"),
    ("any", "bounded"),
    ("rows", "uneven", "segments", "packed"),
)
# Bytes that a thread may spill, by Triton version and launch; launches that are not in it spill none.
STATED = pathlib.Path(__file__).parent / "spills.json"


@dataclasses.dataclass(frozen=True)
class Call:
    """What decides which kernels a call of an op launches, and for which GPU."""

    op: str
    target: int = 90
    head: int = 64
    dtype: str = "bfloat16"
    decay: str = "any"
    layout: str = "rows"
    few: bool = True  # also what few rows and heads add
    form: str = "chunk"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded launch: plain values, so that another process can compile it."""

    call: Call
    module: str
    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    options: Any


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a compiled launch takes: registers and spilled bytes of a thread, shared memory of a block in
    bytes.
    """

    kernel: str
    call: Call
    num_warps: int
    num_stages: int
    registers: int
    spilled: int
    shared: int
    limit: int
    seconds: float

    @property
    def name(self) -> str:
        """What spills.json calls the launch."""
        form = "" if self.call.form == "chunk" else " recurrent"
        return (
            f"{self.kernel}{form} sm_{self.call.target} {self.call.head} {self.call.dtype} {self.call.decay}"
        )


def recorded(call: Call, run: Any, *inputs: Any) -> list[Launch]:
    """The Triton calls in the program of ``run``, in its order."""
    import jax

    from fla_jax.core.gpu import lowering_for

    with lowering_for(call.target):
        traced = jax.make_jaxpr(run)(*inputs)
    return [_launch(call, equation) for equation in _equations(traced.jaxpr)]


def _equations(jaxpr: Any) -> Iterator[Any]:
    import jax

    for equation in jaxpr.eqns:
        if equation.primitive.name == "fla_jax_triton_call":
            yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _launch(call: Call, equation: Any) -> Launch:
    from fla_jax.pallas.backend.lowering import pointer_type

    made = equation.params["call"]
    assert made.capability == call.target, made.capability
    pointers = [[pointer_type(x.aval) for x in side] for side in (equation.invars, equation.outvars)]
    return Launch(
        call,
        made.kernel.fn.__module__,
        made.kernel.__name__,
        tuple(made.parameters(*pointers).items()),
        made.constants,
        made.launch,
    )


def record(call: Call) -> list[Launch]:
    """The launches of forward and backward for full GPUs, then those that few rows and heads add (stretches:
    `fla_jax.pallas.common.state_passing_host`), a forward alone included.
    """
    many = _trace(call, 8, 2048, 64)
    few = (
        _trace(call, 1, 2048, 4) + _trace(call, 1, 2048, 4, gradient=False)
        if call.few and call.layout != "packed"
        else []
    )
    return many + [launch for launch in few if launch.kernel not in {other.kernel for other in many}]


def _trace(call: Call, B: int, T: int, H: int, gradient: bool = True) -> list[Launch]:
    import jax
    import jax.numpy as jnp

    from fla_jax import ops
    from fla_jax.pallas.backend import triton as run_triton

    assert not run_triton.INTERPRET, (
        "Triton's interpreter is on (TRITON_INTERPRET=1): kernels cannot be compiled in this process"
    )
    B, T = (1, T) if call.layout == "packed" else (B, T - 3 if call.layout == "uneven" else T)
    tokens = jax.ShapeDtypeStruct((B, T, H, call.head), call.dtype)
    rows = 16 if call.layout == "packed" else B
    state = jax.ShapeDtypeStruct((rows, H, call.head, call.head), jnp.float32)
    layout = {}
    if call.layout == "segments":
        layout["segment_ids"] = jax.ShapeDtypeStruct((B, T), jnp.int32)
    if call.layout == "packed":
        layout["cu_seqlens"] = jax.ShapeDtypeStruct((rows + 1,), jnp.int32)
    inputs = [tokens] * (4 if call.op == "rwkv6" else 6) + (
        [jax.ShapeDtypeStruct((H, call.head), call.dtype)] if call.op == "rwkv6" else []
    )
    op = getattr(ops, f"{call.form}_{call.op}")

    def run(inputs, state, layout):
        static: dict[str, Any] = dict(implementation="pallas", output_final_state=True)
        if call.form == "chunk":
            static |= dict(implementation="triton", lower_bound=None if call.decay == "any" else -1.0)
        forward = lambda xs, s: op(*xs, initial_state=s, **layout, **static)
        if not gradient:
            return forward(inputs, state)
        out, pull = jax.vjp(forward, inputs, state)
        return pull(out)

    return recorded(call, run, inputs, state, layout)


def compile_launch(launch: Launch) -> Usage:
    """Compiles to PTX and a cubin with Triton's own ptxas, and reads what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fla_jax.core.gpu import GPUS
    from fla_jax.pallas.backend.lowering import triton_source

    start = time.perf_counter()
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    source, _ = triton_source(kernel, dict(launch.signature), dict(launch.constants))
    # As jaxlib compiles: without the option --regAllocOptLevel=2 that Triton gives its own
    # ptxas from 3.7 on, by which these kernels spill up to 150 bytes more. The last one counts; 4 is ptxas'
    # own choice.
    options = dict(
        num_warps=launch.options.num_warps,
        num_stages=launch.options.num_stages,
        ptx_options="--regAllocOptLevel=4",
        maxnreg=launch.options.max_registers or None,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", launch.call.target, 32), options=options)
    assert f".target sm_{launch.call.target}" in compiled.asm["ptx"]
    used = _resources(compiled.asm["cubin"])
    return Usage(
        launch.kernel,
        launch.call,
        launch.options.num_warps,
        launch.options.num_stages,
        used["REG"],
        max(used["STACK"], used["LOCAL"]),
        compiled.metadata.shared,
        GPUS[launch.call.target].smem,
        time.perf_counter() - start,
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """cuobjdump's REG, STACK (where spilled registers go), LOCAL and SHARED."""
    import triton

    exe = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [exe, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def calls(targets, heads, dtypes, decays=("any",), layouts=("rows",), ops=OPS) -> list[Call]:
    """The full sweep over the given values."""
    return [Call(op, *rest) for op, *rest in itertools.product(ops, targets, heads, dtypes, decays, layouts)]


def ci_calls() -> list[Call]:
    """A subset for every day: each kernel for each kind of GPU; most for sm_90, whose speed README states.

    The form for any decay has the bounded one in it and is the larger; sm_86 is as sm_89.
    """
    half = ("bfloat16",)
    others = calls((80, 100, 120), (64,), half, ("bounded",)) + calls((89,), (128,), half, ("bounded",))
    again = calls((90,), (64, 128), half, ("bounded",)) + calls((89,), (64,), half)
    again += calls((90,), (64, 128), ("float32",))
    others += calls((89,), (64,), ("float32",), ("bounded",))
    recurrent = calls((89, 90), (64,), half, ops=("rwkv7",))
    recurrent = [dataclasses.replace(call, form="fused_recurrent") for call in recurrent]
    return (
        calls((90,), (64,), half)
        + others
        + recurrent
        + [dataclasses.replace(call, few=False) for call in again]
    )


def measure(wanted: list[Call], workers: int) -> list[Usage]:
    """Records and compiles, each launch once, in processes of their own (a compiler that crashes takes no
    test run along).
    """
    launches: dict[Any, Launch] = {}
    for call in wanted:
        for launch in record(call):
            any_call = dataclasses.replace(call, op="", decay="", layout="", few=True)
            launches.setdefault(dataclasses.replace(launch, call=any_call), launch)
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(compile_launch, launches.values()))


def table(usages: list[Usage]) -> str:
    """One line for each launch, and what its block may have."""
    lines = [
        f"{'kernel':24} {'GPU':>6} {'head':>4} {'dtype':8} {'decay':7} {'layout':8} warps stages registers "
        "spilled  shared   limit"
    ]
    for u in usages:
        c = u.call
        lines.append(
            f"{u.kernel:24} {'sm_' + str(c.target):>6} {c.head:4} {c.dtype:8} {c.decay:7} {c.layout:8} "
            f"{u.num_warps:5} {u.num_stages:6} {u.registers:9} "
            f"{u.spilled:7} {u.shared:7} {u.limit:7}{' TOO MUCH' if u.shared > u.limit else ''}"
        )
    return "\n".join(lines)


def release() -> str:
    """The installed Triton as spills.json names it: "3.6" for 3.6.0."""
    return ".".join(importlib.metadata.version("triton").split(".")[:2])


def state(usages: list[Usage]) -> None:
    """Writes what the installed Triton spills into spills.json; other versions' numbers stay."""
    stated = json.loads(STATED.read_text())
    spilled = {u.name: max(v.spilled for v in usages if v.name == u.name) for u in usages}
    stated[release()] = {name: number for name, number in sorted(spilled.items()) if number}
    STATED.write_text(json.dumps(dict(sorted(stated.items())), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ci", action="store_true", help="what CI checks, instead of the sweep over the options below"
    )
    parser.add_argument("--record", action="store_true", help="with --ci: write its spills into spills.json")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--targets", nargs="+", type=int, choices=TARGETS, default=TARGETS)
    parser.add_argument("--heads", nargs="+", type=int, default=HEADS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--decays", nargs="+", choices=DECAYS, default=DECAYS[:1])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS[:1])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="for a program to read")
    args = parser.parse_args()
    wanted = (
        ci_calls()
        if args.ci
        else calls(args.targets, args.heads, args.dtypes, args.decays, args.layouts, args.ops)
    )
    if args.record and not args.ci:
        parser.error("--record states what CI checks: give --ci too")
    usages = measure(wanted, args.workers)
    if args.record:
        state(usages)
    if args.json:
        found = [dataclasses.asdict(u) | {"name": u.name} for u in usages]
        print("REPORT", json.dumps({"triton": release(), "usages": found}))
    else:
        print(table(usages))


if __name__ == "__main__":
    main()
