"""Every variant of the chunked Triton kernels in Triton's interpreter, in float32, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from harness import cases, places, scales, variants
from harness.cases import Case

from fla_jax.core.names import remat_policy
from fla_jax.pallas.backend import triton

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not triton.INTERPRET:
    pytest.skip("TRITON_INTERPRET is not set: tests/gpu runs the kernels themselves", allow_module_level=True)

from fla_jax.pallas.common.state_buffers_host import StateBuffers

SAFE = dict(decay="layer", lower_bound=-0.61)


def segments(*lengths: int, **more: Any) -> dict[str, Any]:
    return dict(layout="segments", lengths=lengths) | more


def packed(*lengths: int, **more: Any) -> dict[str, Any]:
    return dict(B=1, layout="packed", lengths=lengths) | more


# states of whole chunks lie in the gradients' memory: in none, one, two or four of them
STATES = [
    segments(5, 27, 16, T=48, K=K, V=V)
    for K, V in ((16, 10), (16, 24), (24, 40), (64, 64), (16, 72), (128, 16))
]
# RWKV-7 stores a state of large heads for two chunks, and gradients of states where those of tokens will be
PAIRS = [
    dict(T=64, K=72, V=128),
    dict(T=96, K=128, V=40, decay="strong"),
    dict(T=50, K=88, V=80, decay="mixed"),
    segments(5, 9, 1, 17, 16, T=48, K=128, V=128, decay="mixed"),
    segments(5, 9, 1, 17, 16, T=40, K=72, V=24),
    segments(5, 27, 32, T=64, K=72, V=24, **SAFE),
    segments(41, 17, T=58, K=128, V=40, **SAFE),
    dict(T=48, K=96, V=128, **SAFE),
    packed(16, 1, 33, 20, 48, K=72, V=24),
    packed(0, 5, 0, 0, 17, 33, 0, K=72, V=24, decay="mixed"),
]
KEY_MAJOR = [
    dict(T=64, K=64, V=64, decay="mixed"),
    dict(T=50, K=24, V=40, decay="strong"),
    dict(T=50, K=56, V=24, scale=0.7, **SAFE),
    segments(5, 9, 1, 17, 18, T=50, K=64),
    # every token a segment; edges of chunks, and of segments longer than one; the last chunk's only token
    segments(*(1,) * 35, T=35, decay="mixed"),
    segments(16, 16, 1, 15, 22, T=70),
    segments(15, 1, 1, 37, 10, T=64, decay="strong"),
    segments(7, 41, 1, T=49),
    segments(1, 30, 1, 1, 31, 5, 1, T=70, **SAFE),
    segments(64, T=64, **SAFE),
    packed(16, 1, 33, 20, K=40, V=72, decay="mixed"),
]
FP32 = [
    dict(T=50, K=24, V=40, decay="strong"),
    dict(T=48, K=64, V=64, decay="mixed"),
    dict(T=48, scale=0.7, **SAFE),
    segments(*(1,) * 35, T=35, decay="mixed"),
    segments(16, 16, 1, 15, 22, T=70, K=40, V=24, **SAFE),
    packed(16, 1, 33, 20, K=40, V=72, decay="mixed"),
    packed(0, 5, 0, 17, 18, K=72, V=40),
    dict(T=40, K=128, decay="mixed"),
    dict(T=40, V=136),
    dict(T=20, K=256, V=24),
]
SPLITS = [
    dict(decay="mixed"),
    SAFE,
    dict(decay="strong"),
    dict(T=80, K=72, V=24),
    segments(16, 16, 1, 40),  # segments that begin where a split does
    segments(80, decay="mixed"),
]
# blocks of values without one of keys, and the other way round
JOINT_SCANS = [dict(T=80, K=24, V=72), dict(T=80, K=64, V=16, decay="mixed"), dict(T=70, K=40, V=24)]
# the token before a split's first one is in the split before
KEY_MAJOR_SPLITS = [segments(16, 16, 1, 40, decay="mixed"), segments(3, 13, 32, 1, 24, **SAFE)]
GROUPS = [
    ("states", "both", ("bf16 dots",), STATES),
    ("pairs", "rwkv7", ("bf16 dots",), PAIRS),
    ("no wgmma", "rwkv7", ("bf16 dots", "no wgmma"), [dict(T=T, H=1, K=72, V=24, **SAFE) for T in (64, 50)]),
    ("key-major", "both", ("bf16 dots", "key-major"), KEY_MAJOR),
    ("fp32", "rwkv7", (), FP32),
    ("tf32x3", "both", ("tf32x3",), [case | dict(H=1) for case in FP32[1:6]]),
    ("splits", "both", ("splits",), SPLITS),
    ("bf16 splits", "rwkv7", ("bf16 dots", "splits"), SPLITS),
    ("joint scans", "rwkv7", ("bf16 dots", "key-major", "splits"), SPLITS + JOINT_SCANS),
    ("pairs in splits", "rwkv7", ("bf16 dots", "splits"), [dict(B=1, T=70, K=104, V=24)]),
    ("key-major splits", "both", ("bf16 dots", "key-major", "splits"), KEY_MAJOR_SPLITS),
]


def parameters() -> list[Any]:
    found = []
    for group, ops, names, calls in GROUPS:
        for op in cases.OPS if ops == "both" else (ops,):
            for i, options in enumerate(calls):
                shape = dict(T=70, H=1) if "splits" in names else {}
                case = Case(op, **(dict(B=2, H=2, K=16, V=16) | shape | options))
                marks = [pytest.mark.one_python, pytest.mark.slow] if i else []
                said = " ".join(str(x) for name, x in options.items() if name != "lengths")
                found.append(pytest.param(case, names, id=f"{op} {group} {said}", marks=marks))
    return found


@pytest.mark.parametrize("case, names", parameters())
def test_variants(case, names):
    """On a GPU float32 operands are multiplied as TF32 parts, to the accuracy that is asked for there."""
    tf32 = "tf32x3" in names
    tol = places.RECURRENCE[places.TRITON_GPU if tf32 else places.TRITON_INTERPRETER]["float32"]
    with variants.forced(*names):
        assert variants.num_splits(case) >= (3 if "splits" in names else 1)
        cases.check(case, "triton", tol)
        if "splits" in names:  # what nothing differentiates is another program
            alone = cases.Results(cases.outputs(case, "triton"), {})
            cases.compare(case, alone, cases.expected(case), tol)


@pytest.mark.parametrize(
    "case, names",
    [  # shapes that no other test has, and so no program
        (Case("rwkv6", B=1, T=48, H=3, K=64, V=64), ()),
        (Case("rwkv7", B=1, T=48, H=3, K=64, V=64), ()),
        (Case("rwkv7", B=1, T=64, H=3, K=72, V=128), ("bf16 dots",)),
    ],
)
def test_gradients_need_not_take_the_memory_of_states(case, names, monkeypatch):
    """In a loop over layers, whose residuals are slices of a stack, XLA gives them memory of their own."""
    given = []
    monkeypatch.setattr(StateBuffers, "aliases", lambda *names: given.append(names) or {})
    with variants.forced(*names):
        cases.check(case, "triton")
    assert given and all(buffers.num_aliased for buffers, *_ in given)


def test_vmap_of_outputs_alone_in_splits(op):
    each = [Case(op, B=1, T=70, H=1, K=16, V=16, seed=seed) for seed in range(2)]
    arrays = jax.tree.map(lambda *x: jnp.stack(x), *(cases.build(case).arrays for case in each))
    with variants.forced("splits"):
        got = jax.jit(jax.vmap(lambda x: cases.call(op, x, implementation="triton")))(arrays)
    for i, case in enumerate(each):
        one = cases.Results(jax.tree.map(lambda x, i=i: x[i], got), {})
        cases.compare(case, one, cases.expected(case))


def test_without_a_gradient_no_residuals_are_stored(op):
    """The kernel's outputs: o and the final state in full, of the rest one number each."""
    x = cases.build(Case(op, T=33, K=16, V=16))
    jaxpr = str(jax.make_jaxpr(lambda arrays: cases.call(op, arrays, implementation="triton"))(x.arrays))
    assert "pure_callback" in jaxpr and "3,2,16,16]" not in jaxpr  # states of three chunks
    assert "3,2,16,16]" in str(jax.make_jaxpr(cases.runner(op, "triton"))(*x))


