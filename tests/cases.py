"""Named inputs of both ops, for every test and benchmark: shapes, log decays, layouts and dtypes, with the
float64 answer and the tolerances to judge by.

``Case`` says what to build, ``build`` builds it (NumPy arrays, already rounded to their dtypes), ``expected``
asks the oracle, ``run`` calls the op and ``check`` compares outputs, states and all gradients. Nothing here
names a platform: an implementation is a string handed to the op.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle

from fla_jax import ops
from fla_jax.core.context import Context
from fla_jax.core.context import shapes_of as abstract
from fla_jax.core.gpu import current_gpu
from fla_jax.core.types import RecurrenceConfig, RWKV6Inputs, RWKV7Inputs

OPS = ("rwkv6", "rwkv7")
IMPLEMENTATIONS = ("reference", "xla")  # every implementation that the shared suite runs
TOKENS = {"rwkv6": ("r", "k", "v", "w"), "rwkv7": ("r", "w", "k", "v", "a", "b")}
INPUTS = {"rwkv6": (*TOKENS["rwkv6"], "u", "initial_state"), "rwkv7": (*TOKENS["rwkv7"], "initial_state")}
# log decays: "forget" empties the state at every token, "mixed" draws one of LEVELS for each element,
# "channels" one for each channel; a case may also say a number, or "mild": one of MILD_LEVELS for each
LEVELS = (0.0, -0.01, -0.6, -20.0, -1e4, -np.inf)
MILD_LEVELS = (0.0, -0.6, -2.0, -4.9)
DECAYS = {
    "none": 0.0,
    "weak": -0.01,
    "layer": -0.6,
    "strong": -20.0,
    "huge": -1e4,
    "forget": -np.inf,
    "mixed": None,
    "channels": None,
    "smooth": None,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one op. ``lengths`` are the packed sequences' (layout "packed", T is their sum) or each
    row's segments' (layout "segments").

    r, k and v are multiplied by ``sizes`` and cotangents by 2 to the power of ``exponents``, the states of
    both as follows from that: one number for all heads or, as for ``decay``, one for each (tests/scales.py
    judges every head by its own norms).
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
    layout: str = "rows"
    lengths: tuple[int, ...] = ()
    parallel: bool = False  # RWKV-7: nearly parallel kk with gate 1
    seed: int = 0
    sizes: tuple[float, ...] = (1.0,)
    exponents: tuple[int, ...] = (0,)

    @property
    def state_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


class Inputs(NamedTuple):
    """Arrays by name, cotangents of o and of the final state, layout arguments."""

    arrays: dict[str, np.ndarray]
    do: np.ndarray
    ds: np.ndarray
    segment_ids: np.ndarray | None
    cu_seqlens: np.ndarray | None


class Outputs(NamedTuple):
    o: Any
    final: Any
    grads: dict[str, Any]


class Tolerances(NamedTuple):
    """Relative Frobenius errors allowed.

    Attributes:
        o: of the output.
        state: of the final state.
        grad: of every gradient but dw.
        dw: of dw.
        channel: of dw in each channel, where a norm over all channels would hide what strong decays lose.
        rounded: whether results of 16 bits are forgiven their own rounding, element by element: what is
            judged then is arithmetic in float32.
    """

    o: float = 3e-6
    state: float = 3e-6
    grad: float = 1e-5
    dw: float = 2e-5
    channel: float = 2e-5
    rounded: bool = True


EXACT = Tolerances()
DOUBLE = Tolerances(1e-12, 1e-12, 1e-12, 1e-12, 1e-12)
SMALLEST = 2.0**-104  # 1e-5 of it is some 2^-121, and float32's normal numbers end at 2^-126
TOKENS_OF_A_NORM = 15  # fewer numbers in a channel have no norm to speak of: they may nearly cancel


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def log_decay(rng: np.random.Generator, decay: str | tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Log decays [B, T, H, K]."""
    if not isinstance(decay, str):
        heads = [log_decay(rng, one, (*shape[:2], 1, *shape[3:])) for one in decay]
        return np.concatenate(heads, 2)
    if decay in ("mixed", "mild"):
        return rng.choice(LEVELS if decay == "mixed" else MILD_LEVELS, shape)
    if decay == "channels":
        return np.broadcast_to(
            rng.permutation(np.resize(LEVELS, np.prod(shape[2:]))).reshape(shape[2:]), shape
        )
    if decay == "smooth":
        return -np.exp(rng.standard_normal(shape) - 1)
    return np.full(shape, float(DECAYS.get(decay, decay)))


