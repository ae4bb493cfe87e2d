"""Outputs, states and all gradients of every implementation against the float64 oracle."""

import cases
import chex
import jax
import numpy as np
import oracle
import pytest
from cases import IMPLEMENTATIONS, OPS, Case, check

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
@pytest.mark.parametrize("decay", cases.DECAYS)
def test_decays(op, implementation, decay):
    check(Case(op, T=37, K=8, V=6, decay=decay), implementation)


@each_op
@pytest.mark.parametrize(
    "implementation, T", [("reference", 1), ("reference", 17), *(("xla", T) for T in (1, 15, 17, 100))]
)
def test_lengths(op, implementation, T):
    check(Case(op, B=1, T=T, decay="mixed", scale=0.35), implementation)


@each_op
@pytest.mark.parametrize(
    "implementation, K, V",
    [
        ("reference", 1, 9),
        ("reference", 24, 16),
        *(("xla", *KV) for KV in [(1, 1), (16, 24), (256, 5), (7, 256)]),
    ],
)
def test_head_sizes(op, implementation, K, V):
    # eight rows and heads: with K = V = 1 and one of them, dS0 is a single number, a product of differences
    # exp(w) - gate that may nearly all cancel, and its relative error would judge the numbers drawn and not
    # the op
    check(Case(op, B=2, T=9, H=4, K=K, V=V, decay="smooth", chunk_size=4), implementation)


@each_op
@pytest.mark.parametrize("chunk_size", [1, 2, 8, 16, 64])
def test_chunk_sizes(op, chunk_size):
    check(Case(op, B=1, T=67, decay="mixed", chunk_size=chunk_size), "xla")


@each_implementation
@each_op
@pytest.mark.parametrize("lower_bound", [-20.0, -0.6])
def test_a_kept_promise_on_the_decay_changes_nothing(op, implementation, lower_bound):
    case = Case(
        op, T=37, K=8, V=6, decay="strong" if lower_bound == -20 else "layer", lower_bound=lower_bound
    )
    check(case, implementation)


@each_implementation
@each_op
@pytest.mark.parametrize("dtype, w_dtype", [("bfloat16", None), ("float16", None), ("bfloat16", "float32")])
def test_sixteen_bit_inputs_cost_only_the_rounding_of_the_results(op, implementation, dtype, w_dtype):
    """Arithmetic and state are float32: on the rounded inputs nothing but the rounding of o and of each
    gradient may differ.
    """
    check(Case(op, T=37, decay="smooth", dtype=dtype, w_dtype=w_dtype), implementation)


@each_implementation
@each_op
@pytest.mark.parametrize("decay", ["smooth", "mixed"])
def test_float64(op, implementation, decay):
    with jax.enable_x64(True):
        check(Case(op, T=37, decay=decay, dtype="float64", scale=1.7), implementation, tol=cases.DOUBLE)


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
@pytest.mark.parametrize("decay", ["none", "layer"])
@pytest.mark.parametrize("chunk_size", [None, 64])
def test_nearly_parallel_kk_with_gate_one(implementation, decay, chunk_size):
    """The triangular inverse of RWKV-7 at its worst: every token removes what nearly the same direction of
    the one before holds.
    """
    check(Case("rwkv7", T=100, K=16, V=16, decay=decay, parallel=True, chunk_size=chunk_size), implementation)


@each_implementation
@each_op
def test_recurrent_form_is_the_same_function(op, implementation):
    check(Case(op, T=37, K=8, V=6, decay="mixed", scale=0.5), implementation, form="fused_recurrent")


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
