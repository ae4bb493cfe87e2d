"""Recurrences, in addition to conformance: promotion, the state's dtype, empty calls."""

import jax
import numpy as np
import pytest
from harness import cases, tiers
from harness.cases import OPS, Case

each_op = pytest.mark.parametrize("op", OPS)
each_implementation = pytest.mark.parametrize("implementation", tiers.first(["xla", "reference"]))


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
