"""What only a GPU shows of the kernels: ``python -m pytest -n 15 tests/conformance tests/gpu`` there.

Kernels are compiled for few combinations of sizes, dtype and layout: each new one costs seconds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, places, variants
from harness.cases import OPS, Case, MixCase, Results
from harness.tiers import each_op

from fla_jax.core.names import remat_policy
from fla_jax.pallas.backend import pallas, triton

if jax.default_backend() != "gpu" or triton.INTERPRET or pallas.is_interpreting():
    pytest.skip("no NVIDIA GPU is visible to JAX, or an interpreter is on", allow_module_level=True)

BOUNDED = dict(decay="layer", lower_bound=-0.61)


def judge(case: Case, got: Results, want: Results, looser: float = 1.0) -> None:
    """Reports all errors at once; ``looser`` multiplies the tolerance of da and db."""
    tol, wrong = places.RECURRENCE[places.TRITON_GPU][case.dtype], {}
    for name, (error, limit) in case.errors(got, want, tol).items():
        limit *= looser if name in ("da", "db") else 1
        if not error <= limit:
            wrong[name] = f"{error:.2e} > {limit:.0e}"
    assert not wrong, wrong


@pytest.mark.parametrize("dtype, D", [("bfloat16", 64), ("float32", 16)])
@pytest.mark.parametrize("options", [dict(decay="weak"), dict(decay="none", lower_bound=-0.61)])
def test_nearly_parallel_keys_with_gate_one(options, dtype, D):
    """An inverse by doubling over 16 tokens loses everything here.

    da and db are small differences: rounding a and b to bfloat16 changes the exact ones by the factor that
    their tolerance is multiplied by.
    """
    case = Case("rwkv7", B=2, T=48, H=2, K=D, V=D, dtype=dtype, parallel=True, **options)
    x, want = cases.build(case), cases.expected(case)
    looser = 1.0
    if dtype == "bfloat16":
        rng = np.random.default_rng(1)
        rounded = {n: x.arrays[n] * (1 + rng.uniform(-(2.0**-9), 2.0**-9, x.arrays[n].shape)) for n in "ab"}
        moved = case.oracle(x._replace(arrays=x.arrays | rounded)).grads
        looser = max(cases.error_of(moved[n], want.grads[n]) for n in "ab") / (2.0**-9 / np.sqrt(3))
        assert looser < 6
    judge(case, cases.run(case, "triton"), want, looser)


@each_op
@pytest.mark.parametrize(
    "options",
    [dict(decay="mixed"), dict(K=128, V=128, **BOUNDED), dict(decay="mild", exponents=(-20,))],
    ids=str,
)
def test_tf32_by_request(op, options):
    """As exact as TF32 can be, and no more: with less than the tolerance of float32 it would not be TF32."""
    case = Case(op, **(dict(B=2, T=200, H=2, K=64, V=64) | options))
    got, want = cases.run(case, "triton", precision="tensorfloat32"), cases.expected(case)
    cases.compare(case, got, want, places.TF32)
    errors = case.errors(got, want, places.RECURRENCE[places.TRITON_GPU]["float32"])
    assert errors["o"][0] > errors["o"][1] and errors["dv"][0] > errors["dv"][1], errors


@each_op
@pytest.mark.parametrize(
    "options",
    [
        dict(T=1024),
        dict(T=600, decay="mixed"),
        dict(T=1024, K=128, V=128),
        dict(T=592, K=16, V=16, dtype="float32", **BOUNDED),
        dict(T=1024, layout="segments", lengths=(255, 1, 256, 100, 412)),
    ],
)
def test_splits(op, options):
    """Against the oracle, and against the same call by programs that each take all tokens."""
    if op == "rwkv6" and options.get("K") == 128:
        pytest.skip("the kernels of the other sizes")
    case = Case(op, **(dict(B=1, H=2, K=64, V=64, dtype="bfloat16") | options))
    assert variants.num_splits(case) > 1
    split, want = cases.run(case, "triton"), cases.expected(case)
    with variants.forced("no splits"):
        whole = cases.run(case, "triton")
    judge(case, split, want)
    judge(case, whole, want)
    judge(case, split, jax.tree.map(lambda x: np.asarray(x, np.float64), whole))
    judge(case, Results(cases.outputs(case, "triton"), {}), want)  # another program


SMALL = dict(B=2, T=48, H=2, K=64, V=64, dtype="bfloat16")
TWICE = [
    *(("triton", Case(op, **SMALL), {}) for op in OPS),
    *(("triton", Case(op, **SMALL | dict(B=1, T=1024)), {}) for op in OPS),
    *(("triton", Case(op, **SMALL | dict(T=40, K=128, V=128)), {}) for op in OPS),
    *(
        (name, Case(op, 4, 300, 8, 64, 64, dtype="bfloat16"), dict(form="fused_recurrent"))
        for op in OPS
        for name in ("triton", "pallas")
    ),
    *(("triton", MixCase(4, 500, C, 6, dtype="bfloat16"), {}) for C in (1024, 4096)),
]  # fmt: skip


@pytest.mark.parametrize("implementation, case, options", TWICE)
def test_two_runs_give_the_same_bits(implementation, case, options):
    """Larger calls than those of tests/conformance."""
    one, two = (cases.run(case, implementation, **options) for _ in range(2))
    cases.assert_same_bits(one, two)


@each_op
@pytest.mark.parametrize("implementation", ["triton", "pallas"])
def test_the_recurrent_kernels_on_a_large_grid(op, implementation):
    """Every program writes its part; compared with `jax.lax.scan` in float32."""
    case = Case(op, B=4, T=512, H=32, K=64, V=64)
    got, want = (cases.run(case, name, form="fused_recurrent") for name in (implementation, "reference"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_less(np.linalg.norm(a - b), 2e-6 * np.linalg.norm(b))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norm_shift_mix_is_as_good_as_plain_jax(dtype):
    case = MixCase(2, 300, 1024, 6, dtype=dtype)
    ours, plain = (case.errors(cases.run(case, name), cases.expected(case)) for name in ("triton", "xla"))
    assert not {n: (ours[n], plain[n]) for n in ours if ours[n][0] > 1.2 * plain[n][0] + 1e-7}, (ours, plain)


@each_op
@pytest.mark.parametrize("D", [64, 128])
def test_a_loop_over_layers_gives_the_bits_of_the_layers(op, D):
    """In the loop gradients have memory of their own, outside of it they take that of states."""
    x = cases.build(Case(op, B=2, T=128, H=2, K=D, V=D, dtype="bfloat16", **BOUNDED)).arrays
    layers = 3
    stacked = {name: jnp.stack([array] * layers) for name, array in x.items() if name in ("r", "k", "w")}

    def layer(v, own):
        return cases.call(op, {**x, **own, "v": v}, implementation="triton", lower_bound=-0.61)["o"]

    def in_loop(v, stacked):
        return jnp.sum(jax.lax.scan(lambda v, own: (layer(v, own), None), v, stacked)[0])

    def one_by_one(v, stacked):
        for i in range(layers):
            v = layer(v, {name: array[i] for name, array in stacked.items()})
        return jnp.sum(v)

    got, want = (jax.jit(jax.grad(f, (0, 1)))(x["v"], stacked) for f in (in_loop, one_by_one))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@each_op
def test_gradient_under_checkpoint_with_the_policy(op):
    case = Case(op, **SMALL)
    x, want = cases.build(case), cases.expected(case)

    def loss(arrays, policy):
        f = functools.partial(cases.call, op, implementation="triton")
        got = f(arrays) if policy is None else jax.checkpoint(f, policy=policy)(arrays)
        wide = lambda a: jnp.asarray(a).astype(jnp.float32)
        return sum(jnp.sum(wide(got[name]) * wide(c)) for name, c in x.cotangents.items())

    policies = (None, remat_policy())
    plain, again = (
        jax.device_get(jax.jit(jax.grad(functools.partial(loss, policy=policy)))(x.arrays))
        for policy in policies
    )
    cases.assert_same_bits(plain, again)
    judge(case, Results({}, again), want)


def _hash(start: int, T: int, H: int, D: int, seed: int) -> jax.Array:
    """Numbers in [-1, 1) by a token's position, so that any part of a long sequence can be made alone."""
    t = (jnp.arange(T, dtype=jnp.uint32) + jnp.uint32(start))[None, :, None, None]
    c = jnp.arange(H * D, dtype=jnp.uint32).reshape(1, 1, H, D)
    x = (t * jnp.uint32(2654435761)) ^ (c * jnp.uint32(2246822519) + jnp.uint32(seed * 374761393))
    for shift, factor in ((15, 2146121005), (12, 2221713035)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x >> 8).astype(jnp.float32) * 2.0**-23 - 1.0


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _part(op: str, start: int, T: int, H: int, state: jax.Array, dht: jax.Array):
    """Ends of o and gradients, both ends of the state, for a part of a very long sequence."""
    D = 16
    make = lambda seed: _hash(start, T, H, D, seed).astype(jnp.bfloat16)
    w = (_hash(start, T, H, D, 4) - 1.0).astype(jnp.bfloat16) * 0.3
    arrays = {"r": make(1), "k": make(2), "v": make(3), "w": w, "initial_state": state}
    if op == "rwkv6":
        arrays["u"] = jnp.full((H, D), 0.5, jnp.bfloat16)
    else:  # |kk| = 1
        kk = jnp.where(make(5) >= 0, 0.25, -0.25).astype(jnp.bfloat16)
        arrays |= {"a": -kk, "b": kk * 0.5}
    got, pull = jax.vjp(lambda x: cases.call(op, x, implementation="triton"), arrays)
    (grads,) = pull({"o": make(6), "ht": dht})
    dh0, ends = grads.pop("initial_state"), lambda x: (x[:, :64], x[:, -64:])
    return ends(got["o"]), got["ht"], {name: ends(g) for name, g in grads.items() if g.ndim == 4}, dh0


