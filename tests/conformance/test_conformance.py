"""Every implementation of every op, where it runs, against float64 references: values and all gradients.

What runs where stands in recurrences.py and pieces.py, how exact it must be in places.py. On a machine with
an NVIDIA GPU the kernels run there, elsewhere in their interpreters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cases
import heads_cases
import jax
import numpy as np
import pytest
from layer_ops import norm_mix_cases

from fla_jax.pallas.layer import norm_shift_mix_variants
from fla_jax.pallas.rwkv7 import chunk_host as rwkv7_launcher

from . import pieces, places, recurrences
from .places import PALLAS_INTERPRETER, TRITON_INTERPRETER, Place

SPAN = 4  # tokens of a stretch of norm, shift and mixes in an interpreter: cases of eleven tokens make three


class Entry(NamedTuple):
    """One comparison: of what, where, of which dtype, and how it is made; ``run`` gives the results alone."""

    name: str
    place: Place
    dtype: str
    check: Callable[[], None]
    run: Callable[[], Any]


def _entries(place: Place) -> Iterator[Entry]:
    of = place.implementation
    for name, form, call in recurrences.calls(place):
        tol = places.RECURRENCE[place][call.dtype]
        yield Entry(
            name,
            place,
            call.dtype,
            functools.partial(cases.check, call, of, form, tol),
            functools.partial(cases.run, call, of, form),
        )
    for table, module, calls in (
        (places.HEADS, heads_cases, pieces.heads),
        (places.NORM_MIX, norm_mix_cases, pieces.norm_mix),
    ):
        for name, call in calls(place) if place in table else ():
            check = functools.partial(module.check, call, of, tolerance=table[place][call.dtype])
            prefix = "norm_mix " if module is norm_mix_cases else ""
            yield Entry(prefix + name, place, call.dtype, check, functools.partial(module.run, call, of))


ENTRIES = [entry for place in places.here() for entry in _entries(place)]
# the first of every op and place stands for the others
FIRST = {(entry.place, entry.name.split()[0]): entry for entry in reversed(ENTRIES)}


def each(entries: Any) -> Any:
    return pytest.mark.parametrize("entry", [pytest.param(e, id=f"{e.place} {e.name}") for e in entries])


def once(entry: Entry) -> Any:
    """In its interpreter values are Triton's and NumPy's: the tests below show that JAX hands them on. More
    sizes, lengths and chunks elsewhere are more of the same programs.
    """
    more = re.fullmatch(r"\S+ (T|K \d+ V|chunk|segments|packed) \d+", entry.name)
    marks = [pytest.mark.one_python] if more or entry.place is TRITON_INTERPRETER else []
    return pytest.param(entry, id=f"{entry.place} {entry.name}", marks=marks)


@pytest.fixture(autouse=True, scope="module")
def forms():
    """In Triton's interpreter RWKV-7 runs its forms for 16 bits, in float32, so that they are compared at
    float32's accuracy; tests/interpret has those for float32.
    """
    if TRITON_INTERPRETER not in places.here():
        yield
        return
    with cases.fresh_traces(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rwkv7_launcher, "has_bf16_dots", lambda x: True)
        yield


@pytest.fixture(autouse=True)
def place(monkeypatch, entry):
    """Interpreters are asked for; where rows are cut there, stretches are short."""
    if entry.place is PALLAS_INTERPRETER:
        monkeypatch.setenv("FLA_JAX_PALLAS_INTERPRET", "1")
    if entry.place is TRITON_INTERPRETER and entry.name.startswith("norm_mix"):
        monkeypatch.setattr(norm_shift_mix_variants, "MIN_BLOCK_LEN", SPAN)


@pytest.mark.parametrize("entry", map(once, ENTRIES))
def test_values_and_gradients(entry):
    with jax.enable_x64(entry.dtype == "float64"):
        entry.check()


@each(FIRST.values())
def test_two_runs_give_the_same_bits(entry):
    one, two = entry.run(), entry.run()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8)), one, two)


def _vmaps(place: Place) -> Iterator[Entry]:
    of = place.implementation
    tol = places.RECURRENCE[place]["float32"]
    form = recurrences.PLANS[place].forms[0]
    for op in cases.OPS:
        for layout in ("rows", "segments", "packed"):
            call = cases.Case(op, B=1, T=20, H=1, K=16, V=16, layout=layout, lengths=(7, 13))
            check = functools.partial(cases.check_vmap, call, of, form, tol)
            yield Entry(f"{form}_{op} {layout}", place, "float32", check, check)
    for op in pieces.HEADS if place in places.HEADS else ():
        for shared in (False, True):
            check = functools.partial(heads_cases.check_vmap, op, of, shared)
            yield Entry(f"{op} shared {shared}", place, "float32", check, check)
    for shared in ((), ("mixes", "scale", "bias")) if place in places.NORM_MIX else ():
        check = functools.partial(norm_mix_cases.check_vmap, of, shared)
        yield Entry(f"norm_mix shared {shared}", place, "float32", check, check)


def rows_once(entry: Entry) -> Any:
    """Layouts are arrays beside the others, which Pallas' slow interpreter batches like them."""
    marks = (
        []
        if entry.place is not PALLAS_INTERPRETER or entry.name.endswith(" rows")
        else [pytest.mark.one_python]
    )
    return pytest.param(entry, id=f"{entry.place} {entry.name}", marks=marks)


@pytest.mark.parametrize("entry", [rows_once(entry) for place in places.here() for entry in _vmaps(place)])
def test_vmap(entry):
    """Over everything, and over tokens with the vectors shared."""
    entry.check()
