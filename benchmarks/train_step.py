"""Speed of whole training steps of an RWKV-7 beside flash-linear-attention's:
``python benchmarks/train_step.py``.

One step is forward, loss, backward, clipping and AdamW on the same sizes, ranks included. Parameters: float32
here (activations bfloat16), bfloat16 there unless ``--fla-precision autocast``; both without ever holding all
logits. Each side runs in a process of its own with a time limit, FLA last, because its autotuning takes
minutes, the compilations for it on all cores before; its ``--fla-python`` may be another environment's. A
side that runs out of memory tries its next kind of rematerialisation. Whatever fails is in the results as
well, with its error. Results are merged into ``benchmarks/results/<device>.json``.

    python benchmarks/train_step.py --layers 2 --width 64 --tokens 128 --batch 1 --vocab 300     # small
    enough for a CPU
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
import tuning

SIZES = ("layers", "width", "tokens", "batch", "vocab")
PACKAGES = {
    "fla_jax": ("jax", "jaxlib", "flax", "optax", "jax-triton", "triton"),
    "fla": ("flash-linear-attention", "fla-core", "torch", "triton", "transformers"),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in zip(SIZES, (24, 1024, 4096, 8, 32000)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--steps", type=int, default=10, help="measured steps, after --warmup; default 10")
    parser.add_argument(
        "--warmup", type=int, default=3, help="steps after the first one that are not measured; default 3"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        default=["fla_jax", "fla"],
        choices=["fla_jax", "fla"],
        help="what to run; FLA goes last in any case",
    )
    parser.add_argument(
        "--remat",
        nargs="+",
        default=["dense", "blocks"],
        choices=["none", "dense", "blocks"],
        help="what fla_jax tries, in order",
    )
    parser.add_argument(
        "--fla-remat",
        nargs="+",
        default=["none", "blocks"],
        choices=["none", "blocks"],
        help="what FLA tries, in order",
    )
    parser.add_argument(
        "--fla-precision",
        default="bf16",
        choices=["bf16", "autocast"],
        help="parameters in bfloat16, or in float32 under torch.autocast",
    )
    parser.add_argument("--fla-python", default=sys.executable, help="the interpreter that has fla and torch")
    parser.add_argument("--no-scan", action="store_true", help="fla_jax: layers unrolled instead of scanned")
    parser.add_argument("--implementation", default=None, help="fla_jax: implementation of the op")
    parser.add_argument(
        "--block-tokens", type=int, default=4096, help="fla_jax: tokens whose logits are held at once"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=900,
        help="seconds for each side and kind of rematerialisation; default 900",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="results file; default: <device>.json in $OUT if that is set, else in benchmarks/results",
    )
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=180,
        help="FLA's Triton configurations are compiled on all cores before, this long at most",
    )
    parser.add_argument("--compile", nargs=2, type=int, metavar=("SHARE", "SHARES"), help=argparse.SUPPRESS)
    # what the processes of the two sides are started with
    parser.add_argument("--run", nargs=3, metavar=("SIDE", "REMAT", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def low_ranks(width: int) -> dict[str, int]:
    """The official ranks; FLA's default values are others. The formula stands here so that FLA's process
    needs no JAX.
    """
    rank = lambda factor: max(32, round(factor * width**0.5 / 32) * 32)
    return {
        "decay_low_rank_dim": rank(2.5),
        "a_low_rank_dim": rank(2.5),
        "v_low_rank_dim": rank(1.7),
        "gate_low_rank_dim": rank(5),
    }


def measure(step: Callable[[], float], options: argparse.Namespace) -> dict[str, Any]:
    """Times of ``step``, which returns the loss once the device is done."""
    began = time.perf_counter()
    losses = [step()]
    first = time.perf_counter() - began
    losses += [step() for _ in range(options.warmup)]
    times = []
    for _ in range(options.steps):
        began = time.perf_counter()
        losses.append(step())
        times.append(1e3 * (time.perf_counter() - began))
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    ms = statistics.median(times)
    rate = options.batch * options.tokens / ms * 1e3
    return {
        "ms": ms,
        "ms_min": min(times),
        "ms_max": max(times),
        "tokens_per_s": rate,
        "first_step_s": first,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def run_fla_jax(options: argparse.Namespace, remat: str) -> dict[str, Any]:
    """This library."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import jax
    import optax

    from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
    from fla_jax.training import chunked_cross_entropy, rwkv_optimizer

    config = RWKV7Config(
        options.vocab,
        options.width,
        options.layers,
        head_dim=64,
        dtype="bfloat16",
        scan_layers=not options.no_scan and options.layers > 1,
        remat={"none": False, "dense": "dense", "blocks": True}[remat],
        implementation=options.implementation,
        **low_ranks(options.width),
    )
    model, optimizer = RWKV7ForCausalLM(config), rwkv_optimizer(6e-4)
    tokens = jax.random.randint(jax.random.key(1), (options.batch, options.tokens + 1), 0, options.vocab)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:1, :2])["params"]

    def train_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            hidden, _ = model.apply({"params": params}, tokens[:, :-1], method="hidden")
            return chunked_cross_entropy(
                hidden, params["head"]["kernel"], tokens[:, 1:], block_tokens=options.block_tokens
            )

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    carry = jax.block_until_ready((params, jax.jit(optimizer.init)(params)))
    count = sum(x.size for x in jax.tree.leaves(params))
    del params
    began = time.perf_counter()
    compiled = jax.jit(train_step, donate_argnums=(0, 1)).lower(*carry, tokens).compile()
    compile_s = time.perf_counter() - began

    def step() -> float:
        nonlocal carry
        *carry, loss = compiled(*carry, tokens)
        jax.block_until_ready(carry)
        return float(loss)

    result = measure(step, options)
    result["first_step_s"] += compile_s
    planned = compiled.memory_analysis()
    stats = jax.devices()[0].memory_stats() or {}
    # without the allocator's count (on CPU): what the compiler planned
    peak = stats.get("peak_bytes_in_use") or planned.temp_size_in_bytes + planned.argument_size_in_bytes
    return {
        **result,
        "peak_gb": peak / 1e9,
        "compile_s": compile_s,
        "parameters": count,
        "device": jax.devices()[0].device_kind,
        "scan": config.scan_layers,
    }


