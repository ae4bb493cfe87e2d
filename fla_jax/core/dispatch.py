"""Which implementation runs a call: the one readable place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from . import launch


def preference(op: str, form: str, T: int) -> tuple[str, ...]:
    """Implementations of one op, the best first, as measured (docs/performance.md); the first that qualifies runs.

    "chunk" forms are parallel inside a chunk, "recurrent" forms go token by token: kernels on a GPU, `jax.lax.scan` elsewhere. One token of RWKV-6 is as
    fast in plain JAX as in a kernel.
    """
    if form == "chunk":
        return "triton", "xla", "reference"
    if T == 1 and op.endswith("rwkv6"):
        return "reference", "xla"
    return "pallas", "reference", "xla"


def platform_of(arrays: tuple[jax.Array, ...]) -> str:
    """The platform that a call runs on: that of its arrays where they are concrete, else JAX's default."""
    for x in arrays:
        if not isinstance(x, jax.core.Tracer):
            return next(iter(x.devices())).platform
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, str) else device.platform if device is not None else jax.default_backend()


def why_not(name: str, call: Any) -> str | None:
    """None where implementation ``name`` can run ``call`` (a `fla_jax.ops.validate.Call`), else the reason."""
    if name not in ("triton", "pallas"):
        return None
    if call.cfg.compute_name == "float64":
        return "its kernels have no float64"
    if name == "triton":
        return launch.why_not(platform_of(call.arrays))
    from . import pallas_call

    return pallas_call.why_not(platform_of(call.arrays))


def _interpreted(name: str) -> bool:
    """Whether an implementation would run in an interpreter: that is for tests, which ask for it by name."""
    if name != "pallas":
        return name == "triton" and launch.INTERPRET
    from . import pallas_call

    return pallas_call.interpreting()


def choose(op: str, form: str, implementation: str | None, table: Mapping[str, Any], call: Any) -> str:
    """The key of ``table`` that serves this call.

    Raises:
        ValueError: ``implementation`` is no implementation of this op, or it cannot run this call here.
    """
    if implementation is None:
        for name in preference(op, form, call.arrays[0].shape[1]):
            reason = why_not(name, call)
            if reason is None and not _interpreted(name):
                return name
            if reason is not None and "jax-triton" in reason:
                warnings.warn(f"{op} runs without its Triton kernels, much slower: {reason}", stacklevel=4)
    if implementation is None or implementation not in table:
        raise ValueError(f"{op}: implementation must be one of {sorted(table)} or None, got {implementation!r}")
    reason = why_not(implementation, call)
    if reason is not None:
        raise ValueError(f"{op}: implementation={implementation!r} cannot run this call: {reason}")
    return implementation
