"""Times a server with many clients, and its `Generator` alone: ``python benchmarks/serve.py``.

RWKV-7 with random parameters. Every client sends one completion after the other; half of the clients stream.
Prompts have few lengths, since every length is several programs to compile. One process has the `Generator`,
with as many requests in flight, then another one the server; clients are in processes without JAX. All share
a compilation cache, which is deleted at the end.

``full`` is the rate while every client has a request: after all have begun, before one has none left.

    python benchmarks/serve.py                                 # 24 x 2048, 256 slots and clients: minutes
    python benchmarks/serve.py --features                      # and what the rules of sampling cost a token
    python benchmarks/serve.py --quick --out /tmp/cpu.json     # tiny sizes, for a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records
import runner
from records import Record
from serving.load import COMPILED, ROUNDS, Load, Timed, rates, warm_up

KEY = records.key_of(
    *("op", "implementation", "library", "version", "model", "batch", "what", "vocab", "weights", "state")
)
COLUMNS: dict[str, Any] = {
    "op": "op",
    "model": lambda r: f"RWKV-{r['version']} {r['model']}",
    "slots": "batch",
    **{"ms/token": "ms:.3f", "tokens/s": "tokens_per_s:.0f", "full": "full_per_s:.0f"},
    **{"first token": "first_token_s:.3f", "95 %": "first_token_95_s:.3f"},
    **{
        "compiled": "compiled",
        "failed": "failed",
        "CPU us/token": "cpu_us_per_token:.1f",
        "cost": "cost:.1%",
        "usual rules": "cost_usual:.1%",
    },
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, for a smoke test; times mean nothing")
    add("--model", metavar="LAYERSxWIDTH", help="default 24x2048")
    add("--vocab", type=int, help="default 65536")
    add("--slots", type=int, help="default 256")
    add("--clients", type=int, help="requests in flight; default 256")
    add("--requests", type=int, help="of each client, on average; default 8")
    add("--prompts", type=int, nargs="+", help="lengths of prompts; default 8 120 250")
    add("--tokens", type=int, nargs=2, help="fewest and most new tokens; default 16 512")
    add("--ramp", type=float, help="seconds in which the clients begin; default 2")
    add("--tokenizer", default="bytes", help="as the server takes it; default bytes")
    add("--features", action="store_true", help="also a token's time with every rule of sampling")
    add(
        "--processes",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="of clients; default half the cores",
    )
    add("--compile-seconds", type=float, default=60, help="longest time to compile ahead; default 60")
    add("--timeout", type=float, default=180, help="seconds for each of the two parts; default 180")
    options = parser.parse_args(arguments)
    defaults: dict[str, tuple[Any, Any]] = {
        "model": ("24x2048", "2x64"), "vocab": (65536, 300), "slots": (256, 4), "clients": (256, 4),
        "requests": (8, 3), "prompts": ([8, 120, 250], [3, 20]), "tokens": ([16, 512], [4, 24]),
        "ramp": (2, 0.1),
    }  # fmt: skip
    for name, (large, small) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, small if options.quick else large)
    return options


def load_of(options: argparse.Namespace) -> Load:
    sizes = options.vocab, options.clients, options.requests
    return Load(*sizes, options.prompts, options.tokens, options.ramp)


@contextlib.contextmanager
def running(folder: Path, options: argparse.Namespace, dtype: str, log: Path, until: float) -> Iterator[Any]:
    """A server's process and its address; it is killed in the end.

    Raises:
        RuntimeError: it did not start; the message shows the end of its log.
    """
    command = [
        sys.executable,
        "-m",
        "fla_jax.serve",
        str(folder),
        "--port",
        "0",
        "--slots",
        str(options.slots),
    ]
    command += ["--dtype", dtype, "--tokenizer", options.tokenizer, "--name", "benchmark", "--warm-up", "0"]
    path = os.pathsep.join([str(records.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"PYTHONPATH": path})
    try:
        while not (found := re.search(r"running on http://(\S+)", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.2)
        yield process.pid, found[1]
    finally:
        process.kill()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """Seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_clients(load: Load, job: dict[str, Any], of: int, until: float) -> list[list[Timed | str]]:
    """The requests of each process of clients: the times of one, or its error."""
    ours = {"load": load._asdict()}
    job |= {"start": time.monotonic() + 1, "until": until, "of": of}
    processes = [
        runner.Process("serving.clients:client", f"clients {i}", [job | {"index": i}], ours)
        for i in range(of)
    ]
    while time.monotonic() < until and not all(process.is_done() for process in processes):
        time.sleep(0.1)
    found: list[list[Timed | str]] = []
    for process in processes:
        lines = [line["record"]["done"] for line in process.new_lines() if "record" in line]
        if not lines:
            lines = [[f"{process.name}: {process.end()}"]]
        found += [[one if isinstance(one, str) else Timed(*one) for one in line] for line in lines]
    return found


