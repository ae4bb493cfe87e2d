"""Calls of the two recurrences: shapes, log decays, layouts, dtypes and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fla_jax import ops
from fla_jax.core.context import Context, shapes_of
from fla_jax.core.gpu import current_gpu
from fla_jax.core.types import RecurrenceConfig, RWKV6Inputs, RWKV7Inputs

from . import oracles
from .compare import EXACT, Inputs, Results, Tolerances, dtype_of, error_of

OPS = ("rwkv6", "rwkv7")
TOKENS = {"rwkv6": ("r", "k", "v", "w"), "rwkv7": ("r", "w", "k", "v", "a", "b")}
INPUTS = {"rwkv6": (*TOKENS["rwkv6"], "u", "initial_state"), "rwkv7": (*TOKENS["rwkv7"], "initial_state")}
LEVELS = (0.0, -0.01, -0.6, -20.0, -1e4, -np.inf)
MILD_LEVELS = (0.0, -0.6, -2.0, -4.9)
# log decays by name; "mixed" draws one of LEVELS for each element, "channels" one for each channel, "mild"
# one of MILD_LEVELS for each element; a case may also give a number
DECAYS = {"none": 0.0, "weak": -0.01, "layer": -0.6, "strong": -20.0, "huge": -1e4, "forget": -np.inf}
DECAYS |= dict.fromkeys(("mixed", "channels", "smooth"))
CHANNEL_TOKENS = 15  # the norm of fewer numbers in a channel says little: they may nearly cancel


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. ``lengths`` are those of packed sequences (layout "packed", T is their sum) or of each batch
    entry's segments (layout "segments").

    r, k and v are multiplied by ``sizes`` and cotangents by 2 to the power of ``exponents``, the states of
    both accordingly: one number for all heads or, as for ``decay``, one for each.
    """

    op: str
    B: int = 2
    T: int = 33
    H: int = 2
    K: int = 8
    V: int = 4
    decay: str | tuple[str, ...] = "smooth"
    dtype: str = "float32"
    w_dtype: str | None = None
    scale: float = 1.0
    chunk_size: int | None = None
    lower_bound: float | None = None
    layout: str = "batch"
    lengths: tuple[int, ...] = ()
    parallel: bool = False  # RWKV-7: nearly parallel kk with gate 1
    seed: int = 0
    sizes: tuple[float, ...] = (1.0,)
    exponents: tuple[int, ...] = (0,)

    def options(self, form: str = "chunk", **more: Any) -> dict[str, Any]:
        """Static arguments of the public function; ``more`` win."""
        options = dict(scale=self.scale, form=form)
        if form == "chunk":
            options |= dict(chunk_size=self.chunk_size, lower_bound=self.lower_bound)
        return options | more

    def build(self) -> Inputs:
        rng = np.random.default_rng(self.seed)
        B, T, H, K, V = self.B, self.T, self.H, self.K, self.V
        layout = {}
        if self.layout == "packed":
            B, T = 1, sum(self.lengths)
            layout["cu_seqlens"] = np.cumsum([0, *self.lengths]).astype(np.int32)
        if self.layout == "segments":
            layout["segment_ids"] = segment_ids(self.lengths, B, T)
        normal = lambda *shape: rng.standard_normal(shape)
        arrays = {
            "r": normal(B, T, H, K),
            "k": normal(B, T, H, K),
            "v": normal(B, T, H, V),
            "w": log_decay(rng, self.decay, (B, T, H, K)),
        }
        if self.op == "rwkv6":
            arrays["u"] = normal(H, K)
        else:
            kk = normal(B, T, H, K)
            kk = np.ones_like(kk) + 0.02 * kk if self.parallel else kk
            kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
            arrays["a"], arrays["b"] = -kk, kk * (1.0 if self.parallel else rng.uniform(0, 1, (B, T, H, K)))
        size = np.broadcast_to(np.array(self.sizes), H)
        scale = np.exp2(np.broadcast_to(np.array(self.exponents, float), H))
        for name in "rkv":
            arrays[name] = arrays[name] * size[:, None]
        dtype, w_dtype = dtype_of(self.dtype), dtype_of(self.w_dtype or self.dtype)
        arrays = {n: arrays[n].astype(w_dtype if n == "w" else dtype) for n in INPUTS[self.op][:-1]}
        N = len(self.lengths) if self.layout == "packed" else B
        state, dht = normal(2, N, H, K, V)
        state, dht = state * (size**2)[:, None, None], dht * (size * scale)[:, None, None]
        do = normal(B, T, H, V) * scale[:, None]
        state_dtype = "float64" if self.dtype == "float64" else "float32"
        arrays["initial_state"] = state.astype(state_dtype)
        return Inputs(arrays, {"o": do.astype(dtype), "ht": dht.astype(state_dtype)}, layout)

    def oracle(self, x: Inputs) -> Results:
        return Results(*getattr(oracles, self.op)(x.arrays, x.cotangents, scale=self.scale, **x.layout))

    def errors(self, got: Results, want: Results, tol: Tolerances = EXACT) -> dict[str, tuple[float, float]]:
        """Error and limit of the outputs and of every gradient, by name."""
        judged = lambda a, b, axes=None: error_of(a, b, axes, tol.rounded)
        limits = {"o": tol.o, "ht": tol.state}
        found = {name: (judged(x, want.outputs[name]), limits[name]) for name, x in got.outputs.items()}
        for name, g in got.grads.items():
            found[f"d{name}"] = judged(g, want.grads[name]), tol.dw if name == "w" else tol.grad
        if "w" in got.grads and got.grads["w"].shape[1] >= CHANNEL_TOKENS:
            found["dw of a channel"] = judged(got.grads["w"], want.grads["w"], (1,)), tol.channel
        return found

    def context(self, devices: int = 1) -> Context:
        """What kernels' host code knows of the call on a GPU."""
        x = self.build()
        inputs = {"rwkv6": RWKV6Inputs, "rwkv7": RWKV7Inputs}[self.op](**x.arrays, **x.layout)
        config = RecurrenceConfig(self.scale, self.chunk_size, self.lower_bound)
        return Context(f"chunk_{self.op}", shapes_of(inputs), config, "gpu", current_gpu(), devices)


