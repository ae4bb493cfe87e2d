"""The ops under jit, vmap, checkpoint, scan, donation, and what they say to forward mode and to a second
derivative.
"""

import functools

import cases
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, INPUTS, OPS, Case, Outputs

each_op = pytest.mark.parametrize("op", OPS)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
SMALL = dict(B=2, T=9, H=2, K=4, V=3, decay="smooth")
LAYOUTS = {
    "rows": {},
    "segments": dict(layout="segments", lengths=(3, 1, 5)),
    "packed": dict(B=1, layout="packed", lengths=(4, 0, 5)),
}


def _loss(op, implementation, x: cases.Inputs, **options):
    """A scalar that feeds back non-trivial cotangents of o and of the final state."""

    def loss(arrays):
        o, final = cases.call(
            op,
            arrays,
            implementation=implementation,
            segment_ids=x.segment_ids,
            cu_seqlens=x.cu_seqlens,
            **options,
        )
        return jnp.sum(jnp.sin(o) * x.do) + jnp.sum(jnp.cos(final) * x.ds)

    return loss


@each_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_by_finite_differences(op, layout, implementation="xla"):
    with jax.enable_x64(True):
        x = cases.build(Case(op, **{**SMALL, "K": 2, "V": 2, "T": 5, "H": 1}, dtype="float64"))
        if layout == "segments":
            x = x._replace(segment_ids=jnp.array([[1, 1, 2, 3, 3]] * 2))
        if layout == "packed":
            one = {
                name: a[:1] if a.ndim == 4 and name != "initial_state" else a for name, a in x.arrays.items()
            }
            x = x._replace(arrays=one, do=x.do[:1], cu_seqlens=jnp.array([0, 2, 5]))
        loss = _loss(op, implementation, x, scale=0.5, chunk_size=2)
        f = jax.jit(lambda *a: loss(dict(zip(x.arrays, a))))
        chex.assert_numerical_grads(
            f,
            tuple(jnp.asarray(a) for a in x.arrays.values()),
            order=1,
            modes=("rev",),
            atol=1e-7,
            rtol=1e-5,
            eps=1e-5,
        )


def _take(x: cases.Inputs, i: int, mapped: frozenset[str]) -> cases.Inputs:
    pick = lambda name, a: a[i] if name in mapped and a is not None else a
    return cases.Inputs(
        {n: pick(n, a) for n, a in x.arrays.items()}, *(pick(n, a) for n, a in zip(x._fields[1:], x[1:]))
    )


def _stacked(case: Case, mapped: frozenset[str]):
    """Inputs of which those in ``mapped`` are two, and the axes for `jax.vmap`."""
    x = cases.build(case)
    others = [cases.build(Case(**{**vars(case), "seed": seed})) for seed in (0, 1)]
    if x.segment_ids is not None:
        others[1] = others[1]._replace(segment_ids=np.flip(x.segment_ids, 0))
    if x.cu_seqlens is not None:
        others[1] = others[1]._replace(cu_seqlens=np.array([0, 0, 7, case.T], np.int32))
    choose = lambda name, get: np.stack([get(y) for y in others]) if name in mapped else get(others[0])
    stacked = cases.Inputs(
        {name: choose(name, lambda y, name=name: y.arrays[name]) for name in x.arrays},
        *(None if getattr(x, f) is None else choose(f, lambda y, f=f: getattr(y, f)) for f in x._fields[1:]),
    )
    axis = lambda name: 0 if name in mapped else None
    axes = (
        {name: axis(name) for name in x.arrays},
        *(None if getattr(x, f) is None else axis(f) for f in x._fields[1:]),
    )
    return stacked, axes


def _check_vmap(op, implementation, case: Case, mapped: frozenset[str]):
    """vmap of outputs and vjp over the arguments in ``mapped``, against the oracle on each slice."""
    stacked, axes = _stacked(case, mapped)
    run = cases.runner(op, implementation, chunk_size=4)
    got = jax.device_get(jax.jit(jax.vmap(run, in_axes=axes))(*stacked))
    for i in range(2):
        y = _take(stacked, i, mapped)
        (o, final), grads = cases.ask_oracle(op, y)
        cases.compare(jax.tree.map(lambda a, i=i: a[i], got), Outputs(o, final, grads))


