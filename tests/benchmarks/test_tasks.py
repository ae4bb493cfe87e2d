"""The synthetic tasks: their data by plain Python, and a model that learns a little of it."""

import itertools
import json

import chex
import jax
import numpy as np
import pytest

pytestmark = pytest.mark.one_python
BATCH, LENGTH, PAIRS, VOCABULARY = 8, 40, 6, 32


def test_recall(module):
    drawn = module("tasks").recall(jax.random.key(0), BATCH, LENGTH, PAIRS, VOCABULARY)
    tokens, positions, labels = (np.asarray(drawn[name]) for name in ("tokens", "positions", "labels"))
    for row in range(BATCH):
        value_of = dict(tokens[row, : 2 * PAIRS].reshape(PAIRS, 2).tolist())
        queries = positions[row]
        assert sorted(tokens[row, queries].tolist()) == sorted(value_of) and len(value_of) == PAIRS
        assert queries.min() >= 2 * PAIRS
        assert [value_of[key] for key in tokens[row, queries].tolist()] == labels[row].tolist()
        assert min(value_of) > 0 and max(value_of) < VOCABULARY // 2 <= min(value_of.values())
        assert np.count_nonzero(tokens[row, 2 * PAIRS :]) == PAIRS  # a key comes back once
    assert len({tuple(sorted(row)) for row in positions.tolist()}) > 1  # queries differ between sequences


@pytest.mark.parametrize(("group", "size"), [("S5", 120), ("A5", 60)])
def test_words(module, group, size):
    tasks = module("tasks")
    drawn = tasks.words(jax.random.key(0), 3, 12, group)
    every = itertools.permutations(range(5))
    elements = [p for p in every if group == "S5" or round(np.linalg.det(np.eye(5)[list(p)])) == 1]
    assert len(elements) == size
    assert (drawn["positions"] == 1 + np.arange(12)).all() and drawn["labels"].shape == (3, 12)
    assert (drawn["tokens"][:, 0] == size).all() and drawn["tokens"].shape == (3, 13)
    for tokens, labels in zip(np.asarray(drawn["tokens"])[:, 1:], np.asarray(drawn["labels"])):
        moved = list(range(5))
        for token, label in zip(tokens, labels):
            moved = [elements[token][i] for i in moved]
            assert elements[label] == tuple(moved)


def test_accuracy(module):
    """A model that always answers 1: one of two sequences is right in both answers, one in one of two."""
    tasks = module("tasks")
    labels = jax.numpy.array([[1, 1], [1, 0]])
    answer = lambda params, batch: jax.nn.one_hot(np.ones(batch["labels"].shape, int), 2)
    count = lambda params, key: tasks._count(answer, lambda key: {"labels": labels}, params, key)
    assert tasks.accuracy(count, {}, jax.random.key(0), rounds=2) == (3 / 4, 1 / 2)


def test_logits_are_those_of_the_positions(module):
    tasks = module("tasks")
    model = tasks.RWKV7ForCausalLM(tasks.RWKV7Config(vocab_size=9, hidden_size=32, num_layers=1, head_dim=16))
    params = tasks.initial_params(model, jax.random.key(0))
    tokens, positions = np.arange(8).reshape(2, 4), np.array([[3, 0], [1, 2]])
    every = model.apply({"params": params}, tokens)[0]
    found = tasks.logits(model, params, {"tokens": tokens, "positions": jax.numpy.asarray(positions)})
    np.testing.assert_allclose(found, np.stack([every[0, [3, 0]], every[1, [1, 2]]]), rtol=1e-6)


def test_the_next_rate_is_tried_only_without_success(module, monkeypatch):
    tasks = module("tasks")
    setting = tasks.Setting("S5", "rwkv7", 32, 1, 4, learning_rates=(3.0, 2.0, 1.0))
    accuracies = {3.0: 0.5, 2.0: 0.995, 1.0: 1.0}
    monkeypatch.setattr(tasks, "train", lambda setting, rate: {"accuracy": accuracies[rate], "steps": 1})
    assert tasks.measure(setting)["learning_rate"] == 2.0
    accuracies.update({2.0: 0.6, 1.0: 0.1})
    assert tasks.measure(setting)["accuracy"] == 0.6


def test_a_curriculum_draws_shorter_sequences_of_fewer_pairs(module):
    tasks = module("tasks")
    (setting,) = (one for one in tasks.settings(False) if one.name == "recall 2048 256 pairs rwkv7 64x2")
    drawn = [tasks.sampler(setting, divisor)(jax.random.key(0)) for divisor in setting.curriculum]
    # batches as Zoology has them for these lengths
    assert [one["tokens"].shape for one in drawn] == [(512, 64), (256, 256)]
    assert [one["labels"].shape for one in drawn] == [(512, 8), (256, 32)]


@pytest.mark.parametrize(("model", "base"), [("rwkv6", "time_decay"), ("rwkv7", "w0")])
def test_a_decay_shift_moves_the_base_of_the_decay_alone(module, model, base):
    tasks = module("tasks")
    kind, config = tasks.MODELS[model]
    made = kind(config(vocab_size=9, hidden_size=32, num_layers=2, head_dim=16))
    first = tasks.initial_params(made, jax.random.key(0))
    found = tasks.shifted_params(made, -6.0)

    def expected(path, x):
        return x - 6.0 if path[-1].key == base else x

    chex.assert_trees_all_close(found, jax.tree_util.tree_map_with_path(expected, first), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--curriculum", "--no-curriculum"])
def test_command(command, tmp_path, option):
    path = tmp_path / "cpu.json"
    path.write_text("[]")
    assert "% right" in command("tasks.py", "--quick", option, "--only", "recall.* rwkv7", "--out", path)
    (record,) = json.loads(path.read_text())
    assert bool(record["shape"]["curriculum"]) == (option == "--curriculum")
    assert (
        record["accuracy"] > 0.9 and record["seconds"] > 0 and record["learning_rate"] == 1e-2
    )  # chance: 1/8
