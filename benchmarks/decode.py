"""Speed of decoding: ``python benchmarks/decode.py``, on one GPU the table of docs/performance_models.md.

A token is all of it: embedding, layers, head, penalties, top-p, the draw, the bookkeeping of `generate`; bf16
weights, float32 states, random parameters. Beside the time stands the floor, the time in which the GPU copies
as many bytes as a token must touch: every weight once, every state twice. ``kernels`` are those of a token in
the compiled program, ``copies`` those that copy something as large as a layer's states, of which there should
be none. Peers run in processes of their own, last: flash-linear-attention's ``generate`` and PyPI's ``rwkv``
(``--peers``); what fails is printed with its error.

    python benchmarks/decode.py                                   # everything: many minutes
    python benchmarks/decode.py --models 24x2048 --batches 1      # the first number to look at
    python benchmarks/decode.py --quick --out /tmp/cpu.json       # tiny sizes, for a smoke test
    python benchmarks/decode.py --models 24x2048 --batches 1 --profile /tmp/trace     # and a trace of kernels
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import records

KEY = ("op", "implementation", "library", "version", "model", "batch", "vocab", "weights", "state", "scan")
# not kernels: names of parts of other results, and of values that are there
NO_KERNELS = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "opt-barrier", "copy-done", "partition-id",
}  # fmt: skip

FORMS: dict[str, bool | str] = {"unroll": "unroll", "loop": True, "off": False}  # of `scan_layers`


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, for a smoke test; times mean nothing")
    add("--versions", nargs="+", type=int, choices=(6, 7), default=[7, 6])
    add("--models", nargs="+", metavar="LAYERSxWIDTH", default=None, help="default 24x2048 24x1024")
    add("--batches", nargs="+", type=int, default=None, help="default 1 32 256")
    add("--vocab", type=int, default=None, help="default 65536")
    add("--implementations", nargs="+", choices=("triton", "plain", "model"), default=None)
    add("--state", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--int8-group", type=int, help="weights in int8, with a factor for so many")
    add("--tokens", type=int, default=None, help="tokens a row that are timed; default 256")
    add(
        "--prefill",
        type=int,
        default=None,
        help="tokens of the prompt that is read; 0 for none; default 8192",
    )
    add("--scan", default="loop", choices=tuple(FORMS), help="of prompts; default loop")
    add("--engine", action="store_true", help="also rows that join and leave, with batches of 32 and more")
    add("--bandwidth", type=float, help="bytes/s for the floor; default: of a copy, measured")
    add("--profile", type=Path, help="folder for a trace of one more call")
    add("--peers", nargs="*", choices=("fla", "rwkv"), default=[], help="run in processes of their own, last")
    add("--peer-python", default=sys.executable, help="the interpreter that has them")
    add("--timeout", type=float, default=600, help="seconds for each peer; default 600")
    add("--out", type=Path, help="default: <device>.json in $OUT if that is set, else in benchmarks/results")
    options = parser.parse_args(arguments)
    defaults = {
        "models": (["24x2048", "24x1024"], ["2x64"]), "batches": ([1, 32, 256], [1, 5]),
        "vocab": (65536, 300), "tokens": (256, 32), "prefill": (8192, 40),
    }  # fmt: skip
    for name, (large, small) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, small if options.quick else large)
    return options


def make(version: int, size: str, vocab: int, dtype: str, scan: bool | str = False) -> tuple[Any, Any]:
    """A model and random parameters: activations near 1, logits as spread as a language model's."""
    import jax
    import jax.numpy as jnp

    from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM, unstack_layers

    layers, width = map(int, size.split("x"))
    config, kind = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[version]
    head = 64 if width >= 128 else 16
    wanted = config(vocab, width, layers, head_dim=head, dtype=dtype, param_dtype=dtype, scan_layers=scan)
    # all layers of a matrix are drawn at once: a draw for each layer compiles for minutes
    model = kind(dataclasses.replace(wanted, scan_layers=True))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def draw(i: int, path: Any, x: Any) -> jax.Array:
        name = path[-1].key
        matrix = x.ndim - (path[0].key == "blocks") > 1 and name not in ("r_k", "time_faaaa")
        values = jax.random.normal(jax.random.key(i), x.shape, jnp.float32)
        values = values * (x.shape[-2] ** -0.5 * (3 if path[0].key == "head" else 1) if matrix else 0.3)
        middle = {"scale": 1.0, "w0": -1.0, "time_decay": -1.0, "k_k": 1.0, "k_a": 1.0}.get(name, 0.5)
        return (values + (0 if matrix or name == "bias" else middle)).astype(x.dtype)

    make_all = jax.jit(lambda: [draw(i, path, x) for i, (path, x) in enumerate(leaves)])
    stacked = jax.tree.unflatten(tree, make_all())
    return kind(wanted), stacked if scan else jax.jit(unstack_layers)(stacked)


