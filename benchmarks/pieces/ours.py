"""Times of this library's pieces, compiled by JAX."""

from __future__ import annotations

import functools
from typing import Any

from running.timing import jax_ms

from pieces.piece import VOCABULARY, Piece, Shape

# Calls of a piece in the program that is timed, each on inputs of its own, as the layers of a model call it.
# A program of one call is as long as what the runtime takes to start a program: an eighth of the time is not
# the piece's. The head's products take milliseconds, and it is called once.
CALLS = 4


def draw(piece: Piece, shape: Shape, dtype: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what has a gradient, what has none), by name."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(seed), 64))
    floats, rest = {}, {}
    for name, (size, wanted) in piece.inputs(shape).items():
        if wanted == "bool":
            rest[name] = jnp.ones(size, bool)
        elif wanted == "int32":
            rest[name] = jax.random.randint(next(keys), size, 0, VOCABULARY)
        else:
            floats[name] = jax.random.normal(next(keys), size, wanted or dtype)
    return floats, rest


def calls_of(piece: Piece) -> int:
    """Calls in a program."""
    return CALLS if piece.flops is None else 1


def functions(
    piece: Piece, shape: Shape, dtype: str, implementation: str | None, passes: tuple[str, ...] | None = None
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A compiled program of `calls_of` calls and its arguments for each pass; None for all that the piece
    has.
    """
    import jax

    sets = [draw(piece, shape, dtype, seed) for seed in range(calls_of(piece))]
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

    def cotangents(results: Any, seed: int) -> Any:
        keys = iter(jax.random.split(jax.random.key(1000 + seed), 64))
        return jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape, a.dtype), results)

    made: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name in piece.moved(shape, 1):
        if passes is not None and name not in passes:
            continue
        function, arguments = {"fwd": forward, "fwd+bwd": both}.get(name, pulled), sets
        if name == "bwd":
            started = [jax.jit(with_pull)(*one) for one in sets]
            arguments = [(pull, cotangents(results, i)) for i, (results, pull) in enumerate(started)]

        def program(*arguments: Any, function: Any = function) -> Any:
            return [function(*one) for one in arguments]

        made[name] = jax.jit(program).lower(*arguments).compile(), tuple(arguments)
    return made


def call_ms(piece: Piece, compiled: Any, arguments: tuple[Any, ...]) -> float:
    """Milliseconds of one of the calls in a program of `functions`."""
    return jax_ms(compiled, *arguments) / calls_of(piece)


def milliseconds(piece: Piece, shape: Shape, dtype: str, implementation: str | None) -> dict[str, float]:
    """Of a call, for each pass."""
    made = functions(piece, shape, dtype, implementation)
    return {name: call_ms(piece, *one) for name, one in made.items()}
