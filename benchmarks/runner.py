"""Child processes of benchmarks: jobs with a time limit, whose results are read as they come.

A child runs this file with ``MODULE:FUNCTION``, a file of jobs and one for results, a JSON line each.
``FUNCTION(settings)`` returns a function of one job. Only the standard library is needed.
"""

from __future__ import annotations

import importlib
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

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
Job = dict[str, Any]
Line = dict[str, Any]
LOST = ("CUDA error", "CUDA_ERROR", "illegal")  # messages after which a process can no longer use the device


def is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def check_torch_device() -> None:
    """Raises a RuntimeError if torch has no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")


def scratch() -> Path:
    """The folder of this user's processes: specifications, results, logs, compiled extensions."""
    folder = Path(tempfile.gettempdir()) / f"fla_jax-benchmark-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


class Process:
    """A child process, started at once.

    Args:
        work: ``MODULE:FUNCTION``.
        name: of its files.
        jobs: passed to it in this order.
        settings: passed to ``FUNCTION``.
        paths: prepended to PYTHONPATH, after the folder of benchmarks.
        variables: of its environment.
        python: the interpreter.

    Raises:
        OSError: the interpreter does not exist.
    """

    def __init__(
        self,
        work: str,
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
        folders = [*map(str, (BENCHMARKS, *paths)), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join(folders)}
        self.num_read, self.killed = 0, False
        with open(self.log, "w") as log:
            command = [python, __file__, work, str(spec), str(self.lines)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def new_lines(self) -> list[Line]:
        """Complete result lines that were not read yet."""
        text = self.lines.read_text()
        new, self.num_read = text[self.num_read : text.rfind("\n") + 1], text.rfind("\n") + 1
        return [json.loads(line) for line in new.splitlines()]

    def is_done(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> str:
        """Kills it if it still runs; returns how it ended."""
        if not self.is_done():
            self.killed = True
            self.process.kill()
            self.process.wait()
        if self.killed:
            return f"no result within {time.monotonic() - self.began:.0f} s"
        tail = self.log.read_text(errors="replace").strip()[-1000:]
        return f"the process ended with status {self.process.returncode}: {tail}"

    @property
    def has_crashed(self) -> bool:
        """Whether it failed without being killed (-9: by the system, for its memory)."""
        return not self.killed and self.process.returncode not in (0, -9)


def results(
    start: Callable[[list[Job]], Process], jobs: Iterable[Job], seconds: float
) -> Iterator[tuple[Job, Line]]:
    """Each job with its line, ``record`` or ``error``; after a crash another process runs the rest."""
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
        left, current, over = dict(enumerate(jobs)), 0, False
        try:
            while not over:
                over = process.is_done() or time.monotonic() > limit
                for line in process.new_lines():
                    current = line.get("began", current)
                    if "id" in line:
                        yield left.pop(line["id"]), line
                time.sleep(0 if over else 0.2)
        finally:
            why = process.end()
        crashed = process.has_crashed
        yield from ((job, {"error": why}) for i, job in left.items() if i <= current or not crashed)
        jobs = [job for i, job in left.items() if i > current] if crashed else []


def wait_for(processes: Sequence[Process], seconds: float) -> str:
    """Waits at most ``seconds`` for processes and kills the others; returns a line about time and errors."""
    began = time.monotonic()
    while time.monotonic() < began + seconds and not all(process.is_done() for process in processes):
        time.sleep(0.2)
    late = [process for process in processes if not process.is_done()]
    for process in late:
        process.end()
    errors = {line["error"][:300] for process in processes for line in process.new_lines() if "error" in line}
    took = f"{time.monotonic() - began:.0f} s, {len(late)} of {len(processes)} processes not done"
    return ", ".join([took, *sorted({process.name for process in late}), *errors])


def serve(work: str, spec_file: str, lines_file: str) -> None:
    """The child: runs each job and records errors; exits if the device is lost."""
    spec = json.loads(Path(spec_file).read_text())
    jobs, run = spec.pop("jobs"), None
    with open(lines_file, "a") as out:

        def say(line: Line) -> None:
            print(json.dumps(line), file=out, flush=True)

        for i, job in enumerate(jobs):
            say({"began": i})
            began = time.perf_counter()
            try:
                if run is None:
                    module, _, function = work.partition(":")
                    run = getattr(importlib.import_module(module), function)(spec)
                record = run(job)
            except Exception as error:
                traceback.print_exc()
                say({"id": i, "error": f"{type(error).__name__}: {error}"[:1000]})
                if any(word in str(error) for word in LOST):
                    sys.exit(1)
            else:
                say({"id": i, "record": record, "took_s": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    serve(*sys.argv[1:])
