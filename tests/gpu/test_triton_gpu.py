"""The chunked Triton kernels on an NVIDIA GPU against the float64 oracle: ``python -m pytest tests/gpu``.

Errors are relative, plain Frobenius norms (nothing is forgiven for the rounding of 16-bit results); dw is
judged in every channel as well. What a kernel is compiled for (heads H, K, V, dtype, mode, layout, whole
chunks or not) is kept few: each new combination costs seconds.
"""

import dataclasses
import functools
import os

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPS, Case, Outputs, Tolerances

from fla_jax.core.names import remat_policy
from fla_jax.pallas.run import triton as run

# several processes on one GPU (pytest -n 8): read when JAX first looks for it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if jax.default_backend() != "gpu":
    pytest.skip(
        "no NVIDIA GPU is visible to JAX: tests/interpret and tests/compile check the kernels without one",
        allow_module_level=True,
    )
if run.INTERPRET:
    pytest.skip(
        "TRITON_INTERPRET is set: the kernels would run in Triton's interpreter", allow_module_level=True
    )

TOLERANCES = {
    "bfloat16": Tolerances(o=4e-3, state=4e-3, grad=6e-3, dw=1e-2),
    # products have bfloat16 operands: three bits of these inputs are rounded away first, which bfloat16
    # inputs do not have
    "float16": Tolerances(o=6e-3, state=6e-3, grad=9e-3, dw=1.5e-2),
    "float32": Tolerances(o=1e-5, state=1e-5, grad=1e-5, dw=1e-5),
}
CHANNEL = 3  # times the tolerance of all dw: that of its worst channel, which shows what strong decays lose
# largest error by op, dtype and result: printed at the end
WORST: dict[tuple[str, str, str], tuple[float, str]] = {}
BOUNDED = dict(decay="layer", lower_bound=-0.61)
each_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture(scope="module", autouse=True)
def summary():
    yield
    for (op, dtype, name), (error, where) in sorted(WORST.items()):
        print(f"largest error {op} {dtype:8} {name:14} {error:.1e}  {where}")


def relative(got, want, axes=None) -> float:
    """Largest error over ``axes`` (all) relative to the norm, apart from underflow of the result's dtype;
    where the norm is zero only zero will do.
    """
    tiny = 0.5 * float(jnp.finfo(got.dtype).smallest_subnormal) if got.dtype.itemsize == 2 else 0.0
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    error = np.maximum(np.abs(got - want) - tiny, 0)
    error, norm = np.sqrt(np.sum(error**2, axes)), np.sqrt(np.sum(want**2, axes))
    return float(
        np.max(
            np.where(norm > 0, error / np.where(norm > 0, norm, 1), np.where(error == 0, 0, np.inf)),
            initial=0,
        )
    )


def judge(case: Case, got: Outputs, want: Outputs, where: str = "", looser: float = 1.0) -> None:
    """Compares everything and says all that is wrong at once; ``looser`` multiplies the tolerance of da and
    db.
    """
    tol = TOLERANCES[case.dtype]
    found = {
        "o": (relative(got.o, want.o), tol.o),
        "final state": (relative(got.final, want.final), tol.state),
    }
    assert got.grads.keys() == want.grads.keys()
    for name, g in got.grads.items():
        found[f"d{name}"] = (
            relative(g, want.grads[name]),
            tol.dw if name == "w" else tol.grad * (looser if name in "ab" else 1.0),
        )
    if case.T >= 15:  # fewer numbers have no norm to speak of
        found["dw by channel"] = relative(got.grads["w"], want.grads["w"], axes=(1,)), CHANNEL * tol.dw
    where = where or f"T {case.T} K {case.K} V {case.V} {case.decay} {case.layout}"
    for name, (error, _) in found.items():
        key = case.op, case.dtype, name
        WORST[key] = max(WORST.get(key, (0.0, "")), (error, where))
    wrong = {
        name: f"{error:.2e} > {limit:.0e}" for name, (error, limit) in found.items() if not error <= limit
    }
    assert not wrong, wrong


def check(op: str, **options) -> None:
    case = Case(op, **(dict(B=2, T=48, H=2, K=64, V=64, dtype="bfloat16") | options))
    judge(case, cases.run(case, "triton"), cases.expected(case))


HEADS = [("bfloat16", 64), ("float16", 32), ("float32", 16)]  # small ones compile faster


@each_op
@pytest.mark.parametrize("dtype, D", HEADS)
@pytest.mark.parametrize("decay", cases.DECAYS)
def test_any_decay(op, decay, dtype, D):
    check(op, decay=decay, dtype=dtype, K=D, V=D, scale=0.7)


@each_op
@pytest.mark.parametrize("dtype, D", [HEADS[0], HEADS[2]])
def test_bounded_decay(op, dtype, D):
    check(op, dtype=dtype, K=D, V=D, **BOUNDED)
    check(op, dtype=dtype, K=D, V=D, decay="none", lower_bound=-0.61)