def log_decay(rng: np.random.Generator, decay: str | tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    if not isinstance(decay, str):
        heads = [log_decay(rng, one, (*shape[:2], 1, *shape[3:])) for one in decay]
        return np.concatenate(heads, 2)
    if decay in ("mixed", "mild"):
        return rng.choice(LEVELS if decay == "mixed" else MILD_LEVELS, shape)
    if decay == "channels":
        levels = rng.permutation(np.resize(LEVELS, np.prod(shape[2:])))
        return np.broadcast_to(levels.reshape(shape[2:]), shape)
    if decay == "smooth":
        return -np.exp(rng.standard_normal(shape) - 1)
    return np.full(shape, float(DECAYS.get(decay, decay)))


def segment_ids(lengths: tuple[int, ...], B: int, T: int) -> np.ndarray:
    """Arbitrary ids (they fall, come back, and are negative); segments start b tokens later in entry b."""
    names = np.array([7, -3, 7, 0, 12, 5])
    ids = np.repeat(names[np.arange(len(lengths)) % len(names)], lengths)
    assert ids.size >= T, (lengths, T)
    shifted = [np.concatenate([np.full(b % (T + 1), ids[0]), ids])[:T] for b in range(B)]
    return np.stack(shifted).astype(np.int32)


def call(op: str, arrays: dict[str, Any], layout: dict[str, Any], form: str = "chunk", **options: Any):
    """Outputs by name of the public function; a missing initial_state is not passed."""
    inputs = [arrays[name] for name in INPUTS[op][:-1]]
    options = dict(output_final_state=True, initial_state=arrays.get("initial_state")) | layout | options
    return dict(zip(("o", "ht"), getattr(ops, f"{form}_{op}")(*inputs, **options)))
