"""Net 2: the StableHLO of ops, models, training steps and decoding, lowered for CPUs (eight fake ones)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nets import adapter, graph

from fla_jax import ops
from fla_jax.generation import Sampling
from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM
from fla_jax.ops import layer
from fla_jax.parallel import TrainStep, make_mesh, over_sequence
from fla_jax.training import chunked_cross_entropy, rwkv_optimizer

Lowered = Callable[[], Any]
OPS = ("chunk_rwkv6", "chunk_rwkv7", "fused_recurrent_rwkv6", "fused_recurrent_rwkv7")
SIZES = dict(vocab_size=32, hidden_size=32, num_layers=3, head_dim=16)
RANKS = {
    6: dict(proj_low_rank_dim=4, decay_low_rank_dim=8),
    7: dict(decay_low_rank_dim=4, a_low_rank_dim=6, v_low_rank_dim=5, gate_low_rank_dim=8),
}
MESHES = {
    "data": dict(data=8),
    "fsdp": dict(fsdp=8),
    "tensor": dict(data=4, tensor=2),
    "sequence": dict(fsdp=2, sequence=2, tensor=2),
}


def _array(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _lower(f: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cpu",)).compiler_ir()


def _value_and_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(floats: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda floats: f(floats, *rest), floats)
        return out, pull(out)

    return run


def recurrence(
    name: str,
    implementation: str,
    gradient: bool,
    layout: str = "rows",
    dtype: str = "float32",
    initial: bool = True,
    mapped: bool = False,
    **options: Any,
) -> Any:
    """The program of one of the four ops: heads of 8 keys and 4 values, 33 tokens."""
    B, T, H, K, V = 1 if layout == "packed" else 2, 33, 2, 8, 4
    N, six = 3 if layout == "packed" else B, "rwkv6" in name
    tokens = _array(B, T, H, K, dtype=dtype)
    floats = dict.fromkeys("rwk" if six else "rwkab", tokens) | {"v": _array(B, T, H, V, dtype=dtype)}
    floats |= {"u": _array(H, K, dtype=dtype)} if six else {}
    floats |= {"initial_state": _array(N, H, K, V)} if initial else {}
    rest = {"segment_ids": _array(B, T, dtype=jnp.int32)} if layout == "segments" else {}
    rest |= {"cu_seqlens": _array(N + 1, dtype=jnp.int32)} if layout == "packed" else {}

    def run(floats: Any, rest: Any) -> Any:
        options_ = dict(output_final_state=initial, implementation=implementation, **options)
        out = getattr(ops, name)(**floats, **rest, **options_)
        return out if initial else out[0]

    run = _value_and_gradient(run) if gradient else run
    if mapped:
        run = jax.vmap(run)
        floats, rest = jax.tree.map(lambda x: _array(3, *x.shape, dtype=x.dtype), (floats, rest))
    return _lower(run, floats, rest)


RECURRENCES: dict[str, dict[str, Any]] = {
    "rows": {},
    "bfloat16, scale": dict(dtype="bfloat16", scale=0.5),
    "no state": dict(initial=False),
    "segments": dict(layout="segments"),
    "packed": dict(layout="packed"),
    "vmap": dict(mapped=True),
}
CHUNKED: dict[str, dict[str, Any]] = {
    "safe gate": dict(lower_bound=-0.61),
    "safe gate, segments": dict(lower_bound=-0.61, layout="segments"),
    "chunks of 8": dict(chunk_size=8),
}


def piece(name: str, gradient: bool, dtype: str, **options: Any) -> Any:
    """The program of an op of `fla_jax.ops.layer`, in plain JAX."""
    B, T, H, N, C = 2, 7, 3, 8, 24
    tokens, vector, wide = _array(B, T, H, N, dtype=dtype), _array(H, N), _array(B, T, C, dtype=dtype)
    options = {"implementation": "xla"} | options
    if name == "rwkv7_keys":
        floats: dict[str, Any] = dict.fromkeys(("decay", "rate", "mix", "k", "v", "v_first"), tokens)
        floats |= dict.fromkeys(("w0", "a0", "v0", "k_k", "k_a"), vector)
        rest = {"residual": _array(dtype=bool)}
    elif name.endswith("readout"):
        seven = name == "rwkv7_readout"
        floats = dict.fromkeys(("o", "r", "k", "v", "gate") if seven else ("o", "gate"), tokens)
        floats |= dict.fromkeys(("scale", "bias", "r_k") if seven else ("scale", "bias"), vector)
        rest = {}
    else:
        row = _array(C)
        floats = dict(x=wide, y=wide, scale=row, bias=row, mixes=(row,) * 3, last=_array(B, C, dtype=dtype))
        floats |= {"mix_delta": _array(3, B, T, C, dtype=dtype)}
        rest = {"segment_ids": _array(B, T, dtype=jnp.int32)}
    run = lambda floats, rest: getattr(layer, name)(**floats, **rest, **options)
    return _lower(_value_and_gradient(run) if gradient else run, floats, rest)


def elementwise(name: str) -> Any:
    """`rwkv6_decay` or `squared_relu`, with its gradient."""
    f = getattr(layer, name)
    args = (_array(2, 5, 12, dtype="bfloat16"), _array(12)) if name == "rwkv6_decay" else (_array(2, 5, 12),)
    return _lower(_value_and_gradient(lambda args: f(*args)), args)


def model_of(version: int, **options: Any) -> Any:
    config, kind = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[version]
    return kind(config(**SIZES | RANKS[version] | options))


def _params(model: Any) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def model(version: int, gradient: bool, T: int = 9, x64: bool = False, **options: Any) -> Any:
    """A model's call with a state and segments on one device."""
    made = model_of(version, **options)

    def run(floats: Any, tokens: Any, ids: Any) -> Any:
        params, state = floats
        return made.apply({"params": params}, tokens, state, ids)

    state = jax.eval_shape(lambda: made.init_state(2))
    ids = _array(2, T, dtype=jnp.int32)
    return _lower(_value_and_gradient(run) if gradient else run, (_params(made), state), ids, ids)


