"""How training scales over devices: ``python benchmarks/scaling.py`` makes the table of docs/scaling.md.

Every mode runs on all devices (or ``--devices``) and, for its efficiency, on one of them with the work of
one, each in a process of its own: a step is forward, loss, backward, clipping and AdamW, compiled for the
mesh; the op's is its forward and backward. Beside times stand the peak memory of the device that has most (as
XLA plans it where nobody counts) and the collectives of the compiled program. Steps are queued, see
`running.timing.queued_steps`. Results are merged into ``benchmarks/results/<device>.json``.

    python benchmarks/scaling.py --modes data fsdp
    python benchmarks/scaling.py --fake 8        # no GPU: small models on fake CPU devices, numbers checked
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import records
from running import results
from running.timing import queued_steps
from steps.kernel_times import profiled

KEY = results.key_of(("op", "mode", "devices"))
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100": 989e12}  # bfloat16 operations a second, without sparsity


@dataclasses.dataclass(frozen=True)
class Mode:
    """One row of the table.

    Attributes:
        mesh: sizes for `fla_jax.parallel.make_mesh`.
        layers: of the model; 0 for the op alone, with ``width / 64`` heads.
        width: C.
        rows: of a device; of all devices where rows are split along T.
        tokens: T of a row.
        baseline: what one device runs: ``"rows"``, its own rows; ``"tokens"``, its own tokens of each row;
            ``"all"``, everything; None where that does not fit.
    """

    mesh: dict[str, int]
    layers: int
    width: int
    rows: int
    tokens: int = 4096
    baseline: str | None = "rows"


MODES = {
    "data": Mode({"data": -1}, 24, 1024, 8),
    "fsdp": Mode({"fsdp": -1}, 24, 2048, 4),
    "fsdp 7B": Mode({"fsdp": -1}, 32, 4096, 1, baseline=None),
    "tensor 2 x fsdp": Mode({"tensor": 2, "fsdp": -1}, 24, 2048, 4),
    "sequence, op": Mode({"sequence": -1}, 0, 2048, 1, 131072, "all"),
    "sequence": Mode({"sequence": -1}, 24, 1024, 1, 262144, "tokens"),
}
VOCAB, SMALL_VOCAB = 32000, 64


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--devices", type=int, help="how many; default all")
    parser.add_argument("--steps", type=int, default=10, help="measured steps, after three; default 10")
    parser.add_argument("--plain", action="store_true", help="without fla_jax.parallel.overlap_options")
    parser.add_argument(
        "--unscanned", action="store_true", help="layers without a scan: faster, compiles long"
    )
    parser.add_argument("--explicit", action="store_true", help="meshes with explicit axes")
    parser.add_argument("--fake", type=int, help="fake CPU devices, small sizes, numbers checked")
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="profile steps, and sum kernels by name"
    )
    results.add_option(parser)
    parser.add_argument("--timeout", type=float, default=550, help="seconds for one process; default 550")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # mode and number of devices, in a child
    return parser.parse_args(arguments)


def small(mode: Mode) -> Mode:
    """The same at a size for fake devices."""
    tokens = 128 if mode.mesh.keys() & {"sequence"} else 32
    rows = 1 if mode.layers == 0 else 2
    return dataclasses.replace(mode, layers=min(mode.layers, 2), width=64, rows=rows, tokens=tokens)


def collectives(text: str) -> dict[str, int]:
    """How many of each kind a compiled program has."""
    found = re.findall(rf"= \S.*? ({'|'.join(KINDS)})(?:-start)?\(", text)
    return dict(collections.Counter(found))


def training(mode: Mode, mesh: Any, rows: int, tokens: int, options: argparse.Namespace) -> tuple[Any, ...]:
    """(compiled step, its arguments, parameters without the embedding)."""
    import jax
    import numpy as np

    from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
    from fla_jax.parallel import TrainStep, overlap_options
    from fla_jax.training import rwkv_optimizer

    vocab = SMALL_VOCAB if options.fake else VOCAB
    config = RWKV7Config(
        vocab,
        mode.width,
        mode.layers,
        head_dim=16 if options.fake else 64,
        dtype="float32" if options.fake else "bfloat16",
        scan_layers=not options.unscanned,
        remat="dense",
    )
    flags = None if options.plain or options.fake else overlap_options()
    step = TrainStep(RWKV7ForCausalLM(config), rwkv_optimizer(6e-4), mesh, compiler_options=flags)
    state = step.init(jax.random.key(0))
    batch = step.shard(np.random.default_rng(0).integers(0, vocab, (rows, tokens + 1), dtype=np.int32))
    count = sum(x.size for x in jax.tree.leaves(state.params)) - vocab * mode.width
    return step.lower(state, batch).compile(), (state, batch), count


def op(mode: Mode, mesh: Any, rows: int, tokens: int, options: argparse.Namespace) -> tuple[Any, ...]:
    """The same of chunk_rwkv7 alone: its "state" are the inputs, which a step hands on as they are."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from fla_jax.ops import chunk_rwkv7

    size = 16 if options.fake else 64
    shape = rows, tokens, mode.width // size, size
    split = NamedSharding(mesh, P(None, "sequence"))

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        r, w, k, v, kk, g = jax.random.normal(key, (6, *shape))
        kk /= jnp.linalg.norm(kk, axis=-1, keepdims=True)
        arrays = r, -0.6065 * jax.nn.sigmoid(w), k, v, -kk, kk * jax.nn.sigmoid(g)
        return tuple(x.astype(jnp.float32 if options.fake else jnp.bfloat16) for x in arrays)

    def step(arrays: tuple[jax.Array, ...], do: jax.Array) -> Any:
        run = lambda *x: chunk_rwkv7(*x, lower_bound=-0.61, sequence_axis="sequence")[0]
        o, pull = jax.vjp(run, *arrays)
        gradients = pull(do)
        return arrays, sum(jnp.sum(jnp.abs(x.astype(jnp.float32))) for x in (o, *gradients))

    with jax.set_mesh(mesh):
        *arrays, do = jax.jit(lambda key: (*make(key), make(key)[0]), out_shardings=split)(jax.random.key(0))
        args = (tuple(arrays), do)
        return jax.jit(step, donate_argnums=0).lower(*args).compile(), args, None


