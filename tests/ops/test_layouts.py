"""Segments and packed sequences: against the oracle, against separate calls, and drawn at random by
hypothesis.
"""

import cases
import chex
import hypothesis
import jax
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, OPS, TOKENS, Case, check
from hypothesis import strategies as st

each_op = pytest.mark.parametrize("op", OPS)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
bounded = lambda n: hypothesis.settings(max_examples=n, deadline=None, derandomize=True, database=None)

SEGMENTS = {
    "few": (10, 17, 16, 9),
    "single tokens": (1,) * 52,
    "one": (52,),
    "short and long": (1, 30, 1, 1, 16, 3),
}
PACKED = {  # seven sequences each, so that one compilation serves them; and a single one
    "several": (16, 1, 14, 3, 2, 1, 3),
    "empty ones": (0, 5, 0, 0, 17, 18, 0),
    "single tokens": (1, 1, 1, 34, 1, 1, 1),
    "one": (40,),
}


@each_op
def test_recurrent_form_takes_the_layouts(op):
    check(Case(op, layout="packed", lengths=(3, 0, 9), decay="mixed"), None, form="fused_recurrent")
    check(Case(op, T=12, layout="segments", lengths=(3, 1, 8), decay="mixed"), None, form="fused_recurrent")


def _cut(x: cases.Inputs, op: str, n: int, lo: int, hi: int) -> cases.Inputs:
    """The tokens [lo, hi) of row 0 with state row n, as a call of their own."""
    arrays = {
        name: a[:, lo:hi] if name in TOKENS[op] else a[n : n + 1] if name == "initial_state" else a
        for name, a in x.arrays.items()
    }
    return cases.Inputs(arrays, x.do[:, lo:hi], x.ds[n : n + 1], None, None)


@each_implementation
@each_op
def test_both_layouts_equal_separate_calls(op, implementation):
    """Three documents in one row: packed with their own states, and as segments from a zero state."""
    lengths = (7, 7, 7)  # equal, so that the separate calls compile once
    run = cases.runner(op, implementation, scale=1.0, chunk_size=4, lower_bound=None)
    x = cases.build(Case(op, layout="packed", lengths=lengths, decay="smooth"))
    packed = jax.device_get(run(*x))
    ids = np.repeat([4, 9, 4], 7)[None].astype(np.int32)
    rows = {**x.arrays, "initial_state": x.arrays["initial_state"][:1]}
    segments = jax.device_get(run(rows, x.do, x.ds[2:], ids))
    du = 0
    for n in range(3):
        lo, hi = 7 * n, 7 * n + 7
        one = _cut(x, op, n, lo, hi)
        got = jax.device_get(run(*one))
        cases.assert_close("packed o", packed.o[:, lo:hi], got.o, 1e-6)
        cases.assert_close("packed state", packed.final[n : n + 1], got.final, 1e-6)
        for name in (*TOKENS[op], "initial_state"):
            part = packed.grads[name][:, lo:hi] if name in TOKENS[op] else packed.grads[name][n : n + 1]
            cases.assert_close(f"packed d{name}", part, got.grads[name], 3e-6)
        du += got.grads.get("u", 0)
        first, last = n == 0, n == 2
        zero = np.zeros_like(one.ds)
        one = one._replace(
            arrays={**one.arrays, "initial_state": one.arrays["initial_state"] if first else zero},
            ds=one.ds if last else zero,
        )
        got = jax.device_get(run(*one))
        cases.assert_close("segment o", segments.o[:, lo:hi], got.o, 1e-6)
        for name in TOKENS[op]:
            cases.assert_close(f"segment d{name}", segments.grads[name][:, lo:hi], got.grads[name], 3e-6)
        if first:
            cases.assert_close(
                "segment dstate", segments.grads["initial_state"], got.grads["initial_state"], 3e-6
            )
        if last:
            cases.assert_close("segment state", segments.final, got.final, 1e-6)
    if op == "rwkv6":
        cases.assert_close("packed du", packed.grads["u"], du, 3e-6)


