"""The checked mode: run a function with every fla_jax op inside it verified at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import checkify

P = ParamSpec("P")
R = TypeVar("R")

_enabled = jax.make_user_context(default_value=False)  # part of jit's cache key: functions jitted before are traced again
GROWTH_SLACK = 100.0


def checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with every fla_jax op inside it checked at run time.

    Reported, with the op's and the argument's name: a log decay ``w`` > 0 (or below a promised ``lower_bound``), NaN in any input, ``cu_seqlens`` that do
    not rise from 0 to T, and, for RWKV-7, rows whose state grows without bound. The last is what happens when ``a`` and ``b`` are drawn at random instead of
    ``a = -kk`` and ``b = kk * gate`` with ``|kk| = 1`` and ``gate`` in [0, 1] (or [0, 2]).

    ``fn`` may be jitted, differentiated, vmapped or scanned inside; it is traced anew under `jax.experimental.checkify`, so expect compile time and some
    run time. The first failing check wins.

    Args:
        fn: function of arrays (and static Python values closed over), such as a training step or ``jax.grad`` of a loss.

    Returns:
        A function with the same arguments and result.

    Raises:
        jax.experimental.checkify.JaxRuntimeError: (a ``ValueError``) when a check fails.

    Example:
        >>> import jax, jax.numpy as jnp, fla_jax
        >>> from fla_jax.ops import chunk_rwkv6
        >>> x = jnp.ones((1, 4, 1, 2))
        >>> fla_jax.checked(lambda w: chunk_rwkv6(x, x, x, w, jnp.ones((1, 2)))[0])(+x)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        jax._src.checkify.JaxRuntimeError: chunk_rwkv6: w, the log decay, must be <= 0...
    """
    checking = checkify.checkify(fn, errors=checkify.user_checks)

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _enabled(True):
            error, result = checking(*args, **kwargs)
        error.throw()
        return result

    return run


def is_checked() -> bool:
    """Whether the function being traced runs under `checked`."""
    return bool(_enabled.value)


def check_inputs(op: str, arrays: Mapping[str, jax.Array], lower_bound: float | None, cu_seqlens: jax.Array | None) -> None:
    """Checks on the inputs of one call."""
    for name, x in arrays.items():
        checkify.check(~jnp.any(jnp.isnan(x)), f"{op}: {name} holds NaN")
    w = arrays["w"]
    checkify.check(jnp.all(w <= 0), f"{op}: w, the log decay, must be <= 0, got a largest value of {{w}}", w=jnp.max(w))
    if lower_bound is not None:
        # a bfloat16 w just above the bound may round to just below it
        low = jnp.min(w).astype(jnp.float32)
        checkify.check(low >= lower_bound * (1 + 2.0**-7), f"{op}: lower_bound promises w >= {lower_bound}, got a smallest value of {{w}}", w=low)
    if cu_seqlens is not None:
        T = w.shape[1]
        cu = cu_seqlens.astype(jnp.int32)  # differences of unsigned integers are never negative
        ok = (cu[0] == 0) & (cu[-1] == T) & jnp.all(jnp.diff(cu) >= 0)
        checkify.check(ok, f"{op}: cu_seqlens must rise from 0 to T = {T} without falling")


def check_growth(op: str, arrays: Mapping[str, jax.Array], initial: jax.Array, final: jax.Array) -> None:
    """RWKV-7: reports rows whose state outgrew what went into it.

    Transitions that do not expand keep ``|S_T| <= |S_0| + sum_t |k_t| |v_t|``; a state `GROWTH_SLACK` times larger was amplified by a and b.
    """
    norm = lambda x, axes: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axes))
    fed = jnp.sum(norm(arrays["k"], -1) * norm(arrays["v"], -1), 1)  # [B, H]
    limit = GROWTH_SLACK * (norm(initial, (-2, -1)) + fed)
    size = norm(final, (-2, -1))
    bad = jnp.any(~(size <= limit), -1)
    checkify.check(
        ~jnp.any(bad),
        f"{op}: the state of row {{row}} grew without bound (|S| = {{size}}): the transition diag(exp(w)) + b a^T expands it. "
        "RWKV-7 passes a = -kk and b = kk * gate with |kk| = 1 and gate in [0, 1]; a and b drawn at random overflow within some steps",
        row=jnp.argmax(bad),
        size=jnp.max(jnp.where(bad[:, None], size, 0)),
    )
