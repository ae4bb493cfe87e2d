"""Times this library's ops and every importable peer's in one run: ``python benchmarks/ops.py``.

Each implementation has its own process: ours, then the peers, then our main shapes again; if the two times
differ by more than 3 % the record has both, and the ratio is of the slower. Before anything is timed all
cores compile our programs and the peers' extensions, and what the peers tune. The results file is written
after every measurement.

Decays: "bounded" is w = -exp(-0.5) * sigmoid(x) with ``lower_bound=-0.61``, "any-weak" the same decays
without it, "any-strong" w = -exp(2 x).

    python benchmarks/ops.py --quick --no-peers                   # seconds, on a CPU too
    python benchmarks/ops.py --only 'rwkv7 chunk' --budget 580    # several runs of a commit share the file
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re

import records
import runner
from peers.ops import IMPLEMENTATIONS, is_cached
from recurrences.errors import small_task
from recurrences.plan import Job, group, plan
from recurrences.report import Run, table


def start(
    name: str,
    jobs: list[Job],
    shares: tuple[int, int] | None = None,
    prepare: bool = False,
    checked: bool = True,
) -> runner.Process:
    """A process with its jobs."""
    listed = [{"implementation": key, "task": dataclasses.asdict(task)} for key, task in jobs]
    # extensions of one name and several head sizes must not share a folder
    extensions = runner.scratch() / "extensions" / re.sub(r"\W", "_", name)
    return runner.Process(
        "recurrences.worker:make",
        f"{name} prepare {shares or ''}" if prepare else name,
        listed,
        {"prepare": prepare, "shares": shares, "checked": checked},
        paths=(records.ROOT, records.ROOT / "tests"),
        variables={
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "FLA_CACHE_RESULTS": "0",  # what FLA's tuning finds while others run must not be kept
            "JAX_COMPILATION_CACHE_DIR": str(runner.scratch() / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
    )


def measure(run: Run, name: str, jobs: list[Job], seconds: float, again: bool = False) -> None:
    """Runs a process's jobs and records the results."""
    for job, line in runner.results(functools.partial(start, name, checked=not again), jobs, seconds):
        if "record" in line:
            run.add(job, line["record"], again)
        elif not again:
            run.skip(job, line["error"])


def prepare(groups: dict[str, list[Job]], seconds: float) -> None:
    """Compiles and tunes at the same time, before anything is timed."""
    chosen: dict[str, list[Job]] = {}
    cached: dict[Job, None] = {}  # each program once: those whose errors are measured serve several jobs
    for name, jobs in groups.items():
        for key, task in filter(is_cached, jobs):
            cached |= dict.fromkeys([(key, task), (key, small_task(IMPLEMENTATIONS[key], task))])
        each: dict[object, Job] = {}
        for key, task in jobs:
            if IMPLEMENTATIONS[key].prepare:  # kernels are compiled for one number and size of heads
                each.setdefault((key, task.form != "chunk", task.shape[2:]), (key, task))
        if each:
            chosen[name] = list(each.values())
    if not chosen and not cached:
        return
    names = [*chosen, *dict.fromkeys(key for key, _ in cached)]
    print(f"compiling: {', '.join(names)} ...", flush=True)
    tuned = [name for name, some in chosen.items() if IMPLEMENTATIONS[some[0][0]].package == "fla"]
    # FLA has hundreds of configurations a variant: a share for each core
    cores = os.cpu_count() or 1
    shares = max(1, cores // max(1, len(tuned)))
    started = [start(name, chosen[name], (i, shares), prepare=True) for name in tuned for i in range(shares)]
    started += [start(name, some, prepare=True) for name, some in chosen.items() if name not in tuned]
    programs = [*cached]
    started += [
        start(f"cached {i}", programs[i::cores], prepare=True) for i in range(min(cores, len(programs)))
    ]
    print(f"  {runner.wait_for(started, seconds)}", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny shapes, for a smoke test; times mean nothing")
    add("--only", type=re.compile, help="regular expression of 'op form shape pass decay implementation'")
    add("--no-peers", action="store_true", help="only this library")
    add("--budget", type=float, help="seconds for everything; what does not fit is recorded as skipped")
    add("--timeout", type=float, default=240, help="seconds for each process; default 240")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)

    def is_ours(job: Job) -> bool:
        return IMPLEMENTATIONS[job[0]].group == "fla_jax"

    def is_wanted(job: Job) -> bool:
        text = f"{job[1].label} {job[0]} {IMPLEMENTATIONS[job[0]].name}"
        chosen = options.only is None or options.only.search(text)
        return bool(chosen and (is_ours(job) or not options.no_peers))

    jobs, again = (list(filter(is_wanted, some)) for some in plan(options.quick))
    run, groups = Run(options.out, options.budget), dict[str, list[Job]]()
    for job in jobs:
        package = IMPLEMENTATIONS[job[0]].package
        if is_ours(job) or runner.is_importable(package):
            groups.setdefault(group(job), []).append(job)
        else:
            run.skip(job, f"package {package} is not installed")
    prepare(groups, min(180, run.seconds_left() / 3))
    reserve = 10 + 4 * len(again) if again else 0
    for name, some in groups.items():
        measure(run, name, some, min(options.timeout, run.seconds_left() - reserve - 5))
    measure(run, "fla_jax again", again, min(options.timeout, run.seconds_left() - 2), again=True)
    run.save()
    skipped = [f"{r['peer']} ({r['op']}): {r['skipped'][:200]}" for r in run.records if "skipped" in r]
    records.report(table(run.measured()) if run.measured() else "", skipped, run.path)


if __name__ == "__main__":
    main()
