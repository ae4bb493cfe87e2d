"""What the host code of the chunked kernels decides: where states are stored, which tiles, which programs."""

import jax
import jax.numpy as jnp
import pytest
from harness.cases import Case

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")

from fla_jax.pallas.common import chunk_plan
from fla_jax.pallas.common.state_buffers_host import state_buffers
from fla_jax.pallas.rwkv6 import variants as rwkv6_variants
from fla_jax.pallas.rwkv7 import chunk_host as rwkv7
from fla_jax.pallas.rwkv7 import variants as rwkv7_variants

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize(
    "K, V, buffers", [(16, 10, 1), (16, 24, 2), (24, 40, 4), (64, 64, 4), (16, 72, 0), (128, 16, 1)]
)
def test_states_in_the_memory_of_gradients(op, K, V, buffers):
    """As many as have the shape of one."""
    x = Case(op, B=2, T=48, H=2, K=K, V=V).context().shapes
    gradients = ("r", "k", "v", "w") if op == "rwkv6" else ("r", "k", "a", "b")
    assert state_buffers(x, gradients, max_values=64, dtype=jnp.float32).num_buffers == buffers


def test_a_forward_program_has_all_values_of_a_backward_program(op):
    """It stores the state of one (`state_buffers`)."""
    launches = {"rwkv6": rwkv6_variants, "rwkv7": rwkv7_variants}[op].LAUNCHES
    backwards = [row for row in launches if row[1] == "bwd"]
    assert backwards
    for variant, _, K in backwards:
        pairs = zip(launches[variant, "fwd", K], launches[variant, "bwd", K], strict=True)
        assert all(fwd.block >= min(64, bwd.block) for fwd, bwd in pairs), (variant, K)


@pytest.mark.parametrize(
    "T, K, V, lengths, buffers",
    [
        (64, 72, 128, (), 4),
        (96, 128, 40, (), 2),
        (50, 88, 80, (), 0),  # the last state is of less than a chunk
        (48, 128, 128, (), 0),  # ... of one chunk, whose tiles lack nothing where the other's lack all
        (64, 72, 24, (), 1),
        (58, 128, 40, (), 0),
        (48, 96, 128, (), 0),
        (0, 72, 24, (16, 1, 33, 20, 48), 0),
    ],
)
def test_large_heads_store_a_state_for_two_chunks(T, K, V, lengths, buffers):
    layout = dict(layout="packed", lengths=lengths) if lengths else {}
    ctx = Case("rwkv7", B=1 if lengths else 2, T=T, H=2, K=K, V=V, dtype="bfloat16", **layout).context()
    call = rwkv7.Call.of(ctx, ctx.shapes)
    assert call.state_buffers(ctx.shapes).chunks_per_state == 2
    assert call.dstate_buffers(ctx.shapes).num_buffers == buffers


@pytest.mark.parametrize(
    "heads, num_splits", [(8, 16), (30, 8), (36, 7), (48, 5), (60, 4), (64, 4), (66, 4), (67, 1)]
)
def test_all_splits_run_at_once(op, heads, num_splits):
    """On the 132 multiprocessors of an H100, four programs on each."""
    ctx = Case(op, B=2, T=4096, H=heads, K=2, V=2).context()
    assert chunk_plan.num_splits_of(ctx) == num_splits


@pytest.mark.parametrize("dtype, is_pair", [("bfloat16", True), ("float32", False), ("float16", False)])
def test_large_heads_as_one_tile_are_bfloat16(dtype, is_pair):
    """Others store a state for every chunk, or have other operands."""
    ctx = Case("rwkv7", T=32, K=128, V=128, decay="layer", lower_bound=-0.61, dtype=dtype).context()
    variant = rwkv7.Call.of(ctx, ctx.shapes).variant
    assert variant.split_bwd and variant.key_major == is_pair


def test_segment_bits():
    """A bit for each token of a chunk that begins a segment, one that is always set, the first of them, the
    last of them.
    """
    lengths = (5, 11, 1, 30, 2, 15, 7)
    ids = jnp.repeat(jnp.arange(len(lengths)), jnp.array(lengths), total_repeat_length=71)[None]
    starts = [sum(lengths[:i]) for i in range(1, len(lengths))]
    for chunk, word in enumerate(chunk_plan.segment_bits(ids)[0].tolist()):
        local = [t % 16 for t in starts if t // 16 == chunk]
        assert word & 0x1FFFF == sum(1 << t for t in (*local, 16))
        assert (word >> 17 & 31, word >> 22) == (min(local, default=16), max(local, default=0))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("lengths", [(16, 1, 33, 20, 48), (0, 5, 0, 0, 17, 33, 0), (40,)])
def test_programs_by_chunks_of_packed_sequences(lengths, every):
    """All chunks of all sequences have a program, and there are few more."""
    ctx = Case("rwkv7", B=1, H=2, K=72, V=24, layout="packed", lengths=lengths).context()
    inputs = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), ctx.shapes)
    inputs = inputs._replace(cu_seqlens=jnp.cumsum(jnp.array((0, *lengths))))
    plan = rwkv7.Call.of(ctx, inputs).plan(ctx, inputs, "bwd_dh", 1)
    (count, heads, others), index = plan.by_chunks(every)
    assert (heads, others) == (2, 1) and count <= -(-sum(lengths) // (16 * every)) + len(lengths)
    chunk_offsets, found = index.chunk_offsets, []
    for number, sequence in enumerate(index.chunk_indices.tolist()):
        n = (number - (int(chunk_offsets[sequence]) + sequence * (every - 1)) // every) * every
        if n * 16 < lengths[sequence]:
            found.append((sequence, n))
    assert found == [(i, n) for i, length in enumerate(lengths) for n in range(0, -(-length // 16), every)]
