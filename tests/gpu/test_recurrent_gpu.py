"""The recurrent Pallas kernels on an NVIDIA GPU against the float64 oracle:
``python -m pytest tests/gpu``.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPS, Case, Tolerances, check

from fla_jax.pallas.run.pallas import interpreting

if jax.default_backend() != "gpu":
    pytest.skip(
        "no NVIDIA GPU is visible to JAX: tests/interpret and tests/compile check the kernels without one",
        allow_module_level=True,
    )
if interpreting():
    pytest.skip(
        "FLA_JAX_PALLAS_INTERPRET is set: the kernels would run in Pallas' interpreter",
        allow_module_level=True,
    )

EXACT = Tolerances(o=1e-6, state=1e-6, grad=1e-6, dw=2e-6)
each_op = pytest.mark.parametrize("op", OPS)


def judge(case):
    # fewer numbers than 15 have no norm to speak of: each is a difference that may nearly cancel; all dw
    # together are judged at any T
    check(
        case, "pallas", form="fused_recurrent", tol=EXACT if case.T >= 15 else EXACT._replace(channel=np.inf)
    )


@each_op
@pytest.mark.parametrize("decay", cases.DECAYS)
def test_decays(op, decay):
    judge(Case(op, B=2, T=100, H=2, K=64, V=64, decay=decay, scale=0.7))


@each_op
@pytest.mark.parametrize("T", [2, 16, 17, 700])
def test_lengths(op, T):
    judge(Case(op, B=2, T=T, H=2, K=64, V=64, decay="smooth"))


@each_op
@pytest.mark.parametrize("K, V", [(16, 16), (24, 40), (64, 256), (128, 128), (256, 64), (5, 3)])
def test_head_sizes(op, K, V):
    judge(Case(op, B=2, T=37, H=4, K=K, V=V, decay="channels"))


@each_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(op, dtype):
    judge(Case(op, B=2, T=100, H=2, K=64, V=64, decay="channels", dtype=dtype, w_dtype="float32"))


@each_op
def test_segments(op):
    judge(
        Case(
            op,
            B=3,
            T=100,
            H=2,
            K=64,
            V=64,
            decay="mixed",
            layout="segments",
            lengths=(5, 11, 1, 16, 40, 40),
            scale=0.5,
        )
    )


@each_op
def test_packed_sequences(op):
    judge(Case(op, H=2, K=64, V=64, decay="mixed", layout="packed", lengths=(5, 0, 16, 1, 77), scale=0.5))


@each_op
def test_two_runs_are_bitwise_equal(op):
    case = Case(op, B=4, T=300, H=8, K=64, V=64, decay="smooth", dtype="bfloat16")
    one, two = (cases.run(case, "pallas", "fused_recurrent") for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)


@each_op
def test_agrees_with_the_reference_on_many_rows_and_heads(op):
    """Every program of a large grid writes its own part; compared with `jax.lax.scan` in float32."""
    case = Case(op, B=4, T=512, H=32, K=64, V=64, decay="smooth")
    x = jax.tree.map(jnp.asarray, cases.build(case))
    got, want = (cases.runner(op, name, "fused_recurrent")(*x) for name in ("pallas", "reference"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_less(jnp.linalg.norm(a - b), 2e-6 * jnp.linalg.norm(b))
