"""One model in many forms: prefill, steps, splits, packed documents, stacked and rematerialised layers."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small

from fla_jax.generation import generate
from fla_jax.models import causal_lm, initial_params, stack_layers, unstack_layers
from fla_jax.training import cross_entropy


@pytest.fixture(scope="module", params=small.VERSIONS)
def setup(request):
    model = small.model(request.param)
    return (
        request.param,
        model,
        small.params(model),
        jax.jit(model.apply),
    )


def test_any_split_is_the_whole(setup):
    _, model, params, apply = setup
    tokens, state = small.tokens(2, 9), small.random_state(model, 2)
    want = apply({"params": params}, tokens, state)
    for split in ((4, 4, 1), (1,) * 9):
        logits, s, start = [], state, 0
        for n in split:
            row, s = apply({"params": params}, tokens[:, start : start + n], s)
            logits.append(row)
            start += n
        small.assert_close((jnp.concatenate(logits, 1), s), want)


def test_no_state_is_zeros(setup):
    _, model, params, apply = setup
    tokens = small.tokens(2, 4)
    assert jax.tree.structure(model.init_state(2)) == jax.tree.structure(apply({"params": params}, tokens)[1])
    small.assert_close(
        apply({"params": params}, tokens), apply({"params": params}, tokens, model.init_state(2))
    )


@pytest.mark.parametrize("version", small.VERSIONS)
def test_a_state_keeps_its_dtypes(version):
    """Also where parameters are wider than what is computed with them: a loop over calls carries it."""
    with jax.enable_x64(True):
        model = small.model(version, num_layers=1, dtype="float32", param_dtype="float64")
        params = jax.tree.map(lambda x: x.astype(jnp.float64), small.params(model))
        state = model.init_state(2)
        for length in (1, 5):
            after = jax.eval_shape(model.apply, {"params": params}, small.tokens(2, length), state)[1]
            assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("version", [6, pytest.param(7, marks=pytest.mark.slow)])
def test_second_derivatives(version):
    """The Hessian of a loss times a vector, against differences of gradients in float64."""
    with jax.enable_x64(True):
        model = small.model(version, num_layers=1, dtype="float64", param_dtype="float64")
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), small.params(model))
        vector = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
        tokens = small.tokens(2, 9)

        def loss(params):
            return cross_entropy(model.apply({"params": params}, tokens[:, :-1])[0], tokens[:, 1:], l2wrap=0)

        gradient = jax.jit(jax.grad(loss))
        along = lambda params: optax.tree.vdot(jax.grad(loss)(params), vector)
        ahead, behind = (
            gradient(jax.tree.map(lambda x, d, h=h: x + h * d, params, vector)) for h in (1e-5, -1e-5)
        )
        want = jax.tree.map(lambda a, b: (a - b) / 2e-5, ahead, behind)
        small.assert_close(jax.jit(jax.grad(along))(params), want, 1e-5)
        forward_over_reverse = jax.jit(lambda params: jax.jvp(jax.grad(loss), (params,), (vector,))[1])
        small.assert_close(forward_over_reverse(params), want, 1e-5)


@pytest.mark.parametrize("version", small.VERSIONS)
def test_forward_over_reverse_in_bfloat16(version):
    """Products with a wider result have a rule of their own; lowered only."""
    model = small.model(version, num_layers=1, dtype="bfloat16")
    params = small.params(model)
    gradient = jax.grad(lambda params: jnp.sum(model.apply({"params": params}, small.tokens(1, 3))[0]))
    jax.jit(lambda params: jax.jvp(gradient, (params,), (params,))).lower(params)


def test_packed_documents(setup):
    """Documents give what each alone gives; only the first one continues the incoming state."""
    _, model, params, apply = setup
    tokens, state = small.tokens(2, 9), small.random_state(model, 2)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1, 1], [7, 7, 7, 3, 3, 3, 7, 7, 7]])
    logits, new = apply({"params": params}, tokens, state, ids)
    alone = lambda start, state=None: apply(
        {"params": params}, tokens[:, start : start + 3], model.init_state(2) if state is None else state
    )
    first, _ = alone(0, state)
    middle, between = alone(3)
    small.assert_close(logits[:, :3], first)
    small.assert_close(logits[:, 3:6], middle)
    for row, start in enumerate((between, None)):  # row 0 goes on, row 1 has a third document
        end, last = alone(6, start)
        small.assert_close(logits[row, 6:], end[row])
        small.assert_close(
            jax.tree.map(lambda x, row=row: x[:, row], new), jax.tree.map(lambda x, row=row: x[:, row], last)
        )
    # and it matters: without the ids everything after the first document differs
    plain, _ = apply({"params": params}, tokens, state)
    assert small.error(plain[:, 3], logits[:, 3]) > 1e-2


def value_and_grad(model, params, tokens):
    """Result and gradients, those of the initial state included."""

    def loss(params, state):
        logits, state = model.apply({"params": params}, tokens, state, jnp.array([[0] * 4 + [1] * 3] * 2))
        return jnp.sum(jnp.sin(logits)) + sum(jnp.sum(x**2) for x in jax.tree.leaves(state)), (logits, state)

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, results), grads = gradient(params, small.random_state(model, 2))
    return results, grads


@pytest.mark.parametrize("version", [7, pytest.param(6, marks=pytest.mark.one_python)])
def test_scan_and_remat(version):
    model, tokens = small.model(version, num_layers=2, implementation="reference"), small.tokens(2, 7)
    params = small.params(model)
    results, (dparams, dstate) = value_and_grad(model, params, tokens)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(dparams)), (
        "a parameter without gradient is not tested"
    )
    for scan, remat in ((False, True), (True, True), (True, "dense"), ("unroll", "dense")):
        other = small.model(version, num_layers=2, implementation="reference", scan_layers=scan, remat=remat)
        got, (dp, ds) = value_and_grad(other, stack_layers(params) if scan else params, tokens)
        small.assert_close(got, results)
        small.assert_close(ds, dstate)
        small.assert_close(unstack_layers(dp) if scan else dp, dparams)


@pytest.mark.parametrize("scan, remat", [(True, False), ("unroll", "dense")])
def test_intermediates(setup, scan, remat):
    """Those of stacked layers are stacked, and have the names of the others."""
    version, model, params, _ = setup

    def run(model, params):
        captured = model.apply({"params": params}, small.tokens(2, 3), capture_intermediates=True)[1]
        return captured["intermediates"]

    want = jax.jit(functools.partial(run, model))(params)
    got = jax.jit(functools.partial(run, small.model(version, scan_layers=scan, remat=remat)))(
        stack_layers(params)
    )
    assert jax.tree.leaves(got["blocks"])[0].shape[0] == 2 and {"att", "ffn"} <= got["blocks"].keys()
    got = unstack_layers(got)
    # the product that layer 0 of RWKV-7 has only where layers are stacked, and what it takes no notice of
    assert jax.tree.structure(got) == jax.tree.structure(want)
    small.assert_close(got, want)


@pytest.mark.parametrize("scan", [False, True, "unroll"])
def test_a_model_says_in_which_form_it_takes_layers(setup, scan):
    version, _, params, _ = setup
    model, tokens = small.model(version, scan_layers=scan), small.tokens(1, 2)
    wrong, name = (params, "stack_layers") if scan else (stack_layers(params), "unstack_layers")
    with pytest.raises(ValueError, match=rf"params .* scan_layers={scan!r} .*: use {name}\(params\)"):
        model.apply({"params": wrong}, tokens)
    with pytest.raises(ValueError, match=rf"use {name}\(params\)"):
        generate(model, wrong, [[1, 2]], max_tokens=1)


def test_stacking_refuses_the_wrong_form(setup):
    _, _, params, _ = setup
    with pytest.raises(ValueError, match="params must hold blocks,"):
        unstack_layers(params)
    with pytest.raises(ValueError, match="without gaps"):
        stack_layers({name: value for name, value in params.items() if name != "blocks_0"})


@pytest.mark.slow
def test_unrolled_layers_are_no_loop():
    """Parameters stacked as for a loop, and none in the compiled gradient but those of the op over tokens."""

    def loops(scan):
        model, tokens = small.model(7, num_layers=3, scan_layers=scan), small.tokens(1, 16)
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.apply({"params": p}, tokens)[0])))
        return gradient.lower(small.shapes(model, tokens)).compile().as_text().count(" while(")

    assert loops("unroll") == loops(False) != loops(True)


def test_a_loop_copies_no_residual_stream():
    """RWKV-7's products do not add to what a loop over layers carries: the carry would be copied."""
    tokens = small.tokens(1, 3)

    def barriers(scan, of):
        model = small.model(7, scan_layers=scan)
        params = small.shapes(model, tokens)
        run = lambda params: jnp.sum(model.apply({"params": params}, tokens)[0])
        return str(jax.make_jaxpr(of(run))(params)).count("optimization_barrier")

    low_rank = 1  # in the body of the loop, or in the second of two layers
    assert barriers(True, lambda run: run) == low_rank + 1
    assert barriers(False, lambda run: run) == low_rank
    assert barriers(True, jax.grad) == 2 * low_rank