def copy_rate(size: int) -> float:
    """Bytes read and written per second by a copy."""
    import jax
    import jax.numpy as jnp

    copy, x = jax.jit(jnp.copy), jnp.zeros(size, jnp.int8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(8):
            y = copy(x)
        y.block_until_ready()
        times.append((time.perf_counter() - began) / 8)
    return 2 * size / min(times)


def bytes_of_a_token(model: Any, batch: int, options: argparse.Namespace) -> int:
    """Every weight once, a row of the embedding for each row, every state twice."""
    import jax
    import jax.numpy as jnp

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    item = jnp.dtype(model.config.dtype).itemsize
    weights = sum(x.size for x in jax.tree.leaves({**shapes, "emb": {}})) * item
    if options.int8_group:
        weights = weights // item + weights // item // options.int8_group * 2
    state = jax.eval_shape(lambda: model.init_state(batch))
    wkv = state.wkv.size * jnp.dtype(options.state).itemsize
    return weights + batch * model.config.hidden_size * item + 2 * (wkv + 2 * state.att_shift.size * item)


def kernels(text: str, least: int) -> tuple[int, int]:
    """Kernels of a token in a compiled program, and those that copy at least ``least`` numbers.

    The loop's body is the computation with the most kernels; what only names or groups values is none.
    """
    best = (0, 0)
    for body in re.split(r"\n(?=\S)", text):
        found = re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = (\S+|\(.*?\)) ([\w-]+)\(", body, re.MULTILINE)
        run = [(shape, name) for shape, name in found if name not in NO_KERNELS]
        copies = 0
        for shape, name in run:
            sizes = re.findall(r"\[([\d,]+)\]", shape)
            numbers = max((eval_product(size) for size in sizes), default=1)
            copies += name.startswith(("copy", "concatenate", "dynamic-update")) and numbers >= least
        best = max(best, (len(run), copies))
    return best


def eval_product(size: str) -> int:
    """``"2,3"`` -> 6."""
    product = 1
    for number in size.split(","):
        product *= int(number)
    return product


def decoding(
    model: Any, params: Any, batch: int, implementation: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Times of tokens, and what the compiled program is made of."""
    import jax
    import numpy as np

    from fla_jax.generation import Decoder, Sampling
    from fla_jax.generation.loop import STEPS_PER_CALL, begin, decode, row_keys
    from fla_jax.generation.prompts import prefill

    began = time.perf_counter()
    group = None if implementation == "model" else options.int8_group
    decoder = Decoder(
        model, params, implementation=implementation, state_dtype=options.state, int8_group=group
    )
    logits, state = prefill(model, params, [[1 + i % 7, 2, 3] for i in range(batch)])
    carry = begin(params, logits, decoder.state(state), row_keys(range(batch)), 2**30)
    rules = Sampling().arrays(model.config.vocab_size)
    arguments = (decoder.step, decoder.weights, rules)
    fixed = decoder.step.per_call
    count = np.int32(fixed or STEPS_PER_CALL)
    size = state.wkv[0].size
    compiled = decode.lower(*arguments, carry, count, fixed).compile()
    run = functools.partial(compiled, decoder.weights, rules)
    carry, out = run(carry, count)
    np.asarray(out)
    first = time.perf_counter() - began
    found, copies = kernels(compiled.as_text(), size)

    times = []
    calls = max(2, options.tokens // int(count))
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(calls):
            carry, out = run(carry, count)
        assert (np.asarray(out) >= 0).all(), "a row without tokens"
        times.append((time.perf_counter() - began) / (calls * int(count)) * 1e3)
    if options.profile:
        with jax.profiler.trace(str(options.profile / f"{implementation}-{batch}")):
            carry, out = run(carry, count)
            np.asarray(out)
    memory = compiled.memory_analysis()
    return {
        "ms_per_token": statistics.median(times), "ms_all": times, "kernels": found, "copies": copies,
        "first_token_s": first, "temporary_gb": getattr(memory, "temp_size_in_bytes", 0) / 1e9,
    }  # fmt: skip


def reading(model: Any, params: Any, length: int) -> dict[str, float]:
    """Tokens/s of a prompt: `prefill` as generate does it, and one call of the model; each waited for."""
    import jax
    import numpy as np

    from fla_jax.generation import prefill
    from fla_jax.generation.prompts import COMPILER_OPTIONS

    prompt = np.random.default_rng(0).integers(1, model.config.vocab_size, length).astype(np.int32)
    call = lambda params, tokens: model.apply({"params": params}, tokens, method="hidden")
    whole = jax.jit(call, compiler_options=COMPILER_OPTIONS)
    runs = {
        "generate": lambda: prefill(model, params, [prompt]),
        "apply": lambda: whole(params, prompt[None]),
    }
    found = {}
    for name, run in runs.items():
        times = []
        for _ in range(4 + 15):  # the first ones compile, and make CUDA graphs
            began = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - began)
        found[name] = length / statistics.median(times[4:])
    return found


def joining(model: Any, params: Any, slots: int, options: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of `Engine`: prompts of 8 to 256 tokens, rows of 16 to 1024, eight for each slot; in all, and
    while prompts wait.
    """
    import numpy as np

    from fla_jax.generation import Decoder, Engine

    small = options.quick
    decoder = Decoder(model, params, state_dtype=options.state, int8_group=options.int8_group)
    count = (2 if small else 8) * slots

    def run() -> dict[str, float]:
        engine, rng = Engine(model, params, slots, decoder=decoder), np.random.default_rng(0)
        for _ in range(count):
            prompt = rng.integers(1, model.config.vocab_size, rng.integers(8, 33 if small else 257))
            engine.put(prompt, int(rng.integers(16, 33 if small else 1025)), seed=1)
        began, full = time.perf_counter(), 0.0
        for ended, result in enumerate(engine.results(), 1):
            if result.error is not None:
                raise result.error
            if ended == count - slots:  # from here on slots stay empty
                full = engine.chosen / (time.perf_counter() - began)
        took = time.perf_counter() - began
        rate = engine.chosen / took
        return {"tokens_per_s": rate, "full_per_s": full, "slots_used": engine.chosen / engine.started}

    run()  # compiles
    return run()


def table(rows: list[dict[str, Any]]) -> str:
    """The records as text."""
    lines = [
        (
            "op",
            "model",
            "batch",
            "implementation",
            "ms/token",
            "tokens/s",
            "floor",
            "kernels",
            "copies",
            "first s",
        )
    ]
    for r in rows:
        cells = (r["op"], f"RWKV-{r['version']} {r['model']}", str(r["batch"]), r["implementation"])
        ms, floor = (f"{r[name]:.4f}" if r.get(name) else "-" for name in ("ms_per_token", "floor_ms"))
        rest = [str(r.get(name, "-")) for name in ("kernels", "copies")]
        lines.append(
            (*cells, ms, f"{r['tokens_per_s']:.0f}", floor, *rest, f"{r.get('first_token_s', 0):.1f}")
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for."""
    options = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory as well
    sys.path.insert(0, str(records.ROOT))
    import jax

    on_gpu = jax.default_backend() == "gpu"
    rate = options.bandwidth or copy_rate(1 << 20 if options.quick else 1 << 30)
    device = jax.devices()[0].device_kind
    print(f"{device}: a copy moves {rate / 1e9:.0f} GB/s", flush=True)
    common = {
        "versions": records.versions(("jax", "jaxlib", "jax-triton", "triton", "flax")),
        "device": device, "commit": records.commit(), "copy_gbs": rate / 1e9, "library": "fla_jax",
        "vocab": options.vocab, "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    dtype = "bfloat16" if on_gpu else "float32"
    weights = f"int8/{options.int8_group}" if options.int8_group else dtype
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for version in options.versions:
        for size in options.models:
            model, params = make(version, size, options.vocab, dtype, FORMS[options.scan])
            about = {"version": version, "model": size, "weights": weights, "state": options.state} | common
            for batch in options.batches:
                floor = bytes_of_a_token(model, batch, options) / rate * 1e3
                for name in options.implementations or (
                    ["triton", "model"] if on_gpu else ["plain", "model"]
                ):
                    try:
                        found = decoding(model, params, batch, name, options)
                    except Exception as error:  # out of memory, say: the others still run
                        skipped.append(
                            f"{version} {size} {batch} {name}: {type(error).__name__}: {error}"[:400]
                        )
                        continue
                    speed = {"tokens_per_s": batch / found["ms_per_token"] * 1e3, "floor_ms": floor}
                    what = {"op": "decode", "implementation": name, "batch": batch}
                    rows.append({**what, "ms": found["ms_per_token"], **found, **speed, **about})
                    print(table(rows[-1:]).partition("\n")[2], flush=True)
                if options.engine and batch >= (1 if options.quick else 32):
                    found = joining(model, params, batch, options)
                    own = [r for r in rows if r["version"] == version and r["model"] == size]
                    steady = max((r["tokens_per_s"] for r in own if r["batch"] == batch), default=None)
                    share = {
                        "of_steady": steady and found["tokens_per_s"] / steady,
                        "full_of_steady": steady and found["full_per_s"] / steady,
                    }
                    rows.append(
                        {"op": "engine", "implementation": "best", "batch": batch} | found | share | about
                    )
                    print(f"engine, {batch} slots: {rows[-1]}", flush=True)
            for name, speed in (reading(model, params, options.prefill) if options.prefill else {}).items():
                found = {"implementation": name, "batch": 1, "tokens_per_s": speed, "scan": options.scan}
                rows.append({"op": "prefill", **found, **about})
            del model, params
            jax.clear_caches()
    for peer in options.peers:
        import decode_peers

        for result in decode_peers.measure(peer, options):
            if isinstance(result, str):
                skipped.append(f"{peer}: {result}")
            else:
                rows.append({**common, **result})
    path = options.out or records.path_of(
        device, Path(os.environ["OUT"]) if os.environ.get("OUT") else records.RESULTS
    )
    key = lambda record: json.dumps([record.get(name) for name in KEY])
    records.write(path, records.merged(records.read(path), rows, key))
    print("\n" + table(rows) if rows else "nothing was measured")
    for line in skipped:
        print(f"skipped: {line}")
    print(f"results: {path}")


if __name__ == "__main__":
    main()
