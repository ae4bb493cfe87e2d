"""Times of this library's layer operations, compiled by JAX."""

from __future__ import annotations

import functools
from typing import Any

from timing import jax_ms

from layer_ops.layer_op import VOCABULARY, LayerOp, Shape

# Calls in the program that is timed, each on its own inputs: in a program of one call, an eighth of the time
# is the start of the program. The head's products take milliseconds.
CALLS = 4


def draw(layer_op: LayerOp, shape: Shape, dtype: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs with a gradient, inputs without), by name."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(seed), 64))
    floats, rest = {}, {}
    for name, (size, wanted) in layer_op.inputs(shape).items():
        if wanted == "bool":
            rest[name] = jnp.ones(size, bool)
        elif wanted == "int32":
            rest[name] = jax.random.randint(next(keys), size, 0, VOCABULARY)
        else:
            floats[name] = jax.random.normal(next(keys), size, wanted or dtype)
    return floats, rest


def num_calls(layer_op: LayerOp) -> int:
    return CALLS if layer_op.flops is None else 1


def programs(
    layer_op: LayerOp,
    shape: Shape,
    dtype: str,
    implementation: str | None,
    passes: tuple[str, ...] | None = None,
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A compiled program of `num_calls` calls and its arguments, for each pass."""
    import jax

    sets = [draw(layer_op, shape, dtype, seed) for seed in range(num_calls(layer_op))]
    call = functools.partial(layer_op.call, implementation=implementation)

    def forward(floats: Any, rest: Any) -> Any:
        return layer_op.written(call(floats | rest))

    def with_pull(floats: Any, rest: Any) -> Any:
        return jax.vjp(lambda floats: call(floats | rest), floats)

    def pulled(pull: Any, cotangents: Any) -> Any:
        (gradients,) = pull(cotangents)
        return {name: gradient for name, gradient in gradients.items() if name not in layer_op.twice}

    def both(floats: Any, rest: Any) -> Any:
        return jax.value_and_grad(lambda floats: call(floats | rest))(floats)

    def cotangents(results: Any, seed: int) -> Any:
        keys = iter(jax.random.split(jax.random.key(1000 + seed), 64))
        return jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape, a.dtype), results)

    made: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name in layer_op.moved(shape, 1):
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


def call_ms(layer_op: LayerOp, compiled: Any, arguments: tuple[Any, ...]) -> float:
    """Milliseconds of one of the calls in a program."""
    return jax_ms(compiled, *arguments) / num_calls(layer_op)


def milliseconds(layer_op: LayerOp, shape: Shape, dtype: str, implementation: str | None) -> dict[str, float]:
    made = programs(layer_op, shape, dtype, implementation)
    return {name: call_ms(layer_op, *program) for name, program in made.items()}
