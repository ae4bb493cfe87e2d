"""Times of this library's pieces, compiled by JAX."""

from __future__ import annotations

import functools
from typing import Any

from timing import jax_ms

from pieces.piece import VOCABULARY, Piece, Shape

# Calls of a piece in the program that is timed, each on its own inputs, as the layers of a model call it. In
# a program of one call, an eighth of the time is the start of the program. The head's products take
# milliseconds.
CALLS = 4


def draw(piece: Piece, shape: Shape, dtype: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs with a gradient, inputs without), by name."""
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


def num_calls(piece: Piece) -> int:
    return CALLS if piece.flops is None else 1


def programs(
    piece: Piece, shape: Shape, dtype: str, implementation: str | None, passes: tuple[str, ...] | None = None
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A compiled program of `num_calls` calls and its arguments, for each pass."""
    import jax

    sets = [draw(piece, shape, dtype, seed) for seed in range(num_calls(piece))]
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
    """Milliseconds of one of the calls in a program."""
    return jax_ms(compiled, *arguments) / num_calls(piece)


def milliseconds(piece: Piece, shape: Shape, dtype: str, implementation: str | None) -> dict[str, float]:
    made = programs(piece, shape, dtype, implementation)
    return {name: call_ms(piece, *program) for name, program in made.items()}
