"""Times decoding on one GPU: ``python benchmarks/decode.py``.

A token is all of a `Generator`'s loop: bfloat16 weights, float32 states, random parameters. The floor is a
copy of the bytes that a token needs: every weight once, every state twice. ``kernels`` counts those of a
token, ``copies`` those that copy a layer's states, which should be none. Peers run last, in their own
processes.

    python benchmarks/decode.py                                   # everything: many minutes
    python benchmarks/decode.py --models 24x2048 --batches 1      # the first number to look at
    python benchmarks/decode.py --quick --out /tmp/cpu.json       # tiny sizes, for a smoke test
    python benchmarks/decode.py --models 24x2048 --batches 1 --profile /tmp/trace     # and a trace of kernels
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records
from decode_model import make
from peers import decode as decode_peers
from records import Record

KEY = records.key_of(
    *("op", "implementation", "library", "version", "model", "batch", "vocab", "weights", "state", "scan")
)
# operations that run no kernel
NO_KERNELS = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "opt-barrier", "copy-done", "partition-id",
}  # fmt: skip

FORMS: dict[str, bool | str] = {"unroll": "unroll", "loop": True, "off": False}  # of `scan_layers`


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, for a smoke test; times mean nothing")
    add("--versions", nargs="+", type=int, choices=(6, 7), default=[7, 6])
    add("--models", nargs="+", metavar="LAYERSxWIDTH", help="default 24x2048 24x1024")
    add("--batches", nargs="+", type=int, help="default 1 32 256")
    add("--vocab", type=int, help="default 65536")
    add("--implementations", nargs="+", choices=("triton", "plain", "model"))
    add("--state", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--weights", choices=("int8", "int4"), help="quantised weights; default: the compute dtype")
    add("--group", type=int, help="weights that share a factor; default: the library's choice")
    add("--tokens", type=int, help="tokens that are timed; default 256")
    add("--prefill", type=int, help="tokens of the prompt; 0 for none; default 8192")
    add("--scan", default="loop", choices=tuple(FORMS), help="of prompts; default loop")
    add("--engine", action="store_true", help="also continuous batching, with batches of 32 and more")
    add("--bandwidth", type=float, help="bytes/s for the floor; default: of a copy, measured")
    add("--profile", type=Path, help="folder for a trace of one more call")
    add("--peers", nargs="*", choices=("fla", "rwkv"), default=[], help="run in processes of their own, last")
    add("--peer-python", default=sys.executable, help="the interpreter that has them")
    add("--timeout", type=float, default=600, help="seconds for each peer; default 600")
    options = parser.parse_args(arguments)
    defaults = {
        "models": (["24x2048", "24x1024"], ["2x64"]), "batches": ([1, 32, 256], [1, 5]),
        "vocab": (65536, 300), "tokens": (256, 32), "prefill": (8192, 40),
    }  # fmt: skip
    for name, (large, small) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, small if options.quick else large)
    return options


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


def quantisation(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `Decoder`."""
    return {"weight_dtype": options.weights, "weight_group": options.group}


def bytes_of_a_token(model: Any, batch: int, options: argparse.Namespace) -> int:
    """Every weight once, an embedding for each sequence, every state twice."""
    import jax
    import jax.numpy as jnp

    from fla_jax.generation.decoder import quantisation_of

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    item = jnp.dtype(model.config.dtype).itemsize
    weights = sum(x.size for x in jax.tree.leaves({**shapes, "emb": {}})) * item
    if quantised := quantisation_of(options.weights, options.group, model, shapes):
        number = weights // item
        weights = number * quantised.bits // 8 + number // quantised.group * 2
    state = jax.eval_shape(lambda: model.init_state(batch))
    wkv = state.wkv.size * jnp.dtype(options.state).itemsize
    return weights + batch * model.config.hidden_size * item + 2 * (wkv + 2 * state.att_shift.size * item)


