"""The recurrent Pallas kernels in Pallas' interpreter: one token, dtypes, what is kept, refusals."""

import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from cases import Case
from conformance import places

from fla_jax.pallas.backend import pallas, triton

if jax.default_backend() == "gpu":
    pytest.skip("an NVIDIA GPU is here: tests/gpu runs the kernels themselves", allow_module_level=True)

EXACT = places.RECURRENCE[places.PALLAS_INTERPRETER]["float32"]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("FLA_JAX_PALLAS_INTERPRET", "1")


@pytest.mark.parametrize("K, V", [(16, 32), (24, 16)])
def test_decoding_step(op, K, V):
    case = Case(op, B=2, T=1, H=2, K=K, V=V, decay="mixed", dtype="bfloat16", scale=0.5)
    x, want = cases.build(case), cases.expected(case)
    o, final = jax.jit(
        lambda arrays: cases.call(op, arrays, "fused_recurrent", implementation="pallas", scale=0.5)
    )(x.arrays)
    cases.assert_close("o", o, want.o, EXACT.o)
    cases.assert_close("final state", final, want.final, EXACT.state)


def test_each_input_keeps_its_dtype():
    x = cases.build(Case("rwkv7", B=1, T=20, H=1, K=16, V=16, dtype="bfloat16"))
    wide = x._replace(
        arrays={name: a.astype(np.float32) if name in ("a", "b", "k") else a for name, a in x.arrays.items()}
    )
    got = jax.device_get(cases.runner("rwkv7", "pallas", "fused_recurrent")(*jax.tree.map(jnp.asarray, wide)))
    assert {name: g.dtype for name, g in got.grads.items()} == {
        name: a.dtype for name, a in wide.arrays.items()
    }
    (o, final), grads = cases.ask_oracle("rwkv7", wide)
    cases.compare(got, cases.Outputs(o, final, grads), EXACT)


def test_without_a_backward_no_states_are_kept_and_the_results_are_the_same(op):
    case = Case(op, B=2, T=37, H=2, K=32, V=32, decay="mixed", scale=0.7)
    x, want = cases.build(case), cases.run(case, "pallas", "fused_recurrent")
    run = jax.jit(
        lambda arrays: cases.call(op, arrays, "fused_recurrent", implementation="pallas", scale=0.7)
    )
    arrays = {name: jnp.asarray(a) for name, a in x.arrays.items()}
    o, final = run(arrays)
    np.testing.assert_array_equal(o, want.o)
    np.testing.assert_array_equal(final, want.final)
    largest = max(v.aval.size for e in jaxprs.equations(run.trace(arrays).jaxpr) for v in e.outvars)
    assert largest == x.arrays["r"].size  # neither states of windows nor padded tokens


def test_where_it_cannot_run_it_says_why(op, monkeypatch):
    monkeypatch.delenv("FLA_JAX_PALLAS_INTERPRET")
    x = cases.build(Case(op, T=5))
    with pytest.raises(ValueError, match=r"pallas.*needs an NVIDIA GPU.*cpu"):
        cases.call(op, x.arrays, "fused_recurrent", implementation="pallas")


def test_float64_is_refused(op):
    with jax.enable_x64(True):
        x = cases.build(Case(op, T=5, dtype="float64"))
        with pytest.raises(ValueError, match="float"):
            cases.call(op, x.arrays, "fused_recurrent", implementation="pallas")


def test_importing_fla_jax_imports_no_pallas():
    code = (
        "import sys, fla_jax, fla_jax.ops; "
        "sys.exit('jax.experimental.pallas' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "case",
    [
        dict(T=48, decay="mixed"),
        dict(T=37, K=24, V=40, decay="smooth", scale=0.7),
        dict(T=50, K=72, decay="layer", lower_bound=-0.61),
        dict(T=40, decay="mixed", layout="segments", lengths=(5, 9, 1, 17, 8)),
        dict(B=1, decay="mixed", layout="packed", lengths=(0, 7, 16, 0, 1, 20, 0)),
    ],
)
def test_gradients_by_the_chunked_kernel(case, monkeypatch, fresh):
    """As where all gradients come out in 16 bits; here in float32, to be compared at its accuracy."""
    if not triton.INTERPRET:
        pytest.skip("needs Triton's interpreter")
    from fla_jax.pallas.rwkv7 import recurrent_host

    monkeypatch.setattr(recurrent_host, "_by_chunks", lambda call, x: True)
    cases.check(Case("rwkv7", **(dict(B=2, H=2, K=16, V=16) | case)), "pallas", "fused_recurrent")


@pytest.mark.parametrize(
    "dtypes, by_chunks",
    [
        ("bfloat16 bfloat16", True),
        ("float16 float16", True),
        ("bfloat16 float32", False),
        ("float32 float32", False),
    ],
)
def test_only_gradients_of_16_bits_come_from_the_chunked_kernel(dtypes, by_chunks, monkeypatch):
    """Never in an interpreter: Triton's multiplies no bfloat16."""
    from fla_jax.pallas.rwkv7 import recurrent_host

    dtype, w_dtype = dtypes.split()
    call = cases.call_of(Case("rwkv7", T=20, dtype=dtype, w_dtype=w_dtype))
    assert not recurrent_host._by_chunks(call, call.inputs)
    monkeypatch.setattr(pallas, "preferred", lambda call: True)
    monkeypatch.setattr(triton, "preferred", lambda call: True)
    monkeypatch.setattr(triton, "supports", lambda call: None)
    assert recurrent_host._by_chunks(call, call.inputs) == by_chunks
    monkeypatch.setattr(triton, "supports", lambda call: "jax-triton is missing")
    assert not recurrent_host._by_chunks(call, call.inputs)
