"""The ways to train that carried_states.py compares."""

import itertools

import numpy as np
import pytest


def test_ways_have_the_same_rows(module):
    """``shuffled`` has each row once, in another order; ``from_zeros`` changes nothing but ``continues``."""
    states = module("carried_states")
    training, held_out = states.sources()
    make = lambda: iter(states.pack_documents(training, 8, 4, carry_state=True))
    batches = list(itertools.islice(make(), 10))
    mixed = list(states.shuffled(make(), 10, seed=0))
    rows = lambda found: [tuple(row) for batch in found for row in batch["tokens"]]
    assert sorted(rows(mixed)) == sorted(rows(batches)) and rows(mixed) != rows(batches)
    assert any(batch["continues"].any() for batch in batches)
    for zeros, batch in zip(states.from_zeros(iter(batches)), batches, strict=True):
        assert not zeros["continues"].any()
        np.testing.assert_equal(zeros | {"continues": 0}, batch | {"continues": 0})
    assert max(map(len, held_out)) == 4096 and all(document[-1] == 0 for document in list(held_out)[:-3])


@pytest.mark.slow
def test_command(command):
    sizes = ("--length", 256, "--steps", 30, "--hidden-size", 64, "--seeds", 0)
    lines = command("carried_states.py", *sizes).splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["carried", "zeros", "shuffled"]
    assert all(0 < float(x) < 5.6 for line in lines[2:] for x in line.split()[5:8:2])