def serve(folder: Path, options: argparse.Namespace, load: Load, dtype: str) -> Record:
    """The rates of a server; the first run compiles what is left."""
    until, log = time.monotonic() + options.timeout, folder.with_name("server.log")
    compiled = lambda: log.read_text(errors="replace").count(COMPILED)
    found: Record = {}
    with running(folder, options, dtype, log, until) as (pid, address):

        def post(prompts: list[list[int]], new: int) -> None:
            body = json.dumps({"prompt": prompts, "max_tokens": new}).encode()
            request = urllib.request.Request(f"http://{address}/v1/completions", body)
            urllib.request.urlopen(request, timeout=max(1, until - time.monotonic())).read()

        began = time.monotonic()
        warm_up(load, post, options.compile_seconds)
        warm = time.monotonic() - began
        print(f"the server compiled or read {compiled()} programs in {warm:.0f} s", flush=True)
        for now in (load.short(), *[load] * ROUNDS):
            before, cpu = compiled(), cpu_seconds(pid)
            each = run_clients(now, {"address": address}, min(options.processes, options.clients), until)
            cpu = cpu_seconds(pid) - cpu
            done = [[one for one in some if not isinstance(one, str)] for some in each]
            errors = sorted({one for some in each for one in some if isinstance(one, str)})
            failed = sum(isinstance(one, str) for some in each for one in some)
            if failed:
                print(f"{failed} failed, such as: {errors[:3]}", flush=True)
            found = {**rates(now, done), "failed": failed, "compiled": compiled() - before}
            found |= {"cpu_us_per_token": cpu / sum(one.tokens for some in done for one in some) * 1e6}
            late = time.monotonic() + 2 * found["took_s"] > until
            if now is load and (late or not found["compiled"]):
                break
    return {**found, "compile_s": warm}


def measure(options: argparse.Namespace, folder: Path, skipped: list[str]) -> Iterator[Record]:
    """The records of every part; the reasons of missing ones go to ``skipped``."""
    load = load_of(options)
    settings = {**vars(options), "out": None, "load": load._asdict(), "folder": str(folder / "model")}
    jobs = [{"part": part} for part in ("save", "update_params", "generator", "features")]
    jobs = jobs if options.features else jobs[:-1]
    start = lambda some: runner.Process(
        "serving.generator:generator", "generator", some, settings, paths=[records.ROOT]
    )
    common: Record = {}
    for job, line in runner.results(start, jobs, options.timeout):
        if "error" in line:
            skipped.append(f"{job['part']}: {line['error']}")
        elif job["part"] == "save":
            common = line["record"]
            print(f"{common['device']}: saved in {line['took_s']} s", flush=True)
        else:
            yield {"op": job["part"], **line["record"], **common}
    if not common:
        skipped.append("serve: there is no checkpoint")
        return
    try:
        found = serve(folder / "model", options, load, common["weights"])
        yield {"op": "serve", "ms": options.clients / found["full_per_s"] * 1e3, **found, **common}
    except Exception as error:
        skipped.append(f"serve: {type(error).__name__}: {error}"[:2000])


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    folder = Path(tempfile.mkdtemp(prefix="fla_jax-serve-"))
    # children inherit these: other processes need memory as well, and the server what the generator compiled
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_LOG_COMPILES": "1"}
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    common = {"library": "fla_jax", "implementation": "best", **records.stamp()}
    common |= {"version": 7, "model": options.model, "batch": options.slots, "vocab": options.vocab}
    low, high = options.tokens
    common["what"] = f"{options.clients} clients, prompts of {options.prompts}, {low} to {high} new tokens"
    made: list[Record] = []
    skipped: list[str] = []
    path = options.out or records.RESULTS
    try:
        for record in measure(options, folder, skipped):
            made.append(common | record)
            path = records.put(options.out, made[-1]["device"], made[-1:], KEY)
            print(records.table(made[-1:], COLUMNS), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    records.report(records.table(made, COLUMNS) if made else "", skipped, path)


if __name__ == "__main__":
    main()
