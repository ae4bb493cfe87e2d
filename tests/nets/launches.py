"""Net 1: the code of every Triton kernel of a set of public calls, compiled for GPUs that are not here.

A call's key is its public description; its launches follow in the order of its program, forward before
backward. Each is its digest (`ptx.normalised`), registers, spilled bytes, shared memory, warps, grid and the
number of results that take over the memory of operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from nets import adapter, ptx

from fla_jax import ops
from fla_jax.generation import Sampling
from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM
from fla_jax.ops import layer

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _array(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(floats: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda floats: f(floats, *rest), floats)
        return out, pull(out)

    return run


def recurrence(
    op: str,
    B: int = 8,
    H: int = 64,
    D: int = 64,
    dtype: str = "bfloat16",
    safe: bool = False,
    layout: str = "rows",
    gradient: bool = True,
    form: str = "chunk",
    V: int | None = None,
    w: str | None = None,
) -> Program:
    """A call of `chunk_rwkv6` and its kin with 2048 tokens, ``safe``: decays with a lower bound."""
    B, T, N = (1, 2048, 16) if layout == "packed" else (B, 2045 if layout == "uneven" else 2048, B)
    V = V or D
    floats = {name: _array(B, T, H, V if name == "v" else D, dtype=dtype) for name in "rwkv"}
    floats["w"] = _array(B, T, H, D, dtype=w or dtype)
    floats |= {"u": _array(H, D, dtype=dtype)} if op == "rwkv6" else {n: floats["r"] for n in "ab"}
    floats["initial_state"] = _array(N, H, D, V)
    options: dict[str, Any] = dict(implementation="triton" if form == "chunk" else "pallas")
    options |= dict(lower_bound=-1.0) if safe else {}
    rest = {}
    if layout == "segments":
        rest["segment_ids"] = _array(B, T, dtype=jnp.int32)
    if layout == "packed":
        rest["cu_seqlens"] = _array(N + 1, dtype=jnp.int32)

    def run(floats: Any, rest: Any) -> Any:
        return getattr(ops, f"{form}_{op}")(**floats, **rest, output_final_state=True, **options)

    return (_with_gradient(run) if gradient else run), (floats, rest)


def norm_mix(M: int, C: int, dtype: str, norm=True, moved=False, normalised=False) -> Program:
    """A call of `norm_shift_mix` with 8 rows of 2048 tokens and segments."""
    tokens, vector = _array(8, 2048, C, dtype=dtype), _array(C)
    floats: dict[str, Any] = {"x": tokens, "mixes": (vector,) * M, "last": _array(8, C, dtype=dtype)}
    floats |= {"y": tokens, "scale": vector, "bias": vector} if norm else {}
    floats |= {"mix_delta": _array(M, 8, 2048, C, dtype=dtype)} if moved else {}
    ids = _array(8, 2048, dtype=jnp.int32)

    def run(floats: Any, segment_ids: Any) -> Any:
        return layer.norm_shift_mix(
            **floats, segment_ids=segment_ids, normalised=normalised, implementation="triton"
        )

    return _with_gradient(run), (floats, ids)


def keys(N: int, dtype: str, gradient: bool) -> Program:
    """A call of `rwkv7_keys`, mixed with the first layer's values where a traced flag says so."""
    tokens, vector = _array(8, 2048, 16, N, dtype=dtype), _array(16, N)
    floats = dict.fromkeys(("decay", "rate", "mix", "k", "v", "v_first"), tokens)
    floats |= dict.fromkeys(("w0", "a0", "v0", "k_k", "k_a"), vector)

    def run(floats: Any, residual: Any) -> Any:
        return layer.rwkv7_keys(**floats, residual=residual, rate_scale=1.0, implementation="triton")

    return (_with_gradient(run) if gradient else run), (floats, _array(dtype=bool))


def readout(version: int, N: int, dtype: str) -> Program:
    """A call of `rwkv7_readout` or `rwkv6_readout`."""
    tokens, vector = _array(8, 2048, 16, N, dtype=dtype), _array(16, N)
    floats = dict.fromkeys(("o", "r", "k", "v", "gate") if version == 7 else ("o", "gate"), tokens)
    floats |= dict.fromkeys(("scale", "bias", "r_k") if version == 7 else ("scale", "bias"), vector)
    f = getattr(layer, f"rwkv{version}_readout")
    return _with_gradient(lambda floats: f(**floats, implementation="triton")), (floats,)


def decoding(
    version: int, C: int, B: int, dtype: str = "bfloat16", group: int | None = None, state: str = "float32"
) -> Program:
    """A decoded token of a model of two layers, chosen from the logits by sampling."""
    config, kind = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[version]
    model = kind(config(65536, C, 2, dtype=dtype))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))["params"]
    weights = jax.eval_shape(lambda params: adapter.decode_weights(model, params, group), params)
    start = jax.eval_shape(lambda: model.init_state(B))
    start = start.replace(wkv=jax.ShapeDtypeStruct(start.wkv.shape, state))
    step = adapter.decode_step(model, "triton")

    def run(weights: Any, tokens: Any, state: Any, active: Any, keys: Any) -> Any:
        logits, state = step(weights, tokens, state, active)
        return state, adapter.sample(Sampling(), logits, keys, "triton")

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
    return run, (weights, _array(B, dtype=jnp.int32), start, _array(B, dtype=bool), keys)