# the reference differs from others in no argument's way of being batched but these, and no JAX from another
DIFFER = ("w", "u", "initial_state")
ONE = [
    pytest.param(op, name, i, marks=[] if name in DIFFER else [pytest.mark.one_python])
    for i in IMPLEMENTATIONS
    for op in OPS
    for name in INPUTS[op]
    if i != "reference" or name in DIFFER
]


@pytest.mark.parametrize("op, name, implementation", ONE)
def test_vmap_over_one_argument(op, implementation, name):
    _check_vmap(op, implementation, Case(op, **SMALL), frozenset([name]))


@pytest.mark.parametrize("op, name, implementation", ONE)
def test_grad_of_vmap_over_one_argument(op, implementation, name):
    """Of a loss of both results: what an argument shared by the slices gets is the sum of theirs."""
    mapped = frozenset([name])
    stacked, (axes, *_) = _stacked(Case(op, **SMALL), mapped)

    @jax.jit
    def one(arrays):
        o, final = cases.call(op, arrays, implementation=implementation, chunk_size=4)
        return jnp.sum(o * stacked.do) + jnp.sum(final * stacked.ds)

    total = lambda arrays: jnp.sum(jax.vmap(one, (axes,))(arrays))
    slices = [cases.ask_oracle(op, _take(stacked, i, mapped))[1] for i in range(2)]
    for got in (jax.grad(total)(stacked.arrays), jax.jit(jax.grad(jax.jit(total)))(stacked.arrays)):
        for of, grad in got.items():
            want = np.stack([s[of] for s in slices])
            want = want if of in mapped else want.sum(0)
            cases.assert_close(f"d{of}", grad, want, 2e-6)


@each_op
@pytest.mark.parametrize("layout", ["segments", "packed"])
def test_vmap_over_the_layout(op, layout, implementation="xla"):
    case = Case(op, **{**SMALL, **LAYOUTS[layout]})
    _check_vmap(
        op, implementation, case, frozenset(["segment_ids" if layout == "segments" else "cu_seqlens"])
    )


@each_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_over_everything(op, layout, implementation="xla"):
    case = Case(op, **{**SMALL, **LAYOUTS[layout]})
    _check_vmap(op, implementation, case, frozenset([*INPUTS[op], "do", "ds", "segment_ids", "cu_seqlens"]))


@each_implementation
@each_op
def test_vmap_of_grad_and_of_two_axes(op, implementation):
    x = cases.build(Case(op, **{**SMALL, "T": 5, "B": 1}))
    grad = jax.grad(_loss(op, implementation, x))
    twice = jax.tree.map(
        lambda a: np.stack([np.stack([a, 2 * a]), np.stack([-a, a])]) if a.ndim else a,
        {k: v for k, v in x.arrays.items() if k != "w"},
    )
    f = lambda arrays: grad({**arrays, "w": x.arrays["w"]})
    got = jax.device_get(jax.jit(jax.vmap(jax.vmap(f)))(twice))
    for i, j in np.ndindex(2, 2):
        arrays = {**jax.tree.map(lambda a, i=i, j=j: a[i, j], twice), "w": x.arrays["w"]}
        arrays = {name: arrays[name] for name in x.arrays}
        (o, final), _ = cases.ask_oracle(op, x._replace(arrays=arrays))
        _, want = cases.ask_oracle(
            op, x._replace(arrays=arrays, do=np.cos(o) * x.do, ds=-np.sin(final) * x.ds)
        )
        for name, g in want.items():
            cases.assert_close(f"d{name}", got[name][i, j], g, 2e-5)


@each_implementation
@each_op
def test_repeated_calls_are_traced_once(op, implementation):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def f(arrays, ids):
        return cases.call(op, arrays, implementation=implementation, segment_ids=ids)

    x = cases.build(Case(op, **SMALL))
    for seed in range(3):  # other values, other placement on the host: same shapes
        y = cases.build(Case(op, **SMALL, seed=seed))
        f(y.arrays if seed else jax.tree.map(jnp.asarray, x.arrays), np.full((2, 9), seed, np.int32))
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
    compiled = [
        r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")
    ]
    assert not compiled, compiled


