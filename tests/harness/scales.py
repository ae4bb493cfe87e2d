"""The recurrences at the scales of training: each head has its own decay, sizes, cotangents and norms."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from . import cases
from .cases import Case, Results, Tolerances

# of each array's norm, in float32 at every scale
FLOAT32 = Tolerances(o=1e-5, state=1e-5, grad=1e-5, dw=4e-5)
ROUNDING = Tolerances(o=0, state=0, grad=2e-6, dw=8e-6)  # between two scales


def of_one_head(tol: Tolerances) -> Tolerances:
    """For products of 16 bits: in a head of few tokens a sum may be far below its terms."""
    return tol._replace(o=8 * tol.o, state=8 * tol.state, grad=8 * tol.grad, dw=8 * tol.dw)


# values of 1e-6 are right for decays of at least -4 and cotangents from 2^LOWEST_OF_SMALL up
SMALL, LOWEST_OF_SMALL = ("-0.6", "-2.0", "-4.0"), -20
BOUNDED = ("-0.6", "-2.0", "-4.0", "-4.9", "-5.0", "mild")
DECAYS = (*BOUNDED, "-8.0", "-20.0", "-60.0", "mixed", "channels")


class Head(NamedTuple):
    """Of one head; ``decay`` as in `cases.Case`."""

    decay: str
    size: float = 1.0
    exponent: int = 0

    def __str__(self) -> str:
        return f"w {self.decay}, size {self.size:g}, cotangents 2^{self.exponent}"


GRID = (
    *itertools.starmap(Head, itertools.product(DECAYS, (1.0, 1e3))),
    *(Head(decay, 1e-6) for decay in SMALL),
)
EXPONENTS = (-60, -40, -30, -20, -7, 20, 40)
# for interpreters
FEW = (
    Head("-0.6"),
    Head("-2.0", 1e-6),
    Head("-4.9", 1e3),
    Head("-5.0"),
    Head("mild", 1e3),
    Head("-20.0"),
    Head("-60.0", 1e3),
    Head("mixed"),
)
# for calls that differ in layout and in what a kernel is compiled for
MIXED_SCALES = (
    Head("-2.0", 1e-6, -20),
    Head("-4.9", 1e3, -30),
    Head("-5.0", 1.0, 40),
    Head("mixed", 1e3, -60),
)


def case_of(op: str, heads: Iterable[Head], **options: Any) -> Case:
    """A case with these heads; ``options`` are of `cases.Case`."""
    decays, sizes, exponents = zip(*heads)
    small: dict[str, Any] = dict(B=1, T=40, K=16, V=16)
    return Case(op, H=len(decays), decay=decays, sizes=sizes, exponents=exponents, **(small | options))


def errors(got: Results, want: Results, rounded: bool = True) -> dict[str, np.ndarray]:
    """Errors of every head [H], by array: see `cases.errors_of`."""
    tokens, states = (0, 1, 3), (0, 2, 3)
    axes = lambda name, x: (1,) if x.ndim == 2 else states if name in ("initial_state", "ht") else tokens
    return {
        prefix + name: cases.errors_of(x, wanted[name], axes(name, x), rounded)
        for prefix, one, wanted in zip(("", "d"), got, want)
        for name, x in one.items()
    }


def wrong(case: Case, got: Results, want: Results, tol: Tolerances, exponent: int = 0) -> dict[str, str]:
    """By head, the arrays over ``tol`` and their errors; not of small values with smaller cotangents."""
    limits = {"o": tol.o, "ht": tol.state, "dw": tol.dw}
    found, said = errors(got, want, tol.rounded), {}
    for h, head in enumerate(map(Head, case.decay, case.sizes, case.exponents)):
        head = head._replace(exponent=head.exponent + exponent)
        if head.size >= 1 or head.exponent >= LOWEST_OF_SMALL:
            over = {name: e[h] for name, e in found.items() if not e[h] <= limits.get(name, tol.grad)}
            said[str(head)] = ", ".join(f"{name} {error:.0e}" for name, error in over.items())
    return {head: arrays for head, arrays in said.items() if arrays}


def check(case: Case, implementation: str, form: str = "chunk", tol: Tolerances = FLOAT32) -> None:
    """Outputs, states and all gradients of every head against the float64 oracle."""
    found = wrong(case, cases.run(case, implementation, form=form), cases.expected(case), tol)
    assert not found, f"{len(found)} of {case.H} heads: {found}"


def check_linear(
    case: Case,
    implementation: str,
    form: str = "chunk",
    exponents: Iterable[int] = EXPONENTS,
    tol: Tolerances = FLOAT32,
) -> None:
    """Gradients of cotangents times 2^n are those of the cotangents times 2^n, to rounding, and right."""
    x, want = cases.build(case), cases.expected(case)

    def run(n: int) -> Results:
        scaled = {name: np.ldexp(c.astype(np.float64), n).astype(c.dtype) for name, c in x.cotangents.items()}
        return cases.run(case, implementation, x._replace(cotangents=scaled), form=form)

    def times(made: Results, n: int) -> Results:
        return made._replace(
            grads={name: np.ldexp(g.astype(np.float64), n) for name, g in made.grads.items()}
        )

    base = run(0)
    found = wrong(case, base, want, tol)
    for n in exponents:
        got = run(n)
        found |= wrong(case, got, times(want, n), tol, n)
        apart = wrong(case, got, times(base, n), ROUNDING, n)
        found |= {head: f"{found.get(head, '')}; unlike those of 2^0: {what}" for head, what in apart.items()}
    assert not found, f"{len(found)} of {case.H * (1 + len(tuple(exponents)))}: {found}"
