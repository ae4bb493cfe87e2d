"""Times of this library's pieces, compiled by JAX."""

from __future__ import annotations

import functools
from typing import Any

from running.timing import jax_ms

from pieces.piece import VOCABULARY, Piece, Shape


def draw(piece: Piece, shape: Shape, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what has a gradient, what has none), by name."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 64))
    floats, rest = {}, {}
    for name, (size, wanted) in piece.inputs(shape).items():
        if wanted == "bool":
            rest[name] = jnp.ones(size, bool)
        elif wanted == "int32":
            rest[name] = jax.random.randint(next(keys), size, 0, VOCABULARY)
        else:
            floats[name] = jax.random.normal(next(keys), size, wanted or dtype)
    return floats, rest


def functions(
    piece: Piece, shape: Shape, dtype: str, implementation: str | None, passes: tuple[str, ...] | None = None
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A compiled function and its arguments for each pass; None for all that the piece has."""
    import jax

    floats, rest = draw(piece, shape, dtype)
    call = functools.partial(piece.call, implementation=implementation)

    def forward(floats: Any, rest: Any) -> Any:
        return piece.written(call(floats | rest))

    def with_pull(floats: Any, rest: Any) -> Any:
        return jax.vjp(lambda floats: call(floats | rest), floats)

    def pulled(pull: Any, cotangents: Any) -> Any:
        (gradients,) = pull(cotangents)
        return {name: gradient for name, gradient in gradients.items() if name not in piece.twice}

    def both(floats: Any, rest: Any) -> Any:
        return jax.value_and_grad(lambda floats: call(floats | rest))(floats)

    made: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name in piece.moved(shape, 1):
        if passes is not None and name not in passes:
            continue
        function, arguments = {"fwd": forward, "fwd+bwd": both}.get(name), (floats, rest)
        if function is None:
            results, pull = jax.jit(with_pull)(floats, rest)
            keys = iter(jax.random.split(jax.random.key(1), 64))
            cotangents = jax.tree.map(lambda a, k=keys: jax.random.normal(next(k), a.shape, a.dtype), results)
            function, arguments = pulled, (pull, cotangents)
        made[name] = jax.jit(function).lower(*arguments).compile(), arguments
    return made


def milliseconds(piece: Piece, shape: Shape, dtype: str, implementation: str | None) -> dict[str, float]:
    """Of each pass."""
    made = functions(piece, shape, dtype, implementation)
    return {name: jax_ms(compiled, *arguments) for name, (compiled, arguments) in made.items()}
