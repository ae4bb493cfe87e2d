"""How training scales over devices: ``python benchmarks/scaling.py`` makes the table of docs/pretraining.md.

Every mode runs on all devices (or ``--devices``) and, for its efficiency, on one with the work of one, each
in its own process. Before, all programs are compiled at the same time, into a cache that is deleted at the
end. Records have times of queued steps, the largest peak memory and the collectives.

    python benchmarks/scaling.py --modes data fsdp
    python benchmarks/scaling.py --fake 8        # no GPU: small models on fake CPU devices, numbers checked
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import records
import runner
from records import Record
from steps.kernel_times import profiled
from steps.sizes import PEAK
from timing import queued_steps, require_finite

KEY = records.key_of("op", "mode", "devices", "scan", "reshard_after_forward", "collectives_in_flight")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PACKAGES = ("jax", "jaxlib", "flax", "triton")
VOCAB, SMALL_VOCAB = 32000, 64


@dataclasses.dataclass(frozen=True)
class Mode:
    """One line of the table; ``baseline`` is the work of one device, None if that does not fit."""

    mesh: dict[str, int]  # sizes for `fla_jax.parallel.make_mesh`
    layers: int  # 0 for the op alone, with width / 64 heads
    width: int
    batch: int  # of a device; of all devices with context parallelism
    tokens: int = 4096
    baseline: Literal["batch", "tokens", "all"] | None = "batch"


MODES = {
    "data": Mode({"data": -1}, 24, 1024, 8),
    "fsdp": Mode({"fsdp": -1}, 24, 2048, 4),
    "fsdp 7B": Mode({"fsdp": -1}, 32, 4096, 1, baseline=None),
    "tensor 2 x fsdp": Mode({"tensor": 2, "fsdp": -1}, 24, 2048, 4),
    "sequence, op": Mode({"sequence": -1}, 0, 2048, 1, 131072, "all"),
    "sequence": Mode({"sequence": -1}, 24, 1024, 1, 262144, "tokens"),
}


class Program(NamedTuple):
    """A compiled step ``(state, examples) -> (state, loss)``, what makes its arguments, and the number of
    parameters without the embedding.
    """

    compiled: Any
    arguments: Callable[[], tuple[Any, Any]]
    parameters: int | None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    add("--devices", type=int, help="how many; default all")
    add("--tokens", type=int, help="of a sequence that is divided; default 131072 (op), 262144 (model)")
    add("--steps", type=int, default=10, help="measured steps, after three; default 10")
    add("--plain", action="store_true", help="without fla_jax.parallel.overlap_options")
    text = "how many may run at a time, see overlap_options; default 1"
    add("--collectives-in-flight", type=int, default=1, help=text)
    add("--unscanned", action="store_true", help="layers without a scan: faster, compiles long")
    text = "the field of the model's configuration; default: true"
    add("--reshard-after-forward", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--explicit", action="store_true", help="meshes with explicit axes")
    add("--fake", type=int, help="fake CPU devices, small sizes, numbers checked")
    add("--profile", type=Path, metavar="FOLDER", help="profile steps, and sum kernels by name")
    add("--timeout", type=float, default=550, help="seconds for one process; default 550")
    text = "longest time to compile ahead; default 180, 0 for not at all"
    add("--compile-seconds", type=float, default=180, help=text)
    return parser.parse_args(arguments)


def small(mode: Mode) -> Mode:
    """The mode at a size for fake devices."""
    tokens = 128 if "sequence" in mode.mesh else 32
    batch = 1 if mode.layers == 0 else 2
    return dataclasses.replace(mode, layers=min(mode.layers, 2), width=64, batch=batch, tokens=tokens)


def collectives(text: str) -> dict[str, int]:
    """The number of each kind in a compiled program."""
    found = re.findall(rf"= \S.*? ({'|'.join(KINDS)})(?:-start)?\(", text)
    return dict(collections.Counter(found))


def training(mode: Mode, mesh: Any, batch: int, tokens: int, options: argparse.Namespace) -> Program:
    """A training step."""
    import jax
    import numpy as np

    from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
    from fla_jax.parallel import TrainStep, overlap_options
    from fla_jax.training import rwkv_optimizer

    vocab, head, dtype = (SMALL_VOCAB, 16, "float32") if options.fake else (VOCAB, 64, "bfloat16")
    sizes = {"head_dim": head, "dtype": dtype, "scan_layers": not options.unscanned, "remat": "dense"}
    sizes["reshard_after_forward"] = options.reshard_after_forward
    model = RWKV7ForCausalLM(RWKV7Config(vocab, mode.width, mode.layers, **sizes))
    flags = None if options.plain or options.fake else overlap_options(options.collectives_in_flight)
    step = TrainStep(model, rwkv_optimizer(6e-4), mesh, compiler_options=flags)
    state = step.abstract_state()
    drawn = np.random.default_rng(0).integers(0, vocab, (batch, tokens + 1), dtype=np.int32)
    count = sum(x.size for x in jax.tree.leaves(state.params)) - vocab * mode.width
    examples = step.shard(drawn)
    compiled = step.lower(state, examples).compile()
    return Program(compiled, lambda: (step.init(jax.random.key(0)), examples), count)


def op(mode: Mode, mesh: Any, batch: int, tokens: int, options: argparse.Namespace) -> Program:
    """chunk_rwkv7 alone: its "state" are the inputs, which a step returns unchanged."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from fla_jax.ops import chunk_rwkv7

    size, dtype = (16, jnp.float32) if options.fake else (64, jnp.bfloat16)
    shape = batch, tokens, mode.width // size, size
    split = NamedSharding(mesh, P(None, "sequence"))

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        r, w, k, v, kk, g = jax.random.normal(key, (6, *shape))
        kk /= jnp.linalg.norm(kk, axis=-1, keepdims=True)
        arrays = r, -0.6065 * jax.nn.sigmoid(w), k, v, -kk, kk * jax.nn.sigmoid(g)
        return tuple(x.astype(dtype) for x in arrays)

    def step(arrays: tuple[jax.Array, ...], do: jax.Array) -> Any:
        run = lambda *x: chunk_rwkv7(*x, lower_bound=-0.61, sequence_axis="sequence")[0]
        o, pull = jax.vjp(run, *arrays)
        gradients = pull(do)
        return arrays, sum(jnp.sum(jnp.abs(x.astype(jnp.float32))) for x in (o, *gradients))

    def arguments() -> tuple[tuple[jax.Array, ...], jax.Array]:
        with jax.set_mesh(mesh):
            made = jax.jit(lambda key: (make(key), make(key)[0]), out_shardings=split)
            return made(jax.random.key(0))

    given = jax.ShapeDtypeStruct(shape, dtype, sharding=split)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=0).lower((given,) * 6, given).compile()
    return Program(compiled, arguments, None)


