"""The fused pieces that layers.py times: their inputs, their calls, and the bytes that they must move."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

Shape = tuple[int, int, int]  # B, T, C
Inputs = dict[str, tuple[tuple[int, ...], str | None]]  # shape and dtype by name; None: that of the tokens
HEAD, VOCABULARY = 64, 32000
PASSES = ("fwd", "bwd", "fwd+bwd")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One use of a fused op by a layer.

    Attributes:
        op: the public function's name.
        name: what the layer calls it for.
        inputs: its inputs by name, from the shape. Integers are labels, booleans are true; neither has a
            gradient.
        call: ``call(inputs, implementation) -> results``, any tree of arrays.
        moved: bytes that each pass must read or write, from the shape and the size of a token's number. A
            pass is "fwd", "bwd" (alone, after a forward pass) or "fwd+bwd".
        peer: name of the function in `pieces.fla_pieces` that does the same, None where there is none.
        written: which of the results a forward pass writes; the others are as they came, or there twice.
        twice: inputs whose gradients are those of another input: a backward pass writes them once. A program
            of its own would have to copy them for whoever calls it, a training step does not.
        implementations: what is measured on a GPU; the last one alone elsewhere.
        flops: floating-point operations of a pass's products, from the shape; None where bytes decide.
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


def mix_inputs(shape: Shape, M: int, norm: bool, moves: bool = False) -> Inputs:
    """The inputs of norm, shift and mixes: parameters float32."""
    B, T, C = shape
    inputs: Inputs = {"x": ((B, T, C), None), "last": ((B, C), None)}
    inputs |= {f"mu{n}": ((C,), "float32") for n in range(M)}
    inputs |= {"y": ((B, T, C), None), "scale": ((C,), "float32"), "bias": ((C,), "float32")} if norm else {}
    return inputs | ({"moves": ((M, B, T, C), None)} if moves else {})


def mix_call(inputs: dict[str, Any], implementation: str | None, normalised: bool = False) -> Any:
    from fla_jax.ops.layer import norm_shift_mix

    mixes = [array for name, array in inputs.items() if name.startswith("mu")]
    rest = {name: array for name, array in inputs.items() if not name.startswith("mu")}
    return norm_shift_mix(**rest, mixes=mixes, normalised=normalised, implementation=implementation)


def mixes(
    name: str, M: int, moved: tuple[float, float], norm: bool = True, moves: bool = False, h: bool = False
) -> Piece:
    """Norm, shift and M mixes; ``h``: the normalised tokens are a result as well."""
    inputs = functools.partial(mix_inputs, M=M, norm=norm, moves=moves)
    call = functools.partial(mix_call, normalised=h)
    return Piece(
        "norm_shift_mix",
        name,
        inputs,
        call,
        arrays(*moved),
        peer="mixes_and_tokens" if h else "mixes",
        twice=("y",) if norm else (),
    )


def heads_of(shape: Shape) -> tuple[int, int, int, int]:
    """B, T, H, N."""
    B, T, C = shape
    return B, T, max(1, C // HEAD), min(C, HEAD)


def key_inputs(shape: Shape, traced: bool) -> Inputs:
    tokens, (_, _, H, N) = heads_of(shape), heads_of(shape)
    inputs: Inputs = {name: (tokens, None) for name in ("decay", "rate", "mix", "k", "v", "v_first")}
    inputs |= {name: ((H, N), "float32") for name in ("w0", "a0", "v0", "k_k", "k_a")}
    return inputs | ({"residual": ((), "bool")} if traced else {})


def key_call(inputs: dict[str, Any], implementation: str | None) -> Any:
    from fla_jax.ops.layer import rwkv7_keys

    dtype = inputs["k"].dtype
    decays = dtype if dtype.name == "bfloat16" else None  # as the layer has them
    return rwkv7_keys(**inputs, decay_dtype=decays, implementation=implementation)


def keys(name: str, traced: bool) -> Piece:
    """RWKV-7's keys; ``traced``: whether there is a value residual is known on the device only, as in a scan
    over layers, and v_first is written again.
    """
    results = 6 if traced else 5
    # backward: six arrays read, the cotangents of all eight results, six gradients
    return Piece(
        "rwkv7_keys",
        name,
        functools.partial(key_inputs, traced=traced),
        key_call,
        arrays(6 + results, 20),
        peer="keys",
        written=lambda made: made[:results],
    )


def readout_inputs(shape: Shape, names: tuple[str, ...], bonus: bool) -> Inputs:
    tokens, (_, _, H, N) = heads_of(shape), heads_of(shape)
    vectors = ("scale", "bias", "r_k") if bonus else ("scale", "bias")
    inputs: Inputs = {name: (tokens, None) for name in names}
    return inputs | {name: ((H, N), "float32") for name in vectors}


def readout_call(inputs: dict[str, Any], implementation: str | None) -> Any:
    from fla_jax.ops import layer

    op = layer.rwkv7_readout if "r_k" in inputs else layer.rwkv6_readout
    return op(**inputs, implementation=implementation)


def readout(version: int) -> Piece:
    """Group norm, RWKV-7's bonus, and the gate: arrays read and one written, then again with gradients."""
    names = ("o", "r", "k", "v", "gate") if version == 7 else ("o", "gate")
    return Piece(
        f"rwkv{version}_readout",
        f"rwkv{version} attention",
        functools.partial(readout_inputs, names=names, bonus=version == 7),
        readout_call,
        arrays(len(names) + 1, 2 * len(names) + 1),
        peer=f"readout{version}",
    )


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
    once = B * T * C * size + 4 * C * VOCABULARY
    return {"fwd": once, "fwd+bwd": 2 * once}


def head_flops(shape: Shape) -> dict[str, float]:
    B, T, C = shape
    one = 2.0 * B * T * C * VOCABULARY
    return {"fwd": one, "fwd+bwd": 3 * one}


# Norm, shift and mixes move: x, y, x + y, the mixed arrays and their cotangents, dx (= dy), once each.
PIECES = [
    mixes("rwkv7 attention", 6, (9, 9)),
    mixes("rwkv7 feed-forward", 1, (4, 4)),
    mixes("rwkv6 feed-forward", 2, (5, 5)),
    mixes("rwkv6 attention, one", 1, (5, 5), h=True),
    mixes("rwkv6 attention, five", 5, (11, 17), norm=False, moves=True),
    keys("rwkv7 attention", traced=False),
    keys("rwkv7 attention, layers scanned", traced=True),
    readout(7),
    readout(6),
    Piece(
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


def piece_of(label: str) -> Piece:
    """The piece with this label."""
    return next(piece for piece in PIECES if piece.label == label)
