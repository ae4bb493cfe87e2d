"""`fla_jax.ops.Op` on a toy op: vmap, rematerialisation and the checked mode from its axes."""

import types
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, jaxprs
from harness import toy_op as toy
from harness.toy_op import ToyCase
from jax.sharding import AbstractMesh, AxisType

import fla_jax
from fla_jax.core.implementation import Unsupported
from fla_jax.ops import Implementation, Op

X = jax.random.normal(jax.random.key(0), (3, 4, 5))
SCALE = jnp.linspace(0.5, 2, 5)
each = pytest.mark.parametrize("implementation", ["kernel", "plain"])


@each
def test_values_and_gradients(implementation):
    cases.check(ToyCase(), implementation)
    run = lambda x, scale: toy.running_sum(x, scale, implementation)
    chex.assert_numerical_grads(run, (X, SCALE), order=1, modes=("rev",), atol=1e-2, rtol=1e-2)


@each
@pytest.mark.parametrize("shared", [("scale",), (), ("x",)])
def test_vmap(implementation, shared):
    cases.check_vmap(ToyCase(), implementation, shared=shared)


class Both(NamedTuple):
    """Sums over the tokens so far, and over all of them."""

    y: Any  # [B, T, C]
    total: Any  # [B, C]


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("used", ["y", "total", "both"])
def test_outputs_that_nothing_depends_on(opaque, used):
    """An implementation that can do without a cotangent gets none; else it gets zeros."""
    seen = []

    def fwd(ctx, x):
        made, _ = toy.fwd(ctx, x)
        return Both(made.y, made.y[:, -1]), {}

    def bwd(ctx, x, residuals, cotangents):
        seen.append(cotangents)
        dy = cotangents.y if cotangents.total is None else cotangents.y.at[:, -1].add(cotangents.total)
        return toy.bwd(ctx, x, residuals, toy.Outputs(dy))

    module = types.SimpleNamespace(fwd=fwd, bwd=bwd, residual_axes=toy.residual_axes)
    one = Implementation("one", lambda: module, opaque=opaque, unused_cotangents=("total",))
    op = Op("two_sums", toy.Inputs, Both, toy.OP.axes | {"total": "b c"}, [one])

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
    assert [one.total is None for one in seen] == [used == "y"] and seen[0].y is not None


def test_rematerialisation_stores_the_outputs_of_the_forward():
    loss = lambda x: jnp.sum(jnp.sin(toy.running_sum(x, SCALE, "kernel")))
    products = {}
    for name, policy in {"stored": fla_jax.remat_policy(), "made again": None}.items():
        step = jax.checkpoint(loss, policy=policy)
        products[name] = jax.jit(jax.value_and_grad(step)).lower(X).as_text().count("stablehlo.dot_general")
    assert products == {"stored": 2, "made again": 3}  # one of the backward


@pytest.mark.parametrize("again", [jax.grad, jax.jacfwd, jax.jit])
def test_second_derivatives(again):
    """Those of a plain implementation are right; a kernel has none, and says which implementation has."""

    def along(implementation, x):
        first = jax.grad(lambda x: jnp.sum(jnp.sin(toy.running_sum(x, SCALE, implementation))))
        if again is jax.jit:  # forward over reverse, in a jitted function
            return jax.jit(lambda x: jax.jvp(first, (x,), (X,))[1])(x)
        return again(lambda x: jnp.vdot(first(x), X))(x)

    y = np.cumsum(np.float64(X) * np.float64(SCALE), 1)  # sums are linear: their change along X is themselves
    want = np.cumsum((-np.sin(y) * y)[:, ::-1], 1)[:, ::-1] * np.asarray(SCALE)
    np.testing.assert_allclose(along("plain", X), want, rtol=1e-4, atol=1e-4)
    message = "running_sum: implementation='kernel' has first derivatives only; .* implementation='plain'"
    with pytest.raises(TypeError, match=message):
        along("kernel", X)


def test_a_mesh_of_devices_that_are_not_here(monkeypatch):
    """Programs that are compiled ahead for several devices divide their work, on a machine with one."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def is_divided():
        traced = jax.make_jaxpr(lambda x: toy.running_sum(x, SCALE, "kernel"))(X)
        return "custom_partitioning" in {one.primitive.name for one in jaxprs.equations(traced.jaxpr)}

    assert not is_divided()
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert is_divided()


def test_checked_mode():
    with pytest.raises(ValueError, match="running_sum: x is negative"):
        fla_jax.checked(lambda x: toy.running_sum(x, SCALE))(-jnp.ones((1, 2, 5)))


def test_choice():
    call = lambda implementation=None: toy.running_sum(X, SCALE, implementation)
    message = r"running_sum: implementation must be one of \['kernel', 'plain'\] or None, got 'fast'"
    with pytest.raises(ValueError, match=message):
        call("fast")
    reason = lambda ctx: Unsupported(f"no {ctx.shapes.x.shape} on {ctx.platform}")
    refused = Implementation("refused", lambda: 1 / 0, supports=reason)
    toy.OP.implementations.insert(0, refused)
    try:
        message = r"running_sum: implementation='refused' cannot run this call: no \(3, 4, 5\) on cpu"
        with pytest.raises(ValueError, match=message):
            call("refused")
        cases.check(ToyCase())  # the next one serves
    finally:
        toy.OP.implementations.remove(refused)


def test_an_implementation_from_outside_serves_a_recurrence():
    """One line adds it; it is selected by name and automatically."""
    from fla_jax.ops.rwkv7 import api, reference

    class Doubled:
        residual_axes = staticmethod(reference.RULE.residual_axes)
        bwd = staticmethod(reference.RULE.bwd)

        @staticmethod
        def fwd(ctx, x):
            outputs, residuals = reference.RULE.fwd(ctx, x)
            return outputs._replace(o=2 * outputs.o), residuals

    api.CHUNK.implementations.insert(0, Implementation("doubled", lambda: Doubled))
    try:
        x = cases.build(cases.Case("rwkv7", B=1, T=5, H=1, K=4, V=4)).arrays
        call = lambda name: cases.call("rwkv7", x, implementation=name)["o"]
        np.testing.assert_array_equal(2 * call("reference"), call("doubled"))
        np.testing.assert_array_equal(call("doubled"), call(None))
    finally:
        del api.CHUNK.implementations[0]
