"""RWKV-7's keys in plain JAX and in Triton (interpreted where there is no GPU) against the float64 oracle."""

import heads_cases
import heads_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads_cases import Case, build, call, check, run

from fla_jax.core.gpu import gpu_missing
from fla_jax.ops.layer.keys import rwkv7_keys
from fla_jax.pallas.backend import triton

IMPLEMENTATIONS = ["xla", *(["triton"] if triton.why_not(jax.default_backend()) is None else [])]
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
OP = "rwkv7_keys"


@pytest.mark.parametrize("residual", [True, False, None])
def test_the_oracles_gradients_are_those_of_its_results(residual):
    """By central differences along a random direction."""
    case = Case(OP, B=1, T=2, H=2, N=4, residual=residual, rate_scale=0.7)
    arrays, cotangents = map(heads_oracle.wide, build(case))
    rng = np.random.default_rng(1)
    direction = {name: rng.normal(size=x.shape) for name, x in arrays.items()}
    value = lambda h: sum(
        np.sum(cotangents[name] * y)
        for name, y in heads_cases.expected(case, {n: x + h * direction[n] for n, x in arrays.items()}, None)[
            0
        ].items()
    )
    _, gradients = heads_cases.expected(case, arrays, cotangents)
    slope = sum(np.sum(gradients[name] * direction[name]) for name in arrays)
    assert abs((value(1e-6) - value(-1e-6)) / 2e-6 - slope) < 1e-7 * max(1, abs(slope))


@each
def test_a_rate_scale_above_one_keeps_directions_wide(implementation):
    case = Case(OP, rate_scale=2.0)
    check(case, implementation)
    arrays = {n: x.astype(jnp.bfloat16) for n, x in build(case)[0].items()}
    kinds = {name: x.dtype for name, x in jax.eval_shape(lambda: call(case, arrays, implementation)).items()}
    bf16, f32 = jnp.bfloat16, jnp.float32
    assert kinds == dict(w=f32, k=bf16, v=bf16, a=f32, b=f32, v_first=bf16, k_bonus=bf16, v_bonus=bf16)


@each
def test_keys_without_length_have_no_direction_and_no_gradient_through_it(implementation):
    case = Case(OP)
    arrays, cotangents = build(case)
    arrays["k"][0, 1, 2] = 0
    arrays["k"][1, 0, 0] = 1e-14
    arrays["k_k"][1] = 0
    check(case, implementation, arrays, cotangents)
    results, gradients = run(case, implementation, arrays, cotangents)
    assert not results["a"][0, 1, 2].any() and not results["b"][:, :, 1].any()
    assert np.max(np.abs(gradients["k"])) < 1e3


@each
def test_strong_gates(implementation):
    """Where sigmoids are 0 or 1 in float32 results stay finite, and exact where they are flat."""
    case = Case(OP)
    arrays, cotangents = build(case)
    for name in ("decay", "rate", "mix"):
        arrays[name] = arrays[name] * 100
    results, gradients = run(case, implementation, arrays, cotangents)
    want, slopes = heads_cases.expected(case, arrays, cotangents)
    for got, right in ((results, want), (gradients, slopes)):
        assert all(np.isfinite(x).all() for x in got.values())
        wrong = {
            n: e for n, e in heads_cases.errors(got, right).items() if not e < 1e-5
        }  # 100 loses six bits
        assert not wrong, wrong


def test_bfloat16_is_rounded_once():
    """As near as its dtype allows; on a GPU the kernels lose at most a fifth more than plain JAX."""
    case = Case(OP, B=2, T=40, H=2, N=64, dtype="bfloat16")
    want = heads_cases.expected(case)
    plain = [heads_cases.errors(got, right) for got, right in zip(run(case, "xla"), want)]
    if gpu_missing(jax.default_backend()) is not None:
        assert max(plain[0].values()) < 2**-8 and plain[0]["w"] < 1e-6 and max(plain[1].values()) < 2**-8
    else:  # the interpreter does not round to bfloat16 as a GPU does, and XLA there not once
        kernel = [heads_cases.errors(got, right) for got, right in zip(run(case, "triton"), want)]
        for mine, theirs in zip(kernel, plain):
            assert all(mine[name] <= 1.2 * theirs[name] + 1e-6 for name in mine), (mine, theirs)


@each
def test_log_decays_in_bfloat16(implementation):
    """Half the bytes; the strongest one stays within what the layer promises of the recurrence."""
    arrays, _ = build(Case(OP))
    arrays["decay"][0, 0] = 40
    w = np.asarray(call(Case(OP), arrays, implementation, decay_dtype=jnp.bfloat16)["w"])
    assert w.dtype == jnp.bfloat16 and w.min() >= -0.61
    want = heads_oracle.keys(arrays)[0]["w"]
    limit = 2**-7 if implementation == "triton" and triton.INTERPRET else 2**-8  # the interpreter truncates
    assert np.max(np.abs(np.asarray(w, np.float64) - want) / np.abs(want)) <= limit


