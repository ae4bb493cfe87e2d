"""The chunked Triton kernels in Triton's interpreter: stretches, what is kept, how often a kernel runs."""

import functools

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import Case, check
from conformance import places

from fla_jax.core.names import remat_policy
from fla_jax.pallas.backend import triton as run

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not run.INTERPRET:
    pytest.skip("TRITON_INTERPRET is not set: tests/gpu runs the kernels themselves", allow_module_level=True)

from fla_jax.pallas.common import chunk_host
from fla_jax.pallas.common.state_buffers_host import state_buffers
from fla_jax.pallas.rwkv6 import chunk_host as rwkv6
from fla_jax.pallas.rwkv7 import chunk_host as rwkv7

launcher = {"rwkv6": rwkv6, "rwkv7": rwkv7}


@pytest.mark.one_python
@pytest.mark.parametrize(
    "K, V, arrays", [(16, 10, 1), (16, 24, 2), (24, 40, 4), (64, 64, 4), (16, 72, 0), (128, 16, 1)]
)
def test_states_kept_where_gradients_go(op, K, V, arrays, half):
    """Whole chunks: the gradients are written over the states (kept_states.py), as many as have the shape of
    one.
    """
    case = Case(op, B=2, T=48, H=2, K=K, V=V, decay="smooth", layout="segments", lengths=(5, 27, 16))
    x = cases.call_of(case).inputs
    gradients = ("r", "k", "v", "w") if op == "rwkv6" else ("r", "k", "a", "b")
    kept = state_buffers(x, gradients, most=64)
    assert kept.num_buffers == arrays
    check(case, "triton")


@pytest.mark.parametrize(
    "case, arrays",
    [
        (dict(T=64, K=72, V=128, decay="smooth"), 4),
        (dict(T=96, K=128, V=40, decay="strong"), 2),  # blocks of keys, and rows of values that are not there
        (dict(T=50, K=88, V=80, decay="mixed"), 0),  # the last state is of less than a chunk
        # ... and of one, where no element of its tiles is missing but all of the other's are
        (dict(T=48, K=128, V=128, decay="mixed", layout="segments", lengths=(5, 9, 1, 17, 16)), 0),
        (dict(T=40, K=72, V=24, decay="smooth", layout="segments", lengths=(5, 9, 1, 17, 16)), 0),
        (dict(T=64, K=72, V=24, decay="layer", lower_bound=-0.61, layout="segments", lengths=(5, 27, 32)), 1),
        # ... one of a chunk that is not whole, one of none
        (dict(T=58, K=128, V=40, decay="layer", lower_bound=-0.61, layout="segments", lengths=(41, 17)), 0),
        (dict(T=48, K=96, V=128, decay="layer", lower_bound=-0.61), 0),
        (dict(K=72, V=24, decay="smooth", layout="packed", lengths=(16, 1, 33, 20, 48)), 0),
        (dict(K=72, V=24, decay="mixed", layout="packed", lengths=(0, 5, 0, 0, 17, 33, 0)), 0),
    ],
)
def test_large_heads_keep_a_state_for_two_chunks(case, arrays, half):
    case = Case("rwkv7", **(dict(B=1 if case.get("layout") == "packed" else 2, H=2) | case))
    x = cases.call_of(case).inputs
    assert rwkv7._state_buffers(x).chunks_per_state == 2 and rwkv7._dstate_buffers(x).num_buffers == arrays
    check(case, "triton")


@pytest.mark.parametrize("dtype, once", [("bfloat16", True), ("float32", False), ("float16", False)])
def test_large_heads_as_one_tile_are_bfloat16(dtype, once):
    """Others keep a state for every chunk, or other operands; and all the registers that they want."""
    case = Case("rwkv7", T=32, K=128, V=128, decay="layer", lower_bound=-0.61, dtype=dtype)
    call = cases.call_of(case)
    plan = chunk_host.make_plan("bwd_dh", rwkv7.LAUNCH, call, call.inputs)
    assert rwkv7._is_pair_tile(plan, call.inputs, call.inputs.v) == once


@pytest.mark.parametrize("T", [64, 50])
def test_large_heads_with_bounded_decays_on_other_gpus(T, half, monkeypatch):
    """Two chunks are one tile on compute capability 9.0 only; elsewhere each is its own."""
    monkeypatch.setattr(rwkv7, "has_wgmma", lambda: False)
    check(Case("rwkv7", B=2, T=T, H=1, K=72, V=24, decay="layer", lower_bound=-0.61), "triton")


