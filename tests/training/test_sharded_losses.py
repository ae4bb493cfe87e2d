"""Losses and accumulated gradients on eight fake devices are those of one; sharded_losses_run.py computes."""

import functools

import pytest
from harness import processes


@functools.cache
def report():
    return processes.report("training/sharded_losses_run.py")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_over_the_batch(kind):
    error, spec = report()["batch"][kind]
    assert error < 1e-12 and spec[0] == "data"


@pytest.mark.parametrize("name", ["chunked_cross_entropy", "chunked_loss", "truncated_value_and_grad"])
def test_in_a_checked_shard_map(name):
    assert report()["shard_map"][name] < 1e-12


@pytest.mark.parametrize("mesh", ["auto", "explicit"])
def test_accumulated(mesh):
    assert report()["accumulated"][mesh] < 1e-12
