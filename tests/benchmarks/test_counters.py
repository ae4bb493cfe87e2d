"""Counters as ``ncu`` reports them, and one case without it."""

import dataclasses

import pytest

pytestmark = pytest.mark.one_python
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def report(counters):
    """What ``ncu --csv --page raw`` prints of one kernel of 1.5 ms, after the program's own lines."""
    fields = {"ID": ("", "0"), "Kernel Name": ("", "rwkv7_fwd_kernel")}
    fields |= {"gpu__time_duration.sum": ("ns", "1,500,000")}
    fields |= {metric: ("", "12.5") for metric in counters.COUNTERS.values()}
    fields |= {STALLED.format(name): ("", value) for name, value in (("selected", "1"), ("wait", "2"))}
    fields |= {STALLED.format("barrier"): ("", "5"), STALLED.format("barrier_not_issued"): ("", "9")}
    quoted = lambda words: ",".join(f'"{word}"' for word in words)
    lines = ["device: an example", "==PROF== Connected", quoted(fields)]
    return "\n".join(lines + [quoted(value[i] for value in fields.values()) for i in (0, 1)])


def test_a_report_is_read(module):
    counters = module("counters")
    (kernel,) = counters.kernels(report(counters))
    assert kernel["implementation"] == "rwkv7_fwd" and kernel["ms"] == 1.5 and kernel["issue"] == 12.5
    assert kernel["stalls"] == {"barrier": 0.625, "wait": 0.25}


def test_a_report_without_kernels_is_an_error(module):
    with pytest.raises(ValueError, match="no kernel: nothing"):
        module("counters").kernels("nothing")


def test_a_case_runs_without_ncu(module):
    counters = module("counters")
    task = next(iter(counters.cases().values()))
    small = dataclasses.replace(task, shape=(1, 32, 1, 16, 16))
    assert counters.run_case(small) == "cpu"