@pytest.mark.parametrize(
    "case",
    [
        dict(T=64, K=64, V=64, decay="mixed"),
        dict(T=50, K=24, V=40, decay="strong"),
        dict(T=50, K=56, V=24, decay="layer", lower_bound=-0.61, scale=0.7),
        dict(T=50, K=64, V=16, decay="smooth", layout="segments", lengths=(5, 9, 1, 17, 18)),
        # every token a segment; edges of chunks, and of segments longer than one; the last chunk's only token
        dict(T=35, decay="mixed", layout="segments", lengths=(1,) * 35),
        dict(T=70, decay="smooth", layout="segments", lengths=(16, 16, 1, 15, 22)),
        dict(T=64, decay="strong", layout="segments", lengths=(15, 1, 1, 37, 10)),
        dict(T=49, decay="smooth", layout="segments", lengths=(7, 41, 1)),
        dict(T=70, decay="layer", lower_bound=-0.61, layout="segments", lengths=(1, 30, 1, 1, 31, 5, 1)),
        dict(T=64, decay="layer", lower_bound=-0.61, layout="segments", lengths=(64,)),
        dict(K=40, V=72, decay="mixed", layout="packed", lengths=(16, 1, 33, 20)),
    ],
)
def test_keys_as_rows(op, case, half, monkeypatch):
    """In 16 bits on compute capability 9.0."""
    monkeypatch.setattr(launcher[op], "_is_key_major", lambda plan, *arrays: True)
    small = dict(B=1 if case.get("layout") == "packed" else 2, H=2, K=16, V=16)
    check(Case(op, **(small | case)), "triton")


SINGLE = [
    dict(T=50, K=24, V=40, decay="strong"),
    dict(T=48, K=64, V=64, decay="mixed"),
    dict(T=48, K=16, V=16, decay="layer", lower_bound=-0.61, scale=0.7),
    dict(T=35, decay="mixed", layout="segments", lengths=(1,) * 35),
    dict(T=70, K=40, V=24, decay="layer", lower_bound=-0.61, layout="segments", lengths=(16, 16, 1, 15, 22)),
    dict(K=40, V=72, decay="mixed", layout="packed", lengths=(16, 1, 33, 20)),
    dict(K=72, V=40, decay="smooth", layout="packed", lengths=(0, 5, 0, 17, 18)),
    dict(T=40, K=128, V=16, decay="mixed"),
    dict(T=40, K=16, V=136, decay="smooth"),
    dict(T=20, K=256, V=24, decay="smooth"),
]


@pytest.mark.parametrize("case", SINGLE)
def test_float32_has_scores_made_beforehand(case):
    """RWKV-7's forms for float32: two kernels for the backward up to heads of 128."""
    small = dict(B=1 if case.get("layout") == "packed" else 2, H=2, K=16, V=16)
    check(Case("rwkv7", **(small | case)), "triton")


@pytest.mark.parametrize("case", SINGLE[1:6])
def test_products_in_parts(op, case, fresh, monkeypatch):
    """On a GPU float32 operands are multiplied as TF32 parts, to the accuracy that is asked for there."""
    monkeypatch.setattr(chunk_host, "INTERPRET", False)
    small = dict(B=1 if case.get("layout") == "packed" else 2, H=1, K=16, V=16)
    check(Case(op, **(small | case)), "triton", tol=places.RECURRENCE[places.TRITON_GPU]["float32"])


def test_large_heads_cut_into_stretches_of_whole_pairs(half, split):
    case = Case("rwkv7", B=1, T=70, H=1, K=104, V=24, decay="smooth")
    assert chunk_host.num_splits_of(cases.call_of(case)) >= 2
    check(case, "triton")


STRETCHES = [
    dict(decay="layer", lower_bound=-0.61),
    dict(decay="strong"),
    dict(T=80, decay="smooth", K=72, V=24),
    # segments that begin where a stretch does
    dict(decay="smooth", layout="segments", lengths=(16, 16, 1, 40)),
    dict(decay="mixed", layout="segments", lengths=(80,)),
]


@pytest.mark.parametrize(
    "case", [dict(decay="mixed"), *(pytest.param(case, marks=pytest.mark.one_python) for case in STRETCHES)]
)
@pytest.mark.parametrize("bits", [16, 32])
def test_rows_cut_into_stretches(op, case, bits, split, request):
    if op == "rwkv7" and bits == 16:
        request.getfixturevalue("half")
    elif bits == 16:
        pytest.skip("RWKV-6 has one form for both")
    case = Case(op, **(dict(B=2, T=70, H=1, K=16, V=16) | case))
    assert chunk_host.num_splits_of(cases.call_of(case)) >= 3
    check(case, "triton")
    (o, final), want = cases.outputs(case, "triton"), cases.expected(case)
    assert o.dtype == cases.dtype_of(case.dtype) and final.dtype == case.state_dtype
    cases.assert_close("o", o, want.o, cases.EXACT.o)
    cases.assert_close("final state", final, want.final, cases.EXACT.state)


@pytest.mark.parametrize(
    "case",
    [
        dict(decay="mixed", lengths=(16, 16, 1, 40)),
        dict(decay="layer", lower_bound=-0.61, lengths=(3, 13, 32, 1, 24)),
    ],
)
def test_keys_as_rows_of_stretches_with_segments(op, case, half, split, monkeypatch):
    """The token before a stretch's first one is in the stretch before."""
    monkeypatch.setattr(launcher[op], "_is_key_major", lambda plan, *arrays: True)
    case = Case(op, **(dict(B=2, T=70, H=1, K=16, V=16, layout="segments") | case))
    assert chunk_host.num_splits_of(cases.call_of(case)) >= 3
    check(case, "triton")