def run_fla(options: argparse.Namespace, remat: str) -> dict[str, Any]:
    """flash-linear-attention."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    from fla.models import RWKV7Config, RWKV7ForCausalLM

    config = RWKV7Config(
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        head_dim=64,
        vocab_size=options.vocab,
        max_position_embeddings=options.tokens,
        fuse_cross_entropy=False,
        fuse_linear_cross_entropy=True,
        use_l2warp=True,
        use_cache=False,
        **low_ranks(options.width),
    )
    torch.manual_seed(0)
    autocast = options.fla_precision == "autocast"
    model = RWKV7ForCausalLM(config).to("cuda", torch.float32 if autocast else torch.bfloat16).train()
    if remat == "blocks":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(0, options.vocab, (options.batch, options.tokens + 1), device="cuda")
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch.cuda.reset_peak_memory_stats()

    def step() -> float:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=inputs, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return float(loss)

    result = measure(step, options)
    count = sum(p.numel() for p in model.parameters())
    return {
        **result,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "parameters": count,
        "device": torch.cuda.get_device_name(),
        "precision": options.fla_precision,
    }


def child(options: argparse.Namespace) -> None:
    """What a side's process does: one measurement, or the error, into a file."""
    side, remat, file = options.run
    try:
        if options.compile:
            tuning.compile_only(*options.compile)
            options.layers, options.batch, options.warmup, options.steps = 2, 2, 0, 1
        result = {"fla_jax": run_fla_jax, "fla": run_fla}[side](options, remat)
    except Exception as error:  # recorded, whatever it is
        result = {"error": f"{type(error).__name__}: {error}"[:2000]}
    Path(file).write_text(json.dumps({**result, "versions": records.versions(PACKAGES[side])}))


def command(
    options: argparse.Namespace, arguments: list[str], side: str, remat: str, file: Path
) -> dict[str, Any]:
    """What `subprocess` needs to start a side."""
    python = options.fla_python if side == "fla" else sys.executable
    path = [str(records.ROOT)] if side == "fla_jax" else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return {
        "args": [python, str(Path(__file__).resolve()), *arguments, "--run", side, remat, str(file)],
        "env": environment,
    }


