"""Every implementation of every op, where it runs, against float64: values and all gradients.

recurrences.py and layer_ops.py list the calls, harness/places.py how exact they must be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest
from harness import cases, places, variants
from harness.cases import AnyCase, Case, HeadCase, MixCase
from harness.places import SCAN_INTERPRETER, TRITON_INTERPRETER, Place

from . import layer_ops, recurrences


class Entry(NamedTuple):
    """One comparison: of which call, where, with which tolerance and options of the public function."""

    name: str
    place: Place
    case: AnyCase
    tol: Any
    form: str | None = None
    shared: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.case, self.place.implementation, self.tol

    @property
    def options(self) -> dict[str, Any]:
        return {"form": self.form} if self.form else {}


def _entries(place: Place) -> Iterator[Entry]:
    for name, form, case in recurrences.calls(place):
        yield Entry(name, place, case, places.RECURRENCE[place][case.dtype], form)
    for table, calls in ((places.HEADS, layer_ops.on_heads), (places.NORM_MIX, layer_ops.mixes)):
        for name, case in calls(place) if place in table else ():
            yield Entry(name, place, case, table[place][case.dtype])


def _vmaps(place: Place) -> Iterator[Entry]:
    form = recurrences.PLANS[place].forms[0]
    for op in cases.OPS:
        for layout in ("batch", "segments", "packed"):
            case = Case(op, B=1, T=20, H=1, K=16, V=16, layout=layout, lengths=(7, 13))
            tol = places.RECURRENCE[place]["float32"]
            yield Entry(f"{form}_{op} {layout}", place, case, tol, form)
    for op in cases.HEAD_OPS if place in places.HEADS else ():
        for shared in ((), cases.VECTORS[op]):
            case, tol = HeadCase(op, B=1, residual="traced True"), places.HEADS[place]["float32"]
            yield Entry(f"{op} shared {bool(shared)}", place, case, tol, None, shared)
    for shared in ((), cases.VECTORS["norm_shift_mix"]) if place in places.NORM_MIX else ():
        case = MixCase(B=1, T=5, C=6, M=2, mix_delta=True, lengths=(2, 4))
        tol = places.NORM_MIX[place]["float32"]
        yield Entry(f"norm_mix shared {shared}", place, case, tol, None, shared)


ENTRIES = [entry for place in places.here() for entry in _entries(place)]
VMAPS = [entry for place in places.here() for entry in _vmaps(place)]
# the first of every op and place
FIRST = {(entry.place, entry.name.split()[0]): entry for entry in reversed(ENTRIES)}


def each(entries: Any, is_one_python: Any = lambda entry: False, is_slow: Any = lambda entry: False) -> Any:
    def parameter(entry: Entry) -> Any:
        marks = [pytest.mark.one_python] * is_one_python(entry) + [pytest.mark.slow] * is_slow(entry)
        return pytest.param(entry, id=f"{entry.place} {entry.name}", marks=marks)

    return pytest.mark.parametrize("entry", [parameter(entry) for entry in entries])


MORE = r"\S+ (T|K \d+ V|chunk|segments|packed) \d+"  # more of the same programs
DECAYS = ("weak", "layer", "strong", "huge", "channels", "smooth")  # all are in "mixed"


def _is_one_python(entry: Entry) -> bool:
    """Values of interpreters are Triton's, Pallas' and NumPy's."""
    return bool(re.fullmatch(MORE, entry.name)) or entry.place in (TRITON_INTERPRETER, SCAN_INTERPRETER)


def _is_slow(entry: Entry) -> bool:
    """The fast tier runs one length, head size, chunk size and layout of each op and place; a GPU all."""
    if entry.place.where == "gpu" or entry in FIRST_OF_A_KIND:
        return False
    decay = entry.name.split(" ")[1] in DECAYS and not entry.name.endswith("float64")
    return decay or "above" in entry.name or bool(re.search(r" \d+$", entry.name))


def _first_of_a_kind() -> list[Entry]:
    kinds: dict[Any, Entry] = {}
    for entry in ENTRIES:
        op, *rest = entry.name.split(" ")
        kinds.setdefault((entry.place, op, re.sub(r"-?[\d.]+", "", " ".join(rest))), entry)
    more = lambda entry: re.search(r" \d+$", entry.name) or "above" in entry.name
    return [entry for entry in kinds.values() if more(entry)]


FIRST_OF_A_KIND = _first_of_a_kind()


@pytest.fixture(autouse=True, scope="module")
def forced():
    """RWKV-7's variants for 16 bits in float32 (tests/kernels has those for float32), and short blocks."""
    names = ("bf16 dots", "mix: token blocks of 4") if TRITON_INTERPRETER in places.here() else ()
    with variants.forced(*names):
        yield


@each(ENTRIES, _is_one_python, _is_slow)
def test_values_and_gradients(entry):
    with jax.enable_x64(entry.case.dtype == "float64"):
        cases.check(*entry.arguments, **entry.options)


@each(FIRST.values())
def test_two_runs_give_the_same_bits(entry):
    one, two = (cases.run(*entry.arguments[:2], **entry.options) for _ in range(2))
    cases.assert_same_bits(one, two)


@each(VMAPS, lambda entry: entry.form == "fused_recurrent" and not entry.name.endswith(" batch"))
def test_vmap(entry):
    """Over everything, and over tokens with the vectors shared."""
    cases.check_vmap(*entry.arguments, shared=entry.shared, **entry.options)