def kernels(text: str, least: int) -> tuple[int, int]:
    """Kernels of the compiled loop's body, and those that copy at least ``least`` numbers."""
    best = (0, 0)
    for body in re.split(r"\n(?=\S)", text):
        found = re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = (\S+|\(.*?\)) ([\w-]+)\(", body, re.MULTILINE)
        run = [(shape, name) for shape, name in found if name not in NO_KERNELS]
        copies = 0
        for shape, name in run:
            sizes = re.findall(r"\[([\d,]+)\]", shape)
            numbers = max((math.prod(map(int, size.split(","))) for size in sizes), default=1)
            copies += name.startswith(("copy", "concatenate", "dynamic-update")) and numbers >= least
        best = max(best, (len(run), copies))
    return best


def token_times(
    model: Any, params: Any, batch: int, implementation: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Times of tokens, and the kernels of the compiled program."""
    import jax
    import numpy as np

    from fla_jax.generation import Decoder, SamplingParams, sampling_arrays
    from fla_jax.generation.decode_loop import STEPS_PER_CALL, begin, decode, row_keys
    from fla_jax.generation.prompts import prefill

    began = time.perf_counter()
    chosen = {} if implementation == "model" else quantisation(options)
    decoder = Decoder(model, params, implementation=implementation, state_dtype=options.state, **chosen)
    logits, state = prefill(model, params, [[1 + i % 7, 2, 3] for i in range(batch)])
    carry = begin(params, logits, decoder.state(state), row_keys(range(batch)), 2**30)
    rules = jax.device_put(sampling_arrays([SamplingParams()] * batch, model.config.vocab_size))
    arguments = (decoder.step, decoder.weights, rules)
    fixed = decoder.step.per_call
    count = np.int32(fixed or STEPS_PER_CALL)
    size = state.wkv[0].size
    compiled = decode.lower(*arguments, carry, count, fixed).compile()
    run = functools.partial(compiled, decoder.weights, rules)
    carry, out = run(carry, count)
    np.asarray(out.tokens)
    first = time.perf_counter() - began
    found, copies = kernels(compiled.as_text(), size)

    times = []
    calls = max(2, options.tokens // int(count))
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(calls):
            carry, out = run(carry, count)
        assert (np.asarray(out.tokens) >= 0).all(), "a sequence without tokens"
        times.append((time.perf_counter() - began) / (calls * int(count)) * 1e3)
    if options.profile:
        with jax.profiler.trace(str(options.profile / f"{implementation}-{batch}")):
            carry, out = run(carry, count)
            np.asarray(out.tokens)
    memory = compiled.memory_analysis()
    return {
        "ms_per_token": statistics.median(times), "ms_all": times, "kernels": found, "copies": copies,
        "first_token_s": first, "temporary_gb": getattr(memory, "temp_size_in_bytes", 0) / 1e9,
    }  # fmt: skip


def prompt_rates(model: Any, params: Any, length: int) -> dict[str, float]:
    """Tokens/s of a prompt by `prefill` and by one call of the model; each is waited for."""
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


def engine_rates(model: Any, params: Any, slots: int, options: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of `Engine` in all and while prompts wait; prompts of 8 to 256 tokens, 16 to 1024 new ones."""
    import numpy as np

    from fla_jax.generation import Decoder, SamplingParams
    from fla_jax.generation.engine import Engine

    small = options.quick
    decoder = Decoder(model, params, state_dtype=options.state, **quantisation(options))
    count = (2 if small else 8) * slots

    def run() -> dict[str, float]:
        engine, rng = Engine(params, decoder, slots), np.random.default_rng(0)
        for _ in range(count):
            prompt = rng.integers(1, model.config.vocab_size, rng.integers(8, 33 if small else 257))
            limit = int(rng.integers(16, 33 if small else 1025))
            engine.submit(prompt, SamplingParams(seed=1, max_tokens=limit))
        began, full, ended = time.perf_counter(), 0.0, 0
        while engine.busy:
            for event in engine.step():
                if event.row.error is not None:
                    raise event.row.error
                ended += event.row.finish_reason is not None
                if ended == count - slots and not full:  # from here on slots stay empty
                    full = engine.chosen / (time.perf_counter() - began)
        took = time.perf_counter() - began
        rate = engine.chosen / took
        return {"tokens_per_s": rate, "full_per_s": full, "slots_used": engine.chosen / engine.started}

    run()  # compiles
    return run()


COLUMNS: dict[str, Any] = {
    "op": "op",
    "model": lambda r: f"RWKV-{r['version']} {r['model']}",
    "batch": "batch",
    "implementation": "implementation",
    **{"ms/token": "ms_per_token:.4f", "tokens/s": "tokens_per_s:.0f", "floor": "floor_ms:.4f"},
    **{"kernels": "kernels", "copies": "copies", "first s": "first_token_s:.1f"},
}


def measure(
    version: int, size: str, options: argparse.Namespace, common: Record, skipped: list[str]
) -> Iterator[Record]:
    """Records of one model; the reasons of missing ones go to ``skipped``."""
    import jax

    from fla_jax.generation.decoder import quantisation_of

    on_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if on_gpu else "float32"
    model, params = make(version, size, options.vocab, dtype, FORMS[options.scan])
    quantised = quantisation_of(options.weights, options.group, model, params)
    weights = f"{options.weights}/{quantised.group}" if quantised else dtype
    about = {"version": version, "model": size, "weights": weights, "state": options.state} | common
    for batch in options.batches:
        floor = bytes_of_a_token(model, batch, options) / common["copy_gbs"] / 1e6
        steady = None
        for name in options.implementations or ["triton" if on_gpu else "plain", "model"]:
            try:
                found = token_times(model, params, batch, name, options)
            except Exception as error:  # such as out of memory: the others still run
                skipped.append(f"{version} {size} {batch} {name}: {type(error).__name__}: {error}"[:400])
                continue
            rate = batch / found["ms_per_token"] * 1e3
            steady = max(rate, steady or 0)
            speed = {"ms": found["ms_per_token"], **found, "tokens_per_s": rate, "floor_ms": floor}
            yield {"op": "decode", "implementation": name, "batch": batch, **speed, **about}
        if options.engine and batch >= (1 if options.quick else 32):
            found = engine_rates(model, params, batch, options)
            share = {
                "of_steady": steady and found["tokens_per_s"] / steady,
                "full_of_steady": steady and found["full_per_s"] / steady,
            }
            yield {"op": "engine", "implementation": "best", "batch": batch} | found | share | about
    for name, rate in (prompt_rates(model, params, options.prefill) if options.prefill else {}).items():
        found = {"implementation": name, "batch": 1, "tokens_per_s": rate, "scan": options.scan}
        yield {"op": "prefill", **found, **about}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory as well
    sys.path.insert(0, str(records.ROOT))
    import jax

    rate = options.bandwidth or copy_rate(1 << 20 if options.quick else 1 << 30)
    device, packages = jax.devices()[0].device_kind, ("jax", "jaxlib", "triton", "flax")
    print(f"{device}: a copy moves {rate / 1e9:.0f} GB/s", flush=True)
    common = {"versions": records.versions(packages), "device": device, "copy_gbs": rate / 1e9}
    common |= {"library": "fla_jax", "vocab": options.vocab, **records.stamp()}
    made: list[Record] = []
    skipped: list[str] = []
    for version in options.versions:
        for size in options.models:
            for record in measure(version, size, options, common, skipped):
                made.append(record)
                print(records.table([record], COLUMNS).partition("\n")[2], flush=True)
            jax.clear_caches()
    for peer in options.peers:
        for result in decode_peers.measure(peer, options):
            if isinstance(result, str):
                skipped.append(f"{peer}: {result}")
            else:
                made.append({**common, **result})
    path = records.put(options.out, device, made, KEY)
    records.report(records.table(made, COLUMNS) if made else "", skipped, path)


if __name__ == "__main__":
    main()
