"""The layer operations that layers.py times: their inputs, their calls, and the bytes that they must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Shape = tuple[int, int, int]  # B, T, C
Inputs = dict[str, tuple[tuple[int, ...], str | None]]  # shape and dtype by name; None: the tokens' dtype
HEAD, VOCABULARY = 64, 32000


@dataclasses.dataclass(frozen=True)
class LayerOp:
    """One use of a fused op by a layer.

    Attributes:
        op: the public function's name.
        name: what the layer calls it for.
        inputs: its inputs by name. Integers are labels, booleans are true; neither has a gradient.
        call: ``call(inputs, implementation) -> results``, any tree of arrays.
        moved: bytes that each pass must read or write, from the shape and the size of a token's number. A
            pass is "fwd", "bwd" (alone, after a forward pass) or "fwd+bwd".
        peer: the function of `peers.fla_layers` that does the same, None if there is none.
        written: the results that a forward pass writes; the others are inputs, or repeated.
        twice: inputs whose gradients equal another input's: a backward pass writes them once. A program of
            its own would have to copy them for its caller, a training step does not.
        implementations: measured on a GPU; only the last one elsewhere.
        flops: operations of each pass's products; None if memory traffic decides.
    """

    op: str
    name: str
    inputs: Callable[[Shape], Inputs]
    call: Callable[[dict[str, Any], str | None], Any]
    moved: Callable[[Shape, int], dict[str, float]]
    peer: str | None = None
    written: Callable[[Any], Any] = lambda results: results
    twice: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ("triton", "xla")
    flops: Callable[[Shape], dict[str, float]] | None = None

    @property
    def label(self) -> str:
        return f"{self.op} {self.name}"


def arrays(forward: float, backward: float) -> Callable[[Shape, int], dict[str, float]]:
    """Bytes of passes that move so many arrays [B, T, C] of the tokens' dtype; vectors count nothing."""

    def moved(shape: Shape, size: int) -> dict[str, float]:
        B, T, C = shape
        return {"fwd": forward * B * T * C * size, "bwd": backward * B * T * C * size}

    return moved


def named(names: tuple[str, ...], shape: tuple[int, ...], dtype: str | None) -> Inputs:
    return dict.fromkeys(names, (shape, dtype))


def mixes(
    name: str, M: int, moved: tuple[float, float], norm: bool = True, mix_delta: bool = False, h: bool = False
) -> LayerOp:
    """Norm, token shift and M mixes; ``h``: also returns the normalised tokens."""

    def inputs(shape: Shape) -> Inputs:
        B, T, C = shape
        made: Inputs = {"x": ((B, T, C), None), "last": ((B, C), None)}
        made |= named(tuple(f"mu{n}" for n in range(M)), (C,), "float32")
        if norm:
            made |= {"y": ((B, T, C), None), **named(("scale", "bias"), (C,), "float32")}
        return made | ({"mix_delta": ((M, B, T, C), None)} if mix_delta else {})

    def call(inputs: dict[str, Any], implementation: str | None) -> Any:
        from fla_jax.ops.layer import norm_shift_mix

        by = [array for name, array in inputs.items() if name.startswith("mu")]
        rest = {name: array for name, array in inputs.items() if not name.startswith("mu")}
        return norm_shift_mix(**rest, mixes=by, normalised=h, implementation=implementation)

    peer, twice = "mixes_and_tokens" if h else "mixes", ("y",) if norm else ()
    return LayerOp("norm_shift_mix", name, inputs, call, arrays(*moved), peer, twice=twice)


