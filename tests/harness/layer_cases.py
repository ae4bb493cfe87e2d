"""Calls of the layer operations: RWKV-7's keys, the readouts, and norm, token shift and mixes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from fla_jax.ops import layer

from . import oracles
from .compare import Inputs, Results, dtype_of, error_of, largest_of

HEAD_OPS = ("rwkv7_keys", "rwkv7_readout", "rwkv6_readout")
TOKENS = {
    "rwkv7_keys": ("decay", "rate", "mix", "k", "v", "v_first"),
    "rwkv7_readout": ("o", "r", "k", "v", "gate"),
    "rwkv6_readout": ("o", "gate"),
}
VECTORS = {
    "rwkv7_keys": ("w0", "a0", "v0", "k_k", "k_a"),
    "rwkv7_readout": ("scale", "bias", "r_k"),
    "rwkv6_readout": ("scale", "bias"),
    "norm_shift_mix": ("mixes", "scale", "bias"),
}
KEYS = ("w", "k", "v", "a", "b", "v_first", "k_bonus", "v_bonus")


@dataclasses.dataclass(frozen=True)
class HeadCase:
    """One call. ``residual`` is None without v_first, a bool as rwkv7_keys takes it, or "traced True"."""

    op: str
    B: int = 2
    T: int = 5
    H: int = 3
    N: int = 16
    residual: Any = True
    rate_scale: float = 1.0
    dtype: str = "float32"
    seed: int = 0

    @property
    def reads_v_first(self) -> bool:
        return self.residual in (True, "traced True")

    def options(self, **more: Any) -> dict[str, Any]:
        if self.op == "rwkv7_keys":
            more = dict(residual=self.residual, rate_scale=self.rate_scale) | more
        return more

    def build(self) -> Inputs:
        """Tokens of the case's dtype, vectors of float32."""
        rng = np.random.default_rng(self.seed)
        absent = () if self.residual is not None else ("mix", "v_first", "v0")
        shape = (self.B, self.T, self.H, self.N)

        def draw(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
            x = rng.normal(size=shape, loc=0.3 if name in ("k_a", "scale") else 0)
            return x.astype("float32").astype(dtype_of(dtype))

        wide = "float64" if self.dtype == "float64" else "float32"
        arrays = {n: draw(n, shape, self.dtype) for n in TOKENS[self.op] if n not in absent}
        arrays |= {n: draw(n, shape[2:], wide) for n in VECTORS[self.op] if n not in absent}
        float32_outputs = ("w", "a", "b") if self.rate_scale > 1 else ("w",)
        outputs = KEYS if self.op == "rwkv7_keys" else ("y",)
        dtypes = {name: wide if name in float32_outputs else self.dtype for name in outputs}
        return Inputs(arrays, {n: draw(n, shape, dtype) for n, dtype in dtypes.items()}, {})

    def oracle(self, x: Inputs) -> Results:
        if self.op == "rwkv7_keys":
            options = dict(residual=self.reads_v_first, rate_scale=self.rate_scale)
            return Results(*oracles.keys(x.arrays, x.cotangents, **options))
        return Results(*oracles.readout(x.arrays, x.cotangents))

    def errors(self, got: Results, want: Results, tol: float = 1e-6) -> dict[str, tuple[float, float]]:
        return _errors(largest_of, got, want, tol)


@dataclasses.dataclass(frozen=True)
class MixCase:
    """One call; ``lengths`` are the segments of every batch entry, later in later ones."""

    B: int = 2
    T: int = 11
    C: int = 20
    M: int = 6
    y: bool = True
    norm: bool = True
    last: bool = True
    mix_delta: bool = False
    normalised: bool = False
    lengths: tuple[int, ...] = ()
    dtype: str = "float32"
    parameters: str = "float32"
    seed: int = 0
    op: str = "norm_shift_mix"

    def options(self, **more: Any) -> dict[str, Any]:
        return dict(normalised=self.normalised) | more

    def build(self) -> Inputs:
        rng = np.random.default_rng(self.seed)
        B, T, C, M = self.B, self.T, self.C, self.M
        token, parameter = dtype_of(self.dtype), dtype_of(self.parameters)
        normal = lambda *shape, dtype=token: rng.standard_normal(shape).astype(dtype)
        # a residual stream has channels with means far from zero
        x = (rng.standard_normal((B, T, C)) * 2 + 5 * rng.standard_normal(C)).astype(token)
        arrays = {"x": x, "mixes": rng.uniform(0, 1, (M, C)).astype(parameter)}
        if self.y:
            arrays["y"] = normal(B, T, C)
        if self.norm:
            arrays["scale"] = (1 + 0.3 * rng.standard_normal(C)).astype(parameter)
            arrays["bias"] = normal(C, dtype=parameter)
        if self.last:
            arrays["last"] = normal(B, C)
        if self.mix_delta:
            arrays["mix_delta"] = (0.3 * rng.standard_normal((M, B, T, C))).astype(token)
        layout = {}
        if self.lengths:
            ids = np.repeat([7, -3, 7, 0, 12][: len(self.lengths)], self.lengths)
            shifted = [np.concatenate([np.full(b, ids[0]), ids])[:T] for b in range(B)]
            layout["segment_ids"] = np.stack(shifted).astype(np.int32)
        cotangents = {"mixed": normal(M, B, T, C), "last": normal(B, C)}
        cotangents |= {"x": normal(B, T, C)} if self.y or self.norm else {}
        cotangents |= {"normalised": normal(B, T, C)} if self.normalised else {}
        return Inputs(arrays, cotangents, layout)

    def oracle(self, x: Inputs) -> Results:
        outputs, grads = oracles.norm_shift_mix(x.arrays, x.cotangents, **x.layout)
        return Results({name: outputs[name] for name in x.cotangents}, grads)

    def errors(self, got: Results, want: Results, tol: float = 1e-6) -> dict[str, tuple[float, float]]:
        return _errors(lambda a, b: error_of(a, b, rounded=False), got, want, tol)


def _errors(measure, got: Results, want: Results, tol: float) -> dict[str, tuple[float, float]]:
    found = {}
    for prefix, one, wanted in zip(("", "d"), got, want):
        assert one.keys() == wanted.keys(), (one.keys(), wanted.keys())
        found |= {prefix + name: (measure(one[name], x), tol) for name, x in wanted.items()}
    return found


def call(op: str, arrays: dict[str, Any], layout: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Outputs by name of the public function; mixes and what is mixed are stacked."""
    if op == "norm_shift_mix":
        arrays = arrays | {"mixes": tuple(arrays["mixes"])}
        made = layer.norm_shift_mix(**arrays, **layout, **options)._asdict()
        made["mixed"] = jnp.stack(made["mixed"])
        return {name: x for name, x in made.items() if x is not None}
    if op == "rwkv7_keys":
        residual = options.pop("residual", True)
        if isinstance(residual, str):
            residual = jnp.array(residual == "traced True")
        options["residual"] = True if residual is None else residual
    made = getattr(layer, op)(**arrays, **options)
    return made._asdict() if op == "rwkv7_keys" else {"y": made}


MIX_CASES = {
    "rwkv7 attention": MixCase(),
    "rwkv7 feed-forward": MixCase(M=1),
    "rwkv6 feed-forward": MixCase(M=2, C=7),
    "rwkv6 attention, one": MixCase(M=1, normalised=True),
    "rwkv6 attention, five": MixCase(M=5, y=False, norm=False, mix_delta=True),
    "public layer": MixCase(y=False, norm=False),
    "no state": MixCase(M=2, last=False),
    "no norm": MixCase(M=2, norm=False),
    "no sum": MixCase(M=2, y=False, normalised=True),
    "everything": MixCase(M=3, mix_delta=True, normalised=True, lengths=(3, 1, 5, 9)),
    "segments": MixCase(M=2, lengths=(4, 1, 1, 9)),
    "segments of moves": MixCase(M=5, y=False, norm=False, mix_delta=True, lengths=(8, 9)),
    "one token": MixCase(T=1),
    "one token of a segment": MixCase(T=1, M=2, last=False, lengths=(1,)),
}
# those that differ in what the kernels are compiled for
MIX_KERNELS = {
    name: MIX_CASES[name]
    for name in (
        "rwkv7 attention",
        "rwkv6 feed-forward",
        "rwkv6 attention, one",
        "rwkv6 attention, five",
        "no state",
        "no sum",
        "everything",
        "segments",
        "one token",
    )
}
