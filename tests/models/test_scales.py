"""A model with strong decays in Triton's interpreter; tests/gpu/test_scales_gpu.py has the real size."""

import jax.numpy as jnp
import pytest
import whole_model

from fla_jax.pallas.backend import triton

OPTIONS = dict(num_layers=12, hidden_size=32, head_dim=16)


@pytest.mark.one_python
@pytest.mark.parametrize(
    "implementation, dtype, least",
    [
        pytest.param("triton", jnp.float32, 1e-5),
        pytest.param("triton", jnp.bfloat16, 1e-3, marks=pytest.mark.slow),
        pytest.param("reference", jnp.bfloat16, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_all_parameters_are_as_exact_as_those_of_plain_jax(implementation, dtype, least):
    if implementation == "triton" and not triton.INTERPRET:
        pytest.skip("TRITON_INTERPRET is not set")
    draws = whole_model.draw(OPTIONS, 1, batch=1, length=32)
    exact = whole_model.exact_gradients(OPTIONS, draws)
    options = OPTIONS | dict(dtype=dtype)
    ours = whole_model.gradients(options | dict(implementation=implementation), draws)
    whole_model.check(ours, whole_model.plain_gradients(options, draws), exact, least)
