"""Segments and packed sequences: the recurrent form, types of arguments, layouts drawn by hypothesis, NaN."""

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases
from harness.cases import OPS, TOKENS, Case
from harness.tiers import each_implementation, each_op
from hypothesis import strategies as st


def some(n: int):
    """Drawn calls have 14 tokens: with more, channels of dw are judged alone, and few digits may remain."""
    return hypothesis.settings(max_examples=n, deadline=None, derandomize=True, database=None)


@each_op
def test_recurrent_form_takes_the_layouts(op):
    for case in (
        Case(op, layout="packed", lengths=(3, 0, 9), decay="mixed"),
        Case(op, T=12, layout="segments", lengths=(3, 1, 8), decay="mixed"),
    ):
        cases.check(case, form="fused_recurrent")


@each_implementation
@each_op
def test_layout_arguments_come_as_lists_numpy_and_any_integer_type(op, implementation):
    x = cases.build(Case(op, layout="packed", lengths=(3, 5), K=2, V=2)).arrays
    one = x | {"initial_state": x["initial_state"][:1]}
    packed = ([0, 3, 8], (0, 3, 8), np.array([0, 3, 8], np.uint8))
    segments = ([[1, 1, 1] + [2] * 5], np.int8([[3, 3, 3] + [-1] * 5]))
    for name, arrays, layouts in (("cu_seqlens", x, packed), ("segment_ids", one, segments)):
        found = [cases.call(op, arrays, {name: layout}, implementation=implementation) for layout in layouts]
        for other in found[1:]:
            chex.assert_trees_all_equal(found[0], other)


some_levels = st.lists(st.sampled_from(cases.LEVELS), min_size=1, max_size=4)
seeds = st.integers(0, 2**20)


def check_drawn(case: Case, implementation: str, layout: dict, levels: list[float], seed: int) -> None:
    x, rng = cases.build(case), np.random.default_rng(seed)
    w = rng.choice(np.array(levels), x.arrays["w"].shape).astype(x.arrays["w"].dtype)
    cases.check(case, implementation, x=x._replace(arrays=x.arrays | {"w": w}, layout=layout))


@each_implementation
@each_op
def test_any_segments_and_decays(op, implementation):
    case = Case(op, T=14, layout="segments", lengths=(14,), chunk_size=8)
    ids = st.lists(st.lists(st.integers(-2, 2), min_size=14, max_size=14), min_size=2, max_size=2)

    @some(12)
    @hypothesis.given(ids=ids, levels=some_levels, seed=seeds)
    def examples(ids, levels, seed):
        check_drawn(case, implementation, {"segment_ids": np.array(ids, np.int32)}, levels, seed)

    examples()


@each_implementation
@each_op
def test_any_packing_and_decays(op, implementation):
    case = Case(op, layout="packed", lengths=(3, 3, 3, 5), chunk_size=4)

    @some(12)
    @hypothesis.given(st.lists(st.integers(0, 14), min_size=3, max_size=3), some_levels, seeds)
    def examples(cuts, levels, seed):
        layout = {"cu_seqlens": np.array([0, *sorted(cuts), 14], np.int32)}
        check_drawn(case, implementation, layout, levels, seed)

    examples()


@each_implementation
@each_op
def test_any_shape(op, implementation):
    size = st.integers(1, 9)

    @some(3)
    @hypothesis.given(
        shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3), size, size),
        chunk_size=st.sampled_from([None, 1, 2, 4, 8, 16]),
        decay=st.sampled_from(list(cases.DECAYS)),
        seed=seeds,
    )
    def examples(shape, chunk_size, decay, seed):
        cases.check(Case(op, *shape, decay=decay, chunk_size=chunk_size, seed=seed), implementation)

    examples()


T, CHUNK = 80, 16


def spoilt(op, implementation, name, value, begins):
    """Tokens with an output that is not finite, whether ht is, and the last token of such a gradient."""
    case = Case(op, B=1, T=T, H=1, K=4, V=4, layout="segments", lengths=(begins, T - begins))
    x = case.build()
    x.arrays[name][:, 3] = value
    x.cotangents["o"][:, :begins] = 0
    got = jax.device_get(cases.runner(op, implementation)(*jax.tree.map(jnp.asarray, x)))
    bad = lambda x: np.flatnonzero(~np.isfinite(x).all((0, 2, 3)))
    last = max(bad(got.grads[n]).max(initial=-1) for n in TOKENS[op])
    return bad(got.outputs["o"]), np.isfinite(got.outputs["ht"]).all(), last


@pytest.mark.parametrize(
    "op, name, value", [(op, n, np.nan) for op in OPS for n in TOKENS[op]] + [(op, "v", np.inf) for op in OPS]
)
def test_a_later_document(op, name, value):
    """Chunked: nothing but its tokens in the chunk in which the other one ends. They were all reached."""
    begins = CHUNK + 4
    o, is_finite, last = spoilt(op, "xla", name, value, begins)
    assert is_finite and last < begins
    assert o.size and o.max() < (begins if op == "rwkv6" else 2 * CHUNK)
    aligned, is_finite, last = spoilt(op, "xla", name, value, 2 * CHUNK)
    assert is_finite and last < 2 * CHUNK and aligned.max() < 2 * CHUNK


@pytest.mark.parametrize("op", OPS)
def test_the_same_chunk(op):
    """RWKV-6 loses the chunk and no more; RWKV-7 what is made of it as well."""
    o, is_finite, last = spoilt(op, "xla", "v", np.nan, 8)
    if op == "rwkv6":
        assert is_finite and o.max() < CHUNK and last < CHUNK
    o, is_finite, last = spoilt(op, "reference", "v", np.nan, 8)
    assert is_finite and o.min() == 3 and o.max() < 8 and last < 8
