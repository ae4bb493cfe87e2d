"""What states of 16 bits and weights of 8 cost: ``python benchmarks/decode_precision.py``, minutes on a CPU.

A small byte-level RWKV learns the reference that Python ships (a tenth of it held out), then reads 4096
held-out bytes token by token with each option of `fla_jax.generation.Decoder`: error of the logits against
float32 (root mean square, of the whole and of the last 512 tokens, in units of the logits' own spread) and
loss in nats a byte.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from _text import python_reference  # noqa: E402

from fla_jax.generation import Decoder  # noqa: E402
from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "state float16": {"state_dtype": "float16"},
    "state bfloat16": {"state_dtype": "bfloat16"},
    "int8, groups of 128": {"int8_group": 128},
    "int8, groups of 64": {"int8_group": 64},
}


def train(model: Any, text: np.ndarray, steps: int, batch: int, length: int) -> Any:
    """Parameters after ``steps`` of Adam on random pieces."""
    rng = np.random.default_rng(0)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    )

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    for i in range(steps):
        at = rng.integers(0, len(text) - length - 1, batch)
        tokens = np.stack([text[start : start + length + 1] for start in at]).astype(np.int32)
        params, state, loss = step(params, state, tokens)
        if i % 50 == 49:
            print(f"step {i + 1}: loss {loss:.3f}", flush=True)
    return params


def logits_of(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] after each of the tokens [T], read one by one."""
    alive = jnp.ones(1, bool)

    def one(state: Any, token: jax.Array) -> Any:
        logits, state = decoder.step(decoder.weights, token[None], state, alive)
        return state, logits[0]

    return np.asarray(jax.jit(lambda state, tokens: jax.lax.scan(one, state, tokens)[1])(
        decoder.init_state(1), jnp.asarray(tokens)
    ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", type=int, choices=(6, 7), default=7)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    text = np.frombuffer(python_reference(), np.uint8)
    cut = len(text) * 9 // 10
    config, kind = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}[options.version]
    model = kind(config(256, options.width, options.layers))
    params = train(model, text[:cut], options.steps, 8, 256)
    tokens = text[cut : cut + options.tokens + 1].astype(np.int32)
    exact = None
    for name, chosen in OPTIONS.items():
        try:
            decoder = Decoder(model, params, implementation="plain", **chosen)
        except ValueError as error:  # groups that do not divide a width
            print(f"{name:20} {error}")
            continue
        logits = logits_of(decoder, tokens[:-1])
        exact = logits if exact is None else exact
        spread, error = exact.std(-1).mean(), np.sqrt(np.square(logits - exact).mean(-1))
        picked = np.take_along_axis(logits, tokens[1:, None], 1)[:, 0]
        losses = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - picked
        print(
            f"{name:20} error {np.sqrt(np.square(error).mean()) / spread:.2e}, last 512 tokens "
            f"{np.sqrt(np.square(error[-512:]).mean()) / spread:.2e}, loss {losses.mean():.4f}, "
            f"other greedy tokens {(logits.argmax(-1) != exact.argmax(-1)).mean():.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
