"""Programs lowered for CUDA on a machine without a GPU: the Triton kernels they call, and what those take.

What is compiled is what the program calls: kernels, types, constants and launch options cannot drift from the
code. Triton's interpreter must be off in the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pathlib
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh

from fla_jax.core.gpu import lowering_for

from . import cases, layer_cases

Program = tuple[Callable[..., Any], tuple[Any, ...]]


class Launch(NamedTuple):
    """One call of a Triton kernel in a program.

    Attributes:
        kernel: its name.
        ptx: its code.
        shared: bytes of shared memory of a block.
        warps: of a block.
        aliases: (operand, result) that share memory.
        makers: operations that make the operands whose memory a result takes.
        target: the name by which XLA knows the call.
    """

    kernel: str
    ptx: str
    shared: int
    warps: int
    aliases: tuple[tuple[int, int], ...]
    makers: tuple[str, ...]
    target: str


class Usage(NamedTuple):
    """Registers and spilled bytes of a thread, shared memory of a block in bytes."""

    kernel: str
    capability: int
    warps: int
    registers: int
    spilled: int
    shared: int


@contextlib.contextmanager
def gpu(capability: int) -> Iterator[None]:
    """JAX lowers for it; from 0.11 on Pallas wants to know which device that is."""
    known = {"platform": "gpu"} if "platform" in AbstractDevice.__dataclass_fields__ else {}
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, **known)
    mesh = AbstractMesh((), (), abstract_device=device)
    with lowering_for(capability), jax.sharding.use_abstract_mesh(mesh):
        yield


def cannot_lower() -> str | None:
    """Why programs cannot be lowered for CUDA in this process."""
    from fla_jax.pallas.backend import triton

    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return "neither jax-cuda12-plugin nor jax-cuda13-plugin is installed"
    with lowering_for(90):
        return triton.why_not("gpu")


def launches(program: Program, capability: int | None = 90) -> list[Launch]:
    """The Triton kernels that a program calls, in its order; with None for the GPU that jax-triton finds."""
    f, args = program
    with contextlib.nullcontext() if capability is None else gpu(capability):
        module = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir()
    return [_launch(op) for op in _operations(module.operation) if _calls_triton(op)]


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner
                yield from _operations(inner)


def _calls_triton(op: Any) -> bool:
    if op.operation.name != "stablehlo.custom_call":
        return False
    return "triton_kernel_call" in str(op.attributes["call_target_name"])


def description(op: Any) -> bytes:
    """jaxlib's TritonAnyKernelCall (jaxlib/gpu/triton.proto) of a custom call, as bytes."""
    attributes = op.attributes  # jax-triton 0.3 stores it in one, 0.4 in the other
    packed = (
        ir.DictAttr(attributes["mhlo.backend_config"])["opaque"]
        if "mhlo.backend_config" in attributes
        else attributes["backend_config"]
    )
    return zlib.decompress(ir.StringAttr(packed).value_bytes)


def _launch(op: Any) -> Launch:
    kernel = _fields(_fields(_fields(description(op))[1])[1])
    pairs = re.findall(
        r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)",
        str(op.attributes["output_operand_aliases"]),
    )
    aliases = sorted((int(operand), int(result)) for result, operand in pairs)
    makers = tuple(op.operands[operand].owner.name for operand, _ in aliases)
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    name, ptx = kernel[1].decode(), kernel[4].decode()
    return Launch(name, ptx, kernel.get(3, 0), kernel.get(2, 1), tuple(aliases), makers, target)


def _fields(data: bytes) -> dict[int, Any]:
    """The fields of a protobuf message: numbers, or bytes; of repeated ones the last."""
    found, i = {}, 0

    def varint() -> int:
        nonlocal i
        value = shift = 0
        while True:
            byte = data[i]
            i += 1
            value |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return value

    while i < len(data):
        key = varint()
        if key & 7 == 0:
            found[key >> 3] = varint()
        else:
            size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
            found[key >> 3] = data[i : i + size]
            i += size
    return found


def usage(launch: Launch, capability: int) -> Usage:
    """What Triton's ptxas makes of a kernel."""
    registers, spilled = _assembled(launch.ptx, capability)
    return Usage(launch.kernel, capability, launch.warps, registers, spilled, launch.shared)


@functools.lru_cache(maxsize=256)
def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes."""
    import triton

    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None and target[1].removeprefix("sm_").rstrip("a") == str(capability), target
    exe = f"ptxas{'-blackwell' if capability >= 100 else ''}"  # Triton brings one of its own for these
    exe = str(pathlib.Path(triton.__file__).parent / "backends/nvidia/bin" / exe)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        options = ["-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        text = subprocess.run([exe, *options], capture_output=True, text=True, check=True).stderr
    registers, stack = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes stack frame", text)
    assert registers is not None, text
    return int(registers[1]), int(stack[1]) if stack else 0


def array(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs, and gradients with the outputs as cotangents."""

    def run(floats: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda floats: f(floats, *rest), floats)
        return out, pull(out)

    return run