def test_more_elements_than_32_bits_count():
    """2^31 + 2^26 elements, against two calls that need no 64-bit offsets."""
    if jax.local_devices()[0].memory_stats()["bytes_limit"] < 90e9:
        pytest.skip("needs 90 GB of GPU memory")
    H, cut, length = 128, 2**20 - 2**15, 2**20 + 2**15
    state, dht = jnp.full((1, H, 16, 16), 0.1), jnp.ones((1, H, 16, 16))
    same = np.testing.assert_array_equal
    # one after the other: each needs most of the memory; rwkv7 needs more, so rwkv6 fits in what it frees
    for op in ("rwkv7", "rwkv6"):
        o, ht, grads, dh0 = jax.device_get(_part(op, 0, length, H, state, dht))
        _, middle, _, _ = _part(op, 0, cut, H, state, dht)
        tail_o, tail_ht, tail_grads, tail_dh0 = _part(op, cut, length - cut, H, middle, dht)
        head_o, _, head_grads, head_dh0 = jax.device_get(_part(op, 0, cut, H, state, tail_dh0))
        assert np.isfinite(ht).all() and np.abs(np.asarray(o[1], np.float32)).max() > 0.1
        same(o[0], head_o[0])
        same(o[1], tail_o[1])
        same(ht, tail_ht)
        same(dh0, head_dh0)
        for name, (first, last) in grads.items():
            same(first, head_grads[name][0], err_msg=name)
            same(last, tail_grads[name][1], err_msg=name)
