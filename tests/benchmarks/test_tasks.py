"""The synthetic tasks: their data by plain Python, and a model that learns a little of it."""

import itertools
import json

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.one_python
BATCH, LENGTH, PAIRS, VOCABULARY = 8, 40, 6, 32


def test_recall(module):
    drawn = module("tasks").recall(jax.random.key(0), BATCH, LENGTH, PAIRS, VOCABULARY)
    tokens, labels, mask = (np.asarray(drawn[name]) for name in ("tokens", "labels", "mask"))
    for row in range(BATCH):
        value_of = dict(tokens[row, : 2 * PAIRS].reshape(PAIRS, 2).tolist())
        queries = np.flatnonzero(mask[row])
        assert sorted(tokens[row, queries].tolist()) == sorted(value_of) and len(value_of) == PAIRS
        assert queries.min() >= 2 * PAIRS
        assert [value_of[key] for key in tokens[row, queries].tolist()] == labels[row, queries].tolist()
        assert min(value_of) > 0 and max(value_of) < VOCABULARY // 2 <= min(value_of.values())
        assert not tokens[row, 2 * PAIRS :][~mask[row, 2 * PAIRS :]].any()  # a key comes back once
    assert len({tuple(row) for row in mask.tolist()}) > 1  # queries differ between sequences


@pytest.mark.parametrize(("group", "size"), [("S5", 120), ("A5", 60)])
def test_words(module, group, size):
    tasks = module("tasks")
    drawn = tasks.words(jax.random.key(0), 3, 12, group)
    every = itertools.permutations(range(5))
    elements = [p for p in every if group == "S5" or round(np.linalg.det(np.eye(5)[list(p)])) == 1]
    assert len(elements) == size
    assert not drawn["mask"][:, 0].any() and drawn["mask"][:, 1:].all()
    assert (drawn["tokens"][:, 0] == size).all() and drawn["tokens"].shape == (3, 13)
    for tokens, labels in zip(np.asarray(drawn["tokens"])[:, 1:], np.asarray(drawn["labels"])[:, 1:]):
        moved = list(range(5))
        for token, label in zip(tokens, labels):
            moved = [elements[token][i] for i in moved]
            assert elements[label] == tuple(moved)


def test_accuracy(module):
    """A model that always answers 1: one of two sequences is right in its only answer, one in one of two."""
    tasks = module("tasks")
    batch = {"tokens": np.zeros((2, 3), int), "labels": np.array([[1, 0, 0], [1, 0, 0]])}
    batch["mask"] = np.array([[True, False, False], [True, True, False]])
    apply = lambda variables, tokens: (jax.nn.one_hot(np.ones(tokens.shape, int), 2), None)
    count = lambda params, key: tasks._count(
        apply, lambda key: jax.tree.map(jax.numpy.asarray, batch), params, key
    )
    assert tasks.accuracy(count, {}, jax.random.key(0), rounds=2) == (2 / 3, 1 / 2)


def test_the_next_rate_is_tried_only_without_success(module, monkeypatch):
    tasks = module("tasks")
    setting = tasks.Setting("S5", "rwkv7", 32, 1, 4, learning_rates=(3.0, 2.0, 1.0))
    accuracies = {3.0: 0.5, 2.0: 0.995, 1.0: 1.0}
    monkeypatch.setattr(
        tasks, "train", lambda setting, rate, draw: {"accuracy": accuracies[rate], "steps": 1}
    )
    assert tasks.measure(setting)["learning_rate"] == 2.0
    accuracies.update({2.0: 0.6, 1.0: 0.1})
    assert tasks.measure(setting)["accuracy"] == 0.6


@pytest.mark.slow
def test_command(command, tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text("[]")
    assert "% right" in command("tasks.py", "--quick", "--only", "recall.* rwkv7", "--out", path)
    (record,) = json.loads(path.read_text())
    assert (
        record["accuracy"] > 0.9 and record["seconds"] > 0 and record["learning_rate"] == 1e-2
    )  # chance: 1/8
