"""The fused pieces that layers.py times: their inputs, their calls, and the bytes that they must move."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Piece:
    """One use of a fused op by a layer.

    Attributes:
        op: the public function's name.
        name: what the layer calls it for.
        inputs: shapes and dtypes of its inputs by name, from B, T, C; dtype None for that of the tokens.
        call: ``call(inputs, implementation) -> results``, any tree of arrays.
        moved: arrays [B, T, C] of the tokens' dtype that forward and backward must read or write.
        peers: by name, ``load() -> call`` with ``call(inputs) -> results`` on torch tensors.
    """

    op: str
    name: str
    inputs: Callable[[int, int, int], dict[str, tuple[tuple[int, ...], str | None]]]
    call: Callable[[dict[str, Any], str | None], Any]
    moved: tuple[float, float]
    peers: dict[str, Callable[[], Callable[[dict[str, Any]], Any]]] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.op} {self.name}"


def mix_inputs(B: int, T: int, C: int, M: int, norm: bool, moves: bool = False):
    """The inputs of norm, shift and mixes: parameters float32."""
    inputs = {"x": ((B, T, C), None), "last": ((B, C), None)} | {
        f"mu{n}": ((C,), "float32") for n in range(M)
    }
    inputs |= {"y": ((B, T, C), None), "scale": ((C,), "float32"), "bias": ((C,), "float32")} if norm else {}
    return inputs | ({"moves": ((M, B, T, C), None)} if moves else {})


def mix_call(inputs: dict[str, Any], implementation: str | None, normalised: bool = False) -> Any:
    from fla_jax.ops.layer import norm_shift_mix

    mixes = [array for name, array in inputs.items() if name.startswith("mu")]
    rest = {name: array for name, array in inputs.items() if not name.startswith("mu")}
    return norm_shift_mix(**rest, mixes=mixes, normalised=normalised, implementation=implementation)


def fla_mix(M: int) -> Callable[[dict[str, Any]], Any]:
    """FLA's pieces as its RWKV-7 block calls them: sum and norm, shift, mixes (one mix by torch)."""
    import torch
    from fla.modules.layernorm import layer_norm
    from fla.modules.token_shift import token_shift
    from fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7

    def call(inputs: dict[str, Any]) -> Any:
        h, x = layer_norm(
            inputs["y"], inputs["scale"], inputs["bias"], residual=inputs["x"], eps=1e-5, prenorm=True
        )
        delta = token_shift(h)
        delta = delta[0] if isinstance(delta, tuple) else delta
        mixes = [inputs[f"mu{n}"].view(1, 1, -1) for n in range(M)]
        mixed = (
            fused_addcmul_rwkv7(h, delta, *mixes) if M == 6 else [torch.addcmul(h, delta, mu) for mu in mixes]
        )
        return *mixed, x

    return call


# Every fused piece. `moved` counts x, y, x + y, the mixed arrays and their cotangents, dx (= dy), once each.
PIECES = [
    Piece(
        "norm_shift_mix",
        "rwkv7 attention",
        functools.partial(mix_inputs, M=6, norm=True),
        mix_call,
        (9, 9),
        {"FLA": functools.partial(fla_mix, 6)},
    ),
    Piece(
        "norm_shift_mix",
        "rwkv7 feed-forward",
        functools.partial(mix_inputs, M=1, norm=True),
        mix_call,
        (4, 4),
        {"FLA": functools.partial(fla_mix, 1)},
    ),
    Piece(
        "norm_shift_mix",
        "rwkv6 feed-forward",
        functools.partial(mix_inputs, M=2, norm=True),
        mix_call,
        (5, 5),
    ),
    Piece(
        "norm_shift_mix",
        "rwkv6 attention, one",
        functools.partial(mix_inputs, M=1, norm=True),
        functools.partial(mix_call, normalised=True),
        (5, 5),
    ),
    Piece(
        "norm_shift_mix",
        "rwkv6 attention, five",
        functools.partial(mix_inputs, M=5, norm=False, moves=True),
        mix_call,
        (11, 17),
    ),
]
