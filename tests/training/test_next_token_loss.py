"""`next_token_loss` of every form of batch, against each document read alone and NumPy's cross-entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small

from fla_jax.data import BinIdxWriter, PackedRows, batches, open_binidx
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import next_token_loss


@pytest.fixture(scope="module")
def model():
    return small.model(7, num_layers=1)


@pytest.fixture(scope="module")
def params(model):
    return small.params(model)


def token_losses(model, params, tokens, labels):
    """Of tokens [B, T], in float64 from the logits on."""
    logits = np.asarray(jax.jit(model.apply)({"params": params}, tokens)[0], np.float64)
    lse = np.log(np.sum(np.exp(logits), -1))
    return lse - np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]


def test_tokens_and_masks(model, params):
    tokens = small.tokens(2, 9)
    each = token_losses(model, params, tokens[:, :-1], tokens[:, 1:])
    mask = np.random.default_rng(0).uniform(size=(2, 8)).astype(np.float32)
    loss = jax.jit(next_token_loss(model, block_tokens=4))
    np.testing.assert_allclose(loss(params, tokens), each.mean(), rtol=1e-5)
    want = np.sum(each * mask) / mask.sum()
    np.testing.assert_allclose(loss(params, (tokens, mask)), want, rtol=1e-5)
    np.testing.assert_allclose(loss(params, [tokens, mask]), want, rtol=1e-5)
    as_dict = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    np.testing.assert_allclose(loss(params, as_dict), each.mean(), rtol=1e-5)
    np.testing.assert_allclose(loss(params, {**as_dict, "mask": mask}), want, rtol=1e-5)


def test_batches_of_packed_documents(model, params, tmp_path):
    """`TrainStep` takes them as they are, and its loss is that of the documents read one by one."""
    with BinIdxWriter(tmp_path / "d") as writer:
        for first in (3, 7, 11):
            writer.add([first, first + 1, first + 2, 0])
    rows = PackedRows(open_binidx(tmp_path / "d"), 11, vocab_size=24)
    batch = next(iter(batches(rows, range(1), jax.device_count())))
    documents = [[3, 4, 5, 0], [0, 7, 8, 9, 0], [0, 11, 12, 13, 0]]  # as they are read
    each = [token_losses(model, params, jnp.array([x[:-1]]), jnp.array([x[1:]])) for x in documents]
    want = np.concatenate(each, 1).mean()
    np.testing.assert_allclose(jax.jit(next_token_loss(model))(params, batch), want, rtol=1e-5)
    step = TrainStep(model, optax.sgd(1.0), make_mesh())
    state, loss = step(step.start(params), step.shard(batch))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert int(state.step) == 1


@pytest.mark.slow
def test_l2wrap_is_passed_on(model, params):
    tokens = small.tokens(1, 5)
    plain, wrapped = (jax.jit(jax.grad(next_token_loss(model, l2wrap=x)))(params, tokens) for x in (0, 1))
    assert small.error(plain["head"]["kernel"], wrapped["head"]["kernel"]) > 0.01


@pytest.mark.slow
def test_ignored_labels_weigh_nothing(model, params):
    """As loss of `TrainStep` it weighs microbatches of unequal numbers of labels."""
    tokens = small.tokens(2, 9)
    labels = tokens[:, 1:].at[0, 2:].set(-100)
    losses = token_losses(model, params, tokens[:, :-1], tokens[:, 1:])
    want = losses[np.asarray(labels) != -100].mean()
    loss, batch = next_token_loss(model, ignore_index=-100), {"tokens": tokens[:, :-1], "labels": labels}
    assert loss.weight(batch) == 10
    step = TrainStep(model, optax.sgd(1.0), make_mesh(devices=jax.devices()[:1]), loss, accumulate=2)
    np.testing.assert_allclose(step(step.start(params), batch)[1], want, rtol=1e-5)


def test_refusals(model, params):
    with pytest.raises(TypeError, match="blok_tokens"):
        next_token_loss(model, blok_tokens=3)
    loss, tokens = next_token_loss(model), small.tokens(2, 9)
    for batch, kind, message in (
        ((tokens, tokens, tokens), ValueError, "pair of tokens and a mask, got 3 arrays"),
        ({"tokens": tokens}, ValueError, "got one of tokens$"),
        ({"tokens": tokens, "labels": tokens, "ids": tokens}, ValueError, "got one of tokens, labels, ids"),
        (tokens[0], TypeError, r"tokens \[B, T \+ 1\], a pair of them and a mask, or a dict"),
        ("text", TypeError, "got str"),
    ):
        with pytest.raises(kind, match=message):
            loss(params, batch)
