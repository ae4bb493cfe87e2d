"""The recurrent kernels, Triton's and Pallas', in their interpreters: one token, dtypes, residuals, refusals,
scales.
"""

import importlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from harness import cases, jaxprs, places, scales, tiers, variants
from harness.cases import Case

from fla_jax.core.implementation import Unsupported
from fla_jax.pallas.backend import pallas, triton

if jax.default_backend() == "gpu":
    pytest.skip("an NVIDIA GPU is here: tests/gpu runs the kernels themselves", allow_module_level=True)

EXACT = places.RECURRENCE[places.PALLAS_INTERPRETER]["float32"]
FORM = dict(form="fused_recurrent")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("FLA_JAX_PALLAS_INTERPRET", "1")


chunked = pytest.mark.skipif(not triton.INTERPRET, reason="needs Triton's interpreter")


@pytest.fixture(params=[pytest.param("triton", marks=chunked), "pallas"])
def implementation(request):
    return request.param


@pytest.mark.parametrize("K, V", [(16, 32), (24, 16), (3, 5)])
def test_decoding_step(op, K, V, implementation):
    case = Case(op, B=2, T=1, H=2, K=K, V=V, decay="mixed", dtype="float16", scale=0.5)
    got = cases.Results(cases.outputs(case, implementation, **FORM), {})
    cases.compare(case, got, cases.expected(case), EXACT)


def test_gradients_have_the_dtype_of_their_input(implementation):
    case = Case("rwkv7", B=1, T=20, H=1, K=16, V=16, dtype="float16")
    x = case.build()
    wide = {name: x.arrays[name].astype(np.float32) for name in ("a", "b", "k")}
    cases.check(case, implementation, EXACT, x=x._replace(arrays=x.arrays | wide), **FORM)


def test_without_a_backward_no_states_are_stored_and_the_results_are_the_same(op, implementation):
    case = Case(op, B=2, T=37, H=2, K=32, V=32, decay="mixed", scale=0.7)
    x = cases.build(case)
    run = jax.jit(lambda arrays: cases.call(op, arrays, implementation=implementation, scale=0.7, **FORM))
    cases.assert_same_bits(run(x.arrays), cases.run(case, implementation, **FORM).outputs)
    largest = max(v.aval.size for e in jaxprs.equations(run.trace(x.arrays).jaxpr) for v in e.outvars)
    assert largest == x.arrays["r"].size  # neither states nor padded tokens


def test_where_it_cannot_run_it_says_why(op, monkeypatch):
    x = cases.build(Case(op, T=5))
    with jax.enable_x64(True), pytest.raises(ValueError, match="float"):
        wide = cases.build(Case(op, T=5, dtype="float64"))
        cases.call(op, wide.arrays, implementation="pallas", **FORM)
    monkeypatch.delenv("FLA_JAX_PALLAS_INTERPRET")
    with pytest.raises(ValueError, match=r"pallas.*needs an NVIDIA GPU.*cpu"):
        cases.call(op, x.arrays, implementation="pallas", **FORM)


def test_importing_fla_jax_imports_no_pallas():
    code = (
        "import sys, fla_jax, fla_jax.ops; "
        "sys.exit('jax.experimental.pallas' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SEGMENTS = dict(layout="segments", lengths=(5, 13, 1, 21))
PACKED = dict(layout="packed", lengths=(3, 0, 20, 17))


@chunked
@pytest.mark.parametrize(
    "case",
    tiers.first(
        [
            dict(T=48, decay="mixed"),
            dict(T=37, K=24, V=40, scale=0.7),
            dict(T=50, K=72, decay="layer", lower_bound=-0.61),
            dict(T=40, decay="mixed", layout="segments", lengths=(5, 9, 1, 17, 8)),
            dict(B=1, decay="mixed", layout="packed", lengths=(0, 7, 16, 0, 1, 20, 0)),
            # state gradients as halves of 16 bits, in the memory of gradients
            dict(T=48, V=64, dtype="float16", w_dtype="float32", decay="mixed"),
            dict(T=32, K=24, V=20, dtype="float16", w_dtype="float32"),
            # two and four splits, one after the other
            dict(H=1, T=530, decay="mixed", layout="segments", lengths=(250, 70, 209, 1)),
            dict(B=1, H=1, T=1024, decay="mixed"),
        ]
    ),
)
def test_gradients_by_the_chunked_kernel(case, implementation):
    """As where all gradients come out in 16 bits; here in float32, to be compared at its accuracy."""
    with variants.forced("recurrent gradients by chunks"):
        cases.check(Case("rwkv7", **(dict(B=2, H=2, K=16, V=16) | case)), implementation, **FORM)


@chunked
@pytest.mark.one_python
@pytest.mark.parametrize("options", tiers.first([PACKED, {}, SEGMENTS, dict(K=24, V=72)]), ids=str)
def test_scales_of_gradients_by_the_chunked_kernel(options, implementation):
    with variants.forced("recurrent gradients by chunks"):
        scales.check(scales.case_of("rwkv7", scales.MIXED_SCALES, **options), implementation, **FORM)


@pytest.mark.one_python
@pytest.mark.parametrize("options", tiers.first([PACKED, SEGMENTS]), ids=str)
def test_scales_of_layouts(op, options, implementation):
    scales.check(scales.case_of(op, scales.MIXED_SCALES, **options), implementation, **FORM)


@pytest.mark.parametrize(
    "dtype, w_dtype, by_chunks",
    [
        ("bfloat16", "bfloat16", True),
        ("float16", "float16", True),
        ("bfloat16", "float32", False),
        ("float32", "float32", False),
    ],
)
@pytest.mark.parametrize("host", ["scan_host", "recurrent_host"])
def test_only_gradients_of_16_bits_come_from_the_chunked_kernel(host, dtype, w_dtype, by_chunks, monkeypatch):
    """Never in an interpreter: Triton's multiplies no bfloat16."""
    by = importlib.import_module(f"fla_jax.pallas.rwkv7.{host}").has_chunk_gradients
    ctx = Case("rwkv7", T=20, dtype=dtype, w_dtype=w_dtype).context()
    assert not triton.INTERPRET or not by(ctx, ctx.shapes)
    monkeypatch.setattr(pallas, "preferred", lambda ctx: True)
    monkeypatch.setattr(triton, "preferred", lambda ctx: True)
    monkeypatch.setattr(triton, "supports", lambda ctx: None)
    assert by(ctx, ctx.shapes) == by_chunks


def test_pallas_gradients_need_triton_for_the_chunked_kernel(monkeypatch):
    from fla_jax.pallas.rwkv7 import recurrent_host

    ctx = Case("rwkv7", T=20, dtype="bfloat16").context()
    monkeypatch.setattr(pallas, "preferred", lambda ctx: True)
    monkeypatch.setattr(triton, "preferred", lambda ctx: True)
    monkeypatch.setattr(triton, "supports", lambda ctx: Unsupported("Triton is missing"))
    assert not recurrent_host.has_chunk_gradients(ctx, ctx.shapes)
