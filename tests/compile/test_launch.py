"""Kernels are launched by name: what does not fit their parameters is an error, never another order."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

from fla_jax.pallas.device.stretches import gather_kernel
from fla_jax.pallas.run.triton import launch


def test_parameters_are_checked_by_name():
    x = jnp.zeros(16)
    out = {"D_": jax.ShapeDtypeStruct((16,), jnp.float32)}
    options = dict(grid=(1,), num_warps=1, num_stages=1, mode=None)
    with pytest.raises(TypeError, match=r"gather_kernel: .*\['span'\]"):
        launch(gather_kernel, {"reads_": x, "do_": x, "T": 1}, out, **options)
    with pytest.raises(TypeError, match=r"gather_kernel: .*\['do', 'do_'\]"):
        launch(gather_kernel, {"reads_": x, "do": x, "T": 1, "span": 1}, out, **options)
