"""Kernels are called with one record a parameter; a wrong number or an unknown alias is an error."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

from fla_jax.pallas.backend.triton import Launch, triton_call
from fla_jax.pallas.common.state_passing import state_grad_kernel


def test_parameters_are_checked():
    x, out = (jnp.zeros(16),), (jax.ShapeDtypeStruct((16,), jnp.float32),)
    options = dict(out=out, config=None, grid=(1, 1, 1), launch=Launch(1))
    count = len(state_grad_kernel.arg_names) - 2
    with pytest.raises(TypeError, match=f"state_grad_kernel has {count + 2} parameters, got {count + 3}"):
        triton_call(state_grad_kernel, *[x] * (count + 1), **options)
    with pytest.raises(KeyError, match="nothing"):
        triton_call(state_grad_kernel, *[x] * count, **options, aliases={"nothing": "0"})
