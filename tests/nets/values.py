"""Nets 3 and 4: hashes of initial parameters, and of what kernels compute in interpreters.

Every variant of every kernel runs there, forward and backward, on small float32 inputs; a variant that such
inputs would not select is forced (`adapter.FORCED`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from nets import adapter

from fla_jax import ops
from fla_jax.checkpoints import save_checkpoint
from fla_jax.generation import Decoder, Sampling, generate
from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM, initial_params
from fla_jax.ops import layer

Found = tuple[list[str], dict[str, str]]
DECAYS = (0.0, -0.01, -0.6, -20.0, -1e4, -np.inf)


def _hash(x: Any) -> str:
    x = np.asarray(x)
    return hashlib.sha256(repr((x.shape, str(x.dtype))).encode() + x.tobytes()).hexdigest()[:12]


def _found(tree: Any, apart: bool) -> Found:
    """One hash of all leaves with their paths, or one a leaf; and the numbers of each, abridged."""
    assert not any(np.isnan(np.asarray(x, np.float64)).any() for x in jax.tree.leaves(tree)), "NaN"
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    each = {name: _hash(x) for name, x in leaves.items()}
    text = "\n".join(f"{name} {each[name]} {np.asarray(x).dtype} {_shown(x)}" for name, x in leaves.items())
    whole = hashlib.sha256(repr(sorted(each.items())).encode()).hexdigest()[:12]
    return [f"{name} {one[:8]}" for name, one in each.items()] if apart else [whole], {"arrays": text}


def _shown(x: Any) -> str:
    x = np.asarray(x).astype(np.float64)
    return f"{x.shape} sum {x.sum():.17g} first {np.ravel(x)[:8].tolist()}"


# ---- initial parameters


def _model(version: int, **options: Any) -> Any:
    config, kind = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[version]
    return kind(config(**dict(vocab_size=48, hidden_size=64, num_layers=3, head_dim=16) | options))


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "scanned": dict(scan_layers=True),
    "unrolled": dict(scan_layers="unroll"),
    "heads of 32, one layer": dict(head_dim=32, num_layers=1),
    "wide feed-forward, bfloat16": dict(intermediate_size=160, param_dtype="bfloat16", dtype="bfloat16"),
    "names of axes": dict(scan_layers=True, logical_axes=True),
}


def _initial(version: int, options: dict[str, Any]) -> Found:
    """By `initial_params`, which does not scan, and by Flax' own way; names of axes, where there are any."""
    model, tokens = _model(version, **options), jnp.zeros((1, 2), jnp.int32)
    made = initial_params(model, jax.random.key(2))
    found, texts = _found(made, apart=False)
    if "logical_axes" in options:
        boxes = jax.eval_shape(model.init, jax.random.key(1), tokens)["params"]
        named = jax.tree.leaves(boxes, is_leaf=lambda x: hasattr(x, "names"))
        found.append(_hash(np.frombuffer(str([x.names for x in named]).encode(), np.uint8)))
    elif options in ({}, dict(scan_layers=True)):
        found += _found(jax.jit(model.init)(jax.random.key(1), tokens)["params"], apart=False)[0]
    return found, texts


