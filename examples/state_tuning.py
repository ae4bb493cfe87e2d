"""Teaches a frozen model another kind of text through its initial states alone:
``python examples/state_tuning.py``.

Without arguments it trains a small byte-level RWKV-7 on English prose (the language reference inside Python),
freezes it, and tunes the initial states, one matrix a head and layer, on program text (Python's own standard
library). It prints the loss on held-out program text before and after, and saves the states in a file that
RWKV-PEFT and programs around the ``rwkv`` package read. One to two minutes on two CPU cores.

    # your model, your text
    python examples/state_tuning.py --checkpoint RWKV-x070-World-0.1B.pth --data my_texts.txt
    python examples/generate.py --checkpoint RWKV-x070-World-0.1B.pth --states runs/state_tuning/states.pth \\
        --prompt "..."
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _cli import about, check_numbers, parse, program
from _text import read_text
from generate import load_model
from rich.progress import track

from fla_jax.checkpoints import save_checkpoint
from fla_jax.generation import checkpoint_tokenizer
from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import (
    load_states,
    lock_folder,
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
    """text to tune on, its last tenth held out (default: program text from Python's standard library)"""
    tokenizer: str | None = None
    """bytes, rwkv_vocab_v20230424, or a tokenizer.json (default: the checkpoint's)"""
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


def program_text() -> str:
    """Some modules of Python's standard library."""
    import argparse
    import ast
    import inspect
    import subprocess

    return "\n".join(map(inspect.getsource, (argparse, ast, dataclasses, inspect, subprocess)))


def random_batch(data: np.ndarray, step: int, options: Options) -> np.ndarray:
    """[B, T + 1] tokens from random positions."""
    random = np.random.default_rng((options.seed, step))
    starts = random.integers(0, len(data) - options.sequence, options.batch)
    return data[starts[:, None] + np.arange(options.sequence + 1)].astype(np.int32)


def train_base(options: Options) -> tuple[Any, Any]:
    """A small byte-level model, trained on prose."""
    model = RWKV7ForCausalLM(RWKV7Config(256, options.base_size, num_layers=2, head_dim=64, scan_layers=True))
    schedule = rwkv_schedule(3e-3, 3e-4, options.base_steps, warmup_steps=min(20, options.base_steps // 10))
    step = TrainStep(model, rwkv_optimizer(schedule), make_mesh(devices=jax.devices()[:1]))
    state, data = step.init(jax.random.key(options.seed)), np.frombuffer(read_text(None), np.uint8)
    for i in track(range(options.base_steps), description="base model"):
        state, loss = step(state, step.shard(random_batch(data, i, options)))
    count = sum(x.size for x in jax.tree.leaves(state.params))
    print(f"base model: {count:,} parameters, loss on prose {float(loss):.3f} nats per byte")
    save_checkpoint(options.out / "base.pth", model, state.params)
    return model, state.params


def run(options: Options) -> None:
    """Tunes and prints."""
    began = time.perf_counter()
    text = program_text()
    if options.data is not None:
        with about(f"--data: {options.data}", "read"):
            text = options.data.read_text(errors="replace")
    model, params = train_base(options) if options.checkpoint is None else load_model(options.checkpoint)
    checkpoint, vocab_size = options.checkpoint or options.out / "base.pth", model.config.vocab_size
    tokenizer = checkpoint_tokenizer(checkpoint, options.tokenizer, vocab_size=vocab_size)
    data, length = np.array(tokenizer.encode(text), np.int32), options.sequence + 1
    cut = len(data) - len(data) // 10
    count = min((len(data) - cut) // length, 64)
    if count < 1:
        needed = f"a tenth of them is held out and must be at least --sequence + 1 = {length}"
        raise ValueError(f"--data: {len(data)} tokens are too few, {needed}")
    train, held = data[:cut], data[cut : cut + count * length].reshape(count, -1)

    measure = jax.jit(lambda states: state_loss(model, params, states, held))
    weights, before = jax.tree.map(np.array, params), float(measure(zero_states(model)))
    batches = (random_batch(train, i, options) for i in track(range(options.steps), description="states    "))
    rates, warmup = (options.learning_rate, 0.01 * options.learning_rate), min(10, options.steps // 10)
    schedule = rwkv_schedule(*rates, options.steps, warmup_steps=warmup)
    states, _ = tune_states(model, params, batches, options.steps, learning_rate=schedule)
    next(batches, None)  # completes the progress bar
    after = float(measure(states))
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(params))
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
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
    check_numbers(options)
    with lock_folder(options.out):
        run(options)


if __name__ == "__main__":
    main()
