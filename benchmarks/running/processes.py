"""Processes of benchmarks: a script with a list of jobs and a time limit, whose lines are read as they come.

The script is given two files: what it is to do, ``{"jobs": [...], ...}``, and where it says what it begins
and what came of it, a JSON line each. `serve` is the script's half. Nothing here needs more than the standard
library: a peer's interpreter may be another environment's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
Job = dict[str, Any]
Line = dict[str, Any]
LOST = ("CUDA error", "CUDA_ERROR", "illegal")  # the device is lost to a process that says this


def importable(package: str) -> bool:
    """Whether a package is there."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def scratch() -> Path:
    """Where processes of this user have their files: specifications, lines, logs, extensions."""
    folder = Path(tempfile.gettempdir()) / f"fla_jax-benchmark-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


class Process:
    """One process, started at once.

    Args:
        script: what runs, a file that calls `serve`.
        name: of its files.
        jobs: given to it in this order; a job's number is its place.
        settings: given to it beside the jobs.
        paths: in front of PYTHONPATH, after the folder of benchmarks.
        variables: of its environment.
        python: the interpreter.

    Raises:
        OSError: there is no such interpreter.
    """

    def __init__(
        self,
        script: Path,
        name: str,
        jobs: Sequence[Job],
        settings: Mapping[str, Any] | None = None,
        *,
        paths: Iterable[Path] = (),
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ):
        self.name, self.began = name, time.monotonic()
        stem = scratch() / re.sub(r"\W+", "_", f"{name} {os.getpid()}")
        self.lines, self.log, spec = (stem.with_suffix(end) for end in (".jsonl", ".log", ".json"))
        self.lines.write_text("")
        spec.write_text(json.dumps({**(settings or {}), "jobs": list(jobs)}))
        given = filter(None, [os.environ.get("PYTHONPATH")])
        environment = {**os.environ, **(variables or {})}
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, (BENCHMARKS, *paths)), *given])
        self.read, self.killed = 0, False
        with open(self.log, "w") as log:
            command = [python, str(script), str(spec), str(self.lines)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def news(self) -> list[Line]:
        """Complete lines that were not read yet."""
        text = self.lines.read_text()
        new, self.read = text[self.read : text.rfind("\n") + 1], text.rfind("\n") + 1
        return [json.loads(line) for line in new.splitlines()]

    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def end(self) -> str:
        """Ends it if need be and says how it ended."""
        if not self.done():
            self.killed = True
            self.process.kill()
            self.process.wait()
        if self.killed:
            return f"no result within {time.monotonic() - self.began:.0f} s"
        tail = self.log.read_text(errors="replace").strip()[-1000:]
        return f"the process ended with status {self.process.returncode}: {tail}"

    @property
    def crashed(self) -> bool:
        """Whether it ended by itself, and not well (-9: the system ended it, for its memory)."""
        return not self.killed and self.process.returncode not in (0, -9)


def results(
    start: Callable[[list[Job]], Process], jobs: Iterable[Job], seconds: float
) -> Iterator[tuple[Job, Line]]:
    """What came of each job, as it comes: a line with ``record``, or with ``error``, which says why not.

    After a crash, what comes after the job that crashed runs in another process.
    """
    jobs, limit = list(jobs), time.monotonic() + seconds
    while jobs:
        if limit - time.monotonic() < 1:
            yield from ((job, {"error": "no time was left"}) for job in jobs)
            return
        try:
            process = start(jobs)
        except OSError as error:
            yield from ((job, {"error": f"{type(error).__name__}: {error}"}) for job in jobs)
            return
        left, current = dict(enumerate(jobs)), 0
        try:
            over = False
            while not over:
                over = process.done() or time.monotonic() > limit
                for line in process.news():
                    current = line.get("began", current)
                    if "id" in line:
                        yield left.pop(line["id"]), line
                time.sleep(0 if over else 0.2)
        finally:
            why = process.end()
        yield from ((job, {"error": why}) for i, job in left.items() if i <= current or not process.crashed)
        jobs = [job for i, job in left.items() if i > current] if process.crashed else []


def all_done(processes: Sequence[Process], seconds: float) -> str:
    """Waits for all processes, ``seconds`` at most, and ends those that are late; says how long it took,
    which were late, and what went wrong.
    """
    began = time.monotonic()
    while time.monotonic() < began + seconds and not all(process.done() for process in processes):
        time.sleep(0.2)
    late = [process for process in processes if not process.done()]
    for process in late:
        process.end()
    wrong = {line["error"][:300] for process in processes for line in process.news() if "error" in line}
    names = sorted({process.name for process in late})
    took = f"{time.monotonic() - began:.0f} s, {len(late)} of {len(processes)} processes not done"
    return ", ".join([took, *names, *wrong])


def serve(make: Callable[[dict[str, Any]], Callable[[Job], Any]]) -> None:
    """The script's half: ``make(settings)`` gives what does a job and returns its record.

    Whatever is raised is recorded, and the next job begun. A process that has lost the device ends: another
    one does the rest.
    """
    spec_file, lines_file = sys.argv[1:]
    spec = json.loads(Path(spec_file).read_text())
    jobs, run = spec.pop("jobs"), None
    with open(lines_file, "a") as out:

        def say(line: Line) -> None:
            print(json.dumps(line), file=out, flush=True)

        for i, job in enumerate(jobs):
            say({"began": i})
            began = time.perf_counter()
            try:
                run = run or make(spec)
                record = run(job)
            except Exception as error:
                traceback.print_exc()
                say({"id": i, "error": f"{type(error).__name__}: {error}"[:1000]})
                if any(word in str(error) for word in LOST):
                    sys.exit(1)
            else:
                say({"id": i, "record": record, "took_s": round(time.perf_counter() - began, 1)})
