"""Jitted public ops lower for CUDA without a GPU and call each kernel as often as they should.

Needs JAX's CUDA plugin of the same version as jaxlib:
``pip install --no-deps jax-cuda13-plugin==<version of jax>`` (8 MB, only lowers). It is no part of an extra:
with the 380 MB that pip would install along, JAX tries to start CUDA in every process and complains.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from harness import cases, lowering, processes

from fla_jax.core.names import remat_policy
from fla_jax.ops.layer import norm_shift_mix

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

# a safe gate and small heads: fewer kernels to trace
BOUNDED: dict[str, Any] = dict(lower_bound=-0.61, implementation="triton")
# calls of the forward kernel in the program of a gradient: a scan over layers has one in its body
FORWARDS = {
    "gradient": 1,
    "checkpoint": 2,
    "checkpoint with the policy": 1,
    "scan": 1,
    "scan of checkpoint": 2,
    "scan of checkpoint with the policy": 1,
}
BARRIER = "stablehlo.optimization_barrier"


def gradient(op: str, wrap=lambda step: step, layers=0, B=4, H=64, D=16, T=2048):
    """Program of value and gradient through one call, or through a scan over layers."""
    arrays = lowering.abstract(op, B, T, H, D, "bfloat16")
    stack = lambda a: lowering.array(*(layers,) * bool(layers), *a.shape, dtype=a.dtype)
    stacked = jax.tree.map(stack, arrays)

    @wrap
    def step(x, arrays):
        got = cases.call(op, {**arrays, "v": arrays["v"] * x}, **BOUNDED)
        return x + jnp.tanh(got["o"]) + jnp.mean(jnp.sin(got["ht"])).astype(x.dtype)

    def loss(arrays, x):
        x = jax.lax.scan(lambda x, one: (step(x, one), None), x, arrays)[0] if layers else step(x, arrays)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    return jax.value_and_grad(loss), (stacked, arrays["v"])


def programs(op: str, name: str) -> lowering.Program:
    small = dict(B=1, H=4)
    policy = functools.partial(jax.checkpoint, policy=remat_policy())
    wraps = {"checkpoint": jax.checkpoint, "checkpoint with the policy": policy}
    if name in FORWARDS:
        layers = 3 if name.startswith("scan") else 0
        return gradient(op, wraps.get(name.removeprefix("scan of "), lambda step: step), layers)
    if name == "small batch":
        return gradient(op, **small)
    if name.startswith("value"):
        size = small if "small" in name else dict(B=4, H=32 if "medium" in name else 64)
        arrays = lowering.abstract(op, T=2048, D=16, dtype="bfloat16", **size)
        return lambda arrays: cases.call(op, arrays, **BOUNDED), (arrays,)
    if name == "large heads":
        return gradient(op, D=72)
    arrays = lowering.abstract(op, 4, 1 if name == "one token" else 2048, 64, 16, "bfloat16")
    if "float32" in name:
        arrays["w"] = lowering.array(*arrays["w"].shape)
    run = lambda x: cases.call(op, x, form="fused_recurrent", implementation="triton")
    return (run if name == "one token" else lowering.with_gradient(run)), (arrays,)


def launched(op: str, name: str, **sizes: int) -> list[lowering.Launch] | str:
    """The launches of a program, or why it cannot be lowered."""
    reason = lowering.cannot_lower()
    if reason is not None:
        return reason
    program = gradient(op, **sizes) if sizes else programs(op, name)
    return lowering.launches(program)[0]


def result(future: concurrent.futures.Future) -> Any:
    found = future.result(timeout=600)
    if isinstance(found, str):
        pytest.skip(f"kernels cannot be lowered here: {found}")
    return found


def counts(op: str, name: str) -> dict[str, int]:
    found = result(processes.compilers().submit(launched, op, name))
    return dict(collections.Counter(launch.kernel for launch in found))


@pytest.mark.parametrize("op", cases.OPS)
def test_values(op):
    """The forward kernel once; in splits, what they do to the state and the states between them, too."""
    assert counts(op, "value") == {f"{op}_fwd_kernel": 1}
    last = "rwkv6_fwd_kernel" if op == "rwkv6" else "add_entry_output_kernel"
    want = {f"{op}_chunk_state_kernel": 1, "state_passing_kernel": 1, last: 1}
    assert counts(op, "value of a small batch") == want
    whole = {"rwkv7_fwd_kernel": 1}  # 128 programs: splits pay for RWKV-7's backward alone
    assert counts(op, "value of a medium batch") == (want if op == "rwkv6" else whole)


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize("name", [*FORWARDS, "small batch"])
def test_gradients(op, name):
    """The policy stores what the forward kernel made: without it, `jax.checkpoint` runs that kernel again."""
    want = {f"{op}_fwd_kernel": FORWARDS.get(name, 1), f"{op}_bwd_kernel": 1}
    if name.startswith("small"):
        want |= {f"{op}_chunk_state_kernel": 1, "state_passing_kernel": 2, "state_grad_kernel": 1}
    assert counts(op, name) == want


def test_large_heads_take_two_backward_kernels():
    kernels = ("rwkv7_fwd", "rwkv7_bwd_dh", "rwkv7_bwd_grads")
    assert counts("rwkv7", "large heads") == {f"{name}_kernel": 1 for name in kernels}


def test_the_recurrent_form():
    """Gradients of RWKV-7 come from the chunked kernel where all of them have 16 bits, in four splits."""
    by_pairs = {"state_sums_kernel": 2, "scores_kernel": 1}
    for op in cases.OPS:
        want = {f"{op}_scan_kernel": 2, f"{op}_pair_grads_kernel": 1} | by_pairs
        assert counts(op, "token by token, float32 decays") == want
    want = {"rwkv7_scan_kernel": 1 + 4, "cotangent_scale_kernel": 1, "rwkv7_bwd_grads_kernel": 4}
    assert counts("rwkv7", "token by token") == want
    assert counts("rwkv7", "one token") == {"rwkv7_token_kernel": 1}


def default_calls() -> str | None:
    """Lowers every op as `None` selects it, with warnings as errors; or says why it cannot."""
    reason = lowering.cannot_lower()
    for op in cases.OPS if reason is None else ():
        for form, T in (("chunk", 40), ("fused_recurrent", 40), ("fused_recurrent", 1)):
            arrays = lowering.abstract(op, 2, T, 4, 64, "bfloat16")
            run = lambda x, op=op, form=form: cases.call(op, x, form=form)
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeprecationWarning)
                found, _ = lowering.launches((run, (arrays,)))
                assert found or (op, T) == ("rwkv6", 1)
                lowering.launches((lowering.with_gradient(run), (arrays,)))
    return reason


def test_no_default_call_is_deprecated():
    """Pallas' Triton lowering is, from JAX 0.11 on."""
    reason = processes.compilers().submit(default_calls).result(timeout=600)
    if reason is not None:
        pytest.skip(f"kernels cannot be lowered here: {reason}")


