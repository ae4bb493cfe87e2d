"""Selection of a chunked call's kernels: the first `Variant` of a table whose predicate holds for the call's
`VariantKey`. The tables are in rwkv6/variants.py and rwkv7/variants.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.context import Context
from ...core.gpu import GPU
from ...core.types import Recurrence, RecurrenceConfig
from ..backend.triton import Launch
from .select import select
from .shapes import tile

SAFE_GATE_BOUND = -2.0  # log decays of the safe gate: its factors reach exp(8 * 2) and exp(-8 * 2)

# launches by variant, pass and padded K: for GPUs with large tiles, then for the others
LaunchTable = Mapping[tuple[str, str, int], "tuple[BlockLaunch, ...]"]


@dataclasses.dataclass(frozen=True)
class BlockLaunch:
    """A launch and the size of its programs' block: of values, in RWKV-7's gradients pass of keys."""

    block: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    @property
    def launch(self) -> Launch:
        """The part that the compiler reads."""
        return Launch(self.num_warps, self.num_stages, self.max_registers)


@dataclasses.dataclass(frozen=True)
class VariantKey:
    """The facts of a call that select its kernels.

    Attributes:
        gpu: of the call.
        K: keys of a head.
        V: values of a head.
        bf16_dots: whether all token arrays but the decay have 16 bits: products then have bfloat16 operands.
        all_bf16: whether they are all bfloat16.
        w_float16: whether the decay is float16.
        safe_gate: whether ``lower_bound`` excludes the unsafe gate.
    """

    gpu: GPU
    K: int
    V: int
    bf16_dots: bool
    all_bf16: bool
    w_float16: bool
    safe_gate: bool

    @property
    def store_dtype(self) -> DTypeLike:
        """The dtype of stored states and operands."""
        return jnp.bfloat16 if self.bf16_dots else jnp.float32


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a chunked op.

    Attributes:
        name: key of the launch table.
        serves: the calls that it serves, for messages.
        when: whether it serves a call.
        split_bwd: whether two kernels compute the backward: state gradients, then token gradients.
        key_major: whether backward tiles of keys are held transposed, for products of a warp group.
        precomputed_A: whether a kernel computes the A matrices of all chunks first.
        joint_scan: whether one program scans the update and the transition of a split (RWKV-7).
        chunks_per_state: chunks that share one stored state.
    """

    name: str
    serves: str
    when: Callable[[VariantKey], bool]
    split_bwd: bool = False
    key_major: bool = False
    precomputed_A: bool = False
    joint_scan: bool = False
    chunks_per_state: int = 1


def variant_key(ctx: Context[Recurrence, RecurrenceConfig], x: Recurrence) -> VariantKey:
    """The key of a call on ``x`` (or on its shapes)."""
    dtypes = [array.dtype for name, array in x._asdict().items() if name in "rkvab"]
    return VariantKey(
        gpu=ctx.gpu,
        K=x.r.shape[-1],
        V=x.v.shape[-1],
        bf16_dots=all(dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes),
        all_bf16=all(dtype == jnp.bfloat16 for dtype in dtypes),
        w_float16=x.w.dtype == jnp.float16,
        safe_gate=ctx.settings.lower_bound is not None and ctx.settings.lower_bound >= SAFE_GATE_BOUND,
    )


def describe(variants: Sequence[Variant], key: VariantKey) -> str:
    """The variant that a call takes, and why, for messages."""
    variant = select(variants, key)
    return f"variant {variant.name} for {variant.serves}"


def launch_of(table: LaunchTable, variant: Variant, name: str, key: VariantKey) -> BlockLaunch:
    """The launch of pass ``name``.

    Raises:
        KeyError: the table lacks the row.
    """
    return table[variant.name, name, max(64, tile(key.K))][0 if key.gpu.large_tiles else 1]