def child(name: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """One mode on ``count`` devices, as a record; with one device the work of one."""
    import jax

    from fla_jax.parallel import make_mesh

    everyone = options.fake or options.devices or len(jax.devices())
    mode = small(MODES[name]) if options.fake else MODES[name]
    along = "sequence" in mode.mesh
    rows, tokens = mode.rows * (1 if along else everyone), mode.tokens
    if count == 1 and mode.baseline == "rows" and not options.fake:
        rows = mode.rows
    if count == 1 and mode.baseline == "tokens" and not options.fake:
        tokens = mode.tokens // everyone
    # fake devices do all of the work on one as well, to compare numbers
    sizes = {"data": 1} if count == 1 else mode.mesh
    mesh = make_mesh(**sizes, explicit=options.explicit, devices=jax.devices()[:count])
    compiled, (state, batch), parameters = (op if mode.layers == 0 else training)(
        mode, mesh, rows, tokens, options
    )
    text, planned = compiled.as_text(), compiled.memory_analysis()

    def start_step() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    with jax.set_mesh(mesh):
        losses = [float(start_step()) for _ in range(3)]
        times, more = queued_steps(start_step, options.steps)
    losses += more
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    ms, kind = statistics.median(times), jax.devices()[0].device_kind
    stats = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.devices()[:count]]
    peak = max(stats) or planned.temp_size_in_bytes + planned.argument_size_in_bytes
    record: dict[str, Any] = {
        "op": "scaling",
        "mode": name,
        "devices": count,
        "ms": ms,
        "peak_gb": peak / 1e9,
        "collectives": collectives(text),
        "shape": {"layers": mode.layers, "C": mode.width, "B": rows, "T": tokens},
        "tokens_per_s": rows * tokens / ms * 1e3,
        "losses": [losses[0], losses[-1]],
        "device": kind,
        **records.versions(("jax", "jaxlib", "flax", "jax-triton", "triton")),
    }
    if options.profile:
        folder = options.profile / f"{name}-{count}".replace(" ", "-")
        with jax.set_mesh(mesh):
            record["kernels_ms"] = profiled(folder, start_step, count)
    if parameters and kind in PEAK:
        record["share_6n"] = 6 * parameters * record["tokens_per_s"] / count / PEAK[kind]
    return record


