"""The checked mode's checks of both recurrences (`fla_jax.checked`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import PyTree

from ..core.context import Context
from ..core.types import Outputs, RecurrenceConfig, RWKV6Inputs, RWKV7Inputs

GROWTH_SLACK = 100.0


def rwkv6(ctx: Context[RWKV6Inputs, RecurrenceConfig], x: RWKV6Inputs, outputs: Outputs) -> None:
    """Checks the inputs of one call."""
    _inputs(ctx, x)


def rwkv7(ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs, outputs: Outputs) -> None:
    """Checks the inputs of one call, then how its states grew."""
    _inputs(ctx, x)
    _growth(ctx.op, x, outputs.final_state)


def _inputs(
    ctx: Context[RWKV6Inputs, RecurrenceConfig] | Context[RWKV7Inputs, RecurrenceConfig],
    x: RWKV6Inputs | RWKV7Inputs,
) -> None:
    op, lower_bound = ctx.op, ctx.settings.lower_bound
    for name, array in x._asdict().items():
        if array is not None and name not in ("segment_ids", "cu_seqlens"):
            _finite(op, name, array)
    checkify.check(
        jnp.all(x.w <= 0),
        f"{op}: w, the log decay, must be <= 0, got a largest value of {{w}}",
        w=jnp.max(x.w),
    )
    if lower_bound is not None:
        # a bfloat16 w just above the bound may round to just below it
        low = jnp.min(x.w).astype(jnp.float32)
        checkify.check(
            low >= lower_bound * (1 + 2.0**-7),
            f"{op}: lower_bound promises w >= {lower_bound}, got a smallest value of {{w}}",
            w=low,
        )
    if x.cu_seqlens is not None:
        T = x.w.shape[1]
        cu = x.cu_seqlens.astype(jnp.int32)  # differences of unsigned integers are never negative
        ok = (cu[0] == 0) & (cu[-1] == T) & jnp.all(jnp.diff(cu) >= 0)
        checkify.check(ok, f"{op}: cu_seqlens must rise from 0 to T = {T} without falling")


def _finite(op: str, name: str, array: jax.Array) -> None:
    """Reports the first NaN or infinity by its position; ``w`` may be -inf, and +inf there has a check of its
    own.
    """
    bad = jnp.isnan(array) if name == "w" else ~jnp.isfinite(array)
    what = "NaN" if name == "w" else "NaN or infinity"
    position = jnp.unravel_index(jnp.argmax(bad), bad.shape)
    at: dict[str, PyTree] = {f"i{n}": index for n, index in enumerate(position)}
    checkify.check(~jnp.any(bad), f"{op}: {name} holds {what} at [{', '.join(f'{{{n}}}' for n in at)}]", **at)


def _growth(op: str, x: RWKV7Inputs, final: jax.Array) -> None:
    """Reports batch elements whose state outgrew what went into it.

    Transitions that do not expand keep ``|S_T| <= |S_0| + sum_t |k_t| |v_t|``; a state `GROWTH_SLACK` times
    larger was amplified by a and b.
    """

    def norm(x: jax.Array, axes: int | tuple[int, ...]) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axes))

    fed = jnp.sum(norm(x.k, -1) * norm(x.v, -1), 1)  # [B, H]
    limit = GROWTH_SLACK * (norm(x.initial_state, (-2, -1)) + fed)
    size = norm(final, (-2, -1))
    bad = jnp.any(~(size <= limit), -1)
    checkify.check(
        ~jnp.any(bad),
        f"{op}: the state of batch element {{row}} grew without bound (|S| = {{size}}): the transition "
        "diag(exp(w)) + b a^T expands it. RWKV-7 passes a = -kk and b = kk * gate with |kk| = 1 and gate "
        "in [0, 1]; a and b drawn at random overflow within some steps",
        row=jnp.argmax(bad),
        size=jnp.max(jnp.where(bad[:, None], size, 0)),
    )
