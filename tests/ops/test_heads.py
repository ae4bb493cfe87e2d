"""RWKV-7's keys and both readouts in plain JAX and in Triton (interpreted without a GPU) against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, oracles
from harness.cases import HEAD_OPS, HeadCase
from harness.compare import largest_of

from fla_jax.core.gpu import gpu_missing
from fla_jax.ops.layer import rwkv7_keys, rwkv7_readout
from fla_jax.pallas.backend import triton

IMPLEMENTATIONS = ["xla", *(["triton"] if triton.why_not(jax.default_backend()) is None else [])]
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_op = pytest.mark.parametrize("op", HEAD_OPS)
each_readout = pytest.mark.parametrize("op", HEAD_OPS[1:])
KEYS = "rwkv7_keys"


@each_op
def test_bfloat16_is_rounded_once(op):
    """As near as the dtype allows; on a GPU the kernels lose at most a fifth more than plain JAX."""
    case = HeadCase(op, B=2, T=40, H=2, N=64, dtype="bfloat16")
    errors = lambda implementation: {
        name: error for name, (error, _) in case.errors(cases.run(case, implementation), want).items()
    }
    want = cases.expected(case)
    plain = errors("xla")
    if gpu_missing(jax.default_backend()) is not None:
        assert max(plain.values()) < 2**-8 and plain.get("w", 0) < 1e-6
    else:  # the interpreter does not round to bfloat16 as a GPU does, and XLA there not once
        kernel = errors("triton")
        assert all(kernel[name] <= 1.2 * plain[name] + 1e-6 for name in kernel), (kernel, plain)


@each_op
def test_float64(op):
    with jax.enable_x64(True):
        case = HeadCase(op, dtype="float64")
        cases.check(case, "xla", 1e-14 if op == KEYS else 1e-13)
        with pytest.raises(ValueError, match=r"implementation='triton' cannot run this call: .*float64"):
            cases.outputs(case, "triton")


@each_op
def test_the_default_on_a_cpu_is_plain_jax(op):
    x = cases.build(HeadCase(op, B=1, T=2, H=1, N=4)).arrays
    assert "custom_call" not in jax.jit(lambda x: cases.call(op, x)).lower(x).as_text()


@each_op
def test_no_tokens(op):
    case = HeadCase(op, T=0)
    outputs, grads = cases.run(case)
    assert outputs["w" if op == KEYS else "y"].shape == (2, 0, 3, 16)
    assert not any(np.any(grads[name]) for name in cases.VECTORS[op])


@each
def test_a_rate_scale_above_one_keeps_directions_in_float32(implementation):
    case = HeadCase(KEYS, rate_scale=2.0)
    cases.check(case, implementation)
    x = {n: a.astype(jnp.bfloat16) for n, a in cases.build(case).arrays.items()}
    run = lambda: cases.call(KEYS, x, implementation=implementation, rate_scale=2.0)
    wide = {name for name, a in jax.eval_shape(run).items() if a.dtype == jnp.float32}
    assert wide == {"w", "a", "b"}


@each
def test_keys_without_length_have_no_direction_and_no_gradient_through_it(implementation):
    case = HeadCase(KEYS)
    x = case.build()
    x.arrays["k"][0, 1, 2] = 0
    x.arrays["k"][1, 0, 0] = 1e-14
    x.arrays["k_k"][1] = 0
    cases.check(case, implementation, x=x)
    outputs, grads = cases.run(case, implementation, x)
    assert not outputs["a"][0, 1, 2].any() and not outputs["b"][:, :, 1].any()
    assert np.max(np.abs(grads["k"])) < 1e3


@each
def test_log_decays_in_bfloat16(implementation):
    """Half the bytes; the strongest one stays within what the layer promises of the recurrence."""
    x = HeadCase(KEYS).build().arrays
    x["decay"][0, 0] = 40
    options = dict(implementation=implementation, decay_dtype=jnp.bfloat16)
    w = np.asarray(cases.call(KEYS, x, **options)["w"])
    assert w.dtype == jnp.bfloat16 and w.min() >= -0.61
    want = oracles.keys(x)[0]["w"]
    assert np.max(np.abs(np.asarray(w, np.float64) - want) / np.abs(want)) <= 2**-8


@each
@pytest.mark.parametrize("residual", ["traced True", "traced False"])
def test_v_first_is_not_overwritten(implementation, residual):
    """Outside jit, where it may be used again; tokens that fill no block."""
    case = HeadCase(KEYS, B=1, T=37, H=3, N=24, residual=residual)
    x = jax.tree.map(jnp.asarray, cases.build(case).arrays)
    before = np.array(x["v_first"])
    got = cases.call(KEYS, x, implementation=implementation, **case.options())
    np.testing.assert_array_equal(x["v_first"], before)
    np.testing.assert_array_equal(got["v_first"], before if case.reads_v_first else x["v"])


def stacked_layers(case: HeadCase) -> dict:
    each = [dataclasses.replace(case, seed=i).build().arrays for i in range(3)]
    return {name: jnp.stack([x[name] for x in each]) for name in each[0] if name != "v_first"}


@each
def test_a_loop_over_layers_that_nothing_differentiates(implementation):
    """v_first is in the loop's own memory: it is written in layer 0 and stays until the last one."""
    stacked = stacked_layers(HeadCase(KEYS, B=2, T=5, H=2, N=8))

    @jax.jit
    def values(stacked):
        def step(v_first, one):
            index, arrays = one
            keys = rwkv7_keys(**arrays, v_first=v_first, residual=index > 0, implementation=implementation)
            return keys.v_first, (keys.v, keys.v_first)

        return jax.lax.scan(step, jnp.full(stacked["v"].shape[1:], jnp.nan), (jnp.arange(3), stacked))[1]

    v, v_first = values(stacked)
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], stacked) | {"v_first": stacked["v"][0]}
        want = oracles.keys(layer, residual=i > 0)[0]
        assert max(largest_of(v[i], want["v"]), largest_of(v_first[i], want["v_first"])) < 1e-6


