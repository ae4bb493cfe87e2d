"""The checked mode: its reports, good inputs unchanged, and inside every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, tiers
from harness.cases import INPUTS, Case
from harness.tiers import each_op
from jax.experimental.checkify import JaxRuntimeError

import fla_jax

SMALL = dict(B=2, T=6, H=2, K=3, V=4)


def _call(op, **options):
    return lambda arrays: cases.call(op, arrays, implementation="reference", **options)


def _spoiled(x, name, value):
    a = np.array(x.arrays[name])
    a[(-1,) * a.ndim] = value
    return {**x.arrays, name: a}


@each_op
@pytest.mark.parametrize("implementation", tiers.first(["xla", "reference"]))
@pytest.mark.parametrize("decay", ["none", "mixed", "forget"])
def test_good_inputs_give_the_same_result(op, implementation, decay):
    case = Case(op, **SMALL, decay=decay)
    f = jax.jit(lambda arrays: cases.call(op, arrays, implementation=implementation))
    got = fla_jax.checked(f)(cases.build(case).arrays)
    cases.compare(case, cases.Results(got, {}), cases.expected(case))


@each_op
def test_positive_log_decay(op):
    x = cases.build(Case(op, **SMALL))
    f = fla_jax.checked(jax.jit(_call(op)))
    f(x.arrays)
    with pytest.raises(
        JaxRuntimeError, match=rf"chunk_{op}: w, .*, must be <= 0, got a largest value of 0.25"
    ):
        f(_spoiled(x, "w", 0.25))
    with pytest.raises(ValueError, match="w, the log decay"):
        f(_spoiled(x, "w", np.inf))


@each_op
def test_nan_in_each_input(op):
    x = cases.build(Case(op, **SMALL))
    f = fla_jax.checked(jax.jit(_call(op)))
    for name in INPUTS[op]:
        with pytest.raises(JaxRuntimeError, match=rf"chunk_{op}: {name} holds NaN"):
            f(_spoiled(x, name, np.nan))


@each_op
def test_broken_lower_bound(op):
    x = cases.build(Case(op, **SMALL, decay="layer"))
    f = fla_jax.checked(jax.jit(_call(op, lower_bound=-0.6)))
    f(x.arrays)
    f({**x.arrays, "w": x.arrays["w"].astype(jnp.bfloat16)})  # rounds to just below the bound
    with pytest.raises(
        JaxRuntimeError, match=r"lower_bound promises w >= -0.6, got a smallest value of -0.75"
    ):
        f(_spoiled(x, "w", -0.75))


@each_op
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_cu_seqlens_that_are_known_only_at_run_time(op, dtype):
    x = cases.build(Case(op, layout="packed", lengths=(2, 4))).arrays
    call = lambda x, cu: cases.call(op, x, {"cu_seqlens": cu}, implementation="reference")
    f = fla_jax.checked(jax.jit(call))
    f(x, np.array([0, 2, 6], dtype))
    f(x, np.array([0, 6, 6], dtype))
    message = f"chunk_{op}: cu_seqlens must rise from 0 to T = 6 without falling"
    for bad in ([0, 7, 6], [1, 2, 6], [0, 2, 5], [0, 2, 7]):
        with pytest.raises(JaxRuntimeError, match=message):
            f(x, np.array(bad, dtype))


def test_a_and_b_at_random_are_reported():
    """The usual mistake with RWKV-7: the state doubles every few tokens; one batch entry of two is bad."""
    case = Case("rwkv7", B=2, T=100, H=2, K=16, V=4, decay="none")
    x = cases.build(case)
    rng = np.random.default_rng(0)
    a, b = np.array(x.arrays["a"]), np.array(x.arrays["b"])
    a[1], b[1] = rng.standard_normal((2, *a[1].shape))
    f = fla_jax.checked(jax.jit(_call("rwkv7")))
    f(x.arrays)
    with pytest.raises(JaxRuntimeError, match="chunk_rwkv7: the state of batch element 1 grew without bound"):
        f({**x.arrays, "a": a, "b": b})


def test_gates_up_to_two_are_no_growth():
    x = cases.build(Case("rwkv7", B=2, T=100, H=2, K=8, V=4, decay="none", parallel=True))
    fla_jax.checked(jax.jit(_call("rwkv7")))({**x.arrays, "b": 2 * x.arrays["b"]})


def _scan(f):
    def g(arrays):
        return jax.lax.scan(lambda c, _: (c + jnp.sum(f(arrays)["o"]), None), 0.0, None, length=2)[0]

    return g


def _twice(f):
    return lambda x: jax.vmap(f)(jax.tree.map(lambda a: jnp.stack([a, a]), x))


def _cond(f):
    zeros = lambda y: jax.tree.map(jnp.zeros_like, f(y))
    return lambda x: jax.lax.cond(x["r"][0, 0, 0, 0] < 100, f, zeros, x)


loss = lambda f: lambda arrays: jnp.sum(f(arrays)["o"])
checkpoint = lambda f: jax.checkpoint(f, policy=fla_jax.remat_policy())
INSIDE = {
    "plain": lambda f: f,
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f))),
    "vmap of grad": lambda f: _twice(jax.grad(loss(f))),
    "grad of scan": lambda f: jax.grad(_scan(f)),
    "grad of checkpoint with the policy": lambda f: jax.grad(checkpoint(loss(f))),
    "grad of scan of checkpoint": lambda f: jax.jit(jax.grad(_scan(checkpoint(f)))),
    "cond": _cond,
}


# the two ops share all that matters here: RWKV-6 goes through the most used ones
@pytest.mark.parametrize(
    "op, transformation",
    [
        *(("rwkv7", name) for name in INSIDE),
        ("rwkv6", "jit of grad"),
        ("rwkv6", "grad of scan of checkpoint"),
    ],
)
def test_inside_transformations(op, transformation):
    x = cases.build(Case(op, **SMALL))
    f = INSIDE[transformation](_call(op))
    want = jax.device_get(jax.jit(f)(x.arrays))
    checking = fla_jax.checked(f)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, jax.device_get(checking(x.arrays)), want)
    with pytest.raises(JaxRuntimeError, match=rf"chunk_{op}: w, the log decay, must be <= 0"):
        checking(_spoiled(x, "w", 0.5))


@each_op
def test_functions_that_were_jitted_and_called_before(op):
    """jit's cache must not hand out the unchecked program, nor the checked one afterwards."""
    x = cases.build(Case(op, **SMALL))
    bad = _spoiled(x, "w", 0.5)
    f = jax.jit(_call(op))
    f(bad)
    with pytest.raises(JaxRuntimeError, match="w, the log decay"):
        fla_jax.checked(f)(bad)
    f(bad)  # unchecked again
    with pytest.raises(JaxRuntimeError, match="w, the log decay"):
        fla_jax.checked(f)(bad)
    with pytest.raises(JaxRuntimeError, match="w, the log decay"):
        fla_jax.checked(jax.grad(lambda a: jnp.sum(f(a)["o"])))(bad)


@each_op
def test_jit_around_checked_says_what_to_do(op):
    """checked belongs outside: an error cannot be raised from within a traced function."""
    x = cases.build(Case(op, **SMALL))
    with pytest.raises(ValueError, match="checkify"):
        jax.jit(fla_jax.checked(_call(op)))(x.arrays)
