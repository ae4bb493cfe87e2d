"""Lowers jitted public ops with implementation="pallas" for CUDA on a machine without a GPU, and looks at
which kernels each program calls.
"""

import collections
import re

import abstract_gpu
import cases
import jax
import jax.numpy as jnp
import pytest
from cases import OPS, TOKENS

each_op = pytest.mark.parametrize("op", OPS)
# the forward walk and all of the backward
BACKWARD = {"scan": 2, "contract_state": 2, "contract_values": 1, "gradients": 1}


@pytest.fixture
def h200(monkeypatch):
    """JAX lowers for this GPU, which is not here."""
    monkeypatch.delenv("FLA_JAX_PALLAS_INTERPRET", raising=False)
    with abstract_gpu.h200():
        yield


def kernels(op: str, f, B=2, T=40, H=2, K=64, V=64, dtype="bfloat16", **layout) -> dict[str, int]:
    """How often the program of ``f(arrays, layout)`` calls each kernel."""
    arrays = {name: jax.ShapeDtypeStruct((B, T, H, V if name == "v" else K), dtype) for name in TOKENS[op]}
    if op == "rwkv6":
        arrays["u"] = jax.ShapeDtypeStruct((H, K), dtype)
    rows = layout["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in layout else B
    arrays["initial_state"] = jax.ShapeDtypeStruct((rows, H, K, V), jnp.float32)
    text = jax.jit(f).trace(arrays, layout).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'stablehlo.custom_call @__gpu\$xla.gpu.triton\(.*?name = "(\w+)"', text)
    return dict(collections.Counter(name.removeprefix(f"{op}_") for name in found))


def value(op: str):
    def run(arrays, layout):
        o, final = cases.call(op, arrays, "fused_recurrent", implementation="pallas", **layout)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    return run


@each_op
def test_forward_and_backward(op, h200):
    assert kernels(op, value(op)) == {"scan": 1}
    assert kernels(op, jax.value_and_grad(value(op))) == BACKWARD


def test_the_decoding_step_is_one_kernel_that_takes_over_the_state(h200):
    assert kernels("rwkv7", value("rwkv7"), T=1) == {"step": 1}


@each_op
@pytest.mark.parametrize("K, V", [(16, 16), (48, 256), (256, 128)])
def test_head_sizes(op, K, V, h200):
    assert kernels(op, jax.grad(value(op)), K=K, V=V, dtype="float32") == BACKWARD


@each_op
def test_layouts(op, h200):
    ids, cu = jax.ShapeDtypeStruct((2, 40), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    assert kernels(op, jax.grad(value(op)), segment_ids=ids) == BACKWARD
    assert kernels(op, jax.grad(value(op)), B=1, cu_seqlens=cu) == BACKWARD
