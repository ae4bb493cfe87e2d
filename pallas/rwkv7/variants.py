"""RWKV-7: the variants of the chunked op and their launches."""

from __future__ import annotations

from ...core.context import Context
from ...core.gpu import GPU
from ...core.types import RecurrenceConfig, RWKV7Inputs
from ..backend import triton
from ..backend.versions import triton_release
from ..common.chunk_variants import BlockLaunch, LaunchTable, Variant, variant_key
from ..common.shapes import tile

VARIANTS = (
    Variant(
        "fused_wgmma",
        "bfloat16 and heads of 33 to 64, on compute capability 9.0",
        lambda key: key.gpu.wgmma and key.all_bf16 and not key.w_float16 and 32 < key.K <= 64,
        key_major=True,
        joint_scan=True,
    ),
    Variant("fused", "16-bit inputs and heads up to 64", lambda key: key.bf16_dots and key.K <= 64),
    Variant(
        "split_pair_wgmma",
        "bfloat16 and heads up to 128, on compute capability 9.0",
        lambda key: key.gpu.wgmma and key.all_bf16 and max(key.K, key.V) <= 128,
        split_bwd=True,
        key_major=True,
        chunks_per_state=2,
    ),
    Variant(
        "split_pair",
        "16-bit inputs and heads up to 128",
        lambda key: key.bf16_dots and max(key.K, key.V) <= 128,
        split_bwd=True,
        chunks_per_state=2,
    ),
    Variant(
        "split_fp32",
        "float32 inputs and heads up to 128",
        lambda key: not key.bf16_dots and max(key.K, key.V) <= 128,
        split_bwd=True,
        precomputed_A=True,
    ),
    Variant("fused_large", "16-bit inputs and heads over 128", lambda key: key.bf16_dots),
    Variant("fused_large_fp32", "float32 inputs and heads over 128", lambda key: True, precomputed_A=True),
)

# Registers for three programs on a multiprocessor; with Triton 3.8 and newer these would spill 400 bytes.
_SAFE_REGISTERS = 168 if triton_release() < (3, 8) else 224

