"""The one-product form of plain JAX, where a promise or the decays themselves allow it, against the float64
oracle.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPS, Case, Outputs, check

from fla_jax.ops import intra_safe

each_op = pytest.mark.parametrize("op", OPS)
PROMISE = dict(decay="layer", lower_bound=-0.61)


@each_op
def test_promise_in_float64(op):
    with jax.enable_x64(True):
        check(Case(op, T=37, dtype="float64", **PROMISE), "xla", tol=cases.DOUBLE)


@each_op
def test_pairs_without_a_decay_do_not_drown_the_rest(op):
    """dw comes from a difference of sums; the products of a row and a column with no decay between them, here
    a million times the others, are in neither.
    """
    x = cases.build(Case(op, B=1, T=32, H=2, K=8, V=8, **PROMISE))
    arrays, read = dict(x.arrays), 5 if op == "rwkv7" else 6
    arrays["k"], arrays["r"] = arrays["k"].copy(), arrays["r"].copy()
    arrays["k"][:, 5] *= 1e3
    arrays["r"][:, read] *= 1e3
    x = x._replace(arrays=arrays)
    _, want = cases.ask_oracle(op, x)
    got = cases.runner(op, "xla", lower_bound=-0.61)(*x)[2]["w"]
    assert np.abs(got - want["w"]).max() < 2e-6 * np.abs(want["w"]).max()


def _halves_of_two_kinds(op, seed):
    """T = 1024 makes four groups of chunks here: the decays of the first half are mild, those of the second
    are not.
    """
    x = cases.build(Case(op, B=2, T=1024, H=2, K=8, V=4, decay="layer", seed=seed))
    w = x.arrays["w"].copy()
    w[:, 512:] = cases.log_decay(np.random.default_rng(seed), "mixed", w[:, 512:].shape)
    return x._replace(arrays={**x.arrays, "w": w})


def _compare(op, x, got):
    (o, final), grads = cases.ask_oracle(op, x)
    cases.compare(jax.device_get(Outputs(*got)), Outputs(o, final, grads))


@each_op
def test_groups_go_by_their_own_decays(op):
    x = _halves_of_two_kinds(op, 0)
    run = cases.runner(op, "xla", chunk_size=8)
    assert "stablehlo.case" in run.lower(*x).as_text()
    _compare(op, x, run(*x))


@each_op
def test_mapped_groups_stay_one_branch(op):
    """One entry with strong decays everywhere, one with mild ones in its first half: no group may take the
    one-product form for both.
    """
    xs = [_halves_of_two_kinds(op, 0), cases.build(Case(op, B=2, T=1024, H=2, K=8, V=4, decay="mixed"))]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *xs)
    run = jax.jit(jax.vmap(cases.runner(op, "xla", chunk_size=8)))
    assert "stablehlo.case" in run.lower(*stacked).as_text()  # and not both branches and a selection
    got = run(*stacked)
    for i, x in enumerate(xs):
        _compare(op, x, jax.tree.map(lambda a, i=i: a[i], got))


def test_where_the_limit_is():
    """The weakest decay that still counts as mild keeps every tolerance; its sum over a chunk is the
    limit.
    """
    weakest = -intra_safe.LIMIT / 16
    for op in OPS:
        x = cases.build(Case(op, T=64, H=2, decay="layer"))
        x = x._replace(arrays={**x.arrays, "w": np.full_like(x.arrays["w"], weakest)})
        _compare(op, x, cases.runner(op, "xla", lower_bound=weakest)(*x))
