"""Speed of whole training steps beside the peers': ``python benchmarks/train_step.py``.

One step is forward, loss, backward, clipping and AdamW on the same sizes, ranks included. Parameters: float32
here (activations bfloat16), bfloat16 there unless ``--fla-precision autocast``; ours and FLA's without ever
holding all logits. Ours has ``scan_layers="unroll"``, XLA's own Triton products off, and is measured with
nothing rematerialised and with ``remat="dense"``. Each side runs each row in a process of its own with a time
limit, FLA last, because its autotuning takes minutes, the compilations for it on all cores before;
``--fla-python`` and ``--rwkv-lm-python`` may be other environments'. RWKV-LM's trainer takes part where
``--rwkv-lm`` names a checkout. A peer that runs out of memory tries its next kind of rematerialisation.
Whatever fails is in the results as well, with its error; so is a peer whose loss does not fall as ours does,
which is no peer. Results are merged into ``benchmarks/results/<device>.json``.

``share_6n``: 6 N operations a token, N all parameters but the embedding, over 989 TFLOP/s.

    python benchmarks/train_step.py --rows all --sides fla_jax --profile profiles
    python benchmarks/train_step.py --quick                   # seconds, on a CPU too; times mean nothing
    python benchmarks/train_step.py --rows rwkv6-24x1024 --layers 2 --batch 1     # a row, other sizes
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import records
from running import processes, results
from running.processes import Job, Process
from steps.measuring import falls_alike
from steps.rows import QUICK, ROWS, SIZES, Row
from steps.rwkv_lm import EXTENSIONS, trainer_of

SIDES = ("fla_jax", "rwkv-lm", "fla")  # in the order in which they run
KEY = results.key_of(("op", "implementation", "model", "shape", "remat"))
XLA_FLAGS = "--xla_gpu_enable_triton_gemm=false"
MEMORY = ("RESOURCE_EXHAUSTED", "memory")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=["rwkv7-24x1024"], choices=[*ROWS, "all"], help="what to train")
    for name in SIZES:
        add(f"--{name}", type=int, help="in place of the rows'")
    add("--quick", action="store_true", help="one tiny row, for a smoke test; times mean nothing")
    add("--steps", type=int, help="measured steps, after --warmup; default 10, with --quick 2")
    add("--warmup", type=int, help="steps after the first one that are not measured; default 3")
    add("--sides", nargs="+", choices=SIDES, help="what to run; default: all there are")
    remat = ["none", "dense", "blocks"]
    add("--remat", nargs="+", default=remat[:2], choices=remat, help="what fla_jax is measured with, each")
    add("--scan", default="unroll", choices=("unroll", "loop", "off"), help="fla_jax; default unroll")
    add("--xla-flags", default=XLA_FLAGS, help=f"fla_jax: added to XLA_FLAGS; default {XLA_FLAGS}")
    add("--implementation", default=None, help="fla_jax: implementation of the op")
    add("--block-tokens", type=int, default=4096, help="fla_jax: tokens whose logits are held at once")
    add(
        "--profile",
        nargs="?",
        type=Path,
        const=Path(os.environ.get("OUT", ".")) / "profile",
        metavar="FOLDER",
        help="fla_jax: profile some steps more, and sum kernels by name; default $OUT/profile",
    )
    add("--fla-remat", nargs="+", default=["none", "blocks"], choices=["none", "blocks"])
    add("--fla-precision", default="bf16", choices=["bf16", "autocast"], help="autocast: float32 parameters")
    add("--fla-python", default=sys.executable, help="the interpreter that has fla and torch")
    add("--rwkv-lm", metavar="CHECKOUT", help="RWKV-LM's repository, or its folder RWKV-v7/train_temp")
    add("--rwkv-lm-python", default=sys.executable, help="the interpreter that has torch, nvcc and ninja")
    add("--timeout", type=float, default=900, help="seconds for each process; default 900")
    add(
        "--compile-seconds",
        type=float,
        default=180,
        help="what peers compile is compiled on all cores before, this long at most; default 180",
    )
    results.add_option(parser)
    options = parser.parse_args(arguments)
    for name in (*SIZES, "steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            sys.exit(f"train_step.py: --{name} must be at least 1, got {getattr(options, name)}")
    if options.sides is None:
        options.sides = [side for side in SIDES if side != "rwkv-lm" or options.rwkv_lm]
    if "rwkv-lm" in options.sides:
        if not options.rwkv_lm:
            sys.exit("train_step.py: --sides rwkv-lm needs --rwkv-lm, a checkout")
        trainer_of(options.rwkv_lm)
    return options


def rows_of(options: argparse.Namespace) -> list[Row]:
    """The rows, with the sizes that were given in place of theirs."""
    rows = list(ROWS.values()) if "all" in options.rows else [ROWS[name] for name in options.rows]
    given = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    return [dataclasses.replace(row, **given) for row in ([QUICK] if options.quick else rows)]


def job_of(side: str, row: Row, options: argparse.Namespace) -> Job:
    """What a side's process is told, but for the kind of rematerialisation."""
    folder = None if options.profile is None else options.profile / row.name.replace(" ", "-")
    return {
        "side": side,
        "row": dataclasses.asdict(row),
        "steps": options.steps or (2 if options.quick else 10),
        "warmup": (1 if options.quick else 3) if options.warmup is None else options.warmup,
        "scan": {"unroll": "unroll", "loop": True, "off": False}[options.scan],
        "implementation": options.implementation,
        "block_tokens": options.block_tokens,
        "profile": folder and str(folder.resolve()),
        "precision": options.fla_precision,
        "checkout": options.rwkv_lm,
    }


