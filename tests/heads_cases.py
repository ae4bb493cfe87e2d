"""Cases of the ops on tokens and heads (tests/layer_ops), and how one is run and compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import heads_oracle
import jax
import jax.numpy as jnp
import numpy as np

from fla_jax.ops.layer.keys import Keys, rwkv7_keys
from fla_jax.ops.layer.readout import rwkv6_readout, rwkv7_readout

KEYS_TOKENS, KEYS_VECTORS = ("decay", "rate", "mix", "k", "v", "v_first"), ("w0", "a0", "v0", "k_k", "k_a")
TOKENS = {
    "rwkv7_keys": KEYS_TOKENS,
    "rwkv7_readout": ("o", "r", "k", "v", "gate"),
    "rwkv6_readout": ("o", "gate"),
}
VECTORS = {
    "rwkv7_keys": KEYS_VECTORS,
    "rwkv7_readout": ("scale", "bias", "r_k"),
    "rwkv6_readout": ("scale", "bias"),
}
FUNCTIONS = {"rwkv7_keys": rwkv7_keys, "rwkv7_readout": rwkv7_readout, "rwkv6_readout": rwkv6_readout}


@dataclasses.dataclass(frozen=True)
class Case:
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
    def there(self) -> bool:
        """Whether v_first takes part."""
        return self.residual in (True, "traced True")


def build(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arrays and cotangents by name: tokens of the case's dtype, vectors of float32."""
    rng = np.random.default_rng(case.seed)
    tokens, vectors = TOKENS[case.op], VECTORS[case.op]
    if case.residual is None:
        tokens = [name for name in tokens if name not in ("mix", "v_first")]
        vectors = [name for name in vectors if name != "v0"]
    shape = (case.B, case.T, case.H, case.N)

    def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=shape, loc=0.3 if name in ("k_a", "scale") else 0).astype("float32")

    arrays = {name: make(name, shape).astype(jnp.dtype(case.dtype)) for name in tokens}
    wide = "float64" if case.dtype == "float64" else "float32"
    arrays |= {name: make(name, shape[2:]).astype(wide) for name in vectors}
    results = Keys._fields if case.op == "rwkv7_keys" else ("y",)
    kinds = dict.fromkeys(results, case.dtype)
    for name in ("w", "a", "b") if case.rate_scale > 1 else ("w",):
        kinds[name] = wide
    return arrays, {name: make(name, shape).astype(jnp.dtype(kinds[name])) for name in results}


def call(
    case: Case, arrays: dict[str, Any], implementation: str | None = None, **options: Any
) -> dict[str, jax.Array]:
    """The results by name."""
    if case.op == "rwkv7_keys":
        residual = True if case.residual is None else case.residual
        if isinstance(residual, str):
            residual = jnp.array(residual == "traced True")
        options |= dict(residual=residual, rate_scale=case.rate_scale)
    got = FUNCTIONS[case.op](**arrays, implementation=implementation, **options)
    return got._asdict() if case.op == "rwkv7_keys" else {"y": got}


def run(case: Case, implementation: str | None, arrays=None, cotangents=None):
    """Results and gradients by name."""
    if arrays is None:
        arrays, cotangents = build(case)
    arrays, cotangents = jax.tree.map(jnp.asarray, (arrays, cotangents))

    @jax.jit
    def both(arrays, cotangents):
        results, pull = jax.vjp(lambda arrays: call(case, arrays, implementation), arrays)
        return results, pull(cotangents)[0]

    return jax.device_get(both(arrays, cotangents))


def expected(case: Case, arrays=None, cotangents=None):
    """The oracle's results and gradients by name."""
    if arrays is None:
        arrays, cotangents = build(case)
    if case.op == "rwkv7_keys":
        return heads_oracle.keys(arrays, cotangents, residual=case.there, rate_scale=case.rate_scale)
    return heads_oracle.readout(arrays, cotangents)


def errors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest deviation of each array, relative to its largest number."""
    assert got.keys() == want.keys()
    found = {}
    for name, x in want.items():
        assert got[name].shape == x.shape, (name, got[name].shape, x.shape)
        away = np.nan_to_num(np.max(np.abs(np.asarray(got[name], np.float64) - x), initial=0), nan=np.inf)
        found[name] = float(away / max(np.max(np.abs(x), initial=0), 1e-30))
    return found


def results(case: Case, implementation: str | None, arrays=None):
    """Results by name of a call that nothing differentiates."""
    arrays = jax.tree.map(jnp.asarray, build(case)[0] if arrays is None else arrays)
    return jax.device_get(jax.jit(lambda arrays: call(case, arrays, implementation))(arrays))


def check(case: Case, implementation: str, arrays=None, cotangents=None, tolerance: float = 1e-6) -> None:
    """Asserts that results and gradients have float32's accuracy."""
    got, want = run(case, implementation, arrays, cotangents), expected(case, arrays, cotangents)
    pairs = [*zip(got, want), (results(case, implementation, arrays), want[0])]
    for got, want in pairs:
        wrong = {name: error for name, error in errors(got, want).items() if not error <= tolerance}
        assert not wrong, wrong


def check_vmap(op: str, implementation: str, shared: bool) -> None:
    """Over tokens and vectors, or over tokens with the vectors ``shared``."""
    each = [build(Case(op, B=1, residual="traced True", seed=seed)) for seed in range(2)]
    case = Case(op, B=1, residual="traced True")
    (one, cotangents), (other, more) = each
    axes = {name: None if shared and name in VECTORS[op] else 0 for name in one}
    other = {name: x if axes[name] == 0 else one[name] for name, x in other.items()}
    stacked = {n: x if axes[n] is None else jnp.stack([x, other[n]]) for n, x in one.items()}
    both = {n: jnp.stack([x, more[n]]) for n, x in cotangents.items()}

    def local(arrays, cotangents):
        results, pull = jax.vjp(lambda arrays: call(case, arrays, implementation), arrays)
        return results, pull(cotangents)[0]

    got = jax.device_get(jax.jit(jax.vmap(local, in_axes=(axes, 0)))(stacked, both))
    for i, (x, c) in enumerate([(one, cotangents), (other, more)]):
        for mine, want in zip(got, expected(case, x, c)):
            assert max(errors({n: y[i] for n, y in mine.items()}, want).values()) < 1e-6
