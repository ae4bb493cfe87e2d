"""Times whole training steps beside the peers': ``python benchmarks/train_step.py``.

A step is forward, loss, backward, clipping and AdamW on equal sizes. Parameters are float32 here, bfloat16
there unless ``--fla-precision autocast``. Ours has ``scan_layers="unroll"``, with nothing rematerialised and
with ``remat="dense"``. Each side runs each size in its own process; RWKV-LM's trainer takes part if
``--rwkv-lm`` names a checkout. A peer out of memory tries its next rematerialisation; one whose loss does not
fall as ours does is no peer. ``share_6n``: 6 N operations a token over 989 TFLOP/s, without the embedding.

    python benchmarks/train_step.py --sizes all --sides fla_jax --profile profiles
    python benchmarks/train_step.py --quick                   # seconds, on a CPU too; times mean nothing
    python benchmarks/train_step.py --sizes rwkv6-24x1024 --layers 2 --batch 1     # with other numbers
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import records
import runner
from peers.rwkv_lm import EXTENSIONS, trainer_of
from records import Record
from steps.measuring import falls_alike
from steps.sizes import FIELDS, QUICK, SIZES, Size

SIDES = ("fla_jax", "rwkv-lm", "fla")  # in the order in which they run
KEY = records.key_of("op", "implementation", "model", "shape", "remat", "precision")
# products in bfloat16 are faster without those that XLA generates with Triton, in FP8 with them
XLA_FLAGS = {"bfloat16": "--xla_gpu_enable_triton_gemm=false", "fp8": ""}
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "memory")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--sizes", nargs="+", default=["rwkv7-24x1024"], choices=[*SIZES, "all"], help="what to train")
    for name in FIELDS:
        add(f"--{name}", type=int, help="replaces the sizes' own")
    add("--quick", action="store_true", help="one tiny size, for a smoke test; times mean nothing")
    add("--steps", type=int, help="measured steps, after --warmup; default 10, with --quick 2")
    add("--warmup", type=int, help="steps after the first one that are not measured; default 3")
    add("--sides", nargs="+", choices=SIDES, help="default: all that can run")
    remat = ["none", "dense", "blocks"]
    add("--remat", nargs="+", default=remat[:2], choices=remat, help="fla_jax: each is measured")
    add("--scan", default="unroll", choices=("unroll", "loop", "off"), help="fla_jax; default unroll")
    add("--xla-flags", help=f"fla_jax: added to XLA_FLAGS; default {XLA_FLAGS['bfloat16']}, with --fp8 none")
    add("--fp8", action="store_true", help="fla_jax: FP8 products of the dense projections")
    add("--implementation", default=None, help="fla_jax: implementation of the op")
    add("--block-tokens", type=int, default=4096, help="fla_jax: tokens of a block of logits")
    profile = Path(os.environ.get("OUT", ".")) / "profile"
    text = "fla_jax: profile more steps and sum kernels by name; default $OUT/profile"
    add("--profile", nargs="?", type=Path, const=profile, metavar="FOLDER", help=text)
    add("--fla-remat", nargs="+", default=["none", "blocks"], choices=["none", "blocks"])
    add("--fla-precision", default="bf16", choices=["bf16", "autocast"], help="autocast: float32 parameters")
    add("--fla-python", default=sys.executable, help="the interpreter that has fla and torch")
    add("--rwkv-lm", metavar="CHECKOUT", help="RWKV-LM's repository, or its folder RWKV-v7/train_temp")
    add("--rwkv-lm-python", default=sys.executable, help="the interpreter that has torch, nvcc and ninja")
    add("--timeout", type=float, default=900, help="seconds for each process; default 900")
    add("--compile-seconds", type=float, default=180, help="limit for compiling peers; default 180")
    options = parser.parse_args(arguments)
    for name in (*FIELDS, "steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            sys.exit(f"train_step.py: --{name} must be at least 1, got {getattr(options, name)}")
    if options.xla_flags is None:
        options.xla_flags = XLA_FLAGS["fp8" if options.fp8 else "bfloat16"]
    if options.sides is None:
        options.sides = [side for side in SIDES if side != "rwkv-lm" or options.rwkv_lm]
    if "rwkv-lm" in options.sides:
        if not options.rwkv_lm:
            sys.exit("train_step.py: --sides rwkv-lm needs --rwkv-lm, a checkout")
        trainer_of(options.rwkv_lm)
    return options


def sizes_of(options: argparse.Namespace) -> list[Size]:
    """The selected sizes, with the numbers that the options replace."""
    sizes = list(SIZES.values()) if "all" in options.sizes else [SIZES[name] for name in options.sizes]
    given = {name: value for name in FIELDS if (value := getattr(options, name)) is not None}
    return [dataclasses.replace(size, **given) for size in ([QUICK] if options.quick else sizes)]


def job_of(side: str, size: Size, options: argparse.Namespace) -> runner.Job:
    """The job of a side, without the kind of rematerialisation."""
    folder = None if options.profile is None else options.profile / size.name.replace(" ", "-")
    return {
        "side": side,
        "size": dataclasses.asdict(size),
        "steps": options.steps or (2 if options.quick else 10),
        "warmup": (1 if options.quick else 3) if options.warmup is None else options.warmup,
        "scan": {"unroll": "unroll", "loop": True, "off": False}[options.scan],
        "implementation": options.implementation,
        "fp8": options.fp8,
        "block_tokens": options.block_tokens,
        "profile": folder and str(folder.resolve()),
        "precision": options.fla_precision,
        "checkout": options.rwkv_lm,
    }


def start(job: runner.Job, options: argparse.Namespace, compiles: bool = False) -> runner.Process:
    """The process of a job, in the side's environment."""
    side, variables = job["side"], {}
    if side == "fla_jax":
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {options.xla_flags}".strip()
    if side == "rwkv-lm":
        variables["TORCH_EXTENSIONS_DIR"] = str(runner.scratch() / "extensions" / "rwkv-lm")
    return runner.Process(
        "steps.worker:make",
        f"{side} {job.get('shares', '')}",
        [job],
        {"compile": compiles},
        paths=(records.ROOT,) if side == "fla_jax" else (),
        variables=variables,
        python={"fla": options.fla_python, "rwkv-lm": options.rwkv_lm_python}.get(side, sys.executable),
    )