@each
@pytest.mark.parametrize("residual", ["traced True", "traced False"])
def test_v_first_is_left_as_it_is(implementation, residual):
    """Outside jit, where somebody may still need it; tokens that no block is full of."""
    case = Case(OP, B=1, T=37, H=3, N=24, residual=residual)
    arrays = jax.tree.map(jnp.asarray, build(case)[0])
    before = np.array(arrays["v_first"])
    got = call(case, arrays, implementation)
    np.testing.assert_array_equal(arrays["v_first"], before)
    np.testing.assert_array_equal(got["v_first"], before if case.there else arrays["v"])


@each
def test_a_loop_over_layers_that_nothing_differentiates(implementation):
    """v_first is in the loop's own memory: it is written in layer 0 and stands until the last one."""
    case = Case(OP, B=2, T=5, H=2, N=8)
    stacked = jax.tree.map(
        lambda *x: jnp.stack(x), *(build(Case(**(vars(case) | dict(seed=i))))[0] for i in range(3))
    )
    del stacked["v_first"]

    @jax.jit
    def values(stacked):
        def step(v_first, one):
            index, arrays = one
            keys = rwkv7_keys(**arrays, v_first=v_first, residual=index > 0, implementation=implementation)
            return keys.v_first, (keys.v, keys.v_first)

        return jax.lax.scan(step, jnp.full(stacked["v"].shape[1:], jnp.nan), (jnp.arange(3), stacked))[1]

    v, v_first = values(stacked)
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], jax.device_get(stacked)) | {
            "v_first": np.asarray(stacked["v"][0])
        }
        want = heads_oracle.keys(layer, residual=i > 0)[0]
        assert (
            max(
                heads_cases.errors(
                    {"v": v[i], "v_first": v_first[i]}, {n: want[n] for n in ("v", "v_first")}
                ).values()
            )
            < 1e-6
        )


def test_float64():
    with jax.enable_x64(True):
        check(Case(OP, dtype="float64"), "xla", tolerance=1e-14)
        arrays, _ = build(Case(OP, dtype="float64"))
        with pytest.raises(ValueError, match=r"implementation='triton' cannot run this call: .*float64"):
            call(Case(OP), arrays, "triton")


@each
def test_remat_and_scan_over_layers(implementation):
    """The layer's index is traced: v_first comes from layer 0, whose residual is none."""
    case = Case(OP, B=1, T=4, H=1, N=8)
    layers = [
        {n: x for n, x in build(Case(**(vars(case) | dict(seed=i))))[0].items() if n != "v_first"}
        for i in range(3)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)

    def loss_of(keys):  # of positive terms: a sum that cancels has no relative error to bound
        return jnp.sum(jnp.square(keys.v * keys.k_bonus)) + jnp.sum(jnp.square(keys.b * keys.w))

    @jax.checkpoint
    def step(v_first, one):
        index, arrays = one
        keys = rwkv7_keys(**arrays, v_first=v_first, residual=index > 0, implementation=implementation)
        return keys.v_first, loss_of(keys)

    def scanned(stacked):
        start = jnp.full(stacked["v"].shape[1:], 7.0)  # which layer 0 must not look at
        return jnp.sum(jax.lax.scan(step, start, (jnp.arange(3), stacked))[1])

    def unrolled(stacked):
        total, v_first = 0.0, None
        for i in range(3):
            arrays = jax.tree.map(lambda x, i=i: x[i], stacked)
            trio = {} if i == 0 else {"v_first": v_first}
            keys = rwkv7_keys(
                **{n: x for n, x in arrays.items() if i or n not in ("mix", "v0")},
                **trio,
                implementation="xla",
            )
            v_first = keys.v_first
            total += loss_of(keys)
        return total

    (got, grads), (want, right) = (jax.jit(jax.value_and_grad(f))(stacked) for f in (scanned, unrolled))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert (
        max(heads_cases.errors(jax.device_get(grads), heads_oracle.wide(jax.device_get(right))).values())
        < 2e-6
    )


def test_the_default_on_a_cpu_is_plain_jax():
    case = Case(OP, B=1, T=2, H=1, N=4)
    assert "custom_call" not in jax.jit(lambda arrays: call(case, arrays)).lower(build(case)[0]).as_text()


def test_no_tokens():
    case = Case(OP, T=0)
    results, gradients = run(case, None)
    assert results["w"].shape == (2, 0, 3, 16) and not gradients["w0"].any()


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(rate=np.zeros((2, 5, 3, 8))), ValueError, r"rate must .* \[2, 5, 3, 16\], got \[2, 5, 3, 8\]"),
        (dict(k=np.zeros((2, 5, 48), "float32")), ValueError, r"k must have shape .*N\], got \[2, 5, 48\]"),
        (
            dict(w0=np.zeros(48, "float32")),
            ValueError,
            r"w0 must have shape \[H, N\] = \[3, 16\], got \[48\]",
        ),
        (dict(a0=np.zeros((3, 16), "int32")), TypeError, "a0 must have a floating-point dtype, got int32"),
        (dict(v0=None), ValueError, "mix, v_first and v0 belong together: .* got v0 = None"),
        (dict(rate_scale=-1), ValueError, "rate_scale must be a Python number >= 0, got -1"),
        (dict(decay_dtype="int8"), ValueError, "decay_dtype must be bfloat16, float16, .* got int8"),
        (dict(implementation="cuda"), ValueError, "must be one of .*'triton', 'xla'.* or None, got 'cuda'"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        rwkv7_keys(**(build(Case(OP))[0] | change))