@each_implementation
@each_op
def test_checkpoint_changes_no_value(op, implementation):
    x = cases.build(Case(op, **SMALL))
    run = jax.jit(jax.value_and_grad(jax.checkpoint(_loss(op, implementation, x))))
    (o, final), _ = cases.ask_oracle(op, x)
    _, want = cases.ask_oracle(op, x._replace(do=np.cos(o) * x.do, ds=-np.sin(final) * x.ds))
    value, got = run(x.arrays)
    np.testing.assert_allclose(value, np.sum(np.sin(o) * x.do) + np.sum(np.cos(final) * x.ds), rtol=1e-4)
    for name, g in want.items():
        cases.assert_close(f"d{name}", got[name], g, 2e-5)


@each_implementation
@each_op
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_scan_that_carries_the_state(op, implementation, form):
    """Three pieces in a lax.scan are the whole sequence, gradients included."""
    case = Case(op, **{**SMALL, "T": 12})
    x = cases.build(case)
    tokens = cases.TOKENS[op]

    def whole(arrays):
        pieces = {
            n: jnp.moveaxis(jnp.reshape(arrays[n], (2, 3, 4, *arrays[n].shape[2:])), 1, 0) for n in tokens
        }
        rest = {n: a for n, a in arrays.items() if n not in (*tokens, "initial_state")}

        def step(state, piece):
            o, state = cases.call(
                op, {**piece, **rest, "initial_state": state}, form, implementation=implementation
            )
            return state, o

        final, o = jax.lax.scan(step, arrays["initial_state"], pieces)
        return jnp.moveaxis(o, 0, 1).reshape(x.do.shape), final

    def run(arrays):
        (o, final), pull = jax.vjp(whole, arrays)
        return Outputs(o, final, pull((jnp.asarray(x.do), jnp.asarray(x.ds)))[0])

    cases.compare(jax.device_get(jax.jit(run)(x.arrays)), cases.expected(case))


@each_implementation
@each_op
def test_donated_state(op, implementation):
    """Decoding: the state's buffer is handed over and comes back as the new state."""
    case = Case(op, **{**SMALL, "T": 1})
    x = cases.build(case)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, arrays):
        return cases.call(
            op, {**arrays, "initial_state": state}, "fused_recurrent", implementation=implementation
        )

    state = jnp.array(x.arrays["initial_state"])
    o, new = step(state, {n: a for n, a in x.arrays.items() if n != "initial_state"})
    assert state.is_deleted()
    cases.assert_close("o", o, cases.expected(case).o, 3e-6)
    cases.assert_close("final state", new, cases.expected(case).final, 3e-6)


@each_implementation
@each_op
def test_forward_mode_is_refused(op, implementation):
    x = cases.build(Case(op, **SMALL))
    f = lambda arrays: cases.call(op, arrays, implementation=implementation)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (x.arrays,), (x.arrays,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(f)(x.arrays)
    with pytest.raises(TypeError, match=rf"chunk_{op} can be differentiated in reverse mode only"):
        jax.linearize(f, x.arrays)  # at once, not when the linear function is called
    # forward over reverse stays possible
    jax.linearize(jax.grad(lambda arrays: jnp.sum(f(arrays)[0])), x.arrays)


@each_implementation
@each_op
def test_second_derivatives_are_right(op, implementation):
    """The rules are plain JAX, so they can be differentiated again, in either mode."""
    with jax.enable_x64(True):
        x = cases.build(Case(op, B=1, T=5, H=1, K=2, V=2, dtype="float64"))
        grad = jax.grad(_loss(op, implementation, x))
        f = jax.jit(lambda *a: sum(jnp.sum(jnp.sin(g)) for g in grad(dict(zip(x.arrays, a))).values()))
        chex.assert_numerical_grads(
            f,
            tuple(jnp.asarray(a) for a in x.arrays.values()),
            order=1,
            modes=("fwd", "rev"),
            atol=1e-7,
            rtol=1e-5,
            eps=1e-5,
        )
