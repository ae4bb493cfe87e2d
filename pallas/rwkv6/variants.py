"""RWKV-6: the variants of the chunked op and their launches."""

from __future__ import annotations

from ..common.chunk_variants import BlockLaunch, LaunchTable, Variant, VariantKey


def _is_key_major(key: VariantKey) -> bool:
    """Backward alone on an H200 at heads of 64, plain and key-major tiles: safe gate 2.3 and 1.3 ms, unsafe
    gate 3.5 and 1.7. At heads of 128 the unsafe gate spills: 7.1 and 10.0 ms.
    """
    fits = 32 < key.K <= 64 or (64 < key.K <= 128 and key.safe_gate)
    return key.gpu.wgmma and key.all_bf16 and not key.w_float16 and fits


VARIANTS = (
    Variant(
        "fused_wgmma",
        "bfloat16 and heads of 33 to 64, under a safe gate to 128, on compute capability 9.0",
        _is_key_major,
        key_major=True,
    ),
    Variant("fused", "16-bit inputs", lambda key: key.bf16_dots),
    Variant("fused_fp32", "float32 inputs", lambda key: True),
)

# Tokens of the recurrent op between saved states: 16 take twice the memory and 3 % more time on an H200.
INTERVAL = 32

# Blocks, warps, stages and registers, on GPUs with large tiles and on others. Measured on an H200; for others
# what fits and spills least.
LAUNCHES: LaunchTable = {
    ("fused_wgmma", "fwd", 64): (BlockLaunch(64, 2, 3),),
    ("fused_wgmma", "bwd", 64): (BlockLaunch(64, 4, 3),),
    ("fused_wgmma", "chunk_state", 64): (BlockLaunch(64, 2, 3),),
    ("fused_wgmma", "fwd", 128): (BlockLaunch(128, 8, 3),),
    ("fused_wgmma", "bwd", 128): (BlockLaunch(128, 8, 1),),
    ("fused_wgmma", "chunk_state", 128): (BlockLaunch(128, 8, 3),),
    ("fused", "fwd", 64): (BlockLaunch(64, 2, 3), BlockLaunch(64, 2, 3)),
    ("fused", "bwd", 64): (BlockLaunch(64, 4, 3), BlockLaunch(32, 4, 1)),
    ("fused", "chunk_state", 64): (BlockLaunch(64, 2, 3), BlockLaunch(64, 2, 3)),
    ("fused", "fwd", 128): (BlockLaunch(128, 8, 3), BlockLaunch(128, 8, 3)),
    ("fused", "bwd", 128): (BlockLaunch(128, 8, 1), BlockLaunch(32, 8, 1)),
    ("fused", "chunk_state", 128): (BlockLaunch(128, 8, 3), BlockLaunch(128, 8, 3)),
    ("fused", "fwd", 256): (BlockLaunch(16, 4, 1), BlockLaunch(16, 4, 1)),
    ("fused", "bwd", 256): (BlockLaunch(16, 8, 1), BlockLaunch(16, 8, 1)),
    ("fused_fp32", "fwd", 64): (BlockLaunch(64, 4, 3), BlockLaunch(32, 4, 1)),
    ("fused_fp32", "bwd", 64): (BlockLaunch(64, 8, 3), BlockLaunch(16, 8, 1)),
    ("fused_fp32", "chunk_state", 64): (BlockLaunch(64, 2, 3), BlockLaunch(32, 4, 1)),
    ("fused_fp32", "fwd", 128): (BlockLaunch(128, 8, 1), BlockLaunch(32, 8, 1)),
    ("fused_fp32", "bwd", 128): (BlockLaunch(128, 8, 1), BlockLaunch(16, 4, 1)),
    ("fused_fp32", "chunk_state", 128): (BlockLaunch(128, 8, 3), BlockLaunch(32, 8, 1)),
    ("fused_fp32", "fwd", 256): (BlockLaunch(16, 4, 1), BlockLaunch(16, 8, 1)),
    ("fused_fp32", "bwd", 256): (BlockLaunch(16, 8, 1), BlockLaunch(16, 8, 1)),
}
