"""The programs that compute a decoded token: the model itself, and the fast path that equals it.

The fast path has a row in `DECODE` for each family: a layer's weights, and a layer's step for one token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..core.decode_layers import CODE_ROWS, NONE, SIGMOID, SQUARE, TANH
from ..layers.state import RWKVState
from ..models import FAMILIES, RWKV7Config
from ..models.config import RWKVConfig
from ..ops import decode
from ..ops.decode import Layer6, Layer7, Matrix

LayerOut = tuple[jax.Array, RWKVState, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class DecodeFamily:
    """How the fast path decodes with models of a family.

    Attributes:
        weights: ``(block, matrix, dtype) -> weights`` of a layer, from its parameters.
        layer: ``(pieces, weights, x, state, before, i, active, first, config)``, one token through layer i:
            ``(x, state, ffn_shift, projections)``; ``first`` are the projections of layer 0, None there.
    """

    weights: Callable[..., Layer6 | Layer7]
    layer: Callable[..., LayerOut]


def decode_family(model: object) -> DecodeFamily | None:
    """The row of `DECODE` for a model; None where only the model itself can decode."""
    names = (name for name, family in FAMILIES.items() if type(model) is family.model)
    return DECODE.get(next(names, ""))


def affine(norm: PyTree) -> tuple[jax.Array, jax.Array]:
    """Scale and bias of a norm."""
    return norm["scale"], norm["bias"]


def padded(x: jax.Array, multiple: int, axis: int = 1, least: int = 0) -> jax.Array:
    """``x``, an axis padded with zeros to a multiple of ``multiple``, at least ``least``."""
    size = -(-max(x.shape[axis], least) // multiple) * multiple
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths)


def rwkv7_weights(block: PyTree, matrix: Callable[..., Matrix], dtype: DTypeLike) -> Layer7:
    """The weights of a layer of RWKV-7."""
    att, ffn = block["att"], block["ffn"]
    if "v1" not in att:  # layer 0 has no value residual: nothing reads these
        C = att["w0"].shape[0]
        nothing = {
            "v0": jnp.zeros_like(att["w0"]),
            "v1": att["w1"][:, :1] * 0,
            "v2": jnp.zeros((1, C), dtype),
        }
        att = {**att, **nothing}
    kinds = {"w": (1, TANH), "a": (4, NONE), "v": (3, NONE), "g": (5, SIGMOID)}
    first = [(padded(att[f"{name}1"], CODE_ROWS), *kind) for name, kind in kinds.items()]
    ranks = tuple(kernel.shape[1] for kernel, _, _ in first)
    second = [padded(att[f"{name}2"].astype(dtype).T, CODE_ROWS, least=max(ranks)) for name in kinds]
    planes = {"receptance": 0, "key": 2, "value": 3}
    into = [(att[name]["kernel"], plane, NONE) for name, plane in planes.items()]
    return Layer7(
        norm=affine(block["ln1"]),
        mixes=jnp.stack([att[f"x_{name}"] for name in "rwkvag"]),
        into=matrix(*into, *first),
        second=jnp.stack(second),
        **{name: att[name] for name in ("w0", "a0", "v0", "k_k", "k_a")},
        r_k=att["r_k"].reshape(-1),
        group_norm=affine(att["ln_x"]),
        output=matrix((att["output"]["kernel"], 0, NONE)),
        ffn_norm=affine(block["ln2"]),
        ffn_mixes=ffn["x_k"][None],
        key=matrix((ffn["key"]["kernel"], 0, SQUARE)),
        value=matrix((ffn["value"]["kernel"], 0, NONE)),
        ranks=ranks,
    )


def rwkv6_weights(block: PyTree, matrix: Callable[..., Matrix], dtype: DTypeLike) -> Layer6:
    """The weights of a layer of RWKV-6."""
    att, ffn = block["att"], block["ffn"]
    planes = {"receptance": 3, "key": 1, "value": 2, "gate": 4}
    into = [(att[name]["kernel"], plane, NONE) for name, plane in planes.items()]
    decay = padded(att["time_decay_w1"], CODE_ROWS)
    value = ffn["value"]["kernel"]
    return Layer6(
        norm=affine(block["ln1"]),
        mix_x=att["time_maa_x"][None],
        first=matrix((padded(att["time_maa_w1"], CODE_ROWS), 0, TANH)),
        mix_delta=att["time_maa_w2"].astype(dtype),
        mixes=jnp.stack([att[f"time_maa_{name}"] for name in "wkvrg"]),
        into=matrix(*into, (decay, 0, TANH)),
        second=padded(att["time_decay_w2"].astype(dtype).T, CODE_ROWS),
        base=att["time_decay"],
        bonus=att["time_faaaa"].reshape(-1),
        group_norm=affine(att["ln_x"]),
        output=matrix((att["output"]["kernel"], 0, NONE)),
        ffn_norm=affine(block["ln2"]),
        ffn_mixes=jnp.stack([ffn["time_maa_k"], ffn["time_maa_r"]]),
        key=matrix((ffn["key"]["kernel"], 0, SQUARE), (ffn["receptance"]["kernel"], 1, SIGMOID)),
        value=matrix((value, 0, NONE)),
    )


def rwkv7_layer(
    pieces: Any,
    p: Layer7,
    x: jax.Array,
    state: RWKVState,
    before: jax.Array | None,
    i: int,
    active: jax.Array,
    first: jax.Array | None,
    config: RWKV7Config,
) -> LayerOut:
    """A layer of RWKV-7 for one token."""
    at = {"layer": i, "active": active}
    made, shift = pieces.project(p.into, x, norm=p.norm, mixes=p.mixes, last=state.att_shift, **at)
    first, scale = made if first is None else first, config.rate_scale
    y, state = pieces.rwkv7_step(p, made, first, state, (shift, before), i, active, scale, x.dtype)
    x, _ = pieces.project(p.output, y, add=x, dtype=x.dtype)
    hidden, ffn_shift = pieces.project(
        p.key, x, norm=p.ffn_norm, mixes=p.ffn_mixes, last=state.ffn_shift, dtype=x.dtype, **at
    )
    x, _ = pieces.project(p.value, hidden, add=x, dtype=x.dtype)
    return x, state, ffn_shift, made


def rwkv6_layer(
    pieces: Any,
    p: Layer6,
    x: jax.Array,
    state: RWKVState,
    before: jax.Array | None,
    i: int,
    active: jax.Array,
    first: jax.Array | None,
    config: RWKVConfig,
) -> LayerOut:
    """A layer of RWKV-6 for one token."""
    at = {"layer": i, "active": active}
    z, shift = pieces.project(p.first, x, norm=p.norm, mixes=p.mix_x, last=state.att_shift, **at)
    mixed = pieces.rwkv6_mix(p, shift, state.att_shift, i, z, x.dtype)
    made, _ = pieces.project(p.into, mixed)
    y, state = pieces.rwkv6_step(p, made, state, (shift, before), i, active, x.dtype)
    x, _ = pieces.project(p.output, y, add=x, dtype=x.dtype)
    hidden, ffn_shift = pieces.project(
        p.key, x, norm=p.ffn_norm, mixes=p.ffn_mixes, last=state.ffn_shift, dtype=x.dtype, **at
    )
    gate_at = hidden.shape[1] - x.shape[1]
    x, _ = pieces.project(p.value, hidden, gate=hidden, gate_at=gate_at, add=x, dtype=x.dtype)
    return x, state, ffn_shift, made


DECODE: dict[str, DecodeFamily] = {
    "rwkv6": DecodeFamily(rwkv6_weights, rwkv6_layer),
    "rwkv7": DecodeFamily(rwkv7_weights, rwkv7_layer),
}


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """The definition of a decoded token: a call of the model with one token.

    Attributes:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
    """

    model: Any
    sampling: ClassVar[str] = "xla"
    per_call: ClassVar[int | None] = None

    def __call__(
        self, weights: PyTree, tokens: jax.Array, state: RWKVState, active: jax.Array
    ) -> tuple[jax.Array, RWKVState]:
        """See `fla_jax.generation.decode_loop.Step`; ``weights`` are the model's parameters."""
        logits, new = self.model.apply({"params": weights}, tokens[:, None], state)

        def kept(x: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(of_rows(active, x), x.astype(old.dtype), old)

        return logits[:, -1], jax.tree.map(kept, new, state)


@dataclasses.dataclass(frozen=True)
class FastStep:
    """The same in a few large pieces (`fla_jax.ops.decode`), with the states of all layers written in place.

    Attributes:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        implementation: of the pieces, ``"triton"`` or ``"plain"``.
    """

    model: Any
    implementation: str

    @property
    def sampling(self) -> str:
        """See `fla_jax.generation.decode_loop.Step`."""
        return "triton" if self.implementation == "triton" else "xla"

    @property
    def per_call(self) -> int | None:
        """See `fla_jax.generation.decode_loop.Step`."""
        return 8 if self.implementation == "triton" else None

    def __call__(
        self, weights: PyTree, tokens: jax.Array, state: RWKVState, active: jax.Array
    ) -> tuple[jax.Array, RWKVState]:
        """See `fla_jax.generation.decode_loop.Step`; ``weights`` are what `prepare_decode_weights` made."""
        pieces, rows = decode.STEPS.named(self.implementation).load(), active.astype(jnp.int32)
        x = jnp.take(weights.table, tokens, axis=0)  # as the model: NaN for what is no token
        family, config = decode_family(self.model), self.model.config
        assert family is not None  # `Decoder` asks `unsupported`
        first = before = None
        for i, p in enumerate(weights.layers):
            x, state, before, made = family.layer(pieces, p, x, state, before, i, rows, first, config)
            first = made if first is None else first
        logits, _ = pieces.project(weights.head, x, norm=weights.norm)
        # apart from the kernels that made them: XLA's fusion of slices with calls makes a cycle of them
        shifts, before = jax.lax.optimization_barrier((state.ffn_shift, before))
        return logits, state.replace(ffn_shift=shifts.at[-1].set(before))


def of_rows(rows: jax.Array, x: jax.Array) -> jax.Array:
    """[B] as something that goes with a leaf [L, B, ...] of a state."""
    return rows.reshape(1, -1, *(1,) * (x.ndim - 2))