def cases() -> dict[str, tuple[int, Callable[[], Program]]]:
    """Compute capability and program of every call, by its description."""
    found: dict[str, tuple[int, Callable[[], Program]]] = {}

    def add(name: str, capability: int, make: Callable[..., Program], *args: Any, **options: Any) -> None:
        found[f"sm_{capability} {name}"] = capability, functools.partial(make, *args, **options)

    def few(op: str, capability: int, D: int, dtype: str, safe: bool) -> None:
        for gradient in (True, False):
            chunk(op, capability, D, dtype, safe, B=1, H=4, gradient=gradient)

    def chunk(op: str, capability: int, D: int, dtype: str, safe: bool, **options: Any) -> None:
        form = options.get("form", "chunk")
        what = {"B": 8, "H": 64} | {n: x for n, x in options.items() if n != "form"}
        text = " ".join(f"{n}={x}" for n, x in what.items())
        name = f"{form}_{op} D={D} {dtype} {'safe gate' if safe else 'any decay'} {text}"
        add(name, capability, recurrence, op, D=D, dtype=dtype, safe=safe, **options)

    for op in ("rwkv6", "rwkv7"):
        chunk(op, 90, 64, "bfloat16", False)
        few(op, 90, 64, "bfloat16", False)
        for capability in (80, 100, 120):
            chunk(op, capability, 64, "bfloat16", True)
            few(op, capability, 64, "bfloat16", True)
        chunk(op, 89, 128, "bfloat16", True)
        few(op, 89, 128, "bfloat16", True)
        chunk(op, 89, 64, "float32", True)
        few(op, 89, 64, "float32", True)
        for D in (64, 128):
            chunk(op, 90, D, "bfloat16", True)
            chunk(op, 90, D, "float32", False)
        chunk(op, 89, 64, "bfloat16", False)
        # other kernels and masks than those of CI's sweep
        for layout in ("uneven", "segments", "packed"):
            chunk(op, 90, 64, "bfloat16", True, layout=layout)
        chunk(op, 89, 64, "bfloat16", True, layout="segments")
        few(op, 90, 128, "bfloat16", True)
        chunk(op, 90, 48, "float16", True, V=80)
        chunk(op, 90, 256, "bfloat16", True)
    chunk("rwkv7", 90, 128, "bfloat16", True, layout="packed")
    chunk("rwkv7", 80, 128, "bfloat16", True)
    chunk("rwkv7", 90, 64, "bfloat16", True, w="float32")
    for capability in (89, 90):
        chunk("rwkv7", capability, 64, "bfloat16", False, form="fused_recurrent")
    sweep = [("six", 1024, "bfloat16", c) for c in (80, 90, 120)] + [
        ("six", 8192, "bfloat16", 90), ("five, moved", 1024, "bfloat16", 90), ("two", 2048, "float32", 90),
        ("one, normalised", 1024, "bfloat16", 90),
    ]  # fmt: skip
    mixes = {"six": dict(M=6), "two": dict(M=2), "one, normalised": dict(M=1, normalised=True)}
    mixes["five, moved"] = dict(M=5, norm=False, moved=True)
    for kind, C, dtype, capability in sweep:
        add(f"norm_shift_mix {kind} C={C} {dtype}", capability, norm_mix, C=C, dtype=dtype, **mixes[kind])
    for capability in (80, 90, 120):
        for gradient in (True, False):
            add(f"rwkv7_keys N=64 bfloat16 {gradient=}", capability, keys, 64, "bfloat16", gradient)
        for version in (6, 7):
            add(f"rwkv{version}_readout N=64 bfloat16", capability, readout, version, 64, "bfloat16")
    steps = [
        (90, 7, 2048, 1, {}), (90, 6, 2048, 1, {}), (90, 7, 2048, 32, {}), (120, 7, 1024, 256, {}),
        (90, 7, 2048, 1, dict(group=128)), (80, 7, 1024, 1, {}), (90, 7, 1024, 8, dict(state="bfloat16")),
        (90, 7, 1024, 1, dict(dtype="float32")), (90, 6, 4096, 4, dict(group=64)), (120, 6, 1024, 32, {}),
    ]  # fmt: skip
    for capability, version, C, B, options in steps:
        name = f"decode rwkv{version} C={C} B={B} " + " ".join(f"{n}={x}" for n, x in options.items())
        add(name.strip(), capability, decoding, version, C, B, **options)
    return found


QUICK = (
    "chunk_rwkv6 D=64 bfloat16 any decay B=8", "chunk_rwkv7 D=64 bfloat16 safe gate B=8", "readout",
    "rwkv7_keys", "norm_shift_mix two", "decode rwkv7 C=2048 B=1", "decode rwkv6 C=2048",
)  # fmt: skip


def keys_of(quick: bool) -> list[str]:
    """The descriptions of all calls, or of a few for one GPU."""
    if not quick:
        return list(cases())
    quick_ones = [key for key in cases() if key.startswith("sm_90") and any(q in key for q in QUICK)]
    return [key for key in quick_ones if "layout" not in key and "group" not in key and "w=" not in key]


def run(key: str, known: list[str] | None) -> tuple[list[str], dict[str, str]]:
    """What to record of a call, and its kernels as text by name.

    ptxas runs where a digest is not ``known``, for equal code takes equal registers.
    """
    reason = adapter.cannot_compile()
    if reason is not None:
        raise RuntimeError(f"Triton kernels cannot be compiled here: {reason}")
    capability, make = cases()[key]
    with adapter.lowering_for(capability):
        f, args = make()
        module = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir()
    found, texts = [], {}
    for i, kernel in enumerate(ptx.kernels(module)):
        head = f"{ptx.digest(kernel)} {kernel.shared}B {kernel.warps}w"
        before = next((x for x in known or () if x.startswith(head)), None)
        used = " ".join(before.split(" ")[-4:-2]) if before else ptx.resources(kernel)
        grid = "x".join(map(str, kernel.grid))
        found.append(f"{head} {used} {grid} {kernel.aliased}a")
        texts[f"{i} {kernel.name}"] = "\n".join([found[-1], ptx.normalised(kernel)])
    assert found, "no kernel is called"
    return found, texts