@each_op
@pytest.mark.parametrize("T", [1, 15, 16, 17, 100])
def test_lengths(op, T):
    check(op, B=8, T=T)


SIZES = [(16, 16), (40, 40), (128, 128), (256, 256), (32, 72), (72, 32)]


@each_op
@pytest.mark.parametrize(
    "K, V, dtype", [(*s, "bfloat16") for s in SIZES] + [(64, 64, "float32"), (128, 128, "float32")]
)
def test_head_sizes(op, K, V, dtype):
    check(op, T=40, K=K, V=V, dtype=dtype)
    check(op, T=40, K=K, V=V, dtype=dtype, decay="mixed")


# RWKV-7's large heads have kernels of their own
@pytest.mark.parametrize("op, K", [("rwkv6", 64), ("rwkv7", 64), ("rwkv7", 128)])
@pytest.mark.parametrize(
    "layout, lengths", [("segments", (5, 9, 1, 17, 16)), ("packed", (0, 7, 16, 0, 1, 24, 0))]
)
def test_layouts(op, layout, lengths, K):
    for decay in ("smooth", "mixed"):
        check(op, T=48, K=K, V=K, decay=decay, layout=layout, lengths=lengths)


@pytest.mark.parametrize("dtype, D", [HEADS[0], HEADS[2]])
@pytest.mark.parametrize("options", [dict(decay="weak"), dict(decay="none", lower_bound=-0.61)])
def test_nearly_parallel_keys_with_gate_one(options, dtype, D):
    """An inverse by doubling over 16 rows loses everything here.

    The state has next to nothing along kk, so that da and db are small differences: rounding a and b once to
    bfloat16 already changes the exact da and db by five times as much. Their tolerance in bfloat16 is larger
    by that factor, computed here; in float32 it is as anywhere.
    """
    case = Case("rwkv7", B=2, T=48, H=2, K=D, V=D, dtype=dtype, parallel=True, **options)
    x, want = cases.build(case), cases.expected(case)
    looser = 1.0
    if dtype == "bfloat16":
        rng = np.random.default_rng(1)
        rounded = {
            n: a * (1 + rng.uniform(-(2.0**-9), 2.0**-9, a.shape)) if n in "ab" else a
            for n, a in x.arrays.items()
        }
        _, moved = cases.ask_oracle("rwkv7", x._replace(arrays=rounded))
        looser = max(relative(moved[n], want.grads[n]) for n in "ab") / (2.0**-9 / np.sqrt(3))
        assert looser < 6
    judge(case, cases.run(case, "triton"), want, "parallel kk", looser)


def unsplit(case: Case, monkeypatch) -> Outputs:
    """The same call by programs that walk whole rows."""
    from fla_jax.pallas.plan import chunked

    with monkeypatch.context() as patch:
        patch.setattr(chunked, "FEW", {})
        jax.clear_caches()
        cases.runner.cache_clear()
        out = cases.run(case, "triton")
    jax.clear_caches()
    cases.runner.cache_clear()
    return out


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
def test_rows_cut_into_stretches(op, options, monkeypatch):
    from fla_jax.pallas.plan import chunked

    if op == "rwkv6" and options.get("K") == 128:
        pytest.skip("the kernels of the other sizes")

    case = Case(op, **(dict(B=1, H=2, K=64, V=64, dtype="bfloat16") | options))
    assert chunked.stretches_of(cases.call_of(case)) > 1
    cut, whole, want = cases.run(case, "triton"), unsplit(case, monkeypatch), cases.expected(case)
    judge(case, cut, want)
    judge(case, whole, want)
    judge(case, cut, jax.tree.map(lambda x: np.asarray(x, np.float64), whole), "cut against whole rows")


@each_op
@pytest.mark.parametrize("options", [dict(), dict(B=1, T=1024), dict(T=40, K=128, V=128)])
def test_two_runs_give_the_same_bits(op, options):
    case = Case(op, **(dict(B=2, T=48, H=2, K=64, V=64, dtype="bfloat16") | options))
    first, second = cases.run(case, "triton"), cases.run(case, "triton")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8)), first, second
    )


@each_op
def test_vmap(op):
    """Every argument mapped but u: folded into the rows."""
    case = Case(op, B=2, T=48, H=2, K=64, V=64, dtype="bfloat16")
    each = [dataclasses.replace(case, seed=seed) for seed in range(3)]
    inputs = [cases.build(one) for one in each]
    x = jax.tree.map(
        lambda *leaves: jnp.stack(leaves),
        *[i._replace(arrays={n: a for n, a in i.arrays.items() if n != "u"}) for i in inputs],
    )
    u = {"u": jnp.asarray(inputs[0].arrays["u"])} if op == "rwkv6" else {}
    run = cases.runner(op, "triton", **cases.options_of(case))
    got = jax.device_get(
        jax.jit(jax.vmap(lambda arrays, do, ds: run({**arrays, **u}, do, ds)))(x.arrays, x.do, x.ds)
    )
    for i, one in enumerate(inputs):
        arrays = {
            name: inputs[0].arrays["u"] if name == "u" else one.arrays[name] for name in cases.INPUTS[op]
        }
        (o, final), grads = cases.ask_oracle(op, one._replace(arrays=arrays))
        judge(case, jax.tree.map(lambda leaf, i=i: leaf[i], got), Outputs(o, final, grads), "vmap")


