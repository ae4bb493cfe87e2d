"""The residuals of the backward, and that a rematerialised block does not run an op's forward twice."""

import functools

import jax
import jax.numpy as jnp
import pytest
from harness import cases, jaxprs
from harness.cases import Case
from harness.tiers import each_implementation, each_op

import fla_jax


def _residual_floats(op, implementation, chunk_size, T, K=32, V=16):
    """Floating-point numbers that the vjp of one call stores besides the call's inputs."""
    x = cases.build(Case(op, B=1, T=T, H=1, K=K, V=V))
    f = lambda arrays: cases.call(op, arrays, implementation=implementation, chunk_size=chunk_size)
    leaves = jax.tree.leaves(jax.eval_shape(lambda arrays: jax.vjp(f, arrays)[1], x.arrays))
    floats = sum(a.size for a in leaves if jnp.issubdtype(a.dtype, jnp.floating))
    return floats - sum(a.size for a in x.arrays.values()), [a.shape for a in leaves]


@each_implementation
@each_op
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_residuals_hold_one_state_per_chunk(op, implementation, chunk_size):
    """Inputs, a state [K, V] for every 16 tokens and values; one for every token would be ten times more."""
    K, V, T = 32, 16, 256
    stored, shapes = _residual_floats(op, implementation, chunk_size, T)
    assert stored <= (T // 16 + 2) * K * V + T * V, shapes
    twice, _ = _residual_floats(op, implementation, chunk_size, 2 * T)
    assert 0 <= twice - stored <= (T // 16) * K * V + T * V


def _whiles(f, *args) -> int:
    """Loops in the optimised program, dead and repeated ones removed."""
    return jax.jit(f).lower(*args).compile().as_text().count(" while(")


@each_op
@pytest.mark.parametrize(
    "policy, implementation", [*(("ours", i) for i in ("reference", "xla")), ("combined", "xla")]
)
def test_remat_policy_runs_the_forward_once(op, implementation, policy):
    """Loops in the gradient of two blocks: equal with the policy and without remat, more with plain remat."""
    x = cases.build(Case(op, B=1, T=64, H=1, K=4, V=4))
    ours = fla_jax.remat_policy()
    if policy == "combined":
        ours = jax.checkpoint_policies.save_from_both_policies(
            ours, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )

    def block(v, scale):
        arrays = {**x.arrays, "v": jnp.tanh(v * scale)}
        got = cases.call(op, arrays, implementation=implementation, chunk_size=4)
        return v + jnp.tanh(got["o"]) * jnp.sum(got["ht"])

    def loss(scales, wrap):
        return jnp.sum(wrap(block)(wrap(block)(x.arrays["v"], scales[0]), scales[1]))

    count = lambda wrap: _whiles(jax.grad(functools.partial(loss, wrap=wrap)), jnp.array([0.5, 0.7]))
    plain = count(lambda f: f)
    again = count(jax.checkpoint)
    with_policy = count(functools.partial(jax.checkpoint, policy=ours))
    assert with_policy == plain < again, (plain, with_policy, again)


@each_op
def test_checkpoint_names_are_on_output_final_state_and_states(op):
    """Layers may name these in other policies."""
    x = cases.build(Case(op, B=1, T=32, H=1))
    f = lambda arrays: jax.vjp(lambda a: cases.call(op, a), arrays)[0]
    names = {
        e.params["name"]
        for e in jaxprs.equations(jax.make_jaxpr(f)(x.arrays).jaxpr)
        if e.primitive.name == "name"
    }
    assert names == set(fla_jax.CHECKPOINT_NAMES)