@pytest.mark.parametrize(
    "op, D, T, results",
    [
        ("rwkv6", 64, 32, [0, 1, 2, 3]),  # a state of 64 values lies in four gradients
        ("rwkv6", 32, 32, [0, 1]),  # one of 32 in two
        ("rwkv6", 32, 33, []),  # the last chunk is not whole, so that its state does not fit
        ("rwkv7", 64, 32, [0, 2, 4, 5]),
        ("rwkv7", 32, 32, [0, 2]),
        ("rwkv7", 32, 33, []),
        ("rwkv7", 128, 64, [0, 2, 3, 4]),  # gradients of states, one for two chunks
        ("rwkv7", 128, 48, []),
    ],
)
def test_gradients_take_the_memory_of_states(op, D, T, results):
    found = result(processes.compilers().submit(launched, op, "", D=D, T=T))
    kernel = "rwkv7_bwd_grads_kernel" if D > 64 else f"{op}_bwd_kernel"
    (launch,) = (one for one in found if one.kernel == kernel)
    operands = [operand for operand, _ in launch.aliases]
    assert operands == list(range(min(operands, default=0), min(operands, default=0) + len(results)))
    assert [result for _, result in launch.aliases] == results
    # behind a barrier, a loop over layers would copy every residual out of its stack
    assert BARRIER not in launch.makers
    assert launch.target == "triton_kernel_call_ffi"  # the name that XLA can put into CUDA graphs


def test_a_kernel_in_place_has_its_own_operands():
    """XLA fuses calls with slices, and forgets that results take the memory of operands."""
    (launch,) = result(processes.compilers().submit(launched, "rwkv7", "one token"))
    assert launch.aliases and {*launch.makers} == {BARRIER}