def training(version: int, mesh: str, explicit: bool, **options: Any) -> Any:
    """A training step on a mesh: packed documents, chunked loss, optimiser."""
    made, on = model_of(version, **options), make_mesh(**MESHES[mesh], explicit=explicit)

    def loss(params: Any, batch: Any) -> Any:
        tokens, mask, ids = batch
        hidden, _ = made.apply(
            {"params": params}, over_sequence(tokens[:, :-1]), None, over_sequence(ids), method="hidden"
        )
        head = params["head"]["kernel"]
        return chunked_cross_entropy(hidden, head, tokens[:, 1:], mask, block_tokens=4)

    step = TrainStep(made, rwkv_optimizer(1e-2), on, loss)
    batch = jnp.zeros((8, 9), jnp.int32), jnp.ones((8, 8)), jnp.zeros((8, 8), jnp.int32)
    state = jax.eval_shape(step.init, jax.random.key(0))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    state = jax.tree.map(place, state, step.shardings)
    return step.lower(state, step.shard(batch)).compiler_ir()


def forward(version: int, mesh: str, explicit: bool) -> Any:
    """A model's call, then tokens one by one, on a mesh."""
    made, on = model_of(version, scan_layers=True), make_mesh(**MESHES[mesh], explicit=explicit)
    step = TrainStep(made, rwkv_optimizer(1e-2), on)
    with jax.set_mesh(on):
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        params = jax.tree.map(place, _params(made), step.shardings.params)
        tokens = jax.ShapeDtypeStruct((8, 8), jnp.int32, sharding=NamedSharding(on, P(("data", "fsdp"))))

        def run(params: Any, tokens: Any) -> Any:
            _, state = made.apply({"params": params}, tokens)
            return made.apply({"params": params}, tokens[:, :1], state)

        return _lower(run, params, tokens)


def decoding(version: int, implementation: str, int8_group: int | None = None, scan=False) -> Any:
    """A decoded token of three rows and its choice."""
    made = model_of(version, hidden_size=64, intermediate_size=128, scan_layers=scan)
    params = _params(made)
    weights = params
    if implementation != "model":
        weights = jax.eval_shape(lambda p: adapter.decode_weights(made, p, int8_group), params)
    state = jax.eval_shape(lambda: made.init_state(3))
    step = adapter.decode_step(made, implementation)

    def run(weights: Any, tokens: Any, state: Any, active: Any, keys: Any) -> Any:
        logits, state = step(weights, tokens, state, active)
        sampling = Sampling(temperature=0.9, top_p=0.8, top_k=5)
        return state, adapter.sample(sampling, logits, keys, "xla")

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    return _lower(run, weights, _array(3, dtype=jnp.int32), state, _array(3, dtype=bool), keys)