def compile_fla(options: argparse.Namespace, arguments: list[str]) -> None:
    """Fills Triton's cache with the hundreds of configurations that FLA's kernels choose from; the choice
    itself is made afresh by the run that counts.
    """
    shares, began = os.cpu_count() or 1, time.monotonic()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        each = [[*arguments, "--compile", str(i), str(shares)] for i in range(shares)]
        try:
            processes = [
                subprocess.Popen(
                    **command(options, x, "fla", options.fla_remat[0], Path(folder) / str(i)), **quiet
                )
                for i, x in enumerate(each)
            ]
        except OSError:  # there is no such interpreter, as the run that counts will say
            return
        late = sum(tuning.wait(processes, options.compile_seconds))
        wrong = {json.loads(file.read_text()).get("error", "") for file in Path(folder).iterdir()} - {""}
    print(
        f"fla: compiled for {time.monotonic() - began:.0f} s, {late} of {shares} processes not "
        f"done{', '.join(['', *wrong])}",
        flush=True,
    )


def run_side(side: str, options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Records of one side: failures, and at the end the measurement if there is one."""
    made: list[dict[str, Any]] = []
    for remat in options.fla_remat if side == "fla" else options.remat:
        print(f"{side}, rematerialisation: {remat} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            try:
                done = subprocess.run(
                    **command(options, arguments, side, remat, file),
                    timeout=options.timeout,
                    capture_output=True,
                    text=True,
                )
                missing = f"the process ended with status {done.returncode}: {done.stderr[-1500:]}"
            except subprocess.TimeoutExpired:
                missing = f"no result within {options.timeout:g} s"
            except OSError as error:
                missing = f"{type(error).__name__}: {error}"
            result = json.loads(file.read_text()) if file.exists() else {"error": missing}
        made.append(
            {
                "op": "train_step",
                "implementation": side,
                "model": "rwkv7",
                "shape": {name: getattr(options, name) for name in SIZES},
                "dtype": "bfloat16",
                "pass": "forward + backward + optimizer",
                "remat": remat,
                **result,
            }
        )
        if "error" not in result:
            facts = (
                f"{result['ms']:.1f} ms a step",
                f"{result['tokens_per_s']:,.0f} tokens/s",
                f"{result['peak_gb']:.1f} GB",
            )
            print(f"  {', '.join(facts)}, first step {result['first_step_s']:.0f} s")
            break
        print(f"  failed: {result['error'][:300]}")
        if not any(word in result["error"] for word in ("RESOURCE_EXHAUSTED", "memory")):
            break
    return made


def key(record: dict[str, Any]) -> str:
    """What records replace each other."""
    return json.dumps([record.get(name) for name in ("op", "implementation", "shape")], sort_keys=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the sides and writes the results."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.run:
        return child(options)
    for name in (*SIZES, "steps"):
        if getattr(options, name) < 1:
            sys.exit(f"train_step.py: --{name} must be at least 1, got {getattr(options, name)}")
    common = {
        "commit": records.commit(),
        "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    made: list[dict[str, Any]] = []
    for side in (side for side in ("fla_jax", "fla") if side in options.sides):
        if side == "fla" and options.compile_seconds > 0:
            compile_fla(options, arguments)
        made += run_side(side, options, arguments)
        best = {record["implementation"]: record for record in made if "error" not in record}
        device = next((record["device"] for record in best.values()), "unknown")
        for record in made:
            record.update({"device": device, **record, **common})
        if len(best) == 2:
            ours, peer = best["fla_jax"], best["fla"]
            ours.update(peer="fla", peer_ms=peer["ms"], ratio=peer["ms"] / ours["ms"])
            print(f"fla_jax is {ours['ratio']:.2f} times as fast as FLA")
        # after each side, so that a run that is cut short keeps what it has
        path = options.out or records.path_of(
            device, Path(os.environ["OUT"]) if os.environ.get("OUT") else records.RESULTS
        )
        base = records.read(path) or (records.read(records.path_of(device)) if options.out is None else [])
        records.write(path, records.merged(base, made, key))
        print(f"results: {path}", flush=True)


if __name__ == "__main__":
    main()
