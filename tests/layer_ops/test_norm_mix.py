"""Norm, token shift and mixes in plain JAX, against the float64 reference; transformations; errors."""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_ops import norm_mix_cases as cases
from layer_ops.norm_mix_cases import Case

from fla_jax.ops.layer import norm_shift_mix


def test_the_reference_by_finite_differences():
    """The reference's gradients, which everything else is compared with, of its own results."""
    case = Case(
        B=1, T=4, C=3, M=2, moves=True, normalised=True, lengths=(2, 2), dtype="float64", parameters="float64"
    )
    arrays, cotangents = cases.build(case)
    _, grads = cases.expected(case)
    weigh = lambda made: sum(np.sum(made[name] * np.asarray(ct)) for name, ct in cotangents.items())
    for name in grads:
        base = np.stack(arrays[name]) if name == "mixes" else arrays[name]
        direction = np.random.default_rng(1).standard_normal(base.shape)
        moved = [
            weigh(cases.reference.results(**arrays | {name: base + e * direction})) for e in (1e-6, -1e-6)
        ]
        want = np.sum(grads[name] * direction)
        assert abs((moved[0] - moved[1]) / 2e-6 - want) < 1e-7 * max(1, abs(want)), name


def layers_today(floats, dtype):
    """What flax's layer norm, the shift and the mixes give in ``dtype``, each operation rounded."""
    total = floats["x"] + floats["y"]
    norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, dtype=dtype)
    h = norm.apply({"params": {"scale": floats["scale"], "bias": floats["bias"]}}, total)
    difference = jnp.concatenate([floats["last"][:, None], h[:, :-1]], 1) - h
    mixed = tuple(h + difference * mu.astype(dtype) for mu in floats["mixes"])
    return {"mixed": mixed, "last": h[:, -1], "x": total}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_operation_by_operation(dtype):
    case = Case(B=2, T=64, C=96, dtype=dtype)
    arrays, cotangents = cases.build(case)
    floats = jax.tree.map(jnp.asarray, arrays)
    made, pull = jax.vjp(lambda floats: layers_today(floats, dtype), floats)
    grads = pull(cotangents | {"mixed": tuple(cotangents["mixed"])})[0]
    stack = lambda tree: {n: np.stack(a) if isinstance(a, tuple) else np.asarray(a) for n, a in tree.items()}
    theirs, ours = cases.errors(case, (stack(made), stack(grads))), cases.errors(case, cases.run(case, None))
    assert not {n: (ours[n], theirs[n]) for n in ours if ours[n] > 1.2 * theirs[n] + 1e-7}, (ours, theirs)


@pytest.mark.parametrize("cut", [1, 5])
def test_a_text_in_two_calls(cut):
    """The second call begins with the first one's ``last``."""
    case = Case(B=2, T=9, M=3)
    arrays, _ = cases.build(case)
    rest = {name: a for name, a in arrays.items() if name not in ("x", "y", "last")}
    whole = norm_shift_mix(**arrays)
    one = norm_shift_mix(arrays["x"][:, :cut], y=arrays["y"][:, :cut], last=arrays["last"], **rest)
    two = norm_shift_mix(arrays["x"][:, cut:], y=arrays["y"][:, cut:], last=one.last, **rest)
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), (one.mixed, one.x), (two.mixed, two.x))
    chex.assert_trees_all_close(joined, (whole.mixed, whole.x), rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(two.last, whole.last, rtol=1e-6, atol=1e-6)


def test_remat_gives_the_same():
    arrays, _ = cases.build(Case(B=1, T=5, C=6, M=2))
    f = lambda arrays: norm_shift_mix(**arrays)._replace(normalised=None)
    weigh = lambda f: lambda arrays: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(arrays)))
    plain, again = (jax.jit(jax.grad(weigh(g)))(arrays) for g in (f, jax.checkpoint(f)))
    chex.assert_trees_all_close(plain, again, rtol=1e-6)


