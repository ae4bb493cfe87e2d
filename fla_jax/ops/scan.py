"""Token by token with `jax.lax.scan`: the definitions of both recurrences, forward and backward.

The state at the start of each chunk is saved; the backward recomputes each chunk, then runs it in reverse, so
memory is linear in T / chunk. Nothing is divided by a decay and no two large sums are subtracted, so every
gradient is exact at every decay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..core.context import Context, X
from ..core.implementation import Residuals
from ..core.types import Outputs, RecurrenceConfig
from ..core.varlen import Chunks, Segments, plan, segments

CHUNK = 64  # tokens between two saved states

Tokens = tuple[jax.Array, ...]
Step = Callable[[jax.Array, Tokens], tuple[jax.Array, jax.Array]]
StepBack = Callable[[jax.Array, tuple[jax.Array, Tokens, jax.Array]], tuple[jax.Array, Tokens]]


@dataclasses.dataclass(frozen=True)
class ScanRule(Generic[X]):
    """A `fla_jax.core.implementation.Rule` made of one token's step.

    Attributes:
        inputs: the op's inputs.
        tokens: names of the arrays [B, T, H, D] among them, in the order in which a step takes them. The last
            thing it takes is whether the state restarts before the token.
        steps: ``(step, back)`` for the inputs of a call: ``step(S, token) -> (S, o)`` and
            ``back(dS, (S before, token, do)) -> (dS, gradients of the tokens and, for each token, of u)``.
    """

    inputs: type[X]
    tokens: tuple[str, ...]
    steps: Callable[[X, RecurrenceConfig], tuple[Step, StepBack]]

    def residual_axes(self, ctx: Context[X, RecurrenceConfig]) -> dict[str, str]:
        """See `Rule`: the state at the start of each chunk."""
        return {"h0": "chunk b h k v"}

    def fwd(self, ctx: Context[X, RecurrenceConfig], x: X) -> tuple[Outputs, Residuals]:
        """See `Rule`."""
        cfg, arrays = ctx.settings, x._asdict()
        chunks, xs = self._prepare(cfg, x)
        step, _ = self.steps(x, cfg)

        def chunk(carry: jax.Array, xs: PyTree) -> tuple[jax.Array, PyTree]:
            sequence, xs = xs
            h0 = chunks.read(carry, sequence)
            ht, y = jax.lax.scan(step, h0, jax.tree.map(_tokens_first, xs))
            return chunks.write(carry, ht, sequence), (_heads_first(y), h0)

        final, (y, states) = jax.lax.scan(chunk, arrays["initial_state"], (chunks.sequence, xs))
        outputs = Outputs(chunks.join(y * cfg.scale, arrays["v"].dtype), final)
        return outputs, {"h0": states} if ctx.save_residuals else {}

    def bwd(self, ctx: Context[X, RecurrenceConfig], x: X, residuals: Residuals, dy: Outputs) -> X:
        """See `Rule`."""
        cfg, arrays = ctx.settings, x._asdict()
        chunks, xs = self._prepare(cfg, x)
        step, back = self.steps(x, cfg)
        do = chunks.split(dy.o, cfg.compute) * cfg.scale

        def chunk(carry: jax.Array, xs: PyTree) -> tuple[jax.Array, PyTree]:
            sequence, h0, xs, do = xs
            xs = jax.tree.map(_tokens_first, xs)
            _, before = jax.lax.scan(lambda S, t: (step(S, t)[0], S), h0, xs)
            dh = chunks.read(carry, sequence)
            dh, grads = jax.lax.scan(back, dh, (before, xs, _tokens_first(do)), reverse=True)
            return chunks.write(carry, dh, sequence), jax.tree.map(_heads_first, grads)

        over = (chunks.sequence, residuals["h0"], xs, do)
        dh0, grads = jax.lax.scan(chunk, dy.final_state, over, reverse=True)
        of_tokens = {name: chunks.join(g, arrays[name].dtype) for name, g in zip(self.tokens, grads)}
        if "u" in arrays:
            of_tokens["u"] = jnp.sum(grads[-1], (0, 1, 3)).astype(arrays["u"].dtype)
        dx = of_tokens | {"initial_state": dh0}
        return self.inputs._make(dx.get(name) for name in self.inputs._fields)

    def _prepare(self, cfg: RecurrenceConfig, x: X) -> tuple[Chunks, Tokens]:
        """The chunks of the call, its token arrays in chunks, and where the state restarts."""
        arrays = x._asdict()
        T = arrays[self.tokens[0]].shape[1]
        chunks = plan(T, min(cfg.chunk_size or CHUNK, T), arrays["cu_seqlens"])
        xs = tuple(chunks.split(arrays[name], cfg.compute) for name in self.tokens)
        return chunks, (*xs, _restart(segments(chunks, arrays["segment_ids"]), xs[0]))


def _tokens_first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 0)  # [B, H, C, D] -> [C, B, H, D]


def _heads_first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, 2)


def _restart(seg: Segments | None, like: jax.Array) -> jax.Array:
    """[n, B, 1, C, 1]: the state is emptied before this token."""
    if seg is None:
        return jnp.zeros((like.shape[0], 1, 1, like.shape[3], 1), bool)
    return jnp.concatenate([~seg.start[..., :1, :], seg.ids[..., 1:, :] != seg.ids[..., :-1, :]], axis=-2)
