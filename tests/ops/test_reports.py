"""The five reports about other RWKV-6 kernels that this library grew from, one test each, with whatever
implementation is the default here.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, check

import fla_jax
from fla_jax.ops import chunk_rwkv6, fused_recurrent_rwkv6


def test_training_at_strong_decay_stays_finite():
    """NaN in training with ``w = -exp(x)``: x is learned here, starts where a decay is e^-55 and is pushed
    further.
    """
    x = {n: jnp.asarray(a) for n, a in cases.build(Case("rwkv6", B=2, T=64, K=16, V=16)).arrays.items()}
    target = jnp.asarray(cases.build(Case("rwkv6", B=2, T=64, K=16, V=16)).do)

    def loss(p):
        o, _ = chunk_rwkv6(x["r"], p["k"], x["v"], -jnp.exp(p["x"]), p["u"])
        return jnp.mean((o - target) ** 2)

    def step(p, _):
        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: a - 0.3 * b, p, g), (
            value,
            jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda a: jnp.all(jnp.isfinite(a)), g)),
        )

    start = {"k": x["k"], "u": x["u"], "x": jnp.linspace(-6.0, 4.0, 16) * jnp.ones((2, 64, 2, 1))}
    _, (losses, finite) = jax.jit(lambda p: jax.lax.scan(step, p, length=30))(start)
    assert np.all(finite) and np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("K, V", [(16, 40), (40, 16)])
def test_backward_with_other_values_than_keys_and_a_state(K, V):
    check(Case("rwkv6", B=2, T=33, K=K, V=V, decay="smooth"), None)


def test_six_thousand_tokens():
    check(Case("rwkv6", B=1, T=6000, H=1, K=16, V=16, decay="smooth"), None)


def test_a_positive_decay_is_reported():
    """``w = exp(x)``, a sign forgotten: the gradient explodes, and the checked mode says why."""
    x = {n: jnp.asarray(a) for n, a in cases.build(Case("rwkv6", B=1, T=64, K=16, V=16)).arrays.items()}

    def gradient(w):
        return jax.grad(lambda k: jnp.sum(chunk_rwkv6(x["r"], k, x["v"], w, x["u"])[0]))(x["k"])

    with pytest.raises(
        ValueError, match=r"chunk_rwkv6: w, the log decay, must be <= 0, got a largest value of"
    ):
        fla_jax.checked(gradient)(-x["w"])
    assert np.all(np.isfinite(fla_jax.checked(gradient)(x["w"])))


def test_chunks_and_recurrence_agree_on_the_same_arrays_twice():
    """Neither form writes to its inputs or remembers a call."""
    case = Case("rwkv6", B=2, T=100, K=16, V=16, decay="mixed")
    x = {n: jnp.asarray(a) for n, a in cases.build(case).arrays.items()}
    before = jax.tree.map(np.array, x)
    call = lambda op: op(
        *(x[n] for n in ("r", "k", "v", "w", "u")), initial_state=x["initial_state"], output_final_state=True
    )
    chunks, tokens, chunks_again, tokens_again = (
        call(chunk_rwkv6),
        call(fused_recurrent_rwkv6),
        call(chunk_rwkv6),
        call(fused_recurrent_rwkv6),
    )
    want = cases.expected(case)
    for got in (chunks, tokens):
        cases.assert_close("o", got[0], want.o, 3e-6)
        cases.assert_close("final state", got[1], want.final, 3e-6)
    assert all(
        jax.tree.leaves(
            jax.tree.map(np.array_equal, (chunks, tokens, x), (chunks_again, tokens_again, before))
        )
    )