def segment_ids(lengths: tuple[int, ...], B: int, T: int) -> np.ndarray:
    """Arbitrary ids (they fall, come back, and are negative); row b starts its segments b tokens later."""
    names = np.array([7, -3, 7, 0, 12, 5])
    ids = np.repeat(names[np.arange(len(lengths)) % len(names)], lengths)
    assert ids.size >= T, (lengths, T)
    return np.stack([np.concatenate([np.full(b % (T + 1), ids[0]), ids])[:T] for b in range(B)]).astype(
        np.int32
    )


@functools.lru_cache(maxsize=64)
def build(case: Case) -> Inputs:
    rng = np.random.default_rng(case.seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    cu = None
    if case.layout == "packed":
        B, T = 1, sum(case.lengths)
        cu = np.cumsum([0, *case.lengths]).astype(np.int32)
    ids = segment_ids(case.lengths, B, T) if case.layout == "segments" else None
    normal = lambda *shape: rng.standard_normal(shape)
    arrays = {
        "r": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, H, V),
        "w": log_decay(rng, case.decay, (B, T, H, K)),
    }
    if case.op == "rwkv6":
        arrays["u"] = normal(H, K)
    else:
        kk = np.ones((B, T, H, K)) + 0.02 * normal(B, T, H, K) if case.parallel else normal(B, T, H, K)
        kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
        arrays["a"], arrays["b"] = -kk, kk * (1.0 if case.parallel else rng.uniform(0, 1, (B, T, H, K)))
    size = np.broadcast_to(np.array(case.sizes), H)
    scale = np.exp2(np.broadcast_to(np.array(case.exponents, float), H))
    for name in "rkv":
        arrays[name] = arrays[name] * size[:, None]
    dtype = dtype_of(case.dtype)
    arrays = {
        name: arrays[name].astype(dtype_of(case.w_dtype or case.dtype) if name == "w" else dtype)
        for name in INPUTS[case.op][:-1]
    }
    rows = B if cu is None else len(case.lengths)
    state, ds = normal(2, rows, H, K, V)
    state, ds = state * (size**2)[:, None, None], ds * (size * scale)[:, None, None]
    do = normal(B, T, H, V) * scale[:, None]
    arrays["initial_state"] = state.astype(case.state_dtype)
    return Inputs(arrays, do.astype(dtype), ds.astype(case.state_dtype), ids, cu)


@functools.lru_cache(maxsize=64)
def expected(case: Case) -> Outputs:
    x = build(case)
    (o, final), grads = ask_oracle(case.op, x, case.scale)
    return Outputs(o, final, grads)


def ask_oracle(op: str, x: Inputs, scale: float = 1.0):
    """((o, final), gradients by name) of the float64 oracle."""
    out, grads = getattr(oracle, op)(
        *x.arrays.values(), x.do, x.ds, scale=scale, segment_ids=x.segment_ids, cu_seqlens=x.cu_seqlens
    )
    return out, dict(zip(INPUTS[op], grads))


def call(op: str, arrays: dict[str, Any], form: str = "chunk", **options: Any):
    """``(o, final_state)`` of the public op on arrays by name; a missing initial_state is not passed."""
    inputs = [arrays[name] for name in INPUTS[op][:-1]]
    options.setdefault("output_final_state", True)
    return getattr(ops, f"{form}_{op}")(*inputs, initial_state=arrays.get("initial_state"), **options)


@functools.cache
def runner(op: str, implementation: str | None, form: str = "chunk", **options: Any):
    """Jitted ``(arrays, do, ds, segment_ids, cu_seqlens) -> Outputs``; one function for each set of static
    options, so that cases share compilations.
    """

    def run(arrays, do, ds, segment_ids=None, cu_seqlens=None):
        layout = dict(segment_ids=segment_ids, cu_seqlens=cu_seqlens)
        (o, final), pull = jax.vjp(
            lambda x: call(op, x, form, implementation=implementation, **layout, **options), arrays
        )
        return Outputs(o, final, pull((do, ds))[0])

    return jax.jit(run)


@contextlib.contextmanager
def fresh_traces():
    """For a patch of the code: traces made before are not used, and those made meanwhile not afterwards."""

    def forget():
        jax.clear_caches()
        runner.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


def call_of(case: Case, devices: int = 1) -> Context:
    """What launchers know of a case."""
    x = build(case)
    inputs = {"rwkv6": RWKV6Inputs, "rwkv7": RWKV7Inputs}[case.op]
    arrays = inputs(**x.arrays, segment_ids=x.segment_ids, cu_seqlens=x.cu_seqlens)
    return Context(
        f"chunk_{case.op}",
        abstract(arrays),
        RecurrenceConfig(case.scale, case.chunk_size, case.lower_bound),
        "gpu",
        current_gpu(),
        devices,
    )


def options_of(case: Case, form: str = "chunk") -> dict[str, Any]:
    return dict(scale=case.scale) | (
        dict(chunk_size=case.chunk_size, lower_bound=case.lower_bound) if form == "chunk" else {}
    )


