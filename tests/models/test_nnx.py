"""Models and layers through Flax's bridge to nnx: the same numbers, the same training step, and back."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
import small_models as small
from flax import nnx
from harness import processes

from fla_jax.training import cross_entropy, rwkv_optimizer

pytestmark = pytest.mark.slow


def loss_of(model, tokens, state):
    """What is differentiated, of anything that is called like a model; also the logits and the state."""
    logits, state = model(tokens[:, :-1], state)
    return cross_entropy(logits, tokens[:, 1:]), (logits, state)


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_bridge():
    module = small.model(7, num_layers=1, implementation="reference")
    tokens, params = small.tokens(2, 6), small.params(module)
    state = small.random_state(module, 2)
    model = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0))
    nnx.jit(lambda model, tokens: model.lazy_init(tokens))(model, tokens[:, :2])
    nnx.update(model, nnx.State(jax.tree.map(nnx.Param, params)))

    def linen(params, tokens, state):
        return loss_of(lambda *args: module.apply({"params": params}, *args), tokens, state)

    (loss, made), grads = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))(model, tokens, state)
    (want, want_made), want_grads = jax.jit(jax.value_and_grad(linen, has_aux=True))(params, tokens, state)
    close((loss, made), (want, want_made))
    close(nnx.to_pure_dict(grads), want_grads)

    # the recipe's groups are found; a large epsilon, since Adam's first step would blow rounding up
    tx = rwkv_optimizer(0.1, eps=1.0)
    nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, grads)
    updates, _ = tx.update(want_grads, tx.init(params), params)
    stepped = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert jax.tree.structure(stepped) == jax.tree.structure(params)
    close(stepped, optax.apply_updates(params, updates))


@pytest.mark.one_python
def test_layers_in_a_model_of_the_page_on_a_mesh():
    """Parameters are made where MaxText's rules put them; three steps have the losses of one device."""
    found = processes.report("models/nnx_run.py")
    assert found["specs"] == {"key": ("fsdp", "tensor"), "w1": ("fsdp", None), "r_k": ("tensor", None)}
    np.testing.assert_allclose(found["mesh"], found["one device"], rtol=2e-5)
    assert found["mesh"][0] > found["mesh"][1] > found["mesh"][2]
