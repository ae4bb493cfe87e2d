"""A NaN or infinity in a packed document: which other documents of the batch entry it reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases
from harness.cases import OPS, TOKENS, Case

T, CHUNK = 80, 16


def spoilt(op, implementation, name, value, begins):
    """Tokens whose output is not finite, whether the final state is, and of each gradient the last token that
    is not: ``value`` in token 3 of ``name``, two documents, a loss of the second one, from token ``begins``.
    """
    case = Case(op, B=1, T=T, H=1, K=4, V=4, layout="segments", lengths=(begins, T - begins))
    x = case.build()
    x.arrays[name][:, 3] = value
    x.cotangents["o"][:, :begins] = 0
    got = jax.device_get(cases.runner(op, implementation)(*jax.tree.map(jnp.asarray, x)))
    bad = lambda x: np.flatnonzero(~np.isfinite(x).all((0, 2, 3)))
    last = max(bad(got.grads[n]).max(initial=-1) for n in TOKENS[op])
    return bad(got.outputs["o"]), np.isfinite(got.outputs["ht"]).all(), last


@pytest.mark.parametrize(
    "op, name, value", [(op, n, np.nan) for op in OPS for n in TOKENS[op]] + [(op, "v", np.inf) for op in OPS]
)
def test_a_later_document(op, name, value):
    """Chunked: nothing but its tokens in the chunk in which the other one ends. They were all reached."""
    begins = CHUNK + 4
    o, is_finite, last = spoilt(op, "xla", name, value, begins)
    assert is_finite and last < begins
    assert o.size and o.max() < (begins if op == "rwkv6" else 2 * CHUNK)
    aligned, is_finite, last = spoilt(op, "xla", name, value, 2 * CHUNK)
    assert is_finite and last < 2 * CHUNK and aligned.max() < 2 * CHUNK


@pytest.mark.parametrize("op", OPS)
def test_the_same_chunk(op):
    """RWKV-6 loses the chunk and no more; RWKV-7 what is made of it as well."""
    o, is_finite, last = spoilt(op, "xla", "v", np.nan, 8)
    if op == "rwkv6":
        assert is_finite and o.max() < CHUNK and last < CHUNK
    o, is_finite, last = spoilt(op, "reference", "v", np.nan, 8)
    assert is_finite and o.min() == 3 and o.max() < 8 and last < 8
