"""The pieces of a decoded token: what a layer does with one token of every row, in a few large pieces.

`fla_jax.generation` puts them together (its fast path). Each has a definition in plain JAX (`plain`) and the
same functions as kernels (`fla_jax.pallas.decode.host`). They are no `Op`s: nothing here is
differentiated, mapped or shared by devices, and the recurrent state is written in place.
"""

from __future__ import annotations

from typing import Any

from ...pallas.backend import triton
from .weights import Layer6 as Layer6
from .weights import Layer7 as Layer7
from .weights import Matrix as Matrix
from .weights import quantised as quantised

IMPLEMENTATIONS = ("triton", "plain")


def pieces(implementation: str) -> Any:
    """The functions ``project``, ``advance7``, ``moves6`` and ``advance6`` of an implementation."""
    if implementation == "plain":
        from . import plain

        return plain
    from ...pallas.decode import host

    return host


def supports(
    implementation: str, platform: str, hidden_size: int, head_dim: int, intermediate_size: int
) -> str | None:
    """None where an implementation can serve a model of these sizes on ``platform``, else the reason."""
    reason = triton.why_not(platform) if implementation == "triton" else None
    if reason is not None:
        return reason.reason
    if hidden_size % 64 or intermediate_size % 32:
        return "it takes widths that are multiples of 64, and of 32 in the feed-forward"
    if max(hidden_size, intermediate_size) > 2**15:
        return "it takes widths of up to 32768"
    if head_dim not in (16, 32, 64, 128):
        return f"it takes heads of 16, 32, 64 or 128 channels, got {head_dim}"
    return None
