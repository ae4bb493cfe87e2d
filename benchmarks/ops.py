"""Times this library's ops beside every peer that can be imported, in one run on one GPU:
``python benchmarks/ops.py``.

Prints a table and writes ``benchmarks/results/<device>.json`` (`records`), after every measurement, so that a
run that is cut short keeps what it has. `chart.py` draws it. Every implementation runs in a process of its
own, one after another: for each op ours, then its peers, FLA's RWKV-7 last (it tunes itself for minutes), and
the main shapes of ours once more at the end: where the two differ by more than 3 %, the record has both
(``ms``, ``ms_end``) and the ratio is of the slower. What compiles with nvcc or has hundreds of Triton
configurations to try does so before anything is timed, all at once. Peers are imported from where Python
finds them (PYTHONPATH).

Decays: "bounded" is w = -exp(-0.5) * sigmoid(x) under the promise ``lower_bound=-0.61``; "any-weak" the same
decays without it; "any-strong" w = -exp(2 x). The peer of a record of ours is the fastest one of the same op,
form, shape, pass and decays (the first two kinds have the same), ``ratio`` our time over its.

``roofline_ms``: the bytes that must move at the rate of a device copy, each array once a pass: forward, the
tokens' arrays read, o written, a state read and one written; backward, the tokens' arrays and do read, their
gradients written, both states read again and one written. RWKV-7 has 6 token arrays, RWKV-6 4.

    python benchmarks/ops.py --quick --no-peers                   # seconds, on a CPU too
    python benchmarks/ops.py --only 'rwkv7 chunk' --budget 580    # records of several runs of a commit come
                                                                  # together in the file
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re

import records
from recurrences.peers import IMPLEMENTATIONS
from recurrences.plan import Job, group, plan
from recurrences.report import Run, table
from running import processes, results
from running.processes import Process, importable


def start(
    name: str,
    jobs: list[Job],
    prepare: bool = False,
    shares: tuple[int, int] | None = None,
    checked: bool = True,
) -> Process:
    """A process of recurrences/child.py with its jobs."""
    listed = [{"implementation": key, "task": dataclasses.asdict(task)} for key, task in jobs]
    # extensions of one name and several head sizes must not share a folder; what FLA's tuning finds while
    # others run must not be kept
    extensions = processes.scratch() / "extensions" / re.sub(r"\W", "_", name)
    return Process(
        processes.BENCHMARKS / "recurrences" / "child.py",
        f"{name} prepare {shares or ''}" if prepare else name,
        listed,
        {"prepare": prepare, "shares": shares, "checked": checked},
        paths=(records.ROOT, records.ROOT / "tests"),
        variables={
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "FLA_CACHE_RESULTS": "0",
        },
    )


def measure(run: Run, name: str, jobs: list[Job], seconds: float, again: bool = False) -> None:
    """Runs a process's jobs and records what comes."""
    for job, line in processes.results(functools.partial(start, name, checked=not again), jobs, seconds):
        if "record" in line:
            run.add(job, line["record"], again)
        elif not again:
            run.skip(job, line["error"])


def prepare(jobs: dict[str, list[Job]], seconds: float) -> None:
    """Lets all that compile or tune for long do so, at the same time and before anything is timed."""
    chosen: dict[str, list[Job]] = {}
    for name, group_jobs in jobs.items():
        seen = {}
        for key, task in group_jobs:
            if IMPLEMENTATIONS[key].prepare:
                # kernels are compiled for one number and size of heads
                seen.setdefault((key, task.form != "chunk", task.shape[2:]), (key, task))
        if seen:
            chosen[name] = list(seen.values())
    if not chosen:
        return
    print(f"compiling: {', '.join(chosen)} ...", flush=True)
    tuned = [name for name, some in chosen.items() if IMPLEMENTATIONS[some[0][0]].package == "fla"]
    # hundreds of configurations a variant, a core each
    shares = max(1, (os.cpu_count() or 1) // max(1, len(tuned)))
    started = [start(name, chosen[name], True, (i, shares)) for name in tuned for i in range(shares)]
    started += [start(name, some, True) for name, some in chosen.items() if name not in tuned]
    print(f"  {processes.all_done(started, seconds)}", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, for a smoke test; times mean nothing"
    )
    parser.add_argument(
        "--only",
        type=re.compile,
        help="regular expression: of 'op form shape pass decay implementation', what to measure",
    )
    parser.add_argument("--no-peers", action="store_true", help="only this library")
    results.add_option(parser)
    parser.add_argument(
        "--budget", type=float, help="seconds for everything; what does not fit is recorded as skipped"
    )
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each process; default 240")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for."""
    options = parse(arguments)

    def mine(job: Job) -> bool:
        return IMPLEMENTATIONS[job[0]].group == "fla_jax"

    def wanted(job: Job) -> bool:
        text = f"{job[1].label} {job[0]} {IMPLEMENTATIONS[job[0]].name}"
        asked = options.only is None or options.only.search(text)
        return bool(asked and (mine(job) or not options.no_peers))

    everything, again = ([job for job in part if wanted(job)] for part in plan(options.quick))
    run, groups = Run(options.out, options.budget), dict[str, list[Job]]()
    for job in everything:
        if importable(IMPLEMENTATIONS[job[0]].package) or mine(job):
            groups.setdefault(group(job), []).append(job)
        else:
            run.skip(job, f"package {IMPLEMENTATIONS[job[0]].package} is not installed")
    prepare(groups, min(180, run.left() / 3))
    reserve = 10 + 4 * len(again) if again else 0
    for name, jobs in groups.items():
        measure(run, name, jobs, min(options.timeout, run.left() - reserve - 5))
    measure(run, "fla_jax again", again, min(options.timeout, run.left() - 2), again=True)
    rows = [r for r in run.records if "skipped" not in r]
    run.save()
    print("\n" + table(rows) if rows else "nothing was measured")
    for r in run.records:
        if "skipped" in r:
            print(f"skipped: {r['peer']} ({r['op']}): {r['skipped'][:200]}")
    print(f"results: {run.path}")


if __name__ == "__main__":
    main()