def start(job: Job, options: argparse.Namespace, compile_: bool = False) -> Process:
    """The process of a job, in the side's environment."""
    side = job["side"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {options.xla_flags}".strip()
    variables = {"XLA_FLAGS": flags} if side == "fla_jax" else {}
    if side == "rwkv-lm":
        variables["TORCH_EXTENSIONS_DIR"] = str(processes.scratch() / "extensions" / "rwkv-lm")
    python = {"fla": options.fla_python, "rwkv-lm": options.rwkv_lm_python}.get(side, sys.executable)
    return Process(
        processes.BENCHMARKS / "steps" / "child.py",
        f"{side} {job.get('shares', '')}",
        [job],
        {"compile": compile_},
        paths=(records.ROOT,) if side == "fla_jax" else (),
        variables=variables,
        python=python,
    )


def compile_before(side: str, row: Row, options: argparse.Namespace) -> None:
    """Fills the caches of a peer: Triton's with the hundreds of configurations that FLA's kernels choose from
    (the choice itself is made afresh by the run that counts), or torch's with RWKV-LM's extensions.
    """
    shares = EXTENSIONS if side == "rwkv-lm" else os.cpu_count() or 1
    job = job_of(side, row, options) | {"remat": options.fla_remat[0]}
    try:
        started = [start(job | {"shares": (i, shares)}, options, True) for i in range(shares)]
    except OSError:  # there is no such interpreter, as the run that counts will say
        return
    print(f"{side}: compiled for {processes.all_done(started, options.compile_seconds)}", flush=True)


def missing(side: str, options: argparse.Namespace) -> str | None:
    """Why a side cannot run at all, as far as this interpreter knows."""
    if side == "fla" and options.fla_python == sys.executable and not processes.importable("fla"):
        return "package fla is not installed"
    return None


def outcome(job: Job, options: argparse.Namespace) -> records.Record:
    """What a job's process measured, or its error."""
    [(_, line)] = processes.results(lambda jobs: start(jobs[0], options), [job], options.timeout)
    return line["record"] if "record" in line else {"error": line["error"]}


def run_side(side: str, row: Row, options: argparse.Namespace) -> list[records.Record]:
    """Records of one side and row: failures, and at the end the measurement if there is one."""
    made: list[records.Record] = []
    kinds = {"fla_jax": options.remat, "fla": options.fla_remat, "rwkv-lm": ["none"]}[side]
    why = missing(side, options)
    for remat in kinds[:1] if why else kinds:
        print(f"{side}, {row.name}, rematerialisation: {remat} ...", flush=True)
        result = {"error": why} if why else outcome(job_of(side, row, options) | {"remat": remat}, options)
        record = {"op": "train_step", "implementation": side, "model": row.model, "shape": row.shape}
        record |= {"dtype": "bfloat16", "pass": "forward + backward + optimizer", "remat": remat, **result}
        made.append(record)
        if "error" not in result:
            facts = (
                f"{result['ms']:.1f} ms a step",
                f"{result['tokens_per_s']:,.0f} tokens/s",
                f"6N {result['share_6n']:.1%} of 989 TFLOP/s",
                f"{result['peak_gb']:.1f} GB",
                *([f"compiled in {result['compile_s']:.0f} s"] if "compile_s" in result else []),
                f"first step {result['first_step_s']:.0f} s",
                f"loss {result['loss_first']:.2f} -> {result['loss_last']:.2f}",
            )
            print(f"  {', '.join(facts)}", flush=True)
        else:
            print(f"  failed: {result['error'][:300]}", flush=True)
        ran_out = any(word in result.get("error", "") for word in MEMORY)
        if side != "fla_jax" and not ran_out:
            break
    return made


def compare(made: list[records.Record]) -> None:
    """Fills in the fastest peer of each of our records, and says of a peer that does not train that it is
    none.
    """
    for ours in (r for r in made if r["implementation"] == "fla_jax" and "error" not in r):
        row = (ours["model"], ours["shape"])
        same = [r for r in made if (r["model"], r["shape"]) == row and r["implementation"] != "fla_jax"]
        peers = []
        for peer in (r for r in same if "error" not in r):
            if falls_alike(ours, peer):
                peers.append(peer)
            else:
                peer["note"] = "no peer: its loss does not fall as ours does"
        if peers:
            best = min(peers, key=lambda r: r["ms"])
            ratio = best["ms"] / ours["ms"]
            ours.update(peer=best["implementation"], peer_ms=best["ms"], ratio=ratio)


def table(made: list[records.Record]) -> str:
    """The records as text."""
    lines = [("model", "side", "remat", "ms", "tokens/s", "6N", "GB", "first step", "loss", "note")]
    for r in made:
        row = Row(r["model"], **r["shape"]).name
        if "error" in r:
            lines.append((row, r["implementation"], r["remat"], *"------", r["error"][:80]))
            continue
        note = r.get("note") or (f"{r['ratio']:.2f} times as fast as {r['peer']}" if "ratio" in r else "")
        loss = f"{r['loss_first']:.2f} -> {r['loss_last']:.2f}"
        cells = (f"{r['ms']:.1f}", f"{r['tokens_per_s']:,.0f}", f"{r['share_6n']:.1%}", f"{r['peak_gb']:.1f}")
        lines.append((row, r["implementation"], r["remat"], *cells, f"{r['first_step_s']:.0f} s", loss, note))
    return results.table(lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs the sides and writes the results."""
    options = parse(arguments)
    common, device = results.stamp(), "unknown"
    made: list[dict[str, Any]] = []
    for side in (side for side in SIDES if side in options.sides):
        for i, row in enumerate(rows_of(options)):
            # RWKV-LM's extensions are for all rows, FLA's kernels for one model's
            before = side == "fla" or (side == "rwkv-lm" and i == 0)
            if before and options.compile_seconds > 0 and missing(side, options) is None:
                compile_before(side, row, options)
            made += run_side(side, row, options)
            device = next((record["device"] for record in made if "error" not in record), device)
            for record in made:
                record.update({"device": device, **record, **common})
            compare(made)
            # after each, so that a run that is cut short keeps what it has
            path = results.put(options.out, device, made, KEY)
    print("\n" + table(made))
    print(f"results: {path}", flush=True)


if __name__ == "__main__":
    main()
