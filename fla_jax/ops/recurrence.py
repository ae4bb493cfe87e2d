"""What the public functions of both recurrences share: the way from arguments to an `Op` and back."""

from __future__ import annotations

from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from ..core.context import Context
from ..core.gpu import Fixable
from ..core.names import FINAL, OUT, STATES
from ..core.op import Op
from ..pallas.backend import triton
from .recurrence_arguments import check

# Axes of every array that an op of this kind may have: rows, tokens, heads, keys, values, packed sequences.
AXES = {name: "b t h k" for name in "rwkab"} | {
    "v": "b t h v",
    "u": "h k",
    "initial_state": "n h k v",
    "segment_ids": "b t",
    "cu_seqlens": "m",
    "o": "b t h v",
    "final_state": "n h k v",
}
NAMES: dict[str, Any] = dict(output_names=(OUT, FINAL), kept_name=STATES)


class Options(TypedDict, total=False):
    """Keyword arguments of all four functions, for type checkers; `fla_jax.ops.chunk_rwkv7` explains them."""

    scale: float
    initial_state: jax.Array | None
    segment_ids: jax.Array | None
    cu_seqlens: jax.Array | None
    implementation: str | None
    sequence_axis: str | None


class ChunkOptions(Options, total=False):
    """Those of the chunked forms."""

    chunk_size: int | None
    lower_bound: float | None


def triton_supports(ctx: Context) -> str | None:
    """None where the chunked Triton kernels can serve ``call``, else the reason."""
    reason = triton.supports(ctx)
    if reason is not None or ctx.cp_size == 1:
        return reason
    _, T, _, K = ctx.inputs.r.shape
    if T % (16 * ctx.cp_size):
        reason = f"of rows that {ctx.cp_size} devices share it takes {16 * ctx.cp_size} tokens, or any "
        reason += f"multiple, got T = {T}"
        return Fixable(reason) if triton.preferred(ctx) else reason
    return None if K <= 128 else f"for rows that devices share it takes K up to 128, got {K}"


def run(
    op: Op,
    tokens: dict[str, Any],
    *,
    output_final_state: bool,
    implementation: str | None,
    sequence_axis: str | None,
    **options: Any,
) -> Any:
    """Checks the arguments of a public function and runs its op: ``(o, final_state or None)``."""
    arrays, settings = check(tokens, warn_layout=op.name.startswith("chunk"), **options)
    x = op.inputs(**arrays)
    if 0 in x.v.shape:  # nothing to run, and no implementation is asked
        if implementation is not None:
            op.named(implementation)
        o, final = jnp.zeros_like(x.v), x.initial_state
    else:
        o, final = op(x, settings, implementation, sequence_axis)
    return o, (final if output_final_state else None)
