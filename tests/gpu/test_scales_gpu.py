"""Scales of training on an NVIDIA GPU, against float64: a model with strong decays under a mean loss over
2^15 tokens, and split sequences at every scale of values and cotangents.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
import whole_model
from harness import places, scales, variants
from harness.tiers import each_op

from fla_jax.pallas.backend import triton

if jax.default_backend() != "gpu" or triton.INTERPRET:
    pytest.skip("no NVIDIA GPU is visible to JAX, or Triton's interpreter is on", allow_module_level=True)

OPTIONS = dict(num_layers=6, hidden_size=256, head_dim=64, remat=True)
DRAWS, B, T = 4, 2, 1024


@functools.cache
def model():
    """Parameters and tokens, and the gradients in float64."""
    draws = whole_model.draw(OPTIONS, DRAWS, B, T)
    return draws, whole_model.exact_gradients(OPTIONS, draws)


@pytest.mark.parametrize("dtype, least", [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-4)])
def test_gradients_of_all_parameters_are_as_exact_as_those_of_plain_jax(dtype, least):
    """In float32 products of the dense layers are TF32, as anywhere on such a GPU."""
    draws, exact = model()
    options = OPTIONS | dict(dtype=dtype)
    ours = whole_model.gradients(options | dict(implementation="triton"), draws)
    whole_model.check(ours, whole_model.plain_gradients(options, draws), exact, least)


@each_op
@pytest.mark.parametrize("decays, options", [(scales.BOUNDED, dict(lower_bound=-5.0)), (scales.DECAYS, {})])
def test_split_sequences_at_every_scale(op, decays, options):
    heads = [head for head in scales.GRID if head.decay in decays]
    heads += [head._replace(exponent=exponent) for head in heads for exponent in (-60, -20, 40)]
    case = scales.case_of(op, heads, T=1024, K=64, V=64, dtype="bfloat16", **options)
    assert variants.num_splits(case) > 1
    scales.check(case, "triton", tol=scales.of_one_head(places.RECURRENCE[places.TRITON_GPU]["bfloat16"]))