def test_float64_is_refused(op):
    with jax.enable_x64(True):
        x = cases.build(Case(op, dtype="float64")).arrays
        message = "implementation='triton' cannot run this call: .*float64"
        with pytest.raises(ValueError, match=message):
            cases.call(op, x, implementation="triton")


@pytest.mark.parametrize("policy, forwards", [("named", 1), ("nothing", 2)])
def test_the_forward_runs_once_under_the_policy(op, policy, forwards):
    x = cases.build(Case(op, B=1, T=20, H=1, K=16, V=16))
    policies = dict(named=remat_policy(), nothing=jax.checkpoint_policies.nothing_saveable)

    @functools.partial(jax.checkpoint, policy=policies[policy])
    def block(arrays):
        arrays = {**arrays, "k": jnp.sin(arrays["k"])}
        return jnp.sum(jnp.sin(cases.call(op, arrays, implementation="triton")["o"]))

    with variants.forced("bf16 dots"):
        text = jax.jit(jax.value_and_grad(block)).lower(x.arrays).as_text()
    # the scale of the cotangents, and the backward
    assert text.count("custom_call @xla_ffi_python_cpu_callback") == forwards + 2


SEGMENTS, PACKED = segments(5, 13, 1, 21), packed(3, 0, 20, 17)
PROMISED = [head for head in scales.MIXED_SCALES if head.decay in scales.BOUNDED]
BF16, MAJOR = ("bf16 dots",), ("bf16 dots", "key-major")
# variants by name, and what is called
FAST: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (BF16, SEGMENTS),
    (MAJOR, dict(K=64, V=24)),
    ((*MAJOR, "splits"), dict(T=64, lower_bound=-5.0)),
]
# RWKV-7 has other kernels for large heads, float32 and GPUs of other generations
FAST7: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (BF16, SEGMENTS | dict(K=72, V=24)),
    (("splits",), dict(T=64)),
]
SLOW: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (BF16, PACKED),
    (BF16, dict(K=24, V=40)),
    (MAJOR, SEGMENTS),
    ((*BF16, "splits"), dict(T=64)),
    (BF16, dict(T=50, lower_bound=-5.0)),
    ((*BF16, "no wgmma"), dict(K=72, V=24, lower_bound=-5.0)),
    (BF16, {}),
    (MAJOR, {}),
    (MAJOR, PACKED),
    (BF16, dict(K=128, V=128)),
    ((), dict(K=128, V=128)),
    ((*BF16, "splits"), segments(16, 16, 1, 37, T=70)),
    (BF16, PACKED | dict(K=72, V=128)),
    (("splits",), dict(T=64, K=72, V=24)),
]


def of_scales() -> list[Any]:
    found = []
    for op in cases.OPS:
        for names, options in [*FAST, *(FAST7 if op == "rwkv7" else ()), *SLOW]:
            heads = PROMISED if "lower_bound" in options else scales.MIXED_SCALES
            said = " ".join(f"{name} {value}" for name, value in options.items() if name != "lengths")
            marks = [pytest.mark.one_python, *[pytest.mark.slow] * ((names, options) in SLOW)]
            case = scales.case_of(op, heads, **options)
            found.append(pytest.param(case, names, id=f"{op} {' '.join(names)} {said}", marks=marks))
    return found


@pytest.mark.parametrize("case, names", of_scales())
def test_scales(case, names):
    with variants.forced(*names):
        assert variants.num_splits(case) > ("splits" in names)
        scales.check(case, "triton")
