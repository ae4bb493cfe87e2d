"""Implementations: what they offer, and how one is selected for a call."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from .context import Context, S, X, Y

Axes = Mapping[str, str]  # the axes of arrays by name, such as {"w": "b t h k"}
Residuals = dict[str, jax.Array]
C = TypeVar("C")  # what a selection depends on: the Context of an op
R = TypeVar("R", covariant=True)  # what an implementation offers: the Rule of an op
I = TypeVar("I", bound="Candidate")


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Why an implementation cannot run a call.

    Attributes:
        reason: for messages.
        fixable: whether the user can change that: an op that runs without the implementation then warns.
    """

    reason: str
    fixable: bool = False


class Rule(Protocol[X, Y, S]):
    """The functions of an implementation's module, on the arrays of one device.

    ``ctx.cp.axis`` names a mesh axis where devices split the tokens: the implementation then communicates
    over it (core/context_parallel.py), returns outputs without tokens alike on all devices and gradients of
    inputs without tokens as that device's share, which the op sums.
    """

    def fwd(self, ctx: Context[X, S], x: X, /) -> tuple[Y, Residuals]:
        """Outputs, and by name the arrays that ``bwd`` reads: those of ``residual_axes``, none where
        ``ctx.save_residuals`` is False.
        """

    def bwd(self, ctx: Context[X, S], x: X, residuals: Residuals, dy: Y, /) -> X:
        """Gradients of x from the cotangents ``dy``; None for integers.

        Those of an input without batch may have one in front, which the op sums. A cotangent is None where
        `Implementation.unused_cotangents` names it and nothing depends on that output.
        """

    def residual_axes(self, ctx: Context[X, S], /) -> Axes:
        """The axes of the residuals. Besides those of the op: ``chunk``, ``state`` and ``split`` are split
        as tokens are.
        """


def supports_every_call(ctx: object) -> Unsupported | None:
    """`Candidate.supports` of implementations that can run every call."""
    return None


def prefers_every_call(ctx: object) -> bool:
    """`Candidate.preferred` of implementations that may be selected for every call they support."""
    return True


def no_variant(ctx: object) -> str:
    """`Candidate.describe` of implementations with one variant."""
    return ""


@dataclasses.dataclass(frozen=True)
class Candidate(Generic[C, R]):
    """An entry of a `Registry`.

    Attributes:
        name: the value of ``implementation=`` that selects it.
        load: returns the module, or an object, with its functions. Called when it first runs, so that
            importing the library imports no GPU package.
        supports: None where it can run a call, else the reason.
        preferred: whether it may be selected without being named.
        describe: which variant it takes for a call and why, for messages; "" where there is one only.
    """

    name: str
    load: Callable[[], R]
    supports: Callable[[C], Unsupported | None] = supports_every_call
    preferred: Callable[[C], bool] = prefers_every_call
    describe: Callable[[C], str] = no_variant

    def refusal(self, ctx: C) -> Unsupported | None:
        """None where it can run a call, else the reason."""
        return self.supports(ctx)


@dataclasses.dataclass(frozen=True)
class Implementation(Candidate[Context[X, S], Rule[X, Y, S]], Generic[X, Y, S]):
    """One way to compute an op.

    Attributes:
        opaque: whether it is a kernel, which XLA cannot partition and JAX cannot map.
        context_parallel: whether it follows ``ctx.cp``.
        unused_cotangents: outputs whose cotangents are None, not zeros, where nothing depends on them.

    Example:
        >>> from fla_jax.ops import OPS
        >>> [one.name for one in OPS["chunk_rwkv7"].implementations]  # in order of preference
        ['triton', 'xla', 'reference', 'pallas']
    """

    opaque: bool = False
    context_parallel: bool = False
    unused_cotangents: tuple[str, ...] = ()

    def refusal(self, ctx: Context[X, S]) -> Unsupported | None:
        """None where it can run a call, else the reason."""
        if ctx.cp.size > 1 and not self.context_parallel:
            return Unsupported(f"it takes whole sequences, and T is split over mesh axis {ctx.cp.axis!r}")
        return self.supports(ctx)


@dataclasses.dataclass(frozen=True)
class Definition(Generic[X, Y, S]):
    """A `Rule` made of a plain function of settings and inputs, differentiated by JAX."""

    function: Callable[[S, X], Y]

    def residual_axes(self, ctx: Context[X, S]) -> Axes:
        """See `Rule`."""
        return {}

    def fwd(self, ctx: Context[X, S], x: X) -> tuple[Y, Residuals]:
        """See `Rule`."""
        return self.function(ctx.settings, x), {}

    def bwd(self, ctx: Context[X, S], x: X, residuals: Residuals, dy: Y) -> X:
        """See `Rule`."""
        dx = jax.vjp(functools.partial(self.function, ctx.settings), x)[1](dy)[0]
        return jax.tree.map(lambda g, a: g if jnp.issubdtype(a.dtype, jnp.floating) else None, dx, x)


class Registry(Generic[I]):
    """An open list of implementations, in order of preference.

    Attributes:
        name: of the public function, for messages.
        implementations: add one with ``registry.implementations.insert(0, ...)``.
    """

    def __init__(self, name: str, implementations: list[I]):
        self.name = name
        self.implementations = implementations

    def select(self, ctx: object, name: str | None, stacklevel: int = 4) -> I:
        """The implementation that runs a call: the named one, else the first that can and may.

        ``stacklevel`` is that of the warning where a fixable reason keeps a preferred one from running.

        Raises:
            ValueError: ``name`` is unknown or cannot run the call, or no implementation can.
        """
        if name is not None:
            one = self.named(name)
            refused = one.refusal(ctx)
            if refused is not None:
                raise ValueError(
                    f"{self.name}: implementation={name!r} cannot run this call: {refused.reason}"
                )
            return one
        for one in self.implementations:
            refused = one.refusal(ctx)
            if refused is None and one.preferred(ctx):
                return one
            if refused is not None and refused.fixable:
                warnings.warn(
                    f"{self.name} runs without {one.name!r}, much slower: {refused.reason}",
                    stacklevel=stacklevel,
                )
        raise ValueError(f"{self.name}: no implementation can run this call: {self.explain(ctx)}")

    def named(self, name: object) -> I:
        """The implementation with a name."""
        for one in self.implementations:
            if isinstance(name, str) and one.name == name:
                return one
        names = sorted(one.name for one in self.implementations)
        raise ValueError(f"{self.name}: implementation must be one of {names} or None, got {name!r}")

    def explain(self, ctx: object) -> str:
        """The implementation and variant that a call takes, the others that can run it, and why the rest
        cannot.
        """
        said, is_selected = [], False
        for one in self.implementations:
            refused = one.refusal(ctx)
            if refused is not None:
                said.append(f"not {one.name}: {refused.reason}")
                continue
            notes = [one.describe(ctx)]
            if not is_selected and one.preferred(ctx):
                is_selected = True
                notes.insert(0, "selected")
            note = ", ".join(filter(None, notes))
            said.append(f"{one.name} ({note})" if note else one.name)
        return "; ".join(said)


def unfit_inputs(ctx: Context[X, S]) -> Unsupported | None:
    """None where kernels can take the arrays of a call, wherever it runs; else the reason."""
    arrays = jax.tree.leaves(ctx.shapes)
    if any(x.dtype == "float64" for x in arrays):
        return Unsupported("its kernels have no float64")
    if not all(isinstance(n, int) for x in arrays for n in x.shape):
        return Unsupported("its kernels need a static batch size, and this call's is symbolic", fixable=True)
    return None
