"""Processes of benchmarks, and the command for CPUs."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

CHILD = """
import os, time
from running.processes import serve

def run(job):
    if job["do"] == "crash":
        os._exit(3)
    if job["do"] == "wait":
        time.sleep(60)
    if job["do"] == "raise":
        raise ValueError("wrong")
    return job["do"]

serve(lambda settings: run)
"""


def test_after_a_crash_another_process_does_the_rest(module, tmp_path):
    processes, started = module("running.processes"), []
    (tmp_path / "child.py").write_text(CHILD)

    def start(jobs):
        started.append([job["do"] for job in jobs])
        return processes.Process(tmp_path / "child.py", "test", jobs)

    jobs = [{"do": what} for what in ("a", "raise", "crash", "b", "wait", "c")]
    lines = [line for _, line in processes.results(start, jobs, 4)]
    assert [len(jobs) for jobs in started] == [6, 3]
    said = [line.get("record") or line["error"] for line in lines]
    assert said[:2] == ["a", "ValueError: wrong"] and said[3] == "b"
    assert "the process ended with status 3" in said[2]
    assert "no result within" in said[4] and "no result within" in said[5]  # c came behind what took too long


def test_those_that_are_late_are_ended_and_named(module, tmp_path):
    processes = module("running.processes")
    (tmp_path / "child.py").write_text(CHILD)
    jobs = {"quick": "a", "wrong": "raise", "late": "wait"}
    started = [processes.Process(tmp_path / "child.py", name, [{"do": jobs[name]}]) for name in jobs]
    said = processes.all_done(started, 4)
    assert said.endswith(" s, 1 of 3 processes not done, late, ValueError: wrong")
    assert all(process.done() for process in started)


def test_no_interpreter_is_an_error_of_each_job(module, tmp_path):
    processes = module("running.processes")

    def start(jobs):
        return processes.Process(tmp_path / "child.py", "test", jobs, python="no/python")

    [(_, one), (_, two)] = processes.results(start, [{}, {}], 5)
    assert "FileNotFoundError" in one["error"] and "FileNotFoundError" in two["error"]


def test_cpu_records_and_checks(command, module, monkeypatch, tmp_path):
    path = tmp_path / "cpu.json"
    assert "compiles in" in command("cpu.py", "--quick", "--out", path)
    found = json.loads(path.read_text())
    assert len(found) == 5 and all(r["ms"] > 0 and r["commit"] for r in found)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which it sets
    cpu = module("cpu")
    monkeypatch.setattr(cpu, "measure", lambda size: ([], ["too slow"]))
    assert cpu.main(["--check"]) == 1 and cpu.main([]) == 0
    monkeypatch.setattr(cpu, "measure", lambda size: ([], []))
    assert cpu.main(["--check"]) == 0
