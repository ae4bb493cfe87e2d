"""Outputs, states and all gradients of every implementation against the float64 oracle."""

import cases
import chex
import jax
import numpy as np
import oracle
import pytest
from cases import IMPLEMENTATIONS, OPS, Case

each_op = pytest.mark.parametrize("op", OPS)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each_op
def test_oracle_gradients_are_the_derivatives_of_its_outputs(op):
    """The judge itself, by central differences along random directions."""
    x = cases.build(Case(op, T=7, dtype="float64", decay="smooth", layout="segments", lengths=(3, 1, 4)))
    _, grads = cases.ask_oracle(op, x, scale=0.7)
    rng = np.random.default_rng(1)

    def loss(arrays):
        ((o, final),) = getattr(oracle, op)(*arrays.values(), scale=0.7, segment_ids=x.segment_ids)
        return np.sum(o * x.do) + np.sum(final * x.ds)

    for name, a in x.arrays.items():
        step = 1e-5 * rng.standard_normal(a.shape)
        slope = (loss({**x.arrays, name: a + step}) - loss({**x.arrays, name: a - step})) / 2
        np.testing.assert_allclose(np.sum(grads[name] * step), slope, rtol=1e-7, err_msg=name)


@each_implementation
@each_op
def test_one_float64_input_makes_the_arithmetic_float64(op, implementation):
    with jax.enable_x64(True):
        x = cases.build(Case(op, B=1, T=2, H=1, K=3))
        f = jax.jit(lambda arrays: cases.call(op, arrays, implementation=implementation))
        for name in x.arrays:
            o, final = f({**x.arrays, name: x.arrays[name].astype(np.float64)})
            assert final.dtype == np.float64 and o.dtype == (np.float64 if name == "v" else np.float32), name
            want = cases.ask_oracle(op, x)[0]
            cases.assert_close("final state", final, want[1], 1e-12)


@each_implementation
@each_op
def test_state_in_bfloat16_and_default_state(op, implementation):
    x = cases.build(Case(op))
    f = jax.jit(lambda arrays: cases.call(op, arrays, implementation=implementation))
    without = {name: a for name, a in x.arrays.items() if name != "initial_state"}
    o, final = f(without)
    zero = x._replace(arrays={**x.arrays, "initial_state": np.zeros_like(x.ds)})
    (want_o, want_final), _ = cases.ask_oracle(op, zero)
    cases.assert_close("o", o, want_o, 3e-6)
    cases.assert_close("final state", final, want_final, 3e-6)
    assert (
        jax.eval_shape(
            lambda a: cases.call(op, a, implementation=implementation, output_final_state=False), without
        )[1]
        is None
    )
    rounded = {**x.arrays, "initial_state": x.arrays["initial_state"].astype(cases.dtype_of("bfloat16"))}
    (want_o, want_final), _ = cases.ask_oracle(op, x._replace(arrays=rounded))
    o, final = f(rounded)
    assert final.dtype == np.float32
    cases.assert_close("o", o, want_o, 3e-6)
    cases.assert_close("final state", final, want_final, 3e-6)


@each_implementation
@each_op
def test_repeated_calls_give_the_same_bits_and_leave_the_inputs_alone(op, implementation):
    x = jax.tree.map(jax.numpy.asarray, cases.build(Case(op, T=37, K=8, V=6, decay="mixed")))
    before = jax.device_get(x)
    run = cases.runner(op, implementation, scale=1.0, chunk_size=None, lower_bound=None)
    first, second = jax.device_get(run(*x)), jax.device_get(run(*x))
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal(jax.device_get(x), before)


@each_implementation
@each_op
def test_no_tokens_or_no_rows(op, implementation):
    for B, T in ((2, 0), (0, 5), (0, 0)):
        x = cases.build(Case(op, B=B, T=T))
        got = cases.runner(op, implementation)(*x)
        assert got.o.shape == (B, T, 2, 4)
        np.testing.assert_array_equal(got.final, x.arrays["initial_state"])
        np.testing.assert_array_equal(got.grads["initial_state"], x.ds)
        assert all(
            g.shape == x.arrays[name].shape and not np.any(g)
            for name, g in got.grads.items()
            if name != "initial_state"
        )
        without = {name: a for name, a in x.arrays.items() if name != "initial_state"}
        assert not np.any(cases.call(op, without, implementation=implementation)[1])