# Blocks, warps, stages and registers, on GPUs with large tiles and on others. Measured on an H200; for
# others, and for fused passes of heads over 128, what fits and spills least
LAUNCHES: LaunchTable = {
    ("fused_wgmma", "fwd", 64): (BlockLaunch(64, 2, 3),),
    ("fused_wgmma", "bwd", 64): (BlockLaunch(64, 4, 3),),
    ("fused_wgmma", "chunk_state", 64): (BlockLaunch(64, 2, 3),),
    ("fused", "fwd", 64): (BlockLaunch(64, 2, 3), BlockLaunch(64, 2, 3)),
    ("fused", "bwd", 64): (BlockLaunch(64, 4, 3), BlockLaunch(32, 4, 1)),
    ("fused", "chunk_state", 64): (BlockLaunch(64, 2, 3), BlockLaunch(64, 2, 3)),
    ("split_pair_wgmma", "fwd", 128): (BlockLaunch(128, 8, 3),),
    ("split_pair_wgmma", "chunk_state", 128): (BlockLaunch(128, 8, 3),),
    ("split_pair_wgmma", "bwd_dh", 128): (BlockLaunch(64, 4, 3),),
    ("split_pair_wgmma", "bwd_grads", 128): (BlockLaunch(64, 4, 1),),
    ("split_pair_wgmma", "bwd_grads_safe", 128): (BlockLaunch(64, 4, 1, _SAFE_REGISTERS),),
    ("split_pair", "fwd", 128): (BlockLaunch(128, 8, 3), BlockLaunch(128, 8, 2)),
    ("split_pair", "chunk_state", 128): (BlockLaunch(128, 8, 3), BlockLaunch(64, 8, 2)),
    ("split_pair", "bwd_dh", 128): (BlockLaunch(64, 4, 3), BlockLaunch(32, 2, 3)),
    ("split_pair", "bwd_grads", 128): (BlockLaunch(64, 4, 1), BlockLaunch(64, 4, 1)),
    ("split_fp32", "fwd", 64): (BlockLaunch(64, 4, 3), BlockLaunch(64, 4, 2)),
    ("split_fp32", "chunk_state", 64): (BlockLaunch(64, 4, 3), BlockLaunch(64, 4, 2)),
    ("split_fp32", "bwd_dh", 64): (BlockLaunch(64, 4, 3), BlockLaunch(64, 4, 2)),
    ("split_fp32", "bwd_grads", 64): (BlockLaunch(64, 4, 3), BlockLaunch(64, 4, 2)),
    ("split_fp32", "fwd", 128): (BlockLaunch(128, 8, 2), BlockLaunch(16, 8, 1)),
    ("split_fp32", "chunk_state", 128): (BlockLaunch(128, 8, 2), BlockLaunch(16, 8, 1)),
    ("split_fp32", "bwd_dh", 128): (BlockLaunch(128, 8, 2), BlockLaunch(16, 8, 1)),
    ("split_fp32", "bwd_grads", 128): (BlockLaunch(64, 4, 2), BlockLaunch(64, 4, 2)),
    ("fused_large", "fwd", 128): (BlockLaunch(128, 8, 3), BlockLaunch(128, 8, 2)),
    ("fused_large", "bwd", 128): (BlockLaunch(128, 8, 1), BlockLaunch(16, 8, 1)),
    ("fused_large", "chunk_state", 128): (BlockLaunch(128, 8, 3), BlockLaunch(64, 8, 2)),
    ("fused_large", "fwd", 256): (BlockLaunch(16, 4, 1), BlockLaunch(16, 4, 1)),
    ("fused_large", "bwd", 256): (BlockLaunch(16, 8, 1), BlockLaunch(16, 8, 1)),
    ("fused_large_fp32", "fwd", 64): (BlockLaunch(64, 4, 3), BlockLaunch(64, 4, 2)),
    ("fused_large_fp32", "bwd", 64): (BlockLaunch(64, 4, 1), BlockLaunch(16, 8, 1)),
    ("fused_large_fp32", "chunk_state", 64): (BlockLaunch(64, 4, 3), BlockLaunch(64, 4, 2)),
    ("fused_large_fp32", "fwd", 128): (BlockLaunch(128, 8, 2), BlockLaunch(16, 8, 1)),
    ("fused_large_fp32", "bwd", 128): (BlockLaunch(128, 8, 1), BlockLaunch(16, 8, 1)),
    ("fused_large_fp32", "chunk_state", 128): (BlockLaunch(128, 8, 2), BlockLaunch(16, 8, 1)),
    ("fused_large_fp32", "fwd", 256): (BlockLaunch(16, 4, 1), BlockLaunch(16, 8, 1)),
    ("fused_large_fp32", "bwd", 256): (BlockLaunch(16, 8, 1), BlockLaunch(16, 8, 1)),
}

# Tokens of the recurrent op between saved states: a chunk, since the chunked op's kernel computes gradients.
# By pairs of tokens 32 would spill: 24 ms for 18 on an H200.
INTERVAL = 16
A_LAUNCH = BlockLaunch(16, 1, 1)  # of the kernel that computes A: keys at a time
GRADS_VALUES = 32  # values at a time in the gradients of one chunk


def from_scans_launch(gpu: GPU, K: int) -> BlockLaunch:
    """The launch of the recurrent op's gradients, as of the variant ``split_fp32``."""
    large, small = LAUNCHES["split_fp32", "bwd_grads", max(64, tile(K))]
    return large if gpu.large_tiles else small


def has_chunk_gradients(ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs) -> bool:
    """Whether the chunked op's kernel computes the recurrent op's gradients of r, w, k, a and b, with float32
    operands.

    It takes 4.5 ms less of 18.5 at B8 T4096 H64 D64. Strong decays cost it up to 2e-5 of the gradient of a
    channel's decays, since one of its factors may undo decays (common/decay.py): less than a hundredth of the
    rounding to 16 bits. Where one of these gradients is float32, all come from pairs of tokens, products of
    decays alone. Never in the interpreter, which multiplies no bfloat16.
    """
    key = variant_key(ctx, x)
    return key.bf16_dots and x.w.dtype.itemsize == 2 and key.K <= 128 and triton.preferred(ctx)
