"""The one-product form of plain JAX, where a promise or the decays themselves allow it, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases
from harness.cases import OPS, Case

from fla_jax.ops import intra_safe

each_op = pytest.mark.parametrize("op", OPS)
PROMISE = dict(decay="layer", lower_bound=-0.61)


@each_op
def test_promise_in_float64(op):
    with jax.enable_x64(True):
        cases.check(Case(op, T=37, dtype="float64", **PROMISE), "xla", cases.DOUBLE)


@each_op
def test_pairs_without_a_decay_do_not_drown_the_rest(op):
    """dw comes from a difference of sums; products of a query and a key with no decay between them, here a
    million times the others, are in neither.
    """
    case = Case(op, B=1, T=32, H=2, K=8, V=8, **PROMISE)
    x = case.build()
    x.arrays["k"][:, 5] *= 1e3
    x.arrays["r"][:, 5 if op == "rwkv7" else 6] *= 1e3
    got, want = cases.run(case, "xla", x).grads["w"], case.oracle(x).grads["w"]
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


def two_kinds(op, seed):
    """T = 1024 makes four groups of chunks here: the decays of the first half are mild, those of the second
    are not.
    """
    x = Case(op, B=2, T=1024, H=2, K=8, V=4, decay="layer", seed=seed).build()
    second = x.arrays["w"][:, 512:]
    second[:] = cases.log_decay(np.random.default_rng(seed), "mixed", second.shape)
    return x


def compare(op, x, got):
    case = Case(op)
    cases.compare(case, jax.device_get(got), case.oracle(x))


@each_op
def test_groups_go_by_their_own_decays(op):
    x, run = two_kinds(op, 0), cases.runner(op, "xla", chunk_size=8)
    assert "stablehlo.case" in run.lower(*x).as_text()
    compare(op, x, run(*x))


@each_op
def test_mapped_groups_stay_one_branch(op):
    """One entry with strong decays everywhere, one with mild ones in its first half: no group may take the
    one-product form for both.
    """
    xs = [two_kinds(op, 0), cases.build(Case(op, B=2, T=1024, H=2, K=8, V=4, decay="mixed"))]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *xs)
    run = jax.jit(jax.vmap(cases.runner(op, "xla", chunk_size=8)))
    assert "stablehlo.case" in run.lower(*stacked).as_text()  # and not both branches and a selection
    got = run(*stacked)
    for i, x in enumerate(xs):
        compare(op, x, jax.tree.map(lambda a, i=i: a[i], got))


@each_op
def test_where_the_limit_is(op):
    """The weakest mild decay meets every tolerance; its sum over a chunk is the limit."""
    weakest = -intra_safe.LIMIT / 16
    cases.check(Case(op, T=64, H=2, decay=str(weakest), lower_bound=float(np.float32(weakest))), "xla")