@pytest.mark.one_python
def test_where_segments_begin():
    """A bit for each token of a chunk, one that is always set, the first of them, the last of them."""
    lengths = (5, 11, 1, 30, 2, 15, 7)
    ids = jnp.repeat(jnp.arange(len(lengths)), jnp.array(lengths), total_repeat_length=71)[None]
    starts = [sum(lengths[:i]) for i in range(1, len(lengths))]
    for chunk, word in enumerate(chunk_host.segment_bits(ids)[0].tolist()):
        own = [t % 16 for t in starts if t // 16 == chunk]
        assert word & 0x1FFFF == sum(1 << t for t in (*own, 16))
        assert (word >> 17 & 31, word >> 22) == (min(own, default=16), max(own, default=0))


@pytest.mark.one_python
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("lengths", [(16, 1, 33, 20, 48), (0, 5, 0, 0, 17, 33, 0), (40,)])
def test_programs_by_chunks_of_packed_sequences(lengths, every):
    """All chunks of all sequences have one, and there are few more."""
    call = cases.call_of(Case("rwkv7", B=1, H=2, K=72, V=24, layout="packed", lengths=lengths))
    inputs = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), call.inputs)
    inputs = inputs._replace(cu_seqlens=jnp.cumsum(jnp.array((0, *lengths))))
    plan = chunk_host.make_plan("bwd_dh", rwkv7.LAUNCH, call, inputs)
    (count, heads, others), owner = plan.by_chunks(every)
    assert (heads, others) == (2, 1) and count <= -(-sum(lengths) // (16 * every)) + len(lengths)
    chunk0, found = plan.ranges["chunk_offsets_"], []
    for number, sequence in enumerate(owner.tolist()):
        n = (number - (int(chunk0[sequence]) + sequence * (every - 1)) // every) * every
        if n * 16 < lengths[sequence]:
            found.append((sequence, n))
    assert found == [(i, n) for i, length in enumerate(lengths) for n in range(0, -(-length // 16), every)]


def test_outputs_alone_of_mapped_rows_cut_into_stretches(op, split):
    """vmap over everything: what nothing differentiates is another program."""
    each = [Case(op, B=1, T=70, H=1, K=16, V=16, seed=seed) for seed in range(2)]
    arrays = jax.tree.map(lambda *x: jnp.stack(x), *(cases.build(case).arrays for case in each))
    o, final = jax.jit(jax.vmap(lambda x: cases.call(op, x, implementation="triton")))(arrays)
    for i, case in enumerate(each):
        want = cases.expected(case)
        cases.assert_close("o", o[i], want.o, cases.EXACT.o)
        cases.assert_close("final state", final[i], want.final, cases.EXACT.state)


def test_without_a_gradient_nothing_is_kept(op):
    """The kernel's outputs: o and the final state in full, of the rest one number each."""
    x = cases.build(Case(op, T=33, K=16, V=16))
    jaxpr = str(
        jax.make_jaxpr(lambda arrays: cases.call(op, arrays, implementation="triton"))(dict(x.arrays))
    )
    assert "pure_callback" in jaxpr and "3,2,16,16]" not in jaxpr  # states of three chunks
    assert "3,2,16,16]" in str(jax.make_jaxpr(cases.runner(op, "triton"))(x.arrays, x.do, x.ds))


@pytest.mark.parametrize("policy, forwards", [("named", 1), ("nothing", 2)])
def test_the_forward_runs_once_under_the_policy(op, policy, forwards, half):
    x = cases.build(Case(op, B=1, T=20, H=1, K=16, V=16))
    keep = dict(named=remat_policy(), nothing=jax.checkpoint_policies.nothing_saveable)[policy]

    @functools.partial(jax.checkpoint, policy=keep)
    def block(arrays):
        o, _ = cases.call(op, {**arrays, "k": jnp.sin(arrays["k"])}, implementation="triton")
        return jnp.sum(jnp.sin(o))

    text = jax.jit(jax.value_and_grad(block)).lower(dict(x.arrays)).as_text()
    assert (
        text.count("custom_call @xla_ffi_python_cpu_callback") == forwards + 2
    )  # the scale of the cotangents and the backward


@pytest.mark.parametrize("bad, reason", [(dict(dtype="float64"), "float64")])
def test_calls_it_cannot_run_say_why(op, bad, reason):
    with jax.enable_x64(True):
        x = cases.build(Case(op, **bad))
        with pytest.raises(ValueError, match=f"implementation='triton' cannot run this call: .*{reason}"):
            cases.call(op, {n: jnp.asarray(a) for n, a in x.arrays.items()}, implementation="triton")