def _saved(version: int, file: str) -> Found:
    """The bytes of a checkpoint; of a folder, those of its files."""
    model = _model(version)
    shapes = jax.eval_shape(model.init, jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.asarray(rng.standard_normal(x.shape), x.dtype), shapes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file
        save_checkpoint(path, model, params, format=None if path.suffix else "huggingface")
        files = sorted(p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())
        return [f"{p.name} {hashlib.sha256(p.read_bytes()).hexdigest()[:12]}" for p in files], {}


def parameters() -> dict[str, Callable[[], Found]]:
    """What computes each result of net 3, by its description."""
    found: dict[str, Callable[[], Found]] = {}
    for version in (6, 7):
        for name, options in CONFIGS.items():
            found[f"rwkv{version} {name}"] = functools.partial(_initial, version, options)
        for file in ("model.pth", "folder"):
            found[f"rwkv{version} saved as {file}"] = functools.partial(_saved, version, file)
    return found


# ---- kernels in interpreters


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a recurrence, and the variants that it forces."""

    op: str
    forced: tuple[str, ...] = ()
    B: int = 1
    T: int = 35
    H: int = 1
    K: int = 16
    V: int = 16
    decay: str = "mixed"
    lower_bound: float | None = None
    segments: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()
    scale: float = 1.0
    gradient: bool = True
    form: str = "chunk"

    def __str__(self) -> str:
        default = Call(self.op)
        said = [f"{f.name}={x}" for f in dataclasses.fields(self) if (x := getattr(self, f.name)) !=
                getattr(default, f.name) and f.name not in ("form", "op")]  # fmt: skip
        return f"{self.form}_{self.op} {' '.join(said)}".strip()


def _inputs(call: Call) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Float arrays, layout and cotangents, from a seed that the description gives."""
    rng = np.random.default_rng(zlib.crc32(str(call).encode()))
    B, T = (1, sum(call.packed)) if call.packed else (call.B, call.T)
    N = len(call.packed) or B
    tokens = lambda n=call.K: rng.standard_normal((B, T, call.H, n)).astype("float32")
    w = rng.choice(DECAYS, tokens().shape).astype("float32")
    if call.decay != "mixed":
        w = np.clip(-np.exp(tokens() - 1), call.lower_bound or -np.inf, 0).astype("float32")
    x: dict[str, Any] = dict(r=tokens(), w=w, k=tokens(), v=tokens(call.V))
    if call.op == "rwkv6":
        x["u"] = rng.standard_normal((call.H, call.K)).astype("float32")
    else:
        kk = tokens()
        kk /= np.sqrt(np.sum(kk * kk, -1, keepdims=True))
        x |= dict(a=-kk, b=kk * rng.uniform(0, 1, kk.shape).astype("float32"))
    state, final = rng.standard_normal((2, N, call.H, call.K, call.V)).astype("float32")
    layout = {}
    if call.segments:
        layout["segment_ids"] = np.repeat(np.arange(len(call.segments)), call.segments)[None].repeat(B, 0)
        layout["segment_ids"] = layout["segment_ids"].astype(np.int32)
    if call.packed:
        layout["cu_seqlens"] = np.cumsum([0, *call.packed]).astype(np.int32)
    return x | {"initial_state": state}, layout, {"o": tokens(call.V), "final": final}


def _recurrence(call: Call) -> Found:
    x, layout, cotangents = jax.tree.map(jnp.asarray, _inputs(call))
    options: dict[str, Any] = dict(implementation="triton" if call.form == "chunk" else "pallas")
    options |= dict(scale=call.scale) | (
        {} if call.lower_bound is None else dict(lower_bound=call.lower_bound)
    )

    def run(x: Any, cotangents: Any) -> Any:
        f = lambda x: dict(zip(("o", "final"), getattr(ops, f"{call.form}_{call.op}")(
            **x, **layout, output_final_state=True, **options)))  # fmt: skip
        if not call.gradient:
            return f(x)
        out, pull = jax.vjp(f, x)
        return out | {f"d{name}": g for name, g in pull(cotangents)[0].items()}

    with adapter.forced(*call.forced):
        return _found(jax.device_get(jax.jit(run)(x, cotangents)), apart=True)


def _calls() -> list[Call]:
    safe = dict(decay="layer", lower_bound=-0.61)
    found = []
    for op in ("rwkv6", "rwkv7"):
        kinds: list[tuple[str, ...]] = [(), ("key-major tiles",)]
        if op == "rwkv7":
            kinds = [(), ("bf16 kernels",), ("bf16 kernels", "key-major tiles")]
        for forced in kinds:
            found += [
                Call(op, forced, B=2, T=48, H=2, scale=0.7),
                Call(op, forced, K=24, V=40, **safe),
                Call(op, forced, segments=(5, 9, 1, 16, 4)),
                Call(op, forced, T=48, segments=(16, 16, 1, 15), **safe),
                Call(op, forced, K=40, V=72, packed=(16, 1, 33, 20)),
                Call(op, (*forced, "splits of 16 tokens"), B=2, T=70, decay="smooth"),
                Call(op, (*forced, "splits of 16 tokens"), T=70, segments=(3, 13, 32, 1, 21), **safe),
            ]
        found += [
            Call(op, T=48, K=64, V=64),
            Call(op, T=37, K=72, V=24),
            Call(op, T=20, K=136, V=24, decay="smooth"),
            Call(op, ("tf32x3 products",), T=48, decay="smooth"),
            Call(op, ("tf32x3 products",), T=35, K=24, V=40, **safe),
            Call(op, T=33, gradient=False),
            Call(op, ("splits of 16 tokens",), T=70, gradient=False),
            Call(op, form="fused_recurrent", B=2, T=37, H=2, K=24, V=40, scale=0.5),
            Call(op, form="fused_recurrent", T=40, segments=(5, 9, 1, 17, 8)),
            Call(op, form="fused_recurrent", packed=(0, 7, 16, 0, 1, 20, 0)),
            Call(op, form="fused_recurrent", B=2, T=1, gradient=False),
        ]
    bf16 = ("bf16 kernels",)
    found += [  # backwards in two kernels, states for two chunks
        Call("rwkv7", bf16, T=64, K=72, V=128, decay="smooth"),
        Call("rwkv7", bf16, T=50, K=88, V=80),
        Call("rwkv7", bf16, T=64, K=72, V=24, segments=(5, 27, 32), **safe),
        Call("rwkv7", bf16, T=58, K=128, V=40, segments=(41, 17), **safe),
        Call("rwkv7", bf16, K=72, V=24, packed=(0, 5, 0, 0, 17, 33, 0)),
        Call("rwkv7", (*bf16, "no wgmma"), T=64, K=72, V=24, **safe),
        Call("rwkv7", (*bf16, "splits of 16 tokens"), T=70, K=104, V=24, decay="smooth"),
        Call("rwkv7", (*bf16, "splits of 16 tokens"), T=70, gradient=False),
        Call("rwkv7", T=40, K=128, V=16),
        Call("rwkv7", T=40, K=16, V=136, decay="smooth"),
        Call("rwkv7", ("recurrent gradients by chunks",), form="fused_recurrent", T=48),
        Call("rwkv7", ("recurrent gradients by chunks",), form="fused_recurrent", T=40, K=24, V=40,
             segments=(5, 9, 1, 17, 8)),
    ]  # fmt: skip
    return found


def _pulled(f: Callable[..., Any], floats: Any, seed: int, forced: tuple[str, ...] = ()) -> Found:
    """Results and gradients, from random cotangents."""
    rng = np.random.default_rng(seed)

    def run(floats: Any, cotangents: Any) -> Any:
        out, pull = jax.vjp(f, floats)
        return {"results": out, "gradients": pull(cotangents)[0]}

    with adapter.forced(*forced):
        draw = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        cotangents = jax.tree.map(draw, jax.eval_shape(f, floats))
        return _found(jax.device_get(jax.jit(run)(floats, cotangents)), apart=False)


def _norm_mix(M: int, C: int, norm=True, moved=False, normalised=False, last=True, forced=(), T=12) -> Found:
    rng = np.random.default_rng(C + M)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), "float32")
    x: dict[str, Any] = {"x": normal(2, T, C), "mixes": tuple(normal(M, C))}
    x |= {"y": normal(2, T, C), "scale": normal(C), "bias": normal(C)} if norm else {}
    x |= {"last": normal(2, C)} if last else {}
    x |= {"mix_delta": normal(M, 2, T, C)} if moved else {}
    ids = (
        jnp.asarray(np.repeat([[0, 1, 2, 0]], [3, 1, 4, T - 8], 1).repeat(2, 0), jnp.int32) if moved else None
    )
    f = lambda x: layer.norm_shift_mix(**x, segment_ids=ids, normalised=normalised, implementation="triton")
    clean = lambda x: {n: a for n, a in f(x)._asdict().items() if a is not None}
    return _pulled(clean, x, M, forced)


