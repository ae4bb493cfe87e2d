"""Deleted arrays, named by the argument that they came in: JAX's own errors name a shape."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator

import jax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import PyTree

# of a new thread, since this module may be imported while JAX traces
with concurrent.futures.ThreadPoolExecutor(1) as _thread:
    _UNTRACED = _thread.submit(get_opaque_trace_state).result()


def check_deleted(**arguments: PyTree) -> None:
    """Raises a ValueError that names the first argument with a deleted array."""
    for name, tree in arguments.items():
        if is_deleted(tree):
            raise ValueError(deleted(name))


def deleted(name: str) -> str:
    """What is wrong with an argument that has deleted arrays."""
    return (
        f"{name} contains deleted arrays: they were donated to an earlier call (donate_argnums of jax.jit, a "
        "training step). Use what that call returned"
    )


def is_deleted(tree: PyTree) -> bool:
    """Whether a `jax.Array` of ``tree`` is deleted."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return any(not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in arrays)


@contextlib.contextmanager
def explain_deleted(**arguments: PyTree) -> Iterator[None]:
    """Turns JAX's error for a deleted array into one that names the argument.

    Unlike `check_deleted` it looks at the arrays only after an error. Looking at all parameters takes 0.1 ms,
    in which a GPU would wait.
    """
    try:
        yield
    except (RuntimeError, ValueError):  # eager operations raise the first, compiled ones either
        check_deleted(**arguments)
        raise


def check_untraced(tree: PyTree) -> None:
    """Raises a TypeError inside of `jax.jit` and other transformations, or if ``tree`` has tracers."""
    is_traced = get_opaque_trace_state() != _UNTRACED
    if is_traced or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            "generation runs outside of jax.jit, jax.grad, jax.vmap and fla_jax.checked: how many tokens "
            "come depends on their values. Its parts are compiled, and NaN is an error in any case"
        )