def heads_of(shape: Shape) -> tuple[int, int, int, int]:
    B, T, C = shape
    return B, T, max(1, C // HEAD), min(C, HEAD)


def keys(name: str, traced: bool) -> LayerOp:
    """RWKV-7's keys. ``traced``: only the device knows the layer, as in a scan; v_first is written again."""

    def inputs(shape: Shape) -> Inputs:
        tokens = heads_of(shape)
        made = named(("decay", "rate", "mix", "k", "v", "v_first"), tokens, None)
        made |= named(("w0", "a0", "v0", "k_k", "k_a"), tokens[2:], "float32")
        return made | ({"residual": ((), "bool")} if traced else {})

    def call(inputs: dict[str, Any], implementation: str | None) -> Any:
        from fla_jax.ops.layer import rwkv7_keys

        dtype = inputs["k"].dtype
        decays = dtype if dtype.name == "bfloat16" else None  # as in the layer
        return rwkv7_keys(**inputs, decay_dtype=decays, implementation=implementation)

    results = 6 if traced else 5
    # backward: six arrays read, the cotangents of all eight results, six gradients
    moved, written = arrays(6 + results, 20), lambda made: made[:results]
    return LayerOp("rwkv7_keys", name, inputs, call, moved, "keys", written)


def readout(version: int) -> LayerOp:
    """Group norm, RWKV-7's bonus, and the gate: arrays read and one written, then again with gradients."""
    names = ("o", "r", "k", "v", "gate") if version == 7 else ("o", "gate")
    vectors = ("scale", "bias", "r_k") if version == 7 else ("scale", "bias")

    def inputs(shape: Shape) -> Inputs:
        tokens = heads_of(shape)
        return named(names, tokens, None) | named(vectors, tokens[2:], "float32")

    def call(inputs: dict[str, Any], implementation: str | None) -> Any:
        from fla_jax.ops import layer

        op = layer.rwkv7_readout if version == 7 else layer.rwkv6_readout
        return op(**inputs, implementation=implementation)

    name, moved = f"rwkv{version} attention", arrays(len(names) + 1, 2 * len(names) + 1)
    return LayerOp(f"rwkv{version}_readout", name, inputs, call, moved, f"readout{version}")


def head_inputs(shape: Shape) -> Inputs:
    B, T, C = shape
    return {"hidden": ((B, T, C), None), "kernel": ((C, VOCABULARY), "float32"), "labels": ((B, T), "int32")}


def head_call(inputs: dict[str, Any], implementation: str | None) -> Any:
    """The loss in blocks of tokens, which never has all logits, or plainly."""
    from fla_jax.training import chunked_cross_entropy, cross_entropy

    hidden, kernel, labels = inputs["hidden"], inputs["kernel"], inputs["labels"]
    if implementation == "blocks":
        return chunked_cross_entropy(hidden, kernel, labels)
    return cross_entropy(hidden @ kernel.astype(hidden.dtype), labels)


def head_moved(shape: Shape, size: int) -> dict[str, float]:
    """Tokens and the head once, and their gradients: logits need not leave the chip."""
    B, T, C = shape
    one_pass = B * T * C * size + 4 * C * VOCABULARY
    return {"fwd": one_pass, "fwd+bwd": 2 * one_pass}


def head_flops(shape: Shape) -> dict[str, float]:
    B, T, C = shape
    product = 2.0 * B * T * C * VOCABULARY
    return {"fwd": product, "fwd+bwd": 3 * product}


# Norm, shift and mixes move: x, y, x + y, the mixed arrays and their cotangents, dx (= dy), once each.
LAYER_OPS = [
    mixes("rwkv7 attention", 6, (9, 9)),
    mixes("rwkv7 feed-forward", 1, (4, 4)),
    mixes("rwkv6 feed-forward", 2, (5, 5)),
    mixes("rwkv6 attention, one", 1, (5, 5), h=True),
    mixes("rwkv6 attention, five", 5, (11, 17), norm=False, mix_delta=True),
    keys("rwkv7 attention", traced=False),
    keys("rwkv7 attention, layers scanned", traced=True),
    readout(7),
    readout(6),
    LayerOp(
        "chunked_cross_entropy",
        f"head and loss, {VOCABULARY} tokens",
        head_inputs,
        head_call,
        head_moved,
        peer="head",
        implementations=("all logits", "blocks"),
        flops=head_flops,
    ),
]


def layer_op_of(label: str) -> LayerOp:
    return next(layer_op for layer_op in LAYER_OPS if layer_op.label == label)
