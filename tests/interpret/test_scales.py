"""Small and large values and cotangents in every form of the chunked Triton kernels, in Triton's interpreter,
and in the recurrent kernels whose gradients come from them: each head against the float64 oracle.

tests/conformance/test_scales.py has the other implementations, and the GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import cases
import pytest
import scales

from fla_jax.pallas.backend import triton as run

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not run.INTERPRET:
    pytest.skip("TRITON_INTERPRET is not set", allow_module_level=True)

from fla_jax.pallas.common import chunk_host
from fla_jax.pallas.rwkv6 import chunk_host as rwkv6
from fla_jax.pallas.rwkv7 import chunk_host as rwkv7
from fla_jax.pallas.rwkv7 import recurrent_host as recurrent

pytestmark = pytest.mark.one_python  # values: Triton's interpreter makes them
launcher = {"rwkv6": rwkv6, "rwkv7": rwkv7}
SEGMENTS = dict(layout="segments", lengths=(5, 13, 1, 21))
PACKED = dict(layout="packed", lengths=(3, 0, 20, 17))
PROMISED = [head for head in scales.MIXED_SCALES if head.decay in scales.BOUNDED]


@contextlib.contextmanager
def kernels(op: str, kinds: str):
    """Takes kernels that the interpreter would not: of ``"half"``, those of RWKV-7 for 16 bits in float32;
    ``"rows"``, those with keys as rows; ``"small"``, those of GPUs without products of a warp group;
    ``"split"``, rows cut from two chunks on.
    """
    with cases.fresh_traces(), pytest.MonkeyPatch.context() as patch:
        if "half" in kinds or "rows" in kinds:
            patch.setattr(rwkv7, "has_bf16_dots", lambda x: True)
        if "rows" in kinds:
            patch.setattr(launcher[op], "_keys_as_rows", lambda plan, *arrays: True)
        if "small" in kinds:
            patch.setattr(rwkv7, "has_wgmma", lambda: False)
        if "split" in kinds:
            patch.setattr(chunk_host, "MIN_SPLIT_LEN", 16)
        yield


# what is called, and the kernels that are taken
CALLS: list[tuple[dict[str, Any], str]] = [
    (SEGMENTS, "half"),
    (PACKED, "half"),
    (dict(K=24, V=40), "half"),
    (SEGMENTS, "rows"),
    (dict(K=64, V=24), "rows"),
    (dict(T=64), "half split"),
    (dict(T=50, lower_bound=-5.0), "half"),
    (dict(T=64, lower_bound=-5.0), "rows split"),
]
# RWKV-7 has other kernels for large heads, float32 and GPUs of other generations
MORE: list[tuple[dict[str, Any], str]] = [
    (SEGMENTS | dict(K=72, V=24), "half"),
    (dict(T=64), "split"),
    (dict(K=72, V=24, lower_bound=-5.0), "half small"),
]
SLOW: list[tuple[dict[str, Any], str]] = [
    ({}, "half"),
    ({}, "rows"),
    (PACKED, "rows"),
    (dict(K=128, V=128), "half"),
    (dict(K=128, V=128), ""),
    (dict(T=70, **SEGMENTS | dict(lengths=(16, 16, 1, 37))), "half split"),
    (PACKED | dict(K=72, V=128), "half"),
    (dict(T=64, K=72, V=24), "split"),
]


def parameters():
    for op in cases.OPS:
        for options, kinds in [*CALLS, *(MORE if op == "rwkv7" else ()), *SLOW]:
            said = " ".join(f"{name} {value}" for name, value in options.items() if name != "lengths")
            marks = [pytest.mark.slow] if (options, kinds) in SLOW else []
            yield pytest.param(op, options, kinds, id=f"{op} {kinds} {said}".strip(), marks=marks)


@pytest.mark.parametrize("op, options, kinds", parameters())
def test_forms_of_the_chunked_kernels(op, options, kinds):
    heads = PROMISED if "lower_bound" in options else scales.MIXED_SCALES
    with kernels(op, kinds):
        case = scales.case_of(op, heads, **options)
        assert chunk_host.num_splits_of(cases.call_of(case)) > ("split" in kinds)
        scales.check(case, "triton")


@pytest.mark.parametrize(
    "options",
    [
        {},
        SEGMENTS,
        PACKED,
        pytest.param(dict(K=24, V=72), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_recurrent_rwkv7_with_gradients_of_the_chunked_kernel(options, monkeypatch, fresh):
    """As where all gradients come out in 16 bits."""
    monkeypatch.setenv("FLA_JAX_PALLAS_INTERPRET", "1")
    monkeypatch.setattr(recurrent, "_by_chunks", lambda call, x: True)
    scales.check(scales.case_of("rwkv7", scales.MIXED_SCALES, **options), "pallas", "fused_recurrent")


@pytest.mark.parametrize("options", [PACKED, pytest.param(SEGMENTS, marks=pytest.mark.slow)], ids=str)
def test_layouts_of_the_recurrent_kernels(op, options, monkeypatch):
    monkeypatch.setenv("FLA_JAX_PALLAS_INTERPRET", "1")
    scales.check(scales.case_of(op, scales.MIXED_SCALES, **options), "pallas", "fused_recurrent")
