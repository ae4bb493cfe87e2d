"""Kernels are launched by name: what does not fit their parameters is an error, never another order."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

from fla_jax.pallas.backend.triton import launch
from fla_jax.pallas.common.state_passing import state_grad_kernel


def test_parameters_are_checked_by_name():
    x = jnp.zeros(16)
    out = {"dh_": jax.ShapeDtypeStruct((16,), jnp.float32)}
    options = dict(grid=(1,), num_warps=1, num_stages=1, c=None)
    with pytest.raises(TypeError, match=r"state_grad_kernel: .*\['split_len'\]"):
        launch(state_grad_kernel, {"q_entry_": x, "do_": x, "T": 1}, out, **options)
    with pytest.raises(TypeError, match=r"state_grad_kernel: .*\['do', 'do_'\]"):
        launch(state_grad_kernel, {"q_entry_": x, "do": x, "T": 1, "split_len": 1}, out, **options)