@each_implementation
@each_op
def test_layout_arguments_come_as_lists_numpy_and_any_integer_type(op, implementation):
    x = cases.build(Case(op, layout="packed", lengths=(3, 5), K=2, V=2))
    results = [
        cases.call(op, x.arrays, implementation=implementation, cu_seqlens=cu)
        for cu in ([0, 3, 8], (0, 3, 8), np.array([0, 3, 8], np.uint8))
    ]
    one = {**x.arrays, "initial_state": x.arrays["initial_state"][:1]}
    results += [
        cases.call(op, one, implementation=implementation, segment_ids=ids)
        for ids in ([[1, 1, 1] + [2] * 5], np.int8([[3, 3, 3] + [-1] * 5]))
    ]
    chex.assert_trees_all_equal(results[0], results[1], results[2])
    chex.assert_trees_all_equal(results[3], results[4])


@each_implementation
@each_op
def test_no_tokens_in_any_packed_sequence(op, implementation):
    x = cases.build(Case(op, layout="packed", lengths=(0, 0)))
    got = cases.runner(op, implementation)(*x)
    assert got.o.shape == (1, 0, 2, 4)
    np.testing.assert_array_equal(got.final, x.arrays["initial_state"])
    np.testing.assert_array_equal(got.grads["initial_state"], x.ds)


def _with_decay(x: cases.Inputs, rng: np.random.Generator, levels: list[float]) -> cases.Inputs:
    w = rng.choice(np.array(levels), x.arrays["w"].shape).astype(x.arrays["w"].dtype)
    return x._replace(arrays={**x.arrays, "w": w})


some_levels = st.lists(st.sampled_from(cases.LEVELS), min_size=1, max_size=4)
seeds = st.integers(0, 2**20)


@each_implementation
@each_op
def test_any_segments_and_decays(op, implementation):
    base = Case(op, T=21, layout="segments", lengths=(21,), chunk_size=8)
    run = cases.runner(op, implementation, **cases.options_of(base))

    @bounded(12)
    @hypothesis.given(
        ids=st.lists(st.lists(st.integers(-2, 2), min_size=21, max_size=21), min_size=2, max_size=2),
        levels=some_levels,
        seed=seeds,
    )
    def examples(ids, levels, seed):
        x = _with_decay(cases.build(base), np.random.default_rng(seed), levels)._replace(
            segment_ids=np.array(ids, np.int32)
        )
        cases.compare(
            jax.device_get(run(*x)),
            cases.Outputs(*(lambda out, grads: (*out, grads))(*cases.ask_oracle(op, x))),
        )

    examples()


@each_implementation
@each_op
def test_any_packing_and_decays(op, implementation):
    base = Case(op, layout="packed", lengths=(5, 5, 5, 6), chunk_size=4)
    run = cases.runner(op, implementation, **cases.options_of(base))

    @bounded(12)
    @hypothesis.given(
        cuts=st.lists(st.integers(0, 21), min_size=3, max_size=3), levels=some_levels, seed=seeds
    )
    def examples(cuts, levels, seed):
        x = _with_decay(cases.build(base), np.random.default_rng(seed), levels)._replace(
            cu_seqlens=np.array([0, *sorted(cuts), 21], np.int32)
        )
        cases.compare(
            jax.device_get(run(*x)),
            cases.Outputs(*(lambda out, grads: (*out, grads))(*cases.ask_oracle(op, x))),
        )

    examples()


@each_implementation
@each_op
def test_any_shape(op, implementation):
    size = st.integers(1, 9)

    @bounded(3)
    @hypothesis.given(
        B=st.integers(1, 3),
        T=st.integers(1, 40),
        H=st.integers(1, 3),
        K=size,
        V=size,
        chunk_size=st.sampled_from([None, 1, 2, 4, 8, 16]),
        decay=st.sampled_from(list(cases.DECAYS)),
        seed=seeds,
    )
    def examples(B, T, H, K, V, chunk_size, decay, seed):
        check(Case(op, B, T, H, K, V, decay=decay, chunk_size=chunk_size, seed=seed), implementation)

    examples()