def measure(name: str, count: int, options: argparse.Namespace, compiles: bool = False) -> Record | None:
    """The record of one mode on ``count`` devices; one device has the work of one. None if it only
    ``compiles``.
    """
    import jax

    from fla_jax.parallel import make_mesh

    num_devices = options.fake or options.devices or len(jax.devices())
    mode = small(MODES[name]) if options.fake else MODES[name]
    if options.tokens and "sequence" in mode.mesh:
        mode = dataclasses.replace(mode, tokens=options.tokens)
    batch, tokens = mode.batch * (1 if "sequence" in mode.mesh else num_devices), mode.tokens
    if count == 1 and not options.fake:  # a fake device has all of the work, to compare numbers
        batch = mode.batch if mode.baseline == "batch" else batch
        tokens = tokens // num_devices if mode.baseline == "tokens" else tokens
    mesh_sizes = {"data": 1} if count == 1 else mode.mesh
    mesh = make_mesh(**mesh_sizes, explicit=options.explicit, devices=jax.devices()[:count])
    build = op if mode.layers == 0 else training
    compiled, arguments, parameters = build(mode, mesh, batch, tokens, options)
    if compiles:
        return None
    state, examples = arguments()

    def start_step() -> Any:
        nonlocal state
        state, loss = compiled(state, examples)
        return loss

    with jax.set_mesh(mesh):
        losses = [float(start_step()) for _ in range(3)]
        times, more = queued_steps(start_step, options.steps)
    losses = require_finite(losses + more)
    ms, kind, planned = statistics.median(times), jax.devices()[0].device_kind, compiled.memory_analysis()
    stats = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.devices()[:count]]
    peak = max(stats) or planned.temp_size_in_bytes + planned.argument_size_in_bytes
    record: Record = {"op": "scaling", "mode": name, "devices": count, "ms": ms, "peak_gb": peak / 1e9}
    record["collectives"] = collectives(compiled.as_text())
    record["shape"] = {"layers": mode.layers, "C": mode.width, "B": batch, "T": tokens}
    record |= {"tokens_per_s": batch * tokens / ms * 1e3, "losses": [losses[0], losses[-1]], "device": kind}
    record |= records.versions(PACKAGES)
    if options.profile:
        folder = options.profile / f"{name}-{count}".replace(" ", "-")
        with jax.set_mesh(mesh):
            record["kernels_ms"] = profiled(folder, start_step, count)
    if parameters and kind.startswith(("NVIDIA H100", "NVIDIA H200")):
        record["share_6n"] = 6 * parameters * record["tokens_per_s"] / count / PEAK
    return record


