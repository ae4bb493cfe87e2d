"""States carried between batches: the losses of whole documents, on any mesh, also after a resumption."""

from __future__ import annotations

import grain
import jax
import numpy as np
import optax
import pytest
import small_models as small
from harness import processes, tiers

from fla_jax.data import pack_documents
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import TrainingCheckpoints, carried_loss, init_lora, merge_lora, zero_carry


def log_probabilities(model, params, document):
    """Of every token of a document that is read whole, in NumPy from the logits."""
    logits, state = model.apply({"params": params}, np.array([[0, *document[:-1]]]))
    logits = np.asarray(logits[0])
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logs[np.arange(len(document)), document], state


@pytest.mark.parametrize("version", tiers.first([7, 6]))
def test_carried_states_are_those_of_whole_documents(version):
    """float64: the loss of every document without ends of rows, and the state at the end of the last row."""
    lengths, rng = [37, 5, 64, 1, 8, 16], np.random.default_rng(0)
    with small.float64():
        model = small.model(version, dtype="float64", param_dtype="float64", implementation="xla")
        params, found = small.params(model), [np.array([*rng.integers(1, 24, n - 1), 0]) for n in lengths]
        whole = [log_probabilities(model, params, document) for document in found]
        loss_of = jax.jit(carried_loss(model, l2wrap=0.0))

        def total(carries):
            carry, sum_ = zero_carry(model, 2), 0.0
            for batch in pack_documents(grain.MapDataset.source(found), 8, 2, carry_state=True):
                loss, new = loss_of(params, {**batch, "carry": carry})
                sum_ += float(loss) * float(batch["mask"].sum())
                carry = new if carries else carry
            return sum_, new

        want = -sum(logs.sum() for logs, _ in whole)
        got, _ = total(carries=True)
        assert abs(got / want - 1) < 1e-13
        assert abs(total(carries=False)[0] / want - 1) > 1e-4
        carry, rows = zero_carry(model, 1), []
        # 64 tokens: the last row ends with the document
        for batch in pack_documents(grain.MapDataset.source([found[2]]), 8, 1, carry_state=True):
            loss, carry = loss_of(params, {**batch, "carry": carry})
            rows.append(-float(loss))
        np.testing.assert_allclose(rows, whole[2][0].reshape(8, 8).mean(1), rtol=1e-12)
        small.assert_close(jax.tree.map(lambda x: x.swapaxes(0, 1), carry), whole[2][1], 1e-13)


def test_labels_that_do_not_count_and_lora(make):
    """An ignored label is one outside the mask; LoRA's pairs equal merged weights, and drop inputs."""
    step, batches = make()
    model, batch = step.model, {**next(batches), "carry": zero_carry(step.model, 2)}
    params, ignored = small.params(model), int(batch["labels"][0, 2])
    counts = batch["mask"].astype(bool) & (batch["labels"] != ignored)
    assert 0 < counts.sum() < batch["mask"].sum()
    loss = carried_loss(model, l2wrap=0.0, ignore_index=ignored)
    want = carried_loss(model, l2wrap=0.0)(params, {**batch, "mask": counts})
    small.assert_close(loss(params, batch), want, 1e-6)
    assert float(loss.weight(batch)) == counts.sum()

    lora = init_lora(params, jax.random.key(1), rank=2, alpha=2, dropout=0.5)
    lora = jax.tree.map(lambda x: x + 0.1, lora)
    want = carried_loss(model)(merge_lora(params, lora), batch)
    small.assert_close(carried_loss(model)(params, batch, lora=lora), want, 1e-5)
    dropped, _ = carried_loss(model)(params, batch, lora=lora, key=jax.random.key(2))
    assert abs(float(dropped) - float(want[0])) > 1e-4


@pytest.mark.slow
def test_steps_on_any_mesh():
    """`TrainStep` on eight devices, with microbatches, against a loop over single sequences."""
    found = processes.report("data/carried_run.py")
    want = found.pop("plain loop")
    assert len(set(want)) == len(want) > 8 and found
    for got in found.values():
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.fixture(scope="module")
def make():
    """A new step, and a new iterator of batches."""
    model, mesh = small.model(7, num_layers=1), make_mesh(devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    source = grain.MapDataset.source([np.array([*rng.integers(1, 24, 40), 0]) for _ in range(6)])

    def make(carry_sequences=2, **options):
        step = TrainStep(model, optax.adam(0.01), mesh, carry_sequences=carry_sequences, **options)
        return step, iter(pack_documents(source.shuffle(seed=1), 8, 2, carry_state=True))

    return make


def test_a_resumed_run_is_the_same(make, tmp_path):
    """To the last bit, with a checkpoint in the middle of documents."""
    step, batches = make()
    state, straight = step.init(jax.random.key(0)), []
    for at in range(8):
        if at == 3:
            with TrainingCheckpoints(tmp_path) as checkpoints:
                checkpoints.save(at, state, batches.get_state())
        batch = next(batches)
        assert batch["continues"].any() or at != 3
        state, loss = step(state, step.shard(batch))
        straight.append(float(loss))
    step, batches = make()
    resumed, place = TrainingCheckpoints(tmp_path, read_only=True).restore(step.abstract_state())
    batches.set_state(place)
    for want in straight[3:]:
        resumed, loss = step(resumed, step.shard(next(batches)))
        assert float(loss) == want
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(resumed), jax.tree.leaves(state))
    assert any(x.any() for x in jax.tree.leaves(resumed.carry))


def test_refusals(make):
    step, batches = make()
    batch, state = next(batches), step.abstract_state()
    with pytest.raises(ValueError, match="batch must have carry_sequences = 2 sequences, got 1"):
        step.lower(state, jax.tree.map(lambda x: x[:1], batch))
    del batch["continues"]
    for wrong, got in ((batch, "a dict of labels, mask, segment_ids, tokens"), (batch["tokens"], "")):
        with pytest.raises(ValueError, match=f"batch must be a dict with continues, as .*; got {got}"):
            step.lower(state, wrong)
    for options, message in (
        ({"has_aux": True}, "has_aux must be False with carry_sequences"),
        ({"carry_sequences": 0}, "carry_sequences must be an integer >= 1, got 0"),
        ({"accumulate": 4}, "times accumulate = 4, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
