"""Teaches a frozen model another kind of text through its initial states alone:
``python examples/state_tuning.py``.

Without arguments it first trains a small byte-level RWKV-7 on English prose (the language reference inside
Python), freezes it, and then tunes the initial states, one matrix per head and layer, on program text
(Python's own standard library). It prints the loss on held-out program text before and after, checks that no
weight has changed, and leaves the states in a file that RWKV-PEFT and programs around the ``rwkv`` package
read. One to two minutes on two CPU cores.

    # your model, your text
    python examples/state_tuning.py --checkpoint RWKV-x070-World-0.1B.pth --data my_texts.txt
    python examples/generate.py --checkpoint RWKV-x070-World-0.1B.pth --states runs/state_tuning/states.pth \\
        --prompt "..."
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _cli import about, check_numbers, claimed, make_folder, parse, program
from generate import load_model
from rich.progress import track

from fla_jax.checkpoints import save_checkpoint
from fla_jax.generation import load_tokenizer
from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
from fla_jax.training import (
    load_states,
    rwkv_optimizer,
    rwkv_schedule,
    save_states,
    state_loss,
    tune_states,
    zero_states,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the tuning."""

    checkpoint: Path | None = None
    """model to tune: whatever examples/generate.py reads (default: a small one is trained first)"""
    data: Path | None = None
    """text to tune on (default: program text from Python's standard library); the last tenth of it is held
    out
    """
    tokenizer: str | None = None
    """bytes, rwkv_vocab_v20230424, or a tokenizer.json (default: by the size of the vocabulary)"""
    out: Path = Path("runs/state_tuning")
    """directory for states.pth (and base.pth, the small model)"""
    steps: int = 100
    """steps of the tuning"""
    sequence: int = 128
    """tokens per sequence"""
    batch: int = 8
    """sequences per step"""
    learning_rate: float = 1.0
    """largest learning rate of the tuning; it falls to a hundredth"""
    base_steps: int = 200
    """steps of training the small model"""
    base_size: int = 128
    """its channels, a multiple of 64"""
    seed: int = 0
    """of the small model and of the order of the data"""


def prose() -> bytes:
    """The topics of Python's ``help()``."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def program_text() -> str:
    """Some modules of Python's standard library."""
    import argparse
    import ast
    import dataclasses as module
    import inspect
    import subprocess

    return "\n".join(inspect.getsource(m) for m in (argparse, ast, module, inspect, subprocess))


def random_batch(data: np.ndarray, step: int, options: Options) -> np.ndarray:
    """[batch, sequence + 1] tokens from random places."""
    starts = np.random.default_rng((options.seed, step)).integers(
        0, len(data) - options.sequence, options.batch
    )
    return data[starts[:, None] + np.arange(options.sequence + 1)].astype(np.int32)


def train_base(options: Options) -> tuple[Any, Any]:
    """A small byte-level model, trained on prose."""
    model = RWKV7ForCausalLM(RWKV7Config(256, options.base_size, num_layers=2, head_dim=64, scan_layers=True))
    params = jax.jit(model.init)(jax.random.key(options.seed), jnp.zeros((1, 2), jnp.int32))["params"]
    optimizer = rwkv_optimizer(
        rwkv_schedule(3e-3, 3e-4, options.base_steps, warmup_steps=min(20, options.base_steps // 10))
    )

    @jax.jit
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: state_loss(model, p, zero_states(model), tokens))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    data, opt_state = np.frombuffer(prose(), np.uint8), optimizer.init(params)
    for i in track(range(options.base_steps), description="base model"):
        params, opt_state, loss = step(params, opt_state, random_batch(data, i, options))
    print(
        f"base model: {sum(x.size for x in jax.tree.leaves(params)):,} parameters, loss on prose "
        f"{float(loss):.3f} nats per byte"
    )
    with about(options.out / "base.pth", "written"):
        save_checkpoint(options.out / "base.pth", model, params)
    return model, params


def run(options: Options) -> None:
    """Tunes and prints."""
    began = time.perf_counter()
    if options.data is None:
        text = program_text()
    else:
        with about(f"--data: {options.data}", "read"):
            text = options.data.read_text(errors="replace")
    model, params = train_base(options) if options.checkpoint is None else load_model(options.checkpoint)
    tokenizer = options.tokenizer and os.path.expanduser(options.tokenizer)
    tokenizer = load_tokenizer(tokenizer, vocab_size=model.config.vocab_size)
    data = np.array(tokenizer.encode(text), np.int32)
    cut = len(data) - len(data) // 10
    rows = min((len(data) - cut) // (options.sequence + 1), 64)
    if rows < 1:
        raise ValueError(
            f"--data: {len(data)} tokens are too few, a tenth of them is held out and must hold --sequence "
            f"+ 1 = {options.sequence + 1}"
        )
    train, held = data[:cut], data[cut : cut + rows * (options.sequence + 1)].reshape(rows, -1)

    measure = jax.jit(lambda states: state_loss(model, params, states, held))
    weights = jax.tree.map(np.array, params)
    before = float(measure(zero_states(model)))
    batches = (random_batch(train, i, options) for i in track(range(options.steps), description="states    "))
    schedule = rwkv_schedule(
        options.learning_rate,
        0.01 * options.learning_rate,
        options.steps,
        warmup_steps=min(10, options.steps // 10),
    )
    states, _ = tune_states(model, params, batches, options.steps, learning_rate=schedule)
    next(batches, None)  # the bar goes to its end when the next batch is asked for
    after = float(measure(states))
    same = all(
        np.array_equal(a, b, equal_nan=True)
        for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(params))
    )

    with about(options.out / "states.pth", "written"):
        save_states(options.out / "states.pth", states)
    assert np.array_equal(load_states(options.out / "states.pth", model), states)
    print(f"weights     {'unchanged, bit for bit' if same else 'CHANGED'}; {states.size:,} numbers tuned")
    print(f"before      {before:.4f} nats per token on {held[:, 1:].size:,} held-out tokens")
    print(f"after       {after:.4f} nats per token")
    print(f"states      {options.out / 'states.pth'}")
    print(f"time        {time.perf_counter() - began:.0f} s")


@program(lower="--batch, --sequence or --base-size")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check_numbers(options, "steps", "sequence", "batch", "base_steps", "base_size", "learning_rate")
    make_folder(options.out)
    with claimed(options.out, options.out / ".lock"):
        run(options)


if __name__ == "__main__":
    main()
