"""What only a GPU shows of the recurrent Pallas kernels."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OPS, Case

from fla_jax.pallas.backend.pallas import is_interpreting

if jax.default_backend() != "gpu":
    pytest.skip(
        "no NVIDIA GPU is visible to JAX: tests/interpret and tests/compile check the kernels without one",
        allow_module_level=True,
    )
if is_interpreting():
    pytest.skip(
        "FLA_JAX_PALLAS_INTERPRET is set: the kernels would run in Pallas' interpreter",
        allow_module_level=True,
    )

each_op = pytest.mark.parametrize("op", OPS)


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