def weights(version: int, int8_group: int | None) -> Any:
    """Parameters as decoding reads them."""
    made = model_of(version, hidden_size=64, intermediate_size=128, scan_layers=True)
    return _lower(lambda p: adapter.decode_weights(made, p, int8_group), _params(made))


def prefill(version: int, dtype: str) -> Any:
    """A piece of a prompt, padded."""
    made = model_of(version, dtype=dtype, scan_layers=True)

    def run(params: Any, tokens: Any, state: Any, lengths: Any) -> Any:
        return made.apply({"params": params}, tokens, state, lengths=lengths, method="hidden")

    state = jax.eval_shape(lambda: made.init_state(2))
    return _lower(run, _params(made), _array(2, 16, dtype=jnp.int32), state, _array(2, dtype=jnp.int32))


def cases() -> dict[str, Lowered]:
    """What lowers each program, by its description."""
    found: dict[str, Lowered] = {}
    both = ((False, "forward"), (True, "gradient"))
    for gradient, what in both:
        for name in OPS:
            of_form = RECURRENCES | (CHUNKED if name.startswith("chunk") else {})
            for implementation in ("xla", "reference"):
                for case, options in of_form.items():
                    if implementation == "reference" and case in CHUNKED:
                        continue
                    key = f"{name} {implementation} {case} {what}"
                    found[key] = functools.partial(recurrence, name, implementation, gradient, **options)
        for name in ("norm_shift_mix", "rwkv7_keys", "rwkv7_readout", "rwkv6_readout"):
            for dtype in ("float32", "bfloat16"):
                found[f"{name} {dtype} {what}"] = functools.partial(piece, name, gradient, dtype)
        for version in (6, 7):
            for form, options in FORMS.items():
                key = f"rwkv{version} model, {form}, {what}"
                found[key] = functools.partial(model, version, gradient, **options)
    for name in ("rwkv6_decay", "squared_relu"):
        found[f"{name} gradient"] = functools.partial(elementwise, name)
    for version in (6, 7):
        for mesh in MESHES:
            for explicit in (False, True):
                kind = "explicit" if explicit else "auto"
                for form, scan in (("scanned", True), ("not scanned", False), ("unrolled", "unroll")):
                    if form == "unrolled" and mesh not in ("fsdp", "sequence"):
                        continue
                    options = dict(scan_layers=scan, remat="dense" if scan is True else False)
                    key = f"rwkv{version} training step, {form}, {mesh}, {kind}"
                    found[key] = functools.partial(training, version, mesh, explicit, **options)
                if mesh != "data":
                    key = f"rwkv{version} forward and a token, {mesh}, {kind}"
                    found[key] = functools.partial(forward, version, mesh, explicit)
        for implementation in ("model", "plain"):
            key = f"rwkv{version} decoded token, {implementation}"
            found[key] = functools.partial(decoding, version, implementation)
        key = f"rwkv{version} decoded token"
        found[f"{key}, plain, int8"] = functools.partial(decoding, version, "plain", 64)
        found[f"{key}, model, scanned"] = functools.partial(decoding, version, "model", None, True)
        for group in (None, 64):
            name = f"rwkv{version} decode weights{', int8' if group else ''}"
            found[name] = functools.partial(weights, version, group)
        for dtype in ("float32", "bfloat16"):
            found[f"rwkv{version} prefill {dtype}"] = functools.partial(prefill, version, dtype)
    return found


FORMS: dict[str, dict[str, Any]] = {
    "not scanned": {},
    "scanned": dict(scan_layers=True),
    "unrolled": dict(scan_layers="unroll"),
    "scanned, remat": dict(scan_layers=True, remat=True),
    "unrolled, remat dense, bfloat16": dict(scan_layers="unroll", remat="dense", dtype="bfloat16"),
    "one token": dict(T=1),
    "scanned, reference": dict(scan_layers=True, implementation="reference"),
}


def keys_of(quick: bool) -> list[str]:
    """The descriptions of all programs, or of some."""
    keys = list(cases())
    if not quick:
        return keys
    few = ("rows", "safe gate g", "packed", "vmap", "float32", "model, scanned, grad", "decoded token, plain")
    return [
        k
        for k in keys
        if any(f in k for f in few) or k.endswith(("scanned, fsdp, auto", "sequence, explicit"))
    ]


def run(key: str, known: list[str] | None) -> tuple[list[str], dict[str, str]]:
    """The program's digest, and its text."""
    module = cases()[key]()
    return [graph.digest(module)], {"program": graph.readable(module)}
