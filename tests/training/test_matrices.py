"""What optimisers do with matrices: masks, Muon, the same updates whether layers are stacked or not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small
from harness import tiers

from fla_jax.models import stack_layers
from fla_jax.training import matrix_mask, muon_dimension_numbers, parameter_groups, rwkv_optimizer

PROJECTIONS = {
    6: {f"att/{name}" for name in ("receptance", "key", "value", "gate", "output")}
    | {f"ffn/{name}" for name in ("receptance", "key", "value")},
    7: {f"att/{name}" for name in ("receptance", "key", "value", "output")}
    | {f"ffn/{name}" for name in ("key", "value")},
}
OPTIMIZERS = {
    "optax's muon": optax.contrib.muon(0.1, muon_weight_dimension_numbers=muon_dimension_numbers),
    "muon": rwkv_optimizer(0.1, kind="muon", weight_decay=0.5),
    "adam": rwkv_optimizer(0.1, weight_decay=0.5),
}


def named(tree):
    is_leaf = lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {"/".join(key.key for key in path): value for path, value in found}


def gradients(like, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), like)


@pytest.mark.parametrize("version", small.VERSIONS)
@pytest.mark.parametrize("scan", [False, True])
def test_which_parameters_are_matrices(version, scan):
    model = small.model(version, scan_layers=scan)
    params = small.shapes(model, jnp.zeros((1, 2), jnp.int32))
    layers = ["blocks"] if scan else ["blocks_0", "blocks_1"]
    dense = {f"{layer}/{name}/kernel" for layer in layers for name in PROJECTIONS[version]}
    mask, axes = named(matrix_mask(params)), named(muon_dimension_numbers(params))
    assert set(mask) == set(axes) == set(named(params))
    matrices = dense | {"emb/embedding", "head/kernel"}
    assert {name for name, is_matrix in mask.items() if is_matrix} == matrices
    assert {name: tuple(x) for name, x in axes.items() if x is not None} == dict.fromkeys(dense, (-2, -1))
    groups, base = named(parameter_groups(params)), "w0" if version == 7 else "time_decay"
    assert {name for name, group in groups.items() if group == "decay_base"} == {
        f"{layer}/att/{base}" for layer in layers
    }
    assert {name for name, group in groups.items() if group == "matrix"} == matrices


@pytest.mark.parametrize("version, kind", tiers.first([(7, kind) for kind in OPTIMIZERS] + [(6, "muon")]))
def test_stacked_layers_get_the_same_updates(version, kind):
    plain = small.params(small.model(version))
    optimizer = OPTIMIZERS[kind]
    states = {False: optimizer.init(plain), True: optimizer.init(stack_layers(plain))}
    update = jax.jit(optimizer.update)
    for seed in range(2):
        grads = gradients(plain, seed)
        got, states[True] = update(stack_layers(grads), states[True], stack_layers(plain))
        want, states[False] = update(grads, states[False], plain)
        for name, x in named(stack_layers(want)).items():
            assert small.error(named(got)[name], x) < 1e-5 and np.any(x), name


def orthogonalised(matrix):
    """Muon's five steps of Newton-Schulz (Keller Jordan's coefficients) on singular values, scaled to 0.2."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values /= np.sqrt(np.sum(values**2))
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    found = left * values @ right
    return found * 0.2 / np.sqrt(np.mean(found**2))


def test_first_step_of_muon():
    """Each matrix of a dense projection is orthogonalised, and everything else gets Adam's step."""
    params = stack_layers(small.params(small.model(7)))
    grads, optimizer = gradients(params, 0), rwkv_optimizer(0.1, kind="muon", weight_decay=0.0)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    dense = {f"blocks/{name}/kernel" for name in PROJECTIONS[7]}
    for name, update in named(updates).items():
        grad = np.asarray(named(grads)[name], np.float64)
        if name in dense:
            want = -0.1 * np.stack([orthogonalised(layer) for layer in grad])
        else:
            want = np.sign(grad) * (-0.2 if name.endswith("w0") else -0.1)
        np.testing.assert_allclose(update, want, rtol=1e-4, atol=1e-6, err_msg=name)


def test_muon_of_zeros_and_refusal():
    params = {"key": {"kernel": jnp.ones((4, 4))}}
    optimizer = rwkv_optimizer(0.1, kind="muon", weight_decay=0.0)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert not np.any(updates["key"]["kernel"])
    with pytest.raises(ValueError, match="kind must be 'adam' or 'muon', got 'sgd'"):
        rwkv_optimizer(0.1, kind="sgd")
