"""The kernels of norm, shift and mixes on an NVIDIA GPU, against the float64 reference."""

import dataclasses

import jax
import numpy as np
import pytest
from layer_ops import norm_mix_cases as cases
from layer_ops.norm_mix_cases import Case

from fla_jax.pallas.backend import triton as run

if jax.default_backend() != "gpu":
    pytest.skip("no NVIDIA GPU is visible to JAX", allow_module_level=True)
if run.INTERPRET:
    pytest.skip("TRITON_INTERPRET is set: the kernels would run in the interpreter", allow_module_level=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_as_good_as_plain_jax(dtype):
    case = Case(2, 300, 1024, 6, dtype=dtype)
    ours, plain = (cases.errors(case, cases.run(case, name)) for name in ("triton", "xla"))
    assert not {n: (ours[n], plain[n]) for n in ours if ours[n] > 1.2 * plain[n] + 1e-7}, (ours, plain)


@pytest.mark.parametrize("C", [1024, 4096])
def test_two_runs_give_the_same_bits(C):
    case = Case(4, 500, C, 6, dtype="bfloat16")
    one = cases.run(case, "triton")
    two = cases.run(dataclasses.replace(case), "triton")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two)))
