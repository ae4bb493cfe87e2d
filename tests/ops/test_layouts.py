"""Segments and packed sequences: the recurrent form, types of arguments, layouts drawn by hypothesis."""

import chex
import hypothesis
import numpy as np
import pytest
from harness import cases, tiers
from harness.cases import OPS, Case
from hypothesis import strategies as st

each_op = pytest.mark.parametrize("op", OPS)
each_implementation = pytest.mark.parametrize("implementation", tiers.first(["xla", "reference"]))


def some(n: int):
    """Drawn calls have 14 tokens: with more, `Case.errors` judges channels of dw alone, and where segments
    and strong decays leave one term to a channel it cancels to few digits in float32.
    """
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
