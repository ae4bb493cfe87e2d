"""The config of the chunked kernels: everything that a launch is compiled for."""

import dataclasses
from typing import Any

import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a launch is compiled for.

    Attributes:
        H: heads.
        K: keys of a head.
        V: values of a head.
        BK: keys of a program, a power of two.
        BV: values of a program, a power of two.
        num_splits: splits of each sequence; 1 for packed sequences.
        scale: factor of r.
        operand: dtype of the large products' operands: bfloat16 for 16-bit inputs, else float32.
        tf32x3: whether products of float32 operands are computed from their TF32 parts, to float32 accuracy.
        exact_sums: whether sums over tokens and A_ab_inv have float32 accuracy, also without ``tf32x3``.
        unsafe_gate: whether decays of a sequence and head may be below the bound of the safe gate, as
            `Index.gates` says. False compiles the safe gate alone.
        safe_gate_exponent: log2 of the centring factor of the safe gate (`load_gate`), where
            ``unsafe_gate`` is False.
        both_gates: whether the kernel has the code of both gates, and this config is for one of them.
        segments: whether a sequence has segments, at whose first token the state restarts.
        packed: whether sequences are packed along T.
        unmasked: whether every element of every tile exists.
        precomputed_A: whether the A matrices of all chunks were computed before (RWKV-7).
        joint_scan: whether one program scans the update and the transition of a split (RWKV-7).
        A_in_registers: whether transposed A matrices become operands in registers (`transposed_A`).
        num_buffers: token-shaped arrays that hold chunk states; 0 for one array of states.
        chunks_per_state: chunks that share one stored state.
        key_major: whether tiles of keys are held transposed, [K, 16] (`key_major`).
        pair_tile: whether pairs of chunks have key-major tiles: one for both under a safe gate, else one for
            each (RWKV-7).
        late_loads: whether the tile of both loads keys late, for few registers.
        from_scans: whether state gradients come from the recurrent kernels (RWKV-7).
        num_blocks: blocks of values or keys that share program axis 0 with something else.
        BT: tokens of a program where that is not a chunk.
    """

    H: int
    K: int
    V: int
    BK: int
    BV: int
    num_splits: int
    scale: float
    operand: tl.dtype
    tf32x3: bool
    exact_sums: bool
    unsafe_gate: bool
    safe_gate_exponent: int
    segments: bool
    packed: bool
    unmasked: bool
    both_gates: bool = False
    precomputed_A: bool = False
    joint_scan: bool = False
    A_in_registers: bool = False
    num_buffers: int = 0
    chunks_per_state: int = 1
    key_major: bool = False
    pair_tile: bool = False
    late_loads: bool = False
    from_scans: bool = False
    num_blocks: int = 1
    BT: int = 16

    def replace(self, **changes: Any) -> "Config":
        """The same with other values."""
        return dataclasses.replace(self, **changes)


@triton.constexpr_function
def with_safe_gate(c):
    """The config of a program under the safe gate."""
    return c.replace(unsafe_gate=False, both_gates=c.unsafe_gate)


@triton.constexpr_function
def with_exact_products(c):
    """The config of products that are as exact as sums."""
    return c.replace(tf32x3=c.exact_sums)


@triton.constexpr_function
def with_square_state(c):
    """The config of a scan with a matrix [K, K] in place of the state."""
    return c.replace(V=c.K)
