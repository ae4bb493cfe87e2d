"""Where kernels find the states that enter chunks: see plan/kept_states.py, which says why they lie there."""

import triton
import triton.language as tl


@triton.jit
def state_rows(states, axes, mode: tl.constexpr, ARRAYS: tl.constexpr):
    """Pointers [BV, BK] to a state from where its chunk begins: in ``ARRAYS`` token arrays, or with 0 in the
    one array [.., V, K].
    """
    if ARRAYS == 0:
        rows = states[0] + axes.value * mode.K
    else:
        # axes.value, in a form that shows the compiler that all rows of a thread lie in one array
        row = tl.arange(0, mode.BV)
        array = row % ARRAYS
        first = tl.where(
            array < 2, tl.where(array < 1, states[0], states[1]), tl.where(array < 3, states[2], states[3])
        )
        rows = first + (row // ARRAYS) * (mode.H * mode.K)
    return rows[:, None] + axes.key[None, :]


@triton.jit
def state_place(chunk, token, mode: tl.constexpr, ARRAYS: tl.constexpr):
    """Where a chunk begins in those arrays: by its number among chunks and heads, or by its first token."""
    return chunk * (mode.K * mode.V) if ARRAYS == 0 else token


@triton.jit
def gradients_over_states(states, gradients, TAKEN: tl.constexpr):
    """Where to write four gradients: the first ``TAKEN`` in the memory of states, through the inputs'
    pointers (run/triton.py).
    """
    first, second, third, fourth = gradients
    if TAKEN > 0:
        first = states[0]
    if TAKEN > 1:
        second = states[1]
    if TAKEN > 2:
        third = states[2]
    if TAKEN > 3:
        fourth = states[3]
    return first, second, third, fourth
