"""Calls of the recurrences that the kernels can run."""

from __future__ import annotations

from collections.abc import Callable

from ..core.context import Context
from ..core.implementation import Unsupported
from ..core.types import RecurrenceConfig, RWKV6Inputs, RWKV7Inputs
from ..pallas.backend import triton
from ..pallas.backend.call import MAX_GRID

Ctx = Context[RWKV6Inputs, RecurrenceConfig] | Context[RWKV7Inputs, RecurrenceConfig]

INTERVAL = 16  # tokens of a program of gradients from pairs of tokens, at least


def triton_supports(ctx: Ctx) -> Unsupported | None:
    """None where the chunked Triton kernels can run a call, else the reason."""
    refused, size = triton.supports(ctx) or _too_many_sequences(ctx), ctx.cp.size
    if refused is not None or size == 1:
        return refused
    _, T, _, K = ctx.shapes.r.shape
    if T % (16 * size):
        wanted = f"of sequences that {size} devices split it takes {16 * size} tokens, or any multiple"
        return Unsupported(f"{wanted}, got T = {T}", fixable=triton.preferred(ctx))
    if K > 128:
        return Unsupported(f"for sequences that devices split it takes K up to 128, got {K}")
    return None


def recurrent_supports(
    supports: Callable[[Ctx], Unsupported | None], by_chunks: str = ""
) -> Callable[[Ctx], Unsupported | None]:
    """The `supports` of a backend's recurrent kernels: those of the backend itself, and the size of grids.

    Args:
        supports: of the backend.
        by_chunks: arrays whose gradients come from a chunked kernel, without a limit, if all have 16 bits.
    """

    def check(ctx: Ctx) -> Unsupported | None:
        widths = [getattr(ctx.shapes, name).dtype.itemsize for name in by_chunks]
        is_limited = ctx.save_residuals and max(widths, default=4) > 2
        return supports(ctx) or _too_many_sequences(ctx) or (_too_many_tokens(ctx) if is_limited else None)

    return check


def _too_many_sequences(ctx: Ctx) -> Unsupported | None:
    N = ctx.shapes.initial_state.shape[0]
    if N <= MAX_GRID:
        return None
    return Unsupported(f"a call takes at most {MAX_GRID} sequences, got {N}: split the batch", fixable=True)


def _too_many_tokens(ctx: Ctx) -> Unsupported | None:
    """The limit of gradients from pairs of tokens."""
    B, T = ctx.shapes.r.shape[:2]
    if B * -(-T // INTERVAL) <= MAX_GRID:
        return None
    wanted = f"gradients token by token take at most {MAX_GRID * INTERVAL} tokens a call"
    return Unsupported(
        f"{wanted}, got B = {B}, T = {T}: split the batch, or use the chunked op", fixable=True
    )
