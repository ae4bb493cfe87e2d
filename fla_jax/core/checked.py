"""The checked mode: run a function with every fla_jax op inside it verified at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.experimental import checkify

P = ParamSpec("P")
R = TypeVar("R")

# part of jit's cache key: functions jitted before are traced again
_enabled = jax.make_user_context(default_value=False)


def checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with every fla_jax op inside it checked at run time.

    Reported, with the op's and the argument's name: a log decay ``w`` > 0 (or below a promised
    ``lower_bound``), NaN or infinity in any input (``w = -inf`` apart) with its position, ``cu_seqlens`` that
    do not rise from 0 to T, and, for RWKV-7, states that grow without bound, as with ``a`` and ``b`` drawn at
    random.

    ``fn`` may be jitted, differentiated, vmapped or scanned inside; it is traced anew under
    `jax.experimental.checkify`, at some cost in compile and run time. The first failing check is raised.

    Args:
        fn: function of arrays (and static Python values closed over), such as a training step.

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