def test_forward_mode_is_refused():
    x = jnp.ones((1, 2, 3))
    with pytest.raises(TypeError, match="norm_shift_mix can be differentiated in reverse mode only"):
        jax.jvp(lambda x: norm_shift_mix(x, [jnp.ones(3)]).mixed[0], (x,), (x,))


def test_rows_may_be_none():
    made = norm_shift_mix(jnp.ones((0, 2, 3)), [jnp.ones(3)], scale=jnp.ones(3), bias=jnp.ones(3))
    assert made.mixed[0].shape == (0, 2, 3) and made.last.shape == (0, 3)


x, c = np.ones((2, 3, 4), np.float32), np.ones(4, np.float32)
WRONG = {
    "rank": (dict(x=c), ValueError, r"x must have shape \[B, T, C\], got \[4\]"),
    "no token": (dict(x=x[:, :0]), ValueError, "x must hold at least one token"),
    "integers": (dict(x=x.astype(np.int32)), TypeError, "x must have a floating-point dtype, got int32"),
    "no mix": (dict(mixes=()), ValueError, "mixes must hold at least one array"),
    "mix": (dict(mixes=[c, c[:3]]), ValueError, r"mixes\[1\] must have shape \[C\] = \[4\], got \[3\]"),
    "y": (dict(y=x[:1]), ValueError, r"y must have shape \[B, T, C\] = \[2, 3, 4\], got \[1, 3, 4\]"),
    "dtype of y": (
        dict(y=x.astype(np.float16)),
        TypeError,
        "y must have the dtype of x, float32, got float16",
    ),
    "scale alone": (dict(scale=c), ValueError, "scale and bias of the norm must be given together"),
    "bias": (dict(scale=c, bias=x), ValueError, r"bias must have shape \[C\] = \[4\]"),
    "last": (dict(last=x), ValueError, r"last must have shape \[B, C\] = \[2, 4\]"),
    "moves": (dict(moves=x), ValueError, r"moves must have shape \[M, B, T, C\] = \[1, 2, 3, 4\]"),
    "segments": (
        dict(segment_ids=np.ones((3, 2), int)),
        ValueError,
        r"segment_ids must have shape \[B, T\] = \[2, 3\]",
    ),
    "segment dtype": (dict(segment_ids=np.ones((2, 3))), TypeError, "segment_ids must be an integer array"),
    "implementation": (dict(implementation="cuda"), ValueError, "implementation must be one of"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_errors_name_the_argument(wrong):
    arguments, error, message = wrong
    with pytest.raises(error, match=message):
        norm_shift_mix(**dict(x=x, mixes=[c]) | arguments)


@pytest.mark.parametrize("name", ["mixes", "scale", "last"])
def test_grad_of_vmap_over_one_argument(name):
    """Of a loss of all results, some of which do not see what is mapped: what the slices share gets the sum
    of what each of them gives it.
    """
    case = Case(B=1, T=5, C=6, M=2, y=False, normalised=True)
    (first, cotangents), (second, _) = (
        cases.build(dataclasses.replace(case, seed=seed)) for seed in range(2)
    )
    slices = first, first | {name: second[name]}
    axes = {argument: 0 if argument == name else None for argument in first}
    stacked = first | {name: jax.tree.map(lambda *a: np.stack(a), first[name], second[name])}
    weights = cotangents | {"mixed": tuple(cotangents["mixed"])}

    def loss(floats):
        made = norm_shift_mix(**floats, normalised=True)._asdict()
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, weights, {n: made[n] for n in weights})))

    got = jax.grad(lambda floats: jnp.sum(jax.vmap(loss, (axes,))(floats)))(stacked)
    ordered = [cotangents[result] for result in ("mixed", "last", "x", "normalised")]
    wanted = [
        cases.reference.gradients(cases.reference.results(**one), one["scale"], *ordered) for one in slices
    ]
    for argument, grad in got.items():
        want = np.stack([one[argument] for one in wanted])
        grad = np.stack(grad, 1) if argument == name == "mixes" else np.asarray(grad)
        want = want if argument == name else want.sum(0)
        np.testing.assert_array_less(np.linalg.norm(grad - want), 1e-6 * np.linalg.norm(want), argument)