def abstract(op: str, B: int, T: int, H: int, D: int, dtype: str, N: int | None = None) -> dict[str, Any]:
    """Arrays of a recurrence by name."""
    floats = dict.fromkeys(cases.TOKENS[op], array(B, T, H, D, dtype=dtype))
    floats |= {"u": array(H, D, dtype=dtype)} if op == "rwkv6" else {}
    return floats | {"initial_state": array(N or B, H, D, D)}


def recurrence(
    op: str,
    D: int = 64,
    dtype: str = "bfloat16",
    gate: str = "any",
    form: str = "chunk",
    B: int = 8,
    H: int = 64,
    T: int = 2048,
    layout: str = "batch",
    gradient: bool = True,
) -> Program:
    """A call with 2048 tokens; ``gate`` "bounded" promises a lower bound of the decays."""
    options: dict[str, Any] = dict(form=form, implementation="triton" if form == "chunk" else "pallas")
    options |= dict(lower_bound=-1.0) if gate == "bounded" else {}
    B, N = (1, 16) if layout == "packed" else (B, B)
    rest = {"segment_ids": array(B, T, dtype=jnp.int32)} if layout == "segments" else {}
    rest = {"cu_seqlens": array(N + 1, dtype=jnp.int32)} if layout == "packed" else rest
    run = lambda floats, layout: cases.call(op, floats, layout, **options)
    return (with_gradient(run) if gradient else run), (abstract(op, B, T, H, D, dtype, N), rest)


def on_heads(op: str, N: int = 64, dtype: str = "bfloat16", gradient: bool = True) -> Program:
    """Keys are mixed with the first layer's values where a traced flag says so."""
    floats = dict.fromkeys(layer_cases.TOKENS[op], array(8, 2048, 16, N, dtype=dtype))
    floats |= dict.fromkeys(cases.VECTORS[op], array(16, N))
    flag = (array(dtype=bool),) if op == "rwkv7_keys" else ()
    options = lambda flags: {"residual": flags[0]} if flags else {}
    run = lambda floats, *flags: cases.call(op, floats, implementation="triton", **options(flags))
    return (with_gradient(run) if gradient else run), (floats, *flag)


# of norm, shift and mixes, what layers call: number of mixes, with a sum and a norm, moved, the normalised
# tokens as an output
MIXES = {
    "six": (6, True, False, False),
    "two": (2, True, False, False),
    "one": (1, True, False, False),
    "one, normalised": (1, True, False, True),
    "five, moved": (5, False, True, False),
}


def mix(kind: str, C: int, dtype: str = "bfloat16") -> Program:
    M, norm, moved, normalised = MIXES[kind]
    tokens, vector = array(8, 2048, C, dtype=dtype), array(C)
    floats = {"x": tokens, "mixes": array(M, C), "last": array(8, C, dtype=dtype)}
    floats |= {"y": tokens, "scale": vector, "bias": vector} if norm else {}
    floats |= {"moves": array(M, 8, 2048, C, dtype=dtype)} if moved else {}
    options = dict(normalised=normalised, implementation="triton")
    run = lambda floats, ids: cases.call("norm_shift_mix", floats, {"segment_ids": ids}, **options)
    return with_gradient(run), (floats, array(8, 2048, dtype=jnp.int32))


def decode(
    version: int, C: int, B: int, dtype: str = "bfloat16", group: int | None = None, state: str = "float32"
) -> Program:
    """A decoded token of a model of two layers, chosen from the logits by sampling."""
    from fla_jax.generation.decode_weights import prepare_decode_weights
    from fla_jax.generation.steps import FastStep
    from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM

    config, kind = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[version]
    model = kind(config(65536, C, 2, dtype=dtype))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))["params"]
    weights = jax.eval_shape(lambda params: prepare_decode_weights(model, params, group), params)
    start = jax.eval_shape(lambda: model.init_state(B))
    start = start.replace(wkv=jax.ShapeDtypeStruct(start.wkv.shape, state))
    step = FastStep(model, "triton")

    def run(weights: Any, tokens: Any, state: Any, active: Any) -> Any:
        logits, state = step(weights, tokens, state, active)
        return state, (choose(logits) if version == 7 else logits)

    return run, (weights, array(B, dtype=jnp.int32), start, array(B, dtype=bool))


def choose(logits: jax.Array) -> jax.Array:
    """Tokens chosen from logits [B, V]."""
    from fla_jax.generation.sampling import Sampling, TokenCounts, sample

    B, V = logits.shape
    keys = jax.random.split(jax.random.key(0), B)
    return sample(Sampling().arrays(V), logits, TokenCounts.none(B, V), keys, "triton")[0]