def run(case: Case, implementation: str | None, form: str = "chunk") -> Outputs:
    x = build(case)
    return jax.device_get(
        runner(case.op, implementation, form, **options_of(case, form))(*jax.tree.map(jnp.asarray, x))
    )


def _wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def errors_of(got, want, axes: tuple[int, ...] | None = None, rounded: bool = True) -> np.ndarray:
    """Frobenius errors over ``axes`` (all) relative to the norm; where the norm is zero only zero will do.

    Results of 16 bits are forgiven their own rounding, element by element, or at least their underflow.
    Where no number is larger than SMALLEST, any that is no larger either will do: float32 has none that are
    right to the last digits asked for.
    """
    got, want = np.asarray(got), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    error = np.abs(_wide(got) - want)
    if got.dtype.itemsize < 4:
        info = ml_dtypes.finfo(got.dtype)
        own = 0.5 * float(info.eps) * np.abs(want) * (1 + 1e-3) if rounded else 0
        error = np.maximum(error - own - 0.5 * float(info.smallest_subnormal), 0)
    top, most = (np.max(np.abs(x), axes, initial=0) for x in (want, _wide(got)))
    error, norm = np.sqrt(np.sum(error**2, axes)), np.sqrt(np.sum(want**2, axes))
    relative = np.where(norm > 0, error / np.where(norm > 0, norm, 1), np.where(error == 0, 0, np.inf))
    if got.dtype.itemsize < 8:
        lost = (top > 0) & (top < SMALLEST) & (most < 2 * SMALLEST)
        relative = np.where(lost, 0, relative)
    return np.where(np.isnan(relative), np.inf, relative)


def error_of(got, want, axes: tuple[int, ...] | None = None, rounded: bool = True) -> float:
    """The largest of `errors_of`."""
    return float(np.max(errors_of(got, want, axes, rounded), initial=0))


def assert_close(name: str, got, want, tol: float) -> None:
    """Frobenius error at most ``tol`` of the norm, see `error_of`."""
    error = error_of(got, want)
    assert error <= tol, f"{name}: relative error {error:.2e} > {tol:.0e}"


def errors(got: Outputs, want: Outputs, tol: Tolerances = EXACT) -> dict[str, tuple[float, float]]:
    """Error and tolerance of the output, the final state and every gradient by name."""
    assert got.grads.keys() == want.grads.keys()
    judged = functools.partial(error_of, rounded=tol.rounded)
    found = {"o": (judged(got.o, want.o), tol.o), "final state": (judged(got.final, want.final), tol.state)}
    for name, g in got.grads.items():
        found[f"d{name}"] = judged(g, want.grads[name]), tol.dw if name == "w" else tol.grad
    if got.grads["w"].shape[1] >= TOKENS_OF_A_NORM:
        found["dw of a channel"] = judged(got.grads["w"], want.grads["w"], axes=(1,)), tol.channel
    return found


def compare(got: Outputs, want: Outputs, tol: Tolerances = EXACT) -> None:
    """Outputs, states and gradients; says all that is wrong at once."""
    found = errors(got, want, tol)
    wrong = {
        name: f"{error:.2e} > {limit:.0e}" for name, (error, limit) in found.items() if not error <= limit
    }
    assert not wrong, wrong


def check(case: Case, implementation: str | None, form: str = "chunk", tol: Tolerances = EXACT) -> None:
    """Values and dtypes of outputs, states and all gradients against the oracle's."""
    x, got = build(case), run(case, implementation, form)
    assert got.o.dtype == x.arrays["v"].dtype and got.final.dtype == case.state_dtype
    assert {name: g.dtype for name, g in got.grads.items()} == {name: a.dtype for name, a in x.arrays.items()}
    compare(got, expected(case), tol)


def outputs(case: Case, implementation: str | None, **options: Any) -> tuple[Any, Any]:
    """``(o, final_state)`` of a call that nothing differentiates."""
    x = build(case)
    layout = dict(segment_ids=x.segment_ids, cu_seqlens=x.cu_seqlens)
    options |= options_of(case) | layout | dict(implementation=implementation)
    return jax.device_get(jax.jit(lambda arrays: call(case.op, arrays, **options))(x.arrays))


def check_vmap(case: Case, implementation: str | None, form: str = "chunk", tol: Tolerances = EXACT) -> None:
    """Over every array at once: rows are merged, packed sequences mapped one by one."""
    each = [dataclasses.replace(case, seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(build, each))
    got = jax.device_get(jax.jit(jax.vmap(runner(case.op, implementation, form)))(*stacked))
    for i, one in enumerate(each):
        compare(jax.tree.map(lambda leaf, i=i: leaf[i], got), expected(one), tol)