def _keys(residual: bool | None, traced: bool = False) -> Found:
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), "float32")
    x = {name: normal(2, 5, 3, 16) for name in ("decay", "rate", "k", "v")}
    x |= {name: normal(3, 16) for name in ("w0", "a0", "k_k", "k_a")}
    if residual is not None:
        x |= {"mix": normal(2, 5, 3, 16), "v_first": normal(2, 5, 3, 16), "v0": normal(3, 16)}
    flag = jnp.asarray(residual) if traced else residual is not False
    f = lambda x: layer.rwkv7_keys(**x, residual=flag, implementation="triton")._asdict()
    if traced:
        with adapter.forced():
            return _found(jax.device_get(jax.jit(f)(x)), apart=False)
    return _pulled(f, x, 3)


def _readout(version: int) -> Found:
    rng = np.random.default_rng(version)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), "float32")
    tokens, vectors = (("o", "gate"), ("scale", "bias"))
    if version == 7:
        tokens, vectors = (*tokens, "r", "k", "v"), (*vectors, "r_k")
    x = {n: normal(2, 5, 3, 24) for n in tokens} | {n: normal(3, 24) for n in vectors}
    f = getattr(layer, f"rwkv{version}_readout")
    return _pulled(lambda x: f(**x, implementation="triton"), x, version)