def make(settings: dict[str, Any]) -> Callable[[runner.Job], Any]:
    """The worker: measures a mode, or counts devices."""
    options = argparse.Namespace(**settings)
    options.profile = options.profile and Path(options.profile)

    def run(job: runner.Job) -> Any:
        if "mode" in job:
            return measure(job["mode"], job["devices"], options, job.get("compiles", False))
        import jax

        return len(jax.devices())

    return run


def start(jobs: list[runner.Job], options: argparse.Namespace) -> runner.Process:
    """A process with its jobs."""
    variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")}
    if options.fake:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.fake}"
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    settings = {
        name: getattr(options, name)
        for name in (
            "devices",
            "tokens",
            "steps",
            "plain",
            "collectives_in_flight",
            "unscanned",
            "reshard_after_forward",
            "explicit",
            "fake",
        )
    }
    settings["profile"] = options.profile and str(options.profile)
    if any("compiles" in job for job in jobs):
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    name = "scaling " + " ".join(f"{job.get('mode', '')} {job.get('devices', '')}" for job in jobs)
    return runner.Process("scaling:make", name, jobs, settings, paths=(records.ROOT,), variables=variables)


def outcome(job: runner.Job, options: argparse.Namespace) -> Any:
    """The result of a job in a process of its own; a record with "error" if it fails."""
    [(_, line)] = runner.results(lambda jobs: start(jobs, options), [job], options.timeout)
    return line["record"] if "record" in line else {"op": "scaling", **job, "error": line["error"]}


def with_efficiency(many: Record, one: Record, mode: Mode, fake: bool) -> Record:
    """``many`` with its efficiency against ``one``, or on fake devices with the difference of its losses."""
    if "error" in many or "error" in one:
        return many
    if fake:
        differences = [abs(a - b) / abs(b) for a, b in zip(many["losses"], one["losses"])]
        return many | {"difference": max(differences)}
    work = many["devices"] if mode.baseline == "all" else 1
    return many | {"efficiency": one["ms"] / (many["ms"] * work)}


def line(record: Record) -> str:
    head = f"{record['mode']:16} {record['devices']:3}"
    if "error" in record:
        return f"{head}  {record['error']}"
    text = f"{head} {record['ms']:10.1f} ms {record['peak_gb']:8.3f} GB"
    forms = {"efficiency": "efficiency {:6.1%}", "share_6n": "6N {:5.1%}", "difference": "off by {:.1e}"}
    words = [form.format(record[name]) for name, form in forms.items() if name in record]
    return "  ".join([text, *words, str(record["collectives"])])


def main(arguments: list[str] | None = None) -> int:
    """Runs the modes, prints the table and writes the results; status 1 if one fails."""
    options = parse(arguments)
    count = options.fake or options.devices or outcome({}, options)
    if not isinstance(count, int):
        sys.exit(f"scaling.py: {count['error']}")
    common = records.stamp() | {"overlap": not (options.plain or options.fake)}
    common |= {"explicit": options.explicit, "scan": not options.unscanned}
    if not options.reshard_after_forward:
        common |= {"reshard_after_forward": False}  # records without the field have the default
    if options.collectives_in_flight > 1:
        common |= {"collectives_in_flight": options.collectives_in_flight}
    with tempfile.TemporaryDirectory(prefix="fla_jax-scaling-") as cache:
        if options.compile_seconds:
            os.environ |= {
                "JAX_COMPILATION_CACHE_DIR": cache,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            compile_ahead(count, options)
        return run(count, common, options)


def compile_ahead(count: int, options: argparse.Namespace) -> None:
    """Fills the cache with the programs of all modes."""
    jobs = [{"mode": name, "devices": n, "compiles": True} for name in options.modes for n in {1, count}]
    started = [
        start([job], options) for job in jobs if job["devices"] > 1 or has_baseline(job["mode"], options)
    ]
    print(f"compiled ahead: {runner.wait_for(started, options.compile_seconds)}", flush=True)


def has_baseline(name: str, options: argparse.Namespace) -> bool:
    """Whether a mode also runs on one device."""
    return bool(MODES[name].baseline or options.fake)


def run(count: int, common: Record, options: argparse.Namespace) -> int:
    """Runs the modes one after the other."""
    failed = False
    for name in options.modes:
        one = {"mode": name, "devices": 1, "error": "nothing fits one device"}
        if fits := has_baseline(name, options):
            one = outcome({"mode": name, "devices": 1}, options)
            print(line(one), flush=True)
        many = outcome({"mode": name, "devices": count}, options)
        many = with_efficiency(many, one, MODES[name], bool(options.fake))
        print(line(many), flush=True)
        failed |= "error" in many or many.get("difference", 0) > 1e-5
        made = [record | common for record in ((one, many) if fits else (many,))]
        if not options.fake or options.out:
            device = next((record["device"] for record in made if "device" in record), "unknown")
            records.put(options.out, device, made, KEY)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