@pytest.mark.parametrize("version, scan", [pytest.param(6, False, marks=pytest.mark.slow), (7, True)])
def test_remat_runs_the_op_once(version, scan, monkeypatch):
    """The token loops of the compiled gradient are as many with remat as without."""
    tokens = small.tokens(1, 5)

    def loops(remat):
        model = small.model(
            version, num_layers=2 if scan else 1, scan_layers=scan, remat=remat, implementation="reference"
        )
        params = small.shapes(model, tokens)
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.apply({"params": p}, tokens)[0])))
        return gradient.lower(params).compile().as_text().count(" while(")

    kept = loops(True)
    assert kept == loops(False)
    monkeypatch.setattr(causal_lm, "remat_policy", lambda **_: jax.checkpoint_policies.nothing_saveable)
    assert loops(True) > kept, "the count does not see a second forward"


@pytest.mark.parametrize("version, ups", [pytest.param(6, 2, marks=pytest.mark.one_python), (7, 3)])
def test_dense_remat_runs_no_projection_twice(version, ups):
    """Only the second halves of the low-rank pairs come again in the compiled gradient."""
    tokens = small.tokens(1, 5)

    def products(remat):
        model = small.model(version, num_layers=1, remat=remat, implementation="reference")
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.apply({"params": p}, tokens)[0])))
        return gradient.lower(small.shapes(model, tokens)).compile().as_text().count(" dot(")

    none, dense, blocks = map(products, (False, "dense", True))
    assert dense - none <= ups and blocks - dense >= 5, (none, dense, blocks)


