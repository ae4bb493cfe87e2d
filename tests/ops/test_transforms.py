"""The recurrences under jit, vmap, checkpoint, scan and donation; forward mode and second derivatives."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, tiers
from harness.cases import INPUTS, OPS, Case, Results
from harness.tiers import each_implementation, each_op

import fla_jax

IMPLEMENTATIONS = ("xla", "reference")
SMALL = dict(B=2, T=9, H=2, K=4, V=3)
LAYOUTS = {
    "batch": {},
    "segments": dict(layout="segments", lengths=(3, 1, 5)),
    "packed": dict(B=1, layout="packed", lengths=(4, 0, 5)),
}


def _loss(op, implementation, x: cases.Inputs, **options):
    """A scalar whose cotangents of o and of the final state depend on their values."""

    def loss(arrays):
        got = cases.call(op, arrays, x.layout, implementation=implementation, **options)
        return jnp.sum(jnp.sin(got["o"]) * x.cotangents["o"]) + jnp.sum(
            jnp.cos(got["ht"]) * x.cotangents["ht"]
        )

    return loss


def _grads_of_loss(case: Case, x: cases.Inputs) -> dict[str, np.ndarray]:
    """Of `_loss`, by the oracle."""
    made = case.oracle(x).outputs
    cotangents = dict(o=np.cos(made["o"]) * x.cotangents["o"], ht=-np.sin(made["ht"]) * x.cotangents["ht"])
    return case.oracle(x._replace(cotangents=cotangents)).grads


def _numerical(f, x: cases.Inputs, modes):
    """Compares with central differences, in float64."""
    arrays = tuple(jnp.asarray(a) for a in x.arrays.values())
    f = jax.jit(lambda *a, f=f: f(dict(zip(x.arrays, a))))
    chex.assert_numerical_grads(f, arrays, order=1, modes=modes, atol=1e-7, rtol=1e-5, eps=1e-5)


@each_implementation
@each_op
def test_second_derivatives_are_right(op, implementation):
    """The rules are plain JAX and can be differentiated again, in either mode."""
    with jax.enable_x64(True):
        x = cases.build(Case(op, B=1, T=5, H=1, K=2, V=2, dtype="float64"))
        grad = jax.grad(_loss(op, implementation, x))
        f = lambda arrays: sum(jnp.sum(jnp.sin(g)) for g in grad(arrays).values())
        _numerical(f, x, ("fwd", "rev"))


# the reference differs from others in no argument's way of being batched but these, and no JAX from another
DIFFER = ("w", "u", "initial_state")
ONE = [
    tiers.mark((op, name, i), *(() if name in DIFFER and i == "xla" else (tiers.ONE_PYTHON, tiers.SLOW)))
    for i in IMPLEMENTATIONS
    for op in OPS
    for name in INPUTS[op]
    if i != "reference" or name in DIFFER
]


@pytest.mark.parametrize("op, name, implementation", ONE)
def test_vmap_over_one_argument(op, implementation, name):
    cases.check_vmap_over(Case(op, **SMALL), implementation, {name}, chunk_size=4)


@pytest.mark.parametrize("op, name, implementation", ONE)
def test_grad_of_vmap_over_one_argument(op, implementation, name):
    cases.check_grad_of_vmap(Case(op, **SMALL), name, 2e-6, implementation, chunk_size=4)


@each_op
@pytest.mark.parametrize("layout, name", [("segments", "segment_ids"), ("packed", "cu_seqlens")])
def test_vmap_over_the_layout(op, layout, name):
    cases.check_vmap_over(Case(op, **{**SMALL, **LAYOUTS[layout]}), "xla", {name}, chunk_size=4)


@each_implementation
@each_op
def test_vmap_of_grad_and_of_two_axes(op, implementation):
    case = Case(op, **{**SMALL, "T": 5, "B": 1})
    x = cases.build(case)
    w = {"w": x.arrays["w"]}
    grad = jax.grad(_loss(op, implementation, x))
    factors = np.array([[1, 2], [-1, 1]], np.float32)
    twice = {n: np.multiply.outer(factors, a) for n, a in x.arrays.items() if n != "w"}
    got = jax.device_get(jax.jit(jax.vmap(jax.vmap(lambda arrays: grad(arrays | w))))(twice))
    for i, j in np.ndindex(2, 2):
        arrays = {name: w["w"] if name == "w" else twice[name][i, j] for name in x.arrays}
        for name, g in _grads_of_loss(case, x._replace(arrays=arrays)).items():
            cases.assert_close(f"d{name}", got[name][i, j], g, 2e-5)


@each_implementation
@each_op
def test_repeated_calls_are_traced_once(op, implementation):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def f(arrays, ids):
        return cases.call(op, arrays, {"segment_ids": ids}, implementation=implementation)

    for seed in range(3):  # other values, other placement on the host: same shapes
        arrays = cases.build(Case(op, **SMALL, seed=seed)).arrays
        f(arrays if seed else jax.tree.map(jnp.asarray, arrays), np.full((2, 9), seed, np.int32))
    chex.clear_trace_counter()


@each_implementation
@each_op
def test_eager_calls_compile_once(op, implementation, caplog):
    """Outside jit a second call with the same shapes must find what the first one compiled."""
    x = jax.tree.map(jnp.asarray, cases.build(Case(op, **{**SMALL, "T": 2})))
    grad = jax.grad(_loss(op, implementation, x))
    grad(x.arrays)
    with jax.log_compiles():
        grad(x.arrays)
    messages = [r.getMessage() for r in caplog.records]
    assert not [m for m in messages if m.startswith("Finished XLA compilation")], messages


@each_implementation
@each_op
@pytest.mark.parametrize("policy", [None, fla_jax.remat_policy()], ids=["nothing", "policy"])
def test_checkpoint_changes_no_value(op, implementation, policy):
    case = Case(op, **SMALL)
    x, made = cases.build(case), cases.expected(case).outputs
    step = jax.checkpoint(_loss(op, implementation, x), policy=policy)
    value, got = jax.jit(jax.value_and_grad(step))(x.arrays)
    want = np.sum(np.sin(made["o"]) * x.cotangents["o"]) + np.sum(np.cos(made["ht"]) * x.cotangents["ht"])
    np.testing.assert_allclose(value, want, rtol=1e-4)
    for name, g in _grads_of_loss(case, x).items():
        cases.assert_close(f"d{name}", got[name], g, 2e-5)


@each_implementation
@each_op
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_scan_that_carries_the_state(op, implementation, form):
    """Three parts in a lax.scan are the whole sequence, gradients included."""
    case = Case(op, **{**SMALL, "T": 12})
    x, tokens = cases.build(case), cases.TOKENS[op]

    def whole(arrays):
        part = lambda a: jnp.moveaxis(jnp.reshape(a, (2, 3, 4, *a.shape[2:])), 1, 0)
        rest = {n: a for n, a in arrays.items() if n not in (*tokens, "initial_state")}

        def step(state, now):
            given = {**now, **rest, "initial_state": state}
            got = cases.call(op, given, form=form, implementation=implementation)
            return got["ht"], got["o"]

        ht, o = jax.lax.scan(step, arrays["initial_state"], {n: part(arrays[n]) for n in tokens})
        return {"o": jnp.moveaxis(o, 0, 1).reshape(x.cotangents["o"].shape), "ht": ht}

    def run(arrays):
        outputs, pull = jax.vjp(whole, arrays)
        return Results(outputs, pull(jax.tree.map(jnp.asarray, x.cotangents))[0])

    cases.compare(case, jax.device_get(jax.jit(run)(x.arrays)))


@each_implementation
@each_op
def test_donated_state(op, implementation):
    case = Case(op, **{**SMALL, "T": 1})
    arrays = dict(cases.build(case).arrays)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, arrays):
        given = {**arrays, "initial_state": state}
        return cases.call(op, given, form="fused_recurrent", implementation=implementation)

    state = jnp.array(arrays.pop("initial_state"))
    got = step(state, arrays)
    assert state.is_deleted()
    cases.compare(case, Results(got, {}))


@each_implementation
@each_op
def test_forward_mode_is_refused(op, implementation):
    x = cases.build(Case(op, **SMALL)).arrays
    f = lambda arrays: cases.call(op, arrays, implementation=implementation)
    for run in (lambda: jax.jvp(f, (x,), (x,)), lambda: jax.jacfwd(f)(x)):
        with pytest.raises(TypeError, match="forward-mode"):
            run()
    with pytest.raises(TypeError, match=rf"chunk_{op} can be differentiated in reverse mode only"):
        jax.linearize(f, x)  # at once, not when the linear function is called
    # forward over reverse stays possible, also if each concerns other arrays
    jax.linearize(jax.grad(lambda arrays: jnp.sum(f(arrays)["o"])), x)
    loss = lambda w, r: jnp.sum(f(x | {"w": w, "r": r})["o"])
    jax.linearize(lambda r: jax.grad(loss)(x["w"], r), x["r"])


@each_implementation
@each_op
def test_vmap_over_nothing(op, implementation):
    x = cases.build(Case(op, **SMALL)).arrays
    v = jnp.zeros((0, *x["v"].shape))
    f = lambda v: cases.call(op, x | {"v": v}, implementation=implementation)["o"]
    assert jax.vmap(f)(v).shape == v.shape
    assert jax.vmap(jax.grad(lambda v: jnp.sum(f(v))))(v).shape == v.shape
