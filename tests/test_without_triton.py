"""Without Triton everything runs on a CPU, and on a GPU in plain JAX, with a warning that names the command.

Triton is hidden in a process of its own.
"""

import functools
import importlib.metadata
import sys
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from harness import cases, lowering, processes, tiers
from harness.cases import Case, HeadCase, MixCase

from fla_jax.generation import SamplingParams, generate
from fla_jax.ops import chunk_rwkv7

pytestmark = pytest.mark.one_python


@functools.cache
def process():
    return processes.executor(1, {"TRITON_INTERPRET": "0", "FLA_JAX_PALLAS_INTERPRET": "1"})


def without_triton(function, *args):
    """What ``function(*args)`` returns in a process that has no Triton."""
    return process().submit(_hidden, function, *args).result(timeout=300)


def _hidden(function, *args):
    assert sys.modules.setdefault("triton", None) is None, "importing the library imports no GPU package"
    installed = importlib.metadata.version

    def version(package):
        if package == "triton":
            raise importlib.metadata.PackageNotFoundError(package)
        return installed(package)

    with mock.patch.object(importlib.metadata, "version", version):
        return function(*args)


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize(
    "form, implementation", [("chunk", None), ("fused_recurrent", None), ("fused_recurrent", "pallas")]
)
def test_recurrences(op, form, implementation):
    case = Case(op, B=1, T=20, H=1, K=16, V=16)
    without_triton(functools.partial(cases.check, form=form), case, implementation)


@pytest.mark.parametrize("case", [*map(HeadCase, cases.HEAD_OPS), MixCase(B=1, T=5, C=6, M=2)], ids=repr)
def test_layer_operations(case):
    without_triton(cases.check, case)


def generated(version):
    model = small_models.model(version)
    params = small_models.draw(small_models.shapes(model, jnp.zeros((1, 1), jnp.int32)))
    loss = lambda params: jnp.mean(model.apply({"params": params}, jnp.array([[1, 2, 3]]))[0] ** 2)
    grads = jax.jit(jax.grad(loss))(params)
    (completion,) = generate(model, params, [[1, 2, 3]], SamplingParams(temperature=0), max_tokens=3)
    text = [1, 2, 3]
    for _ in range(3):
        text.append(int(model.apply({"params": params}, jnp.array([text]))[0][0, -1].argmax()))
    return all(np.isfinite(g).all() for g in jax.tree.leaves(grads)), completion.tokens.tolist(), text[3:]


@pytest.mark.parametrize("version", tiers.first([7, 6]))
def test_models_and_generation(version):
    is_finite, tokens, want = without_triton(generated, version)
    assert is_finite and tokens == want


def on_gpu():
    x = lowering.array(1, 64, 1, 64, dtype="bfloat16")
    with lowering.gpu(90), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(lambda x: chunk_rwkv7(x, x, x, x, x, x), x)
        try:
            jax.eval_shape(lambda x: chunk_rwkv7(x, x, x, x, x, x, implementation="triton"), x)
        except ValueError as error:
            return [str(warning.message) for warning in caught], str(error)


def test_a_gpu():
    command = 'Triton is not installed: run pip install "fla-jax[cuda13]"'
    warned, error = without_triton(on_gpu)
    assert warned == [f"chunk_rwkv7 runs without 'triton', much slower: {command}"]
    assert error == f"chunk_rwkv7: implementation='triton' cannot run this call: {command}"
