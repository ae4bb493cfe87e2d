"""The gate of a program: safe or unsafe, and the scales that follow from it.

A safe gate (log decays of at least `chunk_variants.SAFE_GATE_BOUND`) has factors centred on the chunk. An
unsafe gate takes arbitrarily strong decays (`decay`) and computes with scaled cotangents
(`cotangent_scale_kernel`).
"""

import triton
import triton.language as tl

UNSAFE_GATE = tl.constexpr(-256)  # the gate of an unsafe program with a cotangent scale of 2^0


@triton.jit
def load_gate(index, number, c: tl.constexpr):
    """The gate of split ``number`` and the program's head.

    0 and above: the safe gate, centred: q side times 2^gate, k side and state divided by it. Below 0: the
    unsafe gate, UNSAFE_GATE plus the exponent of `cotangent_scale`.
    """
    if c.unsafe_gate:
        return tl.load(index.gates + number * c.H + tl.program_id(1))
    else:
        return tl.full((), c.safe_gate_exponent, tl.int32)


@triton.jit
def has_unsafe_gate(gate, c: tl.constexpr):
    """Selects the body. Where the config excludes the unsafe gate only one body is compiled."""
    if c.unsafe_gate:
        return gate < 0
    else:
        return False


@triton.jit
def power_of_two(n):
    """2^n, exactly, for ``n`` from -126 to 127."""
    return ((127 + n) << 23).to(tl.float32, bitcast=True)


@triton.jit
def cotangent_scale(gate):
    """Under an unsafe gate, the powers of two that multiply loaded cotangents and stored gradients
    (`cotangent_scale_kernel`).
    """
    n = gate - UNSAFE_GATE
    return power_of_two(n), power_of_two(-n)


@triton.jit
def state_scale(gate, c: tl.constexpr, GRADIENT: tl.constexpr):
    """The factor of a state, or of its gradient, during the scan."""
    if not c.unsafe_gate:
        return power_of_two(gate if GRADIENT else -gate)
    elif GRADIENT:
        return cotangent_scale(gate)[0]
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def inverse_state_scale(gate, c: tl.constexpr):
    """The factor that undoes `state_scale` of a state's gradient."""
    if c.unsafe_gate:
        return cotangent_scale(gate)[1]
    else:
        return power_of_two(-gate)
