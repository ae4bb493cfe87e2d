"""Both readouts in plain JAX and in Triton (interpreted where there is no GPU) against the float64 oracle."""

import heads_cases
import heads_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads_cases import FUNCTIONS, Case, build, call, check, run

from fla_jax.core.gpu import gpu_missing
from fla_jax.ops.layer.readout import rwkv7_readout
from fla_jax.pallas.backend import triton

IMPLEMENTATIONS = ["xla", *(["triton"] if triton.why_not(jax.default_backend()) is None else [])]
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_op = pytest.mark.parametrize("op", ["rwkv7_readout", "rwkv6_readout"])


@each_op
def test_the_oracles_gradients_are_those_of_its_results(op):
    """By central differences along a random direction."""
    arrays, cotangents = map(heads_oracle.wide, build(Case(op, B=1, T=2, H=2, N=4)))
    rng = np.random.default_rng(1)
    direction = {name: rng.normal(size=x.shape) for name, x in arrays.items()}

    def value(h):
        moved = {name: x + h * direction[name] for name, x in arrays.items()}
        return np.sum(cotangents["y"] * heads_oracle.readout(moved)[0]["y"])

    _, gradients = heads_oracle.readout(arrays, cotangents)
    slope = sum(np.sum(gradients[name] * direction[name]) for name in arrays)
    assert abs((value(1e-6) - value(-1e-6)) / 2e-6 - slope) < 1e-7 * max(1, abs(slope))


@each_op
@each
def test_a_head_that_is_constant_or_far_from_zero(op, implementation):
    """The deviation is that of the numbers less their mean, not a difference of two large squares."""
    case = Case(op, B=1, T=3, H=2, N=16)
    arrays, cotangents = build(case)
    arrays["o"][:, 0] = 2.0
    arrays["o"][:, 1] += 512.0
    got, want = run(case, implementation, arrays, cotangents), heads_cases.expected(case, arrays, cotangents)
    for mine, right in zip(got, want):  # 512 leaves float32 15 bits for what is normalised
        assert max(heads_cases.errors(mine, right).values()) < 1e-4


@each_op
def test_bfloat16_is_rounded_once(op):
    """As near as the dtype allows; on a GPU the kernels lose at most a fifth more than plain JAX."""
    case = Case(op, B=2, T=40, H=2, N=64, dtype="bfloat16")
    want = heads_cases.expected(case)
    plain = [heads_cases.errors(got, right) for got, right in zip(run(case, "xla"), want)]
    if gpu_missing(jax.default_backend()) is not None:
        assert max(plain[0].values()) < 2**-8 and max(plain[1].values()) < 2**-8
    else:  # the interpreter does not round to bfloat16 as a GPU does, and XLA there not once
        kernel = [heads_cases.errors(got, right) for got, right in zip(run(case, "triton"), want)]
        for mine, theirs in zip(kernel, plain):
            assert all(mine[name] <= 1.2 * theirs[name] + 1e-6 for name in mine), (mine, theirs)


@each_op
def test_dtypes(op):
    """A float32 gate with bfloat16 tokens; gradients have the dtypes of what came."""
    arrays, _ = build(Case(op, dtype="bfloat16"))
    arrays["gate"] = arrays["gate"].astype("float32")
    for implementation in IMPLEMENTATIONS:

        def both(arrays, implementation=implementation):
            y, pull = jax.vjp(lambda arrays: FUNCTIONS[op](**arrays, implementation=implementation), arrays)
            return y, pull(y)[0]

        y, gradients = jax.eval_shape(both, arrays)
        assert y.dtype == jnp.bfloat16
        assert {n: x.dtype for n, x in gradients.items()} == {n: x.dtype for n, x in arrays.items()}


@each_op
def test_float64(op):
    with jax.enable_x64(True):
        check(Case(op, dtype="float64"), "xla", tolerance=1e-13)
        with pytest.raises(ValueError, match=r"implementation='triton' cannot run this call: .*float64"):
            call(Case(op), build(Case(op, dtype="float64"))[0], "triton")


def test_the_default_on_a_cpu_is_plain_jax():
    case = Case("rwkv7_readout", B=1, T=2, H=1, N=4)
    assert "custom_call" not in jax.jit(lambda arrays: call(case, arrays)).lower(build(case)[0]).as_text()


@each_op
def test_no_tokens(op):
    results, gradients = run(Case(op, T=0), None)
    assert results["y"].shape == (2, 0, 3, 16) and not gradients["scale"].any()


def test_errors():
    arrays = build(Case("rwkv7_readout"))[0]
    with pytest.raises(
        ValueError, match=r"gate must have shape \[B, T, H, N\] = \[2, 5, 3, 16\], got \[2, 5, 48\]"
    ):
        rwkv7_readout(**(arrays | dict(gate=np.zeros((2, 5, 48), "float32"))))
    with pytest.raises(TypeError, match="r_k must be a floating-point array, got NoneType"):
        rwkv7_readout(**(arrays | dict(r_k=None)))
