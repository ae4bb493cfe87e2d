"""RWKV-7, chunked, on NVIDIA GPUs: the forward and backward rules that launch the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.launch import launch
from ..core.partition import partitioned
from ..ops.config import OpConfig
from .chunk_plan import CHUNK, LaunchTable, Layout, Plan, has_half, launch_options, make_plan, partial_shapes, plan_splits, tile, total
from .kept_states import keep_states, result
from .rwkv7_chunk_bwd import rwkv7_bwd_kernel, rwkv7_carry_kernel
from .rwkv7_chunk_fwd import rwkv7_fwd_kernel, rwkv7_transfer_kernel
from .rwkv7_chunk_grads import rwkv7_gradients_kernel
from .sequence_split import enter, enter_backward

# (value block, warps, pipeline stages) by pass and padded K, measured on an H200
LAUNCH: LaunchTable = {
    ("forward", 64): (64, 2, 3),
    ("transfer", 64): (64, 2, 3),
    ("backward", 64): (64, 4, 3),
    ("forward", 128): (128, 8, 3),
    ("transfer", 128): (128, 8, 3),
    ("carry", 128): (32, 2, 3),
    ("gradients", 128): (64, 2, 1),  # the first number is the block of keys: a program holds all values
    ("backward", 128): (128, 8, 1),
    ("forward", 256): (16, 4, 1),
    ("backward", 256): (16, 8, 1),
    # not measured: what fits and spills least (tests/compile/resources.py)
    ("forward", 128, "float32"): (32, 8, 1),
    ("carry", 128, "float32"): (32, 8, 1),
    ("gradients", 128, "float32"): (32, 8, 1),
    ("backward", 64, "small"): (32, 4, 1),
    ("forward", 128, "small"): (128, 8, 2),
    ("transfer", 128, "small"): (64, 8, 2),
    ("backward", 128, "small"): (16, 8, 1),
    ("forward", 64, "small float32"): (32, 4, 1),
    ("transfer", 64, "small float32"): (32, 4, 1),
    ("backward", 64, "small float32"): (16, 8, 1),
    ("forward", 128, "small float32"): (32, 8, 1),
    ("transfer", 128, "small float32"): (32, 8, 1),
    ("carry", 128, "small float32"): (32, 8, 1),
    ("gradients", 128, "small float32"): (32, 8, 1),
    ("backward", 128, "small float32"): (16, 8, 1),
    ("forward", 256, "small float32"): (16, 8, 1),
    ("backward", 256, "small float32"): (16, 8, 1),
}
TOKENS = "b t h k, b t h k, b t h k, b t h v, b t h k, b t h k"


class _Kept:
    """What the forward keeps for the backward, as names of axes (core/partition.py) and as a tuple of arrays."""

    def __init__(self, tokens: Sequence[jax.Array], cu_seqlens: jax.Array | None, splits: int):
        r, _, k, v, a, b = tokens
        self.two_kernels = 64 < r.shape[-1] <= 128 and v.shape[-1] <= 128  # the backward: see rwkv7_chunk_bwd.py
        results = () if self.two_kernels else (r, k, a, b)
        self.states = keep_states(LAUNCH, r, v, results, has_half(r, k, v, a, b), cu_seqlens)
        self.splits = splits
        self.rule = f"{self.states.rule}, b c h x y"  # states that enter the chunks, (I - A_ab)^-1
        self.rule += (", b t h v" if self.two_kernels else "") + (", b s h k j, b t h k" if splits > 1 else "")

    def unpack(self, arrays: tuple[jax.Array, ...]):
        """(states, inverses, U or None, (M, reads) or None, the rest)."""
        n = self.states.count
        states, inverses, rest = arrays[:n], arrays[n], arrays[n + 1 :]
        u, rest = (rest[0], rest[1:]) if self.two_kernels else (None, rest)
        transfer, rest = (rest[:2], rest[2:]) if self.splits > 1 else (None, rest)
        return states, inverses, u, transfer, rest


def _like(x: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def _transfer(plan: Plan, tokens: tuple[jax.Array, ...]):
    """(M, N, reads) of all stretches: see sequence_split.py."""
    r, _, _, v, _, _ = tokens
    (B, _, H, K), V, BV = r.shape, v.shape[-1], plan.options["BV"]
    out = (
        _like(r, plan.store),
        jax.ShapeDtypeStruct((B * plan.splits, H, K, K), jnp.float32),
        jax.ShapeDtypeStruct((B * plan.splits, H, K, V), jnp.float32),
    )
    options = plan.options | dict(grid=(plan.parts + -(-K // BV), H, B * plan.splits), EVEN=plan.options["EVEN"] and K % BV == 0)
    reads, M, N = launch(rwkv7_transfer_kernel, *tokens, *plan.ranges, *plan.lengths, out=out, PARTS=plan.parts, **options)
    return M, N, reads


def forward(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    splits, layout = plan_splits(r, cu_seqlens), Layout(segment_ids, cu_seqlens)
    K, V = r.shape[-1], v.shape[-1]
    keeps = _Kept((r, w, k, v, a, b), cu_seqlens, splits)

    def run(r, w, k, v, a, b, s0, *rest):
        tokens, place = (r, w, k, v, a, b), layout.unpack(rest)
        B, _, H, _ = r.shape
        plan = make_plan("forward", LAUNCH, cfg, r, w, v, (k, a, b), *place, splits)
        transfer: tuple[jax.Array, ...] = ()
        if splits > 1:
            M, N, reads = _transfer(make_plan("transfer", LAUNCH, cfg, r, w, v, (k, a, b), *place, splits), tokens)
            s0, transfer = enter(M, N, s0, splits), (M.reshape(B, splits, H, K, K), reads)
        keep_u = cfg.keep and keeps.two_kernels
        states = keeps.states.shapes(r, V, plan.chunks, cfg.keep)
        inverses, u = result(cfg.keep, (*plan.chunks, H, CHUNK, CHUNK), plan.store), result(keep_u, v.shape, plan.store)
        out = (_like(v), _like(s0), *states, inverses, u)
        y, final, *states, inverses, u = launch(
            rwkv7_fwd_kernel, *tokens, s0, *plan.ranges, *plan.lengths,
            out=out, KEEP=cfg.keep, ARRAYS=keeps.states.arrays, KEEP_U=keep_u, **plan.options,
        )  # fmt: skip
        final = final.reshape(-1, splits, H, K, V)[:, -1]
        return (y, final, *states[: keeps.states.count], inverses, *((u,) if keep_u else ()), *transfer) if cfg.keep else (y, final)

    rule = f"{TOKENS}, {layout.state}{layout.rule} -> b t h v, {layout.state}" + (f", {keeps.rule}" if cfg.keep else "")
    y, final, *kept = partitioned(run, rule, layout.fold)(r, w, k, v, a, b, s0, *layout.operands)
    return (y, final), tuple(kept)


def _backward_by_two(plan: Plan, tokens: tuple[jax.Array, ...], dy: jax.Array, ds: jax.Array, states: jax.Array, inverses: jax.Array, u: jax.Array):
    """The carry kernel, then the gradients kernel, for large heads."""
    r, w, k, v, a, b = tokens
    K, V = r.shape[-1], v.shape[-1]
    dv, ds0, dstates, dz = launch(
        rwkv7_carry_kernel, *tokens, *plan.ranges, dy, ds, inverses, *plan.lengths,
        out=(_like(v), _like(ds), _like(states), _like(v, plan.store)), **plan.options,
    )  # fmt: skip
    BK, num_warps, num_stages = launch_options(LAUNCH, "gradients", K, plan.options["HALF"])
    blocks, number = -(-K // BK), -(-plan.lengths[1] // CHUNK)
    options = plan.options | dict(
        grid=(number * blocks, *plan.options["grid"][1:]), num_warps=num_warps, num_stages=num_stages,
        BK=BK, BV=tile(V), BLOCKS=blocks, EVEN=plan.options["EVEN"] and tile(V) == V,
    )  # fmt: skip
    dr, dw, dk, da, db = launch(
        rwkv7_gradients_kernel, *tokens, *plan.ranges, dy, u, dz, states, dstates, *plan.lengths,
        out=tuple(map(_like, (r, w, k, a, b))), **options,
    )  # fmt: skip
    return dr, dw, dk, dv, da, db, ds0


def backward(cfg: OpConfig, inputs, kept, dy, ds):
    """Backward rule: gradients of r, w, k, v, a, b and the initial state."""
    *tokens, _, segment_ids, cu_seqlens = inputs
    r, _, _, v, _, _ = tokens
    splits, layout = plan_splits(r, cu_seqlens), Layout(segment_ids, cu_seqlens)
    K, V = r.shape[-1], v.shape[-1]
    keeps = _Kept(tokens, cu_seqlens, splits)

    def run(r, w, k, v, a, b, dy, ds, *rest):
        states, inverses, u, transfer, rest = keeps.unpack(rest)
        tokens, H = (r, w, k, v, a, b), r.shape[2]
        plan = make_plan("carry" if keeps.two_kernels else "backward", LAUNCH, cfg, r, w, v, (k, a, b), *layout.unpack(rest), splits)
        if transfer is not None:
            M, reads = transfer
            ds = enter_backward(plan, M.reshape(-1, H, K, K), reads, dy, ds)
        if keeps.two_kernels:
            *grads, ds0 = _backward_by_two(plan, tokens, dy, ds, states[0], inverses, u)
        else:
            dr, dw, dk, da, db = partial_shapes(plan.parts, r, w, k, a, b)
            out = (dr, dw, dk, _like(v), da, db, _like(ds))
            before = (*tokens, *plan.ranges, dy, ds)
            dr, dw, dk, dv, da, db, ds0 = launch(
                rwkv7_bwd_kernel, *before, *keeps.states.operands(states), inverses, *plan.lengths, out=out,
                aliases=keeps.states.aliases(len(before), (0, 2, 4, 5)), ARRAYS=keeps.states.arrays, TAKEN=keeps.states.taken, **plan.options,
            )  # fmt: skip
            grads = [total(dr, r), total(dw, w), total(dk, k), dv, total(da, a), total(db, b)]
        return (*grads, ds0.reshape(-1, splits, H, K, V)[:, 0])

    rule = f"{TOKENS}, b t h v, {layout.state}, {keeps.rule}{layout.rule} -> {TOKENS}, {layout.state}"
    return partitioned(run, rule, layout.fold)(*tokens, dy, ds, *kept, *layout.operands)