@each
def test_remat_and_scan_over_layers(implementation):
    """The layer's index is traced: v_first comes from layer 0, which has no residual."""
    stacked = stacked_layers(HeadCase(KEYS, B=1, T=4, H=1, N=8))

    def loss_of(keys):  # of positive terms: a sum that cancels has no relative error to bound
        return jnp.sum(jnp.square(keys.v * keys.k_bonus)) + jnp.sum(jnp.square(keys.b * keys.w))

    @jax.checkpoint
    def step(v_first, one):
        index, arrays = one
        keys = rwkv7_keys(**arrays, v_first=v_first, residual=index > 0, implementation=implementation)
        return keys.v_first, loss_of(keys)

    def scanned(stacked):
        start = jnp.full(stacked["v"].shape[1:], 7.0)  # which layer 0 must not read
        return jnp.sum(jax.lax.scan(step, start, (jnp.arange(3), stacked))[1])

    def unrolled(stacked):
        total, first = 0.0, {}
        for i in range(3):
            arrays = {n: x[i] for n, x in stacked.items() if i or n not in ("mix", "v0")}
            keys = rwkv7_keys(**arrays, **first, implementation="xla")
            first = {"v_first": keys.v_first}
            total += loss_of(keys)
        return total

    (got, grads), (want, right) = (jax.jit(jax.value_and_grad(f))(stacked) for f in (scanned, unrolled))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert max(largest_of(grads[name], g) for name, g in right.items()) < 2e-6


@each_readout
@each
def test_a_head_that_is_constant_or_far_from_zero(op, implementation):
    """The deviation is that of the numbers less their mean, not a difference of two large squares."""
    case = HeadCase(op, B=1, T=3, H=2, N=16)
    x = case.build()
    x.arrays["o"][:, 0] = 2.0
    x.arrays["o"][:, 1] += 512.0  # leaves float32 15 bits for what is normalised
    cases.check(case, implementation, 1e-4, x=x)


@each_readout
@each
def test_a_float32_gate_with_bfloat16_tokens(op, implementation):
    x = HeadCase(op, dtype="bfloat16").build()
    x.arrays["gate"] = x.arrays["gate"].astype("float32")
    outputs, grads = jax.eval_shape(cases.runner(op, implementation), *x)
    assert outputs["y"].dtype == jnp.bfloat16
    assert {n: g.dtype for n, g in grads.items()} == {n: a.dtype for n, a in x.arrays.items()}


F32 = "float32"
REFUSED = [
    (dict(rate=np.zeros((2, 5, 3, 8))), ValueError, r"rate must .* \[2, 5, 3, 16\], got \[2, 5, 3, 8\]"),
    (dict(k=np.zeros((2, 5, 48), F32)), ValueError, r"k must have shape .*N\], got \[2, 5, 48\]"),
    (dict(w0=np.zeros(48, F32)), ValueError, r"w0 must have shape \[H, N\] = \[3, 16\], got \[48\]"),
    (dict(a0=np.zeros((3, 16), "int32")), TypeError, "a0 must have a floating-point dtype, got int32"),
    (dict(v0=None), ValueError, "mix, v_first and v0 belong together: .* got v0 = None"),
    (dict(rate_scale=-1), ValueError, "rate_scale must be >= 0, got -1"),
    (dict(rate_scale="1"), ValueError, "rate_scale must be a finite number, got '1'"),
    (dict(rate_scale=np.ones(2)), ValueError, "rate_scale must be a finite number, got array"),
    (dict(decay_dtype="int8"), ValueError, "decay_dtype must be bfloat16, float16, .* got int8"),
    (dict(decay_dtype="foo"), ValueError, "decay_dtype must be bfloat16, float16, .* got 'foo'"),
    (dict(residual=np.ones(2, bool)), ValueError, "residual must be a bool, or an array"),
    (dict(implementation="cuda"), ValueError, "must be one of .*'triton', 'xla'.* or None, got 'cuda'"),
]
REFUSED_READOUT = [
    (dict(gate=np.zeros((2, 5, 48), F32)), ValueError, r"gate must have shape .*16\], got \[2, 5, 48\]"),
    (dict(eps=np.nan), ValueError, "eps must be a finite number, got nan"),
    (dict(r_k=None), TypeError, "r_k must be a floating-point array, got NoneType"),
]


@pytest.mark.parametrize("change, error, message", REFUSED)
def test_errors_of_keys(change, error, message):
    with pytest.raises(error, match=message):
        rwkv7_keys(**(cases.build(HeadCase(KEYS)).arrays | change))


@pytest.mark.parametrize("change, error, message", REFUSED_READOUT)
def test_errors_of_readouts(change, error, message):
    with pytest.raises(error, match=message):
        rwkv7_readout(**(cases.build(HeadCase("rwkv7_readout")).arrays | change))