def start(name: str, count: int, arguments: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """`child` in a process of its own; a record with "error" where it fails."""
    env = dict(os.environ)
    if options.fake:
        flags = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.fake}"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(records.ROOT), env.get("PYTHONPATH")]))
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    command = [sys.executable, __file__, *arguments, "--run", f"{name}/{count}"]
    failed = {"op": "scaling", "mode": name, "devices": count}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return failed | {"error": f"not done in {options.timeout:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RECORD ")]
    if done.returncode or not lines:
        return failed | {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:500]}
    return json.loads(lines[-1].removeprefix("RECORD "))


def judged(many: dict[str, Any], one: dict[str, Any], mode: Mode, fake: bool) -> dict[str, Any]:
    """``many`` with its efficiency against ``one``, or on fake devices with the difference of its losses."""
    if "error" in many or "error" in one:
        return many
    if fake:
        differences = [abs(a - b) / abs(b) for a, b in zip(many["losses"], one["losses"])]
        return many | {"difference": max(differences)}
    work = many["devices"] if mode.baseline == "all" else 1
    return many | {"efficiency": one["ms"] / (many["ms"] * work)}


def line(record: dict[str, Any]) -> str:
    """One row of the table on the screen."""
    head = f"{record['mode']:16} {record['devices']:3}"
    if "error" in record:
        return f"{head}  {record['error']}"
    text = f"{head} {record['ms']:10.1f} ms {record['peak_gb']:8.3f} GB"
    for name, form in (
        ("efficiency", "{:6.1%}"),
        ("share_6n", "6N {:5.1%}"),
        ("difference", "off by {:.1e}"),
    ):
        text += (
            f"  {name if name == 'efficiency' else ''} {form.format(record[name])}" if name in record else ""
        )
    return f"{text}  {record['collectives']}"


def main(arguments: list[str] | None = None) -> None:
    """Runs the modes, prints the table and writes the results."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.run:
        name, count = options.run.rsplit("/", 1)
        print("RECORD", json.dumps(child(name, int(count), options)), flush=True)
        return
    asked = "import jax; print(len(jax.devices()))"
    everyone = options.fake or options.devices
    if everyone is None:  # in a process of its own: this one shall hold no device
        everyone = int(
            subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout or 1
        )
    common = results.stamp() | {
        "overlap": not (options.plain or options.fake),
        "explicit": options.explicit,
        "scan": not options.unscanned,
    }
    bad = False
    for name in options.modes:
        one = {"error": "nothing fits one device"}
        if MODES[name].baseline or options.fake:
            one = start(name, 1, arguments, options)
            print(line(one) if "error" not in one else f"{name:16}   1  {one['error']}", flush=True)
        many = judged(start(name, everyone, arguments, options), one, MODES[name], bool(options.fake))
        print(line(many), flush=True)
        bad |= "error" in many or many.get("difference", 0) > 1e-5
        made = [record | common for record in (one, many) if "mode" in record]
        if options.fake and options.out is None:
            continue
        device = next((record["device"] for record in made if "device" in record), "unknown")
        results.put(options.out, device, made, KEY)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
