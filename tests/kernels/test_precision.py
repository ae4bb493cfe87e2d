"""``precision`` of the chunked ops: TF32 products in float32, on request only, and how exact they are.

The kernels round operands themselves, so the interpreter has the errors of a GPU.
"""

import jax
import pytest
from harness import cases, places, variants
from harness.cases import OPS, Case

from fla_jax.ops import chunk_rwkv7
from fla_jax.ops.recurrence import allows_tf32

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

SHAPE = dict(B=2, T=70, H=2, K=32, V=32)
CASES = [
    dict(decay="mixed"),
    dict(decay="layer", lower_bound=-0.61),
    dict(decay="mild", sizes=(1e3,), exponents=(-20,)),
    dict(decay="layer", sizes=(1e-6,), exponents=(-20,)),
    dict(decay="strong", exponents=(-60,)),
    dict(layout="segments", lengths=(3, 13, 32, 1, 21), B=2),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_errors(op, options):
    case = Case(op, **(SHAPE | options))
    with variants.forced("tf32x3"):
        got = cases.run(case, "triton", precision="tensorfloat32")
    cases.compare(case, got, cases.expected(case), places.TF32)


@pytest.mark.parametrize("op", OPS)
def test_only_on_request(op):
    """JAX's own default counts where the call names nothing; inner names win."""
    case = Case(op, **SHAPE)
    exact, tf32 = places.RECURRENCE[places.TRITON_GPU]["float32"], jax.default_matmul_precision("high")
    with variants.forced("tf32x3"):
        cases.check(case, "triton", exact)
        with tf32:
            rounded = cases.run(case, "triton")
            cases.compare(case, cases.run(case, "triton", precision="highest"), cases.expected(case), exact)
    errors = case.errors(rounded, cases.expected(case), exact)
    assert all(error > limit for name, (error, limit) in errors.items() if name in ("o", "dr", "dv")), errors


@pytest.mark.parametrize(
    "precision, allowed",
    [(None, False), ("highest", False), ("float32", False), (jax.lax.Precision.HIGHEST, False)]
    + [("high", True), ("default", True), ("tensorfloat32", True), (jax.lax.Precision.DEFAULT, True)],
)
def test_names(precision, allowed):
    assert allows_tf32(precision) is allowed


@pytest.mark.parametrize("algorithm, allowed", [("TF32_TF32_F32", True), ("F32_F32_F32", False)])
def test_default_algorithm(algorithm, allowed):
    with jax.default_matmul_precision(algorithm):
        assert allows_tf32(None) is allowed


@pytest.mark.parametrize("precision", ["tf31", 3, ("high", "high"), ["high"]])
def test_bad_precision(precision):
    with pytest.raises(ValueError, match=r"precision must be None or a jax\.lax\.Precision"):
        case = Case("rwkv7", **SHAPE)
        x = cases.build(case).arrays
        chunk_rwkv7(*(x[name] for name in "rwkvab"), precision=precision)
