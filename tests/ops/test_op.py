"""`fla_jax.ops.Op` on a toy op: whoever writes one gets sharding, vmap, rematerialisation and the checked
mode for nothing.
"""

import types
from typing import Any, NamedTuple

import chex
import fake_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_op as toy

import fla_jax
from fla_jax.core.implementation import Unsupported
from fla_jax.ops import Implementation, Op

X = jax.random.normal(jax.random.key(0), (3, 4, 5))
SCALE = jnp.linspace(0.5, 2, 5)


def want(x, scale):
    """The definition, in NumPy: sums of x * scale over the tokens so far."""
    return np.cumsum(np.asarray(x, np.float64) * np.asarray(scale, np.float64), 1)


@pytest.mark.parametrize("implementation", ["kernel", "plain"])
def test_values_and_gradients(implementation):
    run = lambda x, scale: toy.running_sum(x, scale, implementation)
    np.testing.assert_allclose(run(X, SCALE), want(X, SCALE), rtol=1e-6)
    chex.assert_numerical_grads(run, (X, SCALE), order=1, modes=("rev",), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("implementation", ["kernel", "plain"])
@pytest.mark.parametrize("mapped", [(0, None), (0, 0), (None, 0)])
def test_vmap(implementation, mapped):
    xs, scales = jnp.stack([X, 2 * X]), jnp.stack([SCALE, -SCALE])
    args = [a if m == 0 else b for a, b, m in zip((xs, scales), (X, SCALE), mapped)]

    def loss(x, scale):
        return jnp.sum(jnp.sin(toy.running_sum(x, scale, implementation)))

    def plain(x, scale):
        return jnp.sum(jnp.sin(jnp.cumsum(x * scale, 1)))

    got, expected = (jax.vmap(jax.value_and_grad(f, (0, 1)), mapped)(*args) for f in (loss, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, expected)


class Both(NamedTuple):
    """Sums over the tokens so far, and over all of them."""

    y: Any  # [B, T, C]
    total: Any  # [B, C]


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("used", ["y", "total", "both"])
def test_results_that_nothing_depends_on(opaque, used):
    """An implementation that can do without a cotangent gets none; else it gets zeros."""
    seen = []

    def fwd(call, x):
        made, _ = toy.fwd(call, x)
        return Both(made.y, made.y[:, -1]), {}

    def bwd(call, x, kept, cotangents):
        seen.append(cotangents)
        dy = cotangents.y if cotangents.total is None else cotangents.y.at[:, -1].add(cotangents.total)
        return toy.bwd(call, x, kept, toy.Outputs(dy))

    module = types.SimpleNamespace(fwd=fwd, bwd=bwd, residual_axes=toy.residual_axes)
    op = Op(
        "two_sums",
        toy.Inputs,
        Both,
        toy.OP.axes | {"total": "b c"},
        [Implementation("one", lambda: module, opaque=opaque, unused_cotangents=("total",))],
    )

    def weighed(made):
        values = {"y": jnp.sum(made.y**2), "total": jnp.sum(made.total**3)}
        return values["y"] + values["total"] if used == "both" else values[used]

    def by_op(x, scale):
        return weighed(op(toy.Inputs(x, scale), None))

    def plain(x, scale):
        y = jnp.cumsum(x * scale, 1)
        return weighed(Both(y, y[:, -1]))

    got, want = (jax.jit(jax.grad(f, (0, 1)))(X, SCALE) for f in (by_op, plain))
    chex.assert_trees_all_close(got, want, rtol=1e-5)
    assert [one.total is None for one in seen] == [used == "y"]
    assert seen[0].y is not None


def test_rematerialisation_keeps_what_the_forward_made():
    loss = lambda x: jnp.sum(jnp.sin(toy.running_sum(x, SCALE, "kernel")))
    products = {}
    for name, policy in {"kept": fla_jax.remat_policy(), "made again": None}.items():
        step = jax.checkpoint(loss, policy=policy)
        products[name] = jax.jit(jax.value_and_grad(step)).lower(X).as_text().count("stablehlo.dot_general")
    assert products == {"kept": 2, "made again": 3}  # one of the backward


@pytest.mark.parametrize("again", [jax.grad, jax.jacfwd, jax.jit])
def test_second_derivatives(again):
    """Those of a plain implementation are right; a kernel has none, and says which implementation has."""

    def along(implementation, x):
        first = jax.grad(lambda x: jnp.sum(jnp.sin(toy.running_sum(x, SCALE, implementation))))
        if again is jax.jit:  # forward over reverse, in a jitted function
            return jax.jit(lambda x: jax.jvp(first, (x,), (X,))[1])(x)
        return again(lambda x: jnp.vdot(first(x), X))(x)

    y, dy = want(X, SCALE), want(X, SCALE)  # sums are linear: their change along X is themselves
    expected = np.cumsum((-np.sin(y) * dy)[:, ::-1], 1)[:, ::-1] * np.asarray(SCALE)
    np.testing.assert_allclose(along("plain", X), expected, rtol=1e-4, atol=1e-4)
    message = (
        "running_sum: implementation='kernel' has first derivatives only; .* want implementation='plain'"
    )
    with pytest.raises(TypeError, match=message):
        along("kernel", X)


def test_checked_mode():
    with pytest.raises(ValueError, match="running_sum: x is negative"):
        fla_jax.checked(lambda x: toy.running_sum(x, SCALE))(-jnp.ones((1, 2, 5)))


def test_choice():
    call = lambda implementation=None: toy.running_sum(X, SCALE, implementation)
    with pytest.raises(
        ValueError,
        match=r"running_sum: implementation must be one of \['kernel', 'plain'\] or None, got 'fast'",
    ):
        call("fast")
    refused = Implementation(
        "refused",
        lambda: 1 / 0,
        supports=lambda ctx: Unsupported(f"no {ctx.shapes.x.shape} on {ctx.platform}"),
    )
    toy.OP.implementations.insert(0, refused)
    try:
        with pytest.raises(
            ValueError,
            match=r"running_sum: implementation='refused' cannot run this call: no \(3, 4, 5\) on cpu",
        ):
            call("refused")
        np.testing.assert_allclose(call(), want(X, SCALE), rtol=1e-6)  # the next one serves
    finally:
        toy.OP.implementations.remove(refused)


def test_an_implementation_from_outside_serves_a_recurrence():
    """One line adds it; by name and by itself."""
    from fla_jax.ops.rwkv7 import api, reference

    class Doubled:
        residual_axes = staticmethod(reference.RULE.residual_axes)

        @staticmethod
        def fwd(call, x):
            outputs, kept = reference.RULE.fwd(call, x)
            return outputs._replace(o=2 * outputs.o), kept

    api.CHUNK.implementations.insert(0, Implementation("doubled", lambda: Doubled))
    try:
        x = jax.random.normal(jax.random.key(1), (6, 1, 5, 1, 4)) / 4
        args = (x[0], -jnp.exp(x[1]), *x[2:])
        one, two = (
            fla_jax.ops.chunk_rwkv7(*args, implementation=name)[0] for name in ("reference", "doubled")
        )
        np.testing.assert_array_equal(2 * one, two)
        np.testing.assert_array_equal(two, fla_jax.ops.chunk_rwkv7(*args)[0])
    finally:
        del api.CHUNK.implementations[0]


def test_every_sharding_mode():
    """Eight devices: right results, no collective but the sum of the gradient of ``scale``."""
    report = fake_devices.report("toy_op.py")
    assert set(report) == {
        "auto",
        "explicit",
        "shard_map",
        "shard_map, unchecked",
        "tokens, auto",
        "tokens, explicit",
    }
    for name in ("auto", "explicit", "shard_map", "shard_map, unchecked"):
        assert report[name]["error"] < 1e-5, (name, report[name])
        assert report[name]["collectives"] == ["all-reduce"], (name, report[name])
    assert report["tokens, auto"]["error"] < 1e-5
    assert (
        "axis T of x [B, T, C] must be whole" in report["tokens, explicit"]["error"]
        and "'data'" in report["tokens, explicit"]["error"]
    )
