"""Programs lowered for CUDA without a GPU: the Triton kernels they call, and what those take.

The compiled code is what the program calls. The interpreter must be off in the process.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import tempfile
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh

from fla_jax.core.gpu import lowering_for

from . import cases, layer_cases

Program = tuple[Callable[..., Any], tuple[Any, ...]]


class Launch(NamedTuple):
    """One call of a Triton kernel in a lowered program.

    Attributes:
        kernel: its name.
        aliases: (operand, result) that share memory.
        makers: operations that make the operands whose memory a result takes.
        target: the name by which XLA knows the call.
    """

    kernel: str
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

    with lowering_for(90):
        refused = triton.why_not("gpu")
    return refused and refused.reason


def lowered(program: Program, capability: int = 90) -> list[Any]:
    """The operations of a program that call Triton kernels, in its order."""
    f, args = program
    with gpu(capability):
        module = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir()
    return [op for op in _operations(module.operation) if _calls_triton(op)]


def launches(program: Program, capability: int = 90) -> tuple[list[Launch], list[Any]]:
    """The calls in a program, and the distinct ones as the backend knows them; nothing is compiled."""
    from fla_jax.pallas.backend import lowering

    calls = []

    def compiled(call, signature):
        calls.append((call, signature))
        return types.SimpleNamespace(to_proto=lambda name, _: name.encode())

    stubs = dict(_compile=compiled, _read_cache=lambda key: None, _write_cache=lambda key, opaque: None)
    with mock.patch.multiple(lowering, compiled_in_this_process={}, **stubs):
        return [_launch(op) for op in lowered(program, capability)], calls


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
    """What jaxlib reads of a custom call: a kernel with its PTX, or the name in its place."""
    packed = ir.DictAttr(op.attributes["mhlo.backend_config"])["opaque"]
    return zlib.decompress(ir.StringAttr(packed).value_bytes)


def _launch(op: Any) -> Launch:
    pairs = re.findall(
        r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)",
        str(op.attributes["output_operand_aliases"]),
    )
    aliases = sorted((int(operand), int(result)) for result, operand in pairs)
    makers = tuple(op.operands[operand].owner.name for operand, _ in aliases)
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    return Launch(description(op).decode(), tuple(aliases), makers, target)


def usages(calls: list[Any]) -> list[Usage]:
    """What the kernels of `launches` take, each once."""
    distinct = {}
    for call, signature in calls:
        key = (call.kernel.__name__, repr(signature), call.constants, call.launch, call.capability)
        distinct[key] = call, signature
    return [_usage(key, *made) for key, made in distinct.items()]


_USAGES: dict[Any, Usage] = {}


def _usage(key: Any, call: Any, signature: Any) -> Usage:
    """Compiles to a cubin with Triton's ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fla_jax.pallas.backend.lowering import triton_options, triton_source

    if key not in _USAGES:
        source, _ = triton_source(call.kernel, signature, dict(call.constants))
        # As jaxlib compiles: without --regAllocOptLevel=2, which Triton gives ptxas from 3.7 on and by which
        # these kernels spill up to 150 bytes more. The last one counts; 4 is ptxas' default.
        options = triton_options(call) | dict(ptx_options="--regAllocOptLevel=4")
        target = GPUTarget("cuda", call.capability, 32)
        made = triton.compile(source, target=target, options=options)
        assert f".target sm_{call.capability}" in made.asm["ptx"]
        used = _resources(made.asm["cubin"])
        spilled = max(used["STACK"], used["LOCAL"])
        name = call.kernel.__name__
        _USAGES[key] = Usage(
            name, call.capability, call.launch.num_warps, used["REG"], spilled, made.metadata.shared
        )
    return _USAGES[key]


def _resources(cubin: bytes) -> dict[str, int]:
    """cuobjdump's REG, STACK (where spilled registers go), LOCAL and SHARED."""
    import triton

    exe = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [exe, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def array(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs, and gradients with the outputs as cotangents."""

    def run(floats: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda floats: f(floats, *rest), floats)
        return out, pull(out)

    return run


def abstract(op: str, B: int, T: int, H: int, D: int, dtype: str, N: int | None = None) -> dict[str, Any]:
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
    options: dict[str, Any] = dict(form=form, implementation="triton")
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
    floats |= {"mix_delta": array(M, 8, 2048, C, dtype=dtype)} if moved else {}
    options = dict(normalised=normalised, implementation="triton")
    run = lambda floats, ids: cases.call("norm_shift_mix", floats, {"segment_ids": ids}, **options)
    return with_gradient(run), (floats, array(8, 2048, dtype=jnp.int32))


def decode(
    version: int,
    C: int,
    B: int,
    dtype: str = "bfloat16",
    quantised: tuple[int, int] | None = None,
    state: str = "float32",
) -> Program:
    """A decoded token of a model of two layers, chosen from the logits by sampling.

    ``quantised``: bits of the weights, and their group.
    """
    from fla_jax.generation.decode_steps import FastStep
    from fla_jax.generation.decode_weights import prepare_decode_weights
    from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM
    from fla_jax.ops.decode import Quantisation

    config, kind = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[version]
    model = kind(config(65536, C, 2, dtype=dtype))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))["params"]
    rounded = Quantisation(*quantised) if quantised else None
    weights = jax.eval_shape(lambda params: prepare_decode_weights(model, params, rounded), params)
    start = jax.eval_shape(lambda: model.init_state(B))
    start = start.replace(wkv=jax.ShapeDtypeStruct(start.wkv.shape, state))
    step = FastStep(model, "triton")

    def run(weights: Any, tokens: Any, state: Any, active: Any) -> Any:
        logits, state = step(weights, tokens, state, active)
        return state, (choose(logits) if version == 7 else logits)

    return run, (weights, array(B, dtype=jnp.int32), start, array(B, dtype=bool))


def choose(logits: jax.Array) -> jax.Array:
    from fla_jax.generation import SamplingParams, TokenCounts
    from fla_jax.generation.sampling import choose as choose_tokens

    B, V = logits.shape
    keys = jax.random.split(jax.random.key(0), B)
    rules = SamplingParams().arrays(V)
    return choose_tokens(rules, logits, TokenCounts.none(B, V), keys, "triton")[0]