def compile_before(side: str, size: Size, options: argparse.Namespace) -> None:
    """Fills Triton's cache with what FLA's kernels choose from, or torch's with RWKV-LM's extensions."""
    shares = EXTENSIONS if side == "rwkv-lm" else os.cpu_count() or 1
    job = job_of(side, size, options) | {"remat": options.fla_remat[0]}
    try:
        started = [start(job | {"shares": (i, shares)}, options, compiles=True) for i in range(shares)]
    except OSError:  # the interpreter does not exist, as the run that counts will record
        return
    print(f"{side}: compiled for {runner.wait_for(started, options.compile_seconds)}", flush=True)


def is_missing(side: str, options: argparse.Namespace) -> bool:
    """Whether this interpreter knows that a side cannot run."""
    return side == "fla" and options.fla_python == sys.executable and not runner.is_importable("fla")


def outcome(job: runner.Job, options: argparse.Namespace) -> Record:
    """The measurement of a job's process, or its error."""
    [(_, line)] = runner.results(lambda jobs: start(jobs[0], options), [job], options.timeout)
    return line["record"] if "record" in line else {"error": line["error"]}


def run_side(side: str, size: Size, options: argparse.Namespace) -> list[Record]:
    """Records of one side and size: failures, and the measurement if one succeeds."""
    made: list[Record] = []
    kinds = {"fla_jax": options.remat, "fla": options.fla_remat, "rwkv-lm": ["none"]}[side]
    missing = is_missing(side, options)
    for remat in kinds[:1] if missing else kinds:
        print(f"{side}, {size.name}, rematerialisation: {remat} ...", flush=True)
        job = job_of(side, size, options) | {"remat": remat}
        result = {"error": "package fla is not installed"} if missing else outcome(job, options)
        record = {"op": "train_step", "implementation": side, "model": size.model, "shape": size.shape}
        record |= {"dtype": "bfloat16", "pass": "forward + backward + optimizer", "remat": remat, **result}
        if options.fp8 and side == "fla_jax":
            record["precision"] = "fp8"
        made.append(record)
        print(records.table(made[-1:], COLUMNS), flush=True)
        error = result.get("error", "")
        if side != "fla_jax" and not any(word in error for word in OUT_OF_MEMORY):
            break
    return made


def compare(made: list[Record]) -> None:
    """Fills in the fastest peer of each of our records; a note for a peer that does not train."""
    measured = [r for r in made if "error" not in r]
    for ours in (r for r in measured if r["implementation"] == "fla_jax"):
        same = [r for r in measured if (r["model"], r["shape"]) == (ours["model"], ours["shape"])]
        peers = []
        for peer in (r for r in same if r["implementation"] != "fla_jax"):
            if falls_alike(ours, peer):
                peers.append(peer)
            else:
                peer["note"] = "no peer: its loss does not fall as ours does"
        if peers:
            best = min(peers, key=lambda r: r["ms"])
            ratio = best["ms"] / ours["ms"]
            ours.update(peer=best["implementation"], peer_ms=best["ms"], ratio=ratio)


def note(r: Record) -> str:
    if "error" in r:
        return r["error"][:80]
    return r.get("note") or (f"{r['ratio']:.2f} times as fast as {r['peer']}" if "ratio" in r else "")


COLUMNS = {
    "model": lambda r: Size(r["model"], **r["shape"]).name,
    **{
        "side": "implementation",
        "remat": "remat",
        "precision": "precision",
        "ms": "ms:.1f",
        "tokens/s": "tokens_per_s:,.0f",
    },
    **{"6N": "share_6n:.1%", "GB": "peak_gb:.1f", "first step, s": "first_step_s:.0f"},
    **{"loss": "loss_first:.2f", "then": "loss_last:.2f", "note": note},
}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    common, device = records.stamp(), "unknown"
    made: list[Record] = []
    for side in (side for side in SIDES if side in options.sides):
        for i, size in enumerate(sizes_of(options)):
            # RWKV-LM's extensions are for all sizes, FLA's kernels for one model's
            compiles = side == "fla" or (side == "rwkv-lm" and i == 0)
            if compiles and options.compile_seconds > 0 and not is_missing(side, options):
                compile_before(side, size, options)
            made += run_side(side, size, options)
            device = next((record["device"] for record in made if "error" not in record), device)
            for record in made:
                record.update({"device": device, **record, **common})
            compare(made)
            # after each size, so that a run that is cut short loses nothing
            path = records.put(options.out, device, made, KEY)
    records.report(records.table(made, COLUMNS), [], path)


if __name__ == "__main__":
    main()