@pytest.mark.parametrize("version", small.VERSIONS)
def test_logical_axes(version):
    """Boxed on request only; names fit the shapes, scanned layers included."""
    tokens = small.tokens(1, 2)
    for scan in (False, True):
        plain = small.shapes(small.model(version, scan_layers=scan), tokens)
        assert not any(
            isinstance(x, nn.LogicallyPartitioned)
            for x in jax.tree.leaves(plain, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
        )
        boxed = small.shapes(small.model(version, scan_layers=scan, logical_axes=True), tokens)
        assert jax.tree.structure(nn.meta.unbox(boxed)) == jax.tree.structure(plain)
        leaves = jax.tree_util.tree_leaves_with_path(
            boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
        )
        for path, box in leaves:
            assert isinstance(box, nn.LogicallyPartitioned), jax.tree_util.keystr(path)
            assert len(box.names) == box.value.ndim, jax.tree_util.keystr(path)
            assert (box.names[0] == "layers") == (path[0].key == "blocks")


@pytest.mark.parametrize("version", small.VERSIONS)
@pytest.mark.parametrize(
    "form",
    [{}, {"scan_layers": True}, {"scan_layers": "unroll"}, {"num_layers": 1}, {"logical_axes": True}],
)
def test_initial_params(version, form):
    """They have the names, shapes and boxes of model.init's, and the numbers of the scanned model's."""
    model = small.model(version, **form)
    want = jax.eval_shape(model.init, jax.random.key(3), small.tokens(1, 2))["params"]
    got = initial_params(model, jax.random.key(3))
    shapes = jax.eval_shape(lambda: got)
    assert jax.tree.structure(shapes) == jax.tree.structure(want)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(want)
    if form == {}:
        scanned = small.model(version, scan_layers=True)
        drawn = jax.jit(scanned.init)(jax.random.key(3), small.tokens(1, 2))["params"]
        jax.tree.map(np.testing.assert_array_equal, got, unstack_layers(drawn))
