"""Lowers jitted public ops for CUDA on a machine without a GPU and prints, as JSON, which Triton kernels each
program calls.

Started by test_lowering.py in a process without Triton's interpreter. ``python lower.py`` prints what a
person can read; the kernels are compiled to PTX.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import re
import zlib

import abstract_gpu
import cases
import jax
import jax.numpy as jnp
from cases import OPS, TOKENS

from fla_jax.core.gpu import lowering_for
from fla_jax.core.names import remat_policy
from fla_jax.generation import Sampling
from fla_jax.generation.sampling import TokenCounts, sample
from fla_jax.pallas.backend.triton import why_not

H, D, T = 64, 16, 2048  # small heads: they compile fast
CAPABILITY = 90
BOUNDED = {"lower_bound": -0.61}


def arguments(op: str, B: int = 4, H: int = H, D: int = D, T: int = T, layers: int | None = None):
    """Abstract token arrays, u and initial state, by name; with ``layers`` each of them once per layer."""
    lead = () if layers is None else (layers,)
    arrays = {name: jax.ShapeDtypeStruct((*lead, B, T, H, D), "bfloat16") for name in TOKENS[op]}
    if op == "rwkv6":
        arrays["u"] = jax.ShapeDtypeStruct((*lead, H, D), "bfloat16")
    return arrays, jax.ShapeDtypeStruct((*lead, B, H, D, D), jnp.float32)


def layer(op: str):
    """``(x, arrays, state) -> x``: one call of the op, its values fed by ``x`` and its output added to it.
    Decays are bounded: kernels with that form alone compile in half the time.
    """

    def run(x, arrays, state):
        o, final = cases.call(
            op, {**arrays, "v": arrays["v"] * x, "initial_state": state}, **BOUNDED, implementation="triton"
        )
        return x + jnp.tanh(o) + jnp.mean(jnp.sin(final)).astype(o.dtype)

    return run


def value(op: str):
    """``(x, arrays, state) -> number``."""
    return lambda x, arrays, state: jnp.sum(layer(op)(x, arrays, state).astype(jnp.float32))


def gradient(op: str, remat=False, policy=None, layers: int | None = None):
    """Value and gradient through one layer, or through a scan over layers; each layer under `jax.checkpoint`
    with ``remat``.
    """
    step = layer(op)
    if remat:
        step = jax.checkpoint(step, policy=policy)

    def loss(arrays, state, x):
        if layers is None:
            x = step(x, arrays, state)
        else:
            x, _ = jax.lax.scan(lambda x, one: (step(x, *one), None), x, (arrays, state))
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    return lambda x, arrays, state: jax.value_and_grad(loss)(arrays, state, x)


def recurrent_gradient(op: str):
    """Gradient of the recurrent form, by its Pallas kernels."""

    def loss(arrays, state):
        o, final = cases.call(
            op, {**arrays, "initial_state": state}, "fused_recurrent", implementation="pallas"
        )
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    return lambda x, arrays, state: jax.grad(loss)(arrays, state)


def triton_calls(f, x, arrays, state) -> list:
    """The operations in the program of ``f`` that call Triton kernels."""
    with abstract_gpu.h200():
        lowered = jax.jit(f).trace(x, arrays, state).lower(lowering_platforms=("cuda",))
    return calls_in(lowered.compiler_ir().operation)


def calls_in(op) -> list:
    """The operations in ``op`` that call Triton kernels."""
    found = []
    if op.operation.name == "stablehlo.custom_call" and "triton_kernel_call" in str(
        op.attributes["call_target_name"]
    ):
        found.append(op)
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                found += calls_in(inner)
    return found


def kernels(f, *args) -> dict[str, int]:
    """How often the program of ``f`` calls each Triton kernel."""
    return dict(sorted(collections.Counter(map(name_of, triton_calls(f, *args))).items()))


def taken_over(op: str, D: int, T: int) -> dict[str, list[int]]:
    """Operands and results of the kernel that writes gradients of keys which share memory, and the number of
    all results; D keys and values, T tokens.
    """
    name = "rwkv7_bwd_grads_kernel" if op == "rwkv7" and D > 64 else f"{op}_bwd_kernel"
    arrays, state = arguments(op, D=D, T=T)
    (call,) = (c for c in triton_calls(gradient(op), arrays["v"], arrays, state) if name_of(c) == name)
    pairs = re.findall(
        r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)",
        str(call.attributes["output_operand_aliases"]),
    )
    pairs.sort(key=lambda pair: int(pair[1]))
    return {
        "operands": [int(x) for _, x in pairs],
        "results": [int(x) for x, _ in pairs],
        "all": [len(call.operation.results)],
    }


def description(op) -> bytes:
    """What jaxlib reads of a custom call on the GPU, which is compressed: name, PTX and more."""
    from jax.extend.mlir import ir

    attributes = op.attributes  # jax-triton 0.3 keeps the description in one, 0.4 in the other
    packed = (
        ir.DictAttr(attributes["mhlo.backend_config"])["opaque"]
        if "mhlo.backend_config" in attributes
        else attributes["backend_config"]
    )
    return zlib.decompress(ir.StringAttr(packed).value_bytes)


def name_of(op) -> str:
    """The kernel that a custom call runs."""
    text = description(op)
    names = [name for name in KERNELS if name.encode() in text]
    assert len(names) == 1, (names, text[:200])
    return names[0]


def recorded() -> dict[str, object]:
    """Of the kernels that choose a token, and of a gradient's: the names that they are called by; how many of
    their results take over the memory of an operand; what makes such operands.
    """
    rules, none = Sampling().arrays(300), TokenCounts.none(1, 300)
    keys = jax.random.split(jax.random.key(0), 1)
    arrays, state = arguments("rwkv7", T=32)
    names, makers = set(), []
    with lowering_for(CAPABILITY):
        choice = jax.jit(sample, static_argnums=4).trace(rules, jnp.zeros((1, 300)), none, keys, "triton")
        step = jax.jit(gradient("rwkv7")).trace(arrays["v"], arrays, state)
        modules = [traced.lower(lowering_platforms=("cuda",)).compiler_ir() for traced in (choice, step)]
    for call in (call for module in modules for call in calls_in(module.operation)):
        names.add(str(call.attributes["call_target_name"]))
        for i in re.findall(r"operand_index = (\d+)", str(call.attributes["output_operand_aliases"])):
            makers.append(call.operands[int(i)].owner.name)
    return {"names": sorted(names), "taken": len(makers), "makers": sorted(set(makers))}


def kept() -> dict[str, object]:
    """Whether a program is the same where nothing can be compiled, as in a later process; whether a kernel
    that was not compiled before is missed there. And the GPUs that kernels are compiled for by machines that
    share what they keep.
    """
    from fla_jax.pallas.backend import lowering

    named = ("call_target_name", "backend_config", "output_operand_aliases")

    def calls(D: int) -> list[str]:
        arrays, state = arguments("rwkv6", D=D)
        found = triton_calls(value("rwkv6"), arrays["v"], arrays, state)
        return [str({name: str(call.attributes[name]) for name in named}) for call in found]

    targets = []
    for capability in (80, 90):
        jax.clear_caches()
        rules, none = Sampling().arrays(300), TokenCounts.none(1, 300)
        keys = jax.random.split(jax.random.key(0), 1)
        with lowering_for(capability):
            traced = jax.jit(sample, static_argnums=4).trace(rules, jnp.zeros((1, 300)), none, keys, "triton")
            module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
        texts = [description(call) for call in calls_in(module.operation)]
        targets.append(sorted({re.search(rb"\.target (\w+)", text)[1].decode() for text in texts}))
    first = calls(16)
    lowering.compiled_in_this_process.clear()
    lowering.make_backend = None
    again = calls(16) == first
    try:
        calls(24)
    except TypeError:
        missed = True
    else:
        missed = False
    return {"again": again, "missed": missed, "targets": targets}


KERNELS = (
    *(f"rwkv6_{name}_kernel" for name in ("fwd", "chunk_state", "bwd")),
    *(f"rwkv7_{name}_kernel" for name in ("fwd", "chunk_state", "bwd", "bwd_dh", "bwd_grads")),
    "cotangent_scale_kernel",
    "state_passing_kernel",
    "state_grad_kernel",
    "add_entry_output_kernel",
)


def programs(op: str):
    """Name, function and arguments of each program."""
    plain, (stacked, states), few = arguments(op), arguments(op, layers=3), arguments(op, B=1, H=4)
    x = plain[0]["v"]
    yield "value", value(op), (x, *plain)
    yield "gradient", gradient(op), (x, *plain)
    yield "checkpoint", gradient(op, remat=True), (x, *plain)
    yield "checkpoint with the policy", gradient(op, remat=True, policy=remat_policy()), (x, *plain)
    yield "scan", gradient(op, layers=3), (x, stacked, states)
    yield "scan of checkpoint", gradient(op, remat=True, layers=3), (x, stacked, states)
    yield (
        "scan of checkpoint with the policy",
        gradient(op, remat=True, policy=remat_policy(), layers=3),
        (x, stacked, states),
    )
    yield "few rows and heads", gradient(op), (few[0]["v"], *few)
    yield "value of few rows and heads", value(op), (few[0]["v"], *few)
    if op == "rwkv7":
        large = arguments(op, D=72)
        yield "large heads", gradient(op), (large[0]["v"], *large)
        wide = {**plain[0], "w": jax.ShapeDtypeStruct(plain[0]["w"].shape, jnp.float32)}
        yield "token by token", recurrent_gradient(op), (x, *plain)
        yield "token by token, float32 decays", recurrent_gradient(op), (x, wide, plain[1])


if __name__ == "__main__":
    with lowering_for(CAPABILITY):
        refused = why_not("gpu")
    reason = refused and refused.reason
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        reason = "neither jax-cuda12-plugin nor jax-cuda13-plugin is installed"
    report = (
        {"skip": reason}
        if reason
        else {op: {name: kernels(f, *args) for name, f, args in programs(op)} for op in OPS}
    )
    if not reason:
        report["taken over"] = {
            op: [taken_over(op, 64, 32), taken_over(op, 32, 32), taken_over(op, 32, 33)] for op in OPS
        }
        report["taken over, large"] = [taken_over("rwkv7", 128, T) for T in (64, 48)]
        report["recorded"] = recorded()
        report["kept"] = kept()  # the last: from here on nothing can be compiled
    print("REPORT", json.dumps(report))
