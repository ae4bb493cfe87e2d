"""Recurrences, in addition to conformance: promotion, the state's dtype, empty calls, mild decays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases
from harness.cases import Case
from harness.tiers import each_implementation, each_op

from fla_jax.ops import intra_safe


@each_implementation
@each_op
def test_one_float64_input_makes_the_arithmetic_float64(op, implementation):
    with jax.enable_x64(True):
        case = Case(op, B=1, T=2, H=1, K=3)
        x = cases.build(case)
        f = jax.jit(lambda arrays: cases.call(op, arrays, implementation=implementation))
        for name in x.arrays:
            got = f({**x.arrays, name: x.arrays[name].astype(np.float64)})
            assert got["ht"].dtype == np.float64, name
            assert got["o"].dtype == (np.float64 if name == "v" else np.float32), name
            cases.assert_close("ht", got["ht"], cases.expected(case).outputs["ht"], 1e-12)


@each_implementation
@each_op
def test_state_in_bfloat16_and_default_state(op, implementation):
    case = Case(op)
    x = cases.build(case)
    state = x.arrays["initial_state"]
    bare = {name: a for name, a in x.arrays.items() if name != "initial_state"}
    rounded = x._replace(arrays=bare | {"initial_state": state.astype(cases.dtype_of("bfloat16"))})
    zero = x._replace(arrays=bare | {"initial_state": np.zeros_like(state)})
    for given, like in ((x._replace(arrays=bare), zero), (rounded, rounded)):
        got = cases.outputs(case, implementation, given)
        assert got["ht"].dtype == np.float32
        cases.compare(case, cases.Results(got, {}), case.oracle(like))
    options = dict(implementation=implementation, output_final_state=False)
    assert jax.eval_shape(lambda a: cases.call(op, a, **options), bare)["ht"] is None


@each_implementation
@each_op
@pytest.mark.parametrize(
    "shape", [dict(T=0), dict(B=0), dict(B=0, T=0), dict(layout="packed", lengths=(0, 0))]
)
def test_no_tokens_or_an_empty_batch(op, implementation, shape):
    case = Case(op, **shape)
    x, got = cases.build(case), cases.run(case, implementation)
    state = x.arrays["initial_state"]
    assert got.outputs["o"].shape == x.cotangents["o"].shape
    np.testing.assert_array_equal(got.outputs["ht"], state)
    np.testing.assert_array_equal(got.grads.pop("initial_state"), x.cotangents["ht"])
    assert all(g.shape == x.arrays[name].shape and not np.any(g) for name, g in got.grads.items())
    without = {name: a for name, a in x.arrays.items() if name != "initial_state"}
    assert not np.any(cases.call(op, without, x.layout, implementation=implementation)["ht"])


# plain JAX takes one product where a promise or the decays themselves allow it
PROMISE = dict(decay="layer", lower_bound=-0.61)


@each_op
def test_promise_in_float64(op):
    with jax.enable_x64(True):
        cases.check(Case(op, T=37, dtype="float64", **PROMISE), "xla", cases.DOUBLE)


@each_op
def test_pairs_without_a_decay_do_not_drown_the_rest(op):
    """dw is a difference of sums; pairs without a decay between them, a million times larger, are in none."""
    case = Case(op, B=1, T=32, H=2, K=8, V=8, **PROMISE)
    x = case.build()
    x.arrays["k"][:, 5] *= 1e3
    x.arrays["r"][:, 5 if op == "rwkv7" else 6] *= 1e3
    got, want = cases.run(case, "xla", x).grads["w"], case.oracle(x).grads["w"]
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


def half_mild(op, seed):
    """Inputs of four groups of chunks, of which the first two have mild decays."""
    x = Case(op, B=2, T=1024, H=2, K=8, V=4, decay="layer", seed=seed).build()
    second = x.arrays["w"][:, 512:]
    second[:] = cases.log_decay(np.random.default_rng(seed), "mixed", second.shape)
    return x


def compare(op, x, got):
    case = Case(op)
    cases.compare(case, jax.device_get(got), case.oracle(x))


@each_op
def test_groups_go_by_their_own_decays(op):
    x, run = half_mild(op, 0), cases.runner(op, "xla", chunk_size=8)
    assert "stablehlo.case" in run.lower(*x).as_text()
    compare(op, x, run(*x))


@each_op
def test_mapped_groups_stay_one_branch(op):
    """One entry with strong decays, one with mild ones at first: no group takes one product for both."""
    xs = [half_mild(op, 0), cases.build(Case(op, B=2, T=1024, H=2, K=8, V=4, decay="mixed"))]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *xs)
    run = jax.jit(jax.vmap(cases.runner(op, "xla", chunk_size=8)))
    assert "stablehlo.case" in run.lower(*stacked).as_text()  # and not both branches and a selection
    got = run(*stacked)
    for i, x in enumerate(xs):
        compare(op, x, jax.tree.map(lambda a, i=i: a[i], got))


@each_op
def test_where_the_limit_is(op):
    """The weakest mild decay meets every tolerance; its sum over a chunk is the limit."""
    weakest = -intra_safe.LIMIT / 16
    cases.check(Case(op, T=64, H=2, decay=str(weakest), lower_bound=float(np.float32(weakest))), "xla")