def cached() -> Any:
    """Whether a program is the same where nothing can be compiled, as in a later process; whether a kernel
    that was not compiled before is missed there; and the GPUs that kernels are compiled for by machines that
    share a cache.
    """
    reason = lowering.cannot_lower()
    if reason is not None:
        return reason
    from fla_jax.pallas.backend import lowering as backend  # fails where kernels cannot be lowered

    described = lambda program, capability=90: [
        lowering.description(op) for op in lowering.lowered(program, capability)
    ]

    def calls(D: int) -> list[bytes]:
        arrays = lowering.abstract("rwkv6", 4, 2048, 64, D, "bfloat16")
        return described((lambda arrays: cases.call("rwkv6", arrays, **BOUNDED), (arrays,)))

    targets = []
    for capability in (80, 90):
        texts = described((lowering.choose, (lowering.array(1, 300),)), capability)
        targets.append(sorted({re.search(rb"\.target (\w+)", text)[1].decode() for text in texts}))
    first = calls(16)
    backend.compiled_in_this_process.clear()
    backend.make_backend = None
    again = calls(16) == first
    try:
        calls(24)
    except TypeError:
        return {"again": again, "missed": True, "targets": targets}
    return {"again": again, "missed": False, "targets": targets}


def test_kernels_are_compiled_once(tmp_path):
    """A later process reads what an earlier one compiled, but for another kind of GPU."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    with processes.executor(1, environment) as fresh:
        found = result(fresh.submit(cached))
    assert found == {"again": True, "missed": True, "targets": [["sm_80"], ["sm_90a"]]}


# the forward scan and all of the backward
PALLAS = {"scan": 2, "contract_state": 2, "contract_values": 1, "gradients": 1}
CALL: dict[str, Any] = dict(B=2, T=40, H=2, K=64, V=64)


def pallas_kernels(op: str, gradient: bool = True, dtype: str = "bfloat16", layout: Any = None, **sizes: int):
    """How often the program of a recurrent call calls each Pallas kernel."""
    B, T, H, K, V = (CALL | sizes).values()
    layout = layout or {}
    N = layout["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in layout else B
    arrays = lowering.abstract(op, B, T, H, K, dtype) | {"v": lowering.array(B, T, H, V, dtype=dtype)}
    arrays["initial_state"] = lowering.array(N, H, K, V)
    run = lambda x, layout: cases.call(op, x, layout, form="fused_recurrent", implementation="pallas")
    with lowering.gpu(90):
        traced = jax.jit(lowering.with_gradient(run) if gradient else run).trace(arrays, layout)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'stablehlo.custom_call @__gpu\$xla.gpu.triton\(.*?name = "(\w+)"', text)
    return dict(collections.Counter(name.removeprefix(f"{op}_") for name in found))


def mixed(dtype: str) -> list[lowering.Launch] | str:
    """The launches of a mix of tokens with segment ids of a dtype, or why it cannot be lowered."""
    run = lambda x, mu, ids: norm_shift_mix(x, (mu,), segment_ids=ids, implementation="triton").mixed[0]
    arrays = lowering.array(1, 8, 64), lowering.array(64), lowering.array(1, 8, dtype=dtype)
    return lowering.cannot_lower() or lowering.launches((run, arrays))[0]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_segment_ids_of_any_integers(dtype):
    (launch,) = result(processes.compilers().submit(mixed, dtype))
    assert launch.kernel == "mix_fwd_kernel"


@pytest.mark.parametrize("op", cases.OPS)
def test_pallas_kernels(op, monkeypatch):
    monkeypatch.delenv("FLA_JAX_PALLAS_INTERPRET", raising=False)
    assert pallas_kernels(op, gradient=False) == {"scan": 1} and pallas_kernels(op) == PALLAS
    for K, V in ((16, 16), (48, 256), (256, 128)):
        assert pallas_kernels(op, dtype="float32", K=K, V=V) == PALLAS
    ids, cu = lowering.array(2, 40, dtype=jnp.int32), lowering.array(4, dtype=jnp.int32)
    assert pallas_kernels(op, layout={"segment_ids": ids}) == PALLAS
    assert pallas_kernels(op, B=1, layout={"cu_seqlens": cu}) == PALLAS


def test_the_decoding_step_is_one_kernel(monkeypatch):
    monkeypatch.delenv("FLA_JAX_PALLAS_INTERPRET", raising=False)
    assert pallas_kernels("rwkv7", gradient=False, T=1) == {"step": 1}