@each_op
def test_gradient_under_checkpoint_with_the_policy(op):
    case = Case(op, B=2, T=48, H=2, K=64, V=64, dtype="bfloat16")
    x = cases.build(case)

    def loss(arrays, policy):
        f = functools.partial(cases.call, op, implementation="triton")
        o, final = f(arrays) if policy is None else jax.checkpoint(f, policy=policy)(arrays)
        return jnp.sum(o.astype(jnp.float32) * x.do.astype(jnp.float32)) + jnp.sum(final * x.ds)

    arrays = jax.tree.map(jnp.asarray, x.arrays)
    grads = [
        jax.device_get(jax.jit(jax.grad(functools.partial(loss, policy=policy)))(arrays))
        for policy in (None, remat_policy())
    ]
    jax.tree.map(np.testing.assert_array_equal, *grads)
    want = cases.expected(case)
    judge(case, Outputs(want.o, want.final, grads[1]), want, "checkpoint")


def _hash(start: int, T: int, H: int, D: int, seed: int) -> jax.Array:
    """Numbers in [-1, 1) that depend on a token's place, so that any stretch of a long row can be made by
    itself.
    """
    t = (jnp.arange(T, dtype=jnp.uint32) + jnp.uint32(start))[None, :, None, None]
    c = jnp.arange(H * D, dtype=jnp.uint32).reshape(1, 1, H, D)
    x = (t * jnp.uint32(2654435761)) ^ (c * jnp.uint32(2246822519) + jnp.uint32(seed * 374761393))
    for shift, factor in ((15, 2146121005), (12, 2221713035)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x >> 8).astype(jnp.float32) * 2.0**-23 - 1.0


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _stretch(op: str, start: int, T: int, H: int, state: jax.Array, ds: jax.Array):
    """Ends of o and of the gradients, final state and gradient of the initial one, for tokens ``start`` to
    ``start + T`` of a very long row.
    """
    D = 16
    make = lambda seed: _hash(start, T, H, D, seed).astype(jnp.bfloat16)
    arrays = {
        "r": make(1),
        "k": make(2),
        "v": make(3),
        "w": (_hash(start, T, H, D, 4) - 1.0).astype(jnp.bfloat16) * 0.3,
    }
    if op == "rwkv6":
        arrays["u"] = jnp.full((H, D), 0.5, jnp.bfloat16)
    else:  # |kk| = 1
        kk = jnp.where(make(5) >= 0, 0.25, -0.25).astype(jnp.bfloat16)
        arrays |= {"a": -kk, "b": kk * 0.5}
    (o, final), pull = jax.vjp(
        lambda x, s: cases.call(op, {**x, "initial_state": s}, implementation="triton"), arrays, state
    )
    grads, ds0 = pull((make(6), ds))
    ends = lambda x: (x[:, :64], x[:, -64:])
    return ends(o), final, {name: ends(g) for name, g in grads.items() if g.ndim == 4}, ds0


def test_more_elements_than_32_bits_count():
    """A row of 2^31 + 2^26 elements per array, against the same row in two calls, of which neither needs
    64-bit offsets.
    """
    if jax.local_devices()[0].memory_stats()["bytes_limit"] < 90e9:
        pytest.skip("needs 90 GB of GPU memory")
    H, cut, length = 128, 2**20 - 2**15, 2**20 + 2**15
    state, ds = jnp.full((1, H, 16, 16), 0.1), jnp.ones((1, H, 16, 16))
    same = np.testing.assert_array_equal
    for op in OPS:  # one after the other: they need most of the memory
        o, final, grads, ds0 = jax.device_get(_stretch(op, 0, length, H, state, ds))
        _, middle, _, _ = _stretch(op, 0, cut, H, state, ds)
        tail_o, tail_final, tail_grads, tail_ds0 = _stretch(op, cut, length - cut, H, middle, ds)
        head_o, _, head_grads, head_ds0 = jax.device_get(_stretch(op, 0, cut, H, state, tail_ds0))
        assert np.isfinite(final).all() and np.abs(np.asarray(o[1], np.float32)).max() > 0.1
        same(o[0], head_o[0])
        same(o[1], tail_o[1])
        same(final, tail_final)
        same(ds0, head_ds0)
        for name, (first, last) in grads.items():
            same(first, head_grads[name][0], err_msg=name)
            same(last, tail_grads[name][1], err_msg=name)
