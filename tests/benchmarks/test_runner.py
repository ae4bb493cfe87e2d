"""Child processes of benchmarks."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

CHILD = """
import os, time

def run(job):
    if job["do"] == "crash":
        os._exit(3)
    if job["do"] == "wait":
        time.sleep(60)
    if job["do"] == "raise":
        raise ValueError("wrong")
    return job["do"]

def make(settings):
    return run
"""


@pytest.fixture
def start(module, tmp_path):
    (tmp_path / "some_child.py").write_text(CHILD)
    runner = module("runner")
    return lambda jobs, name="test", **rest: runner.Process(
        "some_child:make", name, jobs, paths=(tmp_path,), **rest
    )


def test_after_a_crash_another_process_runs_the_rest(module, start):
    started = []

    def noted(jobs):
        started.append(len(jobs))
        return start(jobs)

    jobs = [{"do": what} for what in ("a", "raise", "crash", "b", "wait", "c")]
    said = [line.get("record") or line["error"] for _, line in module("runner").results(noted, jobs, 4)]
    assert started == [6, 3]
    assert said[:2] == ["a", "ValueError: wrong"] and said[3] == "b"
    assert "the process ended with status 3" in said[2]
    assert (
        "no result within" in said[4] and "no result within" in said[5]
    )  # c came after a job that took too long


def test_late_processes_are_killed_and_named(module, start):
    jobs = {"quick": "a", "wrong": "raise", "late": "wait"}
    started = [start([{"do": what}], name) for name, what in jobs.items()]
    said = module("runner").wait_for(started, 4)
    assert said.endswith(" s, 1 of 3 processes not done, late, ValueError: wrong")
    assert all(process.is_done() for process in started)


def test_a_missing_interpreter_is_an_error_of_each_job(module, start):
    lines = module("runner").results(lambda jobs: start(jobs, python="no/python"), [{}, {}], 5)
    assert ["FileNotFoundError" in line["error"] for _, line in lines] == [True, True]