def _decoded(version: int, rows: int, group: int | None = None) -> Found:
    """Tokens, states and log probabilities of a few steps through the decode kernels."""
    width = 128 if group else 192 if rows == 1 else 64
    model = _model(version, vocab_size=23, hidden_size=width, num_layers=1 if version == 6 else 2)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), params)
    prompts = [[3, 1, 4], [9], [2, 6], [5], [3, 5]][:rows]
    with adapter.forced("decode: 8 programs"):
        decoder = Decoder(model, params, implementation="triton", int8_group=group)
        sampling = Sampling(temperature=0.9, top_p=0.9, top_k=9)
        made, state = generate(model, params, prompts, 2, sampling, seed=5, decoder=decoder)
        return _found(jax.device_get({"tokens": made, "state": state}), apart=False)


def interpreted() -> dict[str, Callable[[], Found]]:
    """What computes each result of net 4, by its description."""
    found: dict[str, Callable[[], Found]] = {
        str(call): functools.partial(_recurrence, call) for call in _calls()
    }
    mixes: dict[str, dict[str, Any]] = {
        "six": dict(M=6, C=20), "two": dict(M=2, C=7), "one, normalised": dict(M=1, C=20, normalised=True),
        "five, moved": dict(M=5, C=20, norm=False, moved=True), "no last": dict(M=2, C=20, last=False),
        "everything": dict(M=3, C=20, moved=True, normalised=True),
    }  # fmt: skip
    for name, options in mixes.items():
        found[f"norm_shift_mix {name}"] = functools.partial(_norm_mix, **options)
    for forced in ("mix: token blocks of 4", "mix: channel tiles of 128", "mix: two tokens at once"):
        for name, options in {"one": dict(M=1, C=300, normalised=True), "six": dict(M=6, C=300)}.items():
            found[f"norm_shift_mix {name} {forced}"] = functools.partial(
                _norm_mix, **options, forced=(forced,)
            )
    for residual in (True, False, None):
        found[f"rwkv7_keys residual={residual}"] = functools.partial(_keys, residual)
    found["rwkv7_keys residual traced"] = functools.partial(_keys, True, True)
    for version in (6, 7):
        found[f"rwkv{version}_readout"] = functools.partial(_readout, version)
        for rows in (1, 5):
            found[f"rwkv{version} decoded, {rows} rows"] = functools.partial(_decoded, version, rows)
    found["rwkv7 decoded, 1 row, int8"] = functools.partial(_decoded, 7, 1, 64)
    return found


def keys_of(cases: dict[str, Callable[[], Found]], quick: bool) -> list[str]:
    """All descriptions, or every fourth."""
    return list(cases)[:: 4 if quick else 1]
