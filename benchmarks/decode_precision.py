"""The cost of 16-bit states, 8-bit and 4-bit weights: ``python benchmarks/decode_precision.py``, minutes on a
CPU.

A small byte-level RWKV is trained, then reads other text with each option of `fla_jax.generation.Decoder`.
Errors of logits are root mean squares in units of their spread; the loss is in nats a byte.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import records

sys.path[:0] = [str(records.ROOT), str(records.ROOT / "examples")]

from _text import read_text  # noqa: E402

from fla_jax import models  # noqa: E402
from fla_jax.generation import Decoder  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "state float16": {"state_dtype": "float16"},
    "state bfloat16": {"state_dtype": "bfloat16"},
    "int8, groups of 128": {"weight_dtype": "int8", "weight_group": 128},
    "int8, groups of 64": {"weight_dtype": "int8", "weight_group": 64},
    "int4, groups of 32": {"weight_dtype": "int4", "weight_group": 32},
    "int4, groups of 16": {"weight_dtype": "int4", "weight_group": 16},
}


def train(model: Any, text: np.ndarray, steps: int, batch: int, length: int) -> Any:
    """Parameters after ``steps`` of Adam on random parts of the text."""
    rng = np.random.default_rng(0)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

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
    active = jnp.ones(1, bool)

    def read(state: Any, token: jax.Array) -> Any:
        logits, state = decoder.step(decoder.weights, token[None], state, active)
        return state, logits[0]

    scan = jax.jit(lambda state, tokens: jax.lax.scan(read, state, tokens)[1])
    return np.asarray(scan(decoder.init_state(1), jnp.asarray(tokens)))


def main() -> None:
    parser = records.parser(__doc__, out=False)
    parser.add_argument("--version", type=int, choices=(6, 7), default=7)
    for name, default in {"layers": 3, "width": 128, "steps": 400, "tokens": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    text = np.frombuffer(read_text(None), np.uint8)
    cut = len(text) * 9 // 10
    config = getattr(models, f"RWKV{options.version}Config")(256, options.width, options.layers)
    model = getattr(models, f"RWKV{options.version}ForCausalLM")(config)
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
        error, spread = np.square(logits - exact).mean(-1), exact.std(-1).mean()
        whole, last = (np.sqrt(some.mean()) / spread for some in (error, error[-512:]))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()
        others = (logits.argmax(-1) != exact.argmax(-1)).mean()
        print(
            f"{name:20} error {whole:.2e}, last 512 tokens {last:.2e}, loss {loss:.4f}, "
            f"other greedy tokens {others:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
