"""Trains a byte-level RWKV language model: ``python examples/train_lm.py --data my_texts/ --out runs/mine``.

Without --data it learns the language reference inside Python, in minutes on two CPU cores. It prints held-out
losses and a sample, and leaves checkpoints, metrics and a picture in --out; --resume goes on from there.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal

import _run
import jax
import numpy as np
from _cli import check_numbers, compute_dtype, first_device, noted_interrupts, parse, program
from _text import read_text

from fla_jax.generation import SamplingParams, generate
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import RunFolder, chunked_loss, rwkv_optimizer, rwkv_schedule

BLOCKS, WINDOW = 8, 64  # held-out blocks, spread over the text; bytes that evaluation reads at a time
COLUMNS = ("step", "loss", "evaluation_loss", "tokens_per_second", "memory_gb")
# options that may differ when a run is resumed
MAY_CHANGE = {"data", "out", "resume", "checkpoint_every", "sample_bytes", "prompt", "temperature"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a training run."""

    data: Path | None = None
    """text to learn: a file, or a directory whose text files are all read (default: Python's reference)"""
    out: Path = Path("runs/train_lm")
    """folder for checkpoints, metrics.csv, tensorboard and loss.png; an earlier run there is moved aside"""
    resume: bool = False
    """go on from the last checkpoint in --out, with the same options"""
    model: Literal["rwkv7", "rwkv6"] = "rwkv7"
    """architecture"""
    hidden_size: int = 128
    """channels"""
    num_layers: int = 3
    """layers"""
    head_dim: int = 64
    """channels per head, a divisor of --hidden-size"""
    sequence: int = 128
    """bytes per training sequence"""
    batch: int = 8
    """sequences per optimiser step"""
    steps: int = 600
    """optimiser steps"""
    learning_rate: float = 3e-3
    """largest learning rate, reached after a short warm-up"""
    final_learning_rate: float = 3e-4
    """learning rate at the last step, reached along a cosine"""
    weight_decay: float = 0.1
    """decay of embedding, head and dense projections"""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """compute dtype, fp8: bf16 with FP8 products in training; parameters, decays, states, logits stay float32
    (auto: bf16 on CUDA, fp32 elsewhere)"""
    validation_share: float = 0.1
    """part of the text that is held out, below 1 (half a megabyte at most)"""
    checkpoint_every: int = 100
    """steps from one validation and checkpoint to the next"""
    seed: int = 0
    """of the initial parameters, the order of the data and the sample"""
    sample_bytes: int = 500
    """length of the sample; 0 for none"""
    prompt: str | None = None
    """what the sample continues (default: the beginning of a held-out block)"""
    temperature: float = 0.7
    """of the sample; 0 always takes the most probable byte"""


def split(text: bytes, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Training bytes [N] and held-out bytes [BLOCKS, M]: the last M of each eighth of the text."""
    size = min(int(len(text) * options.validation_share), 1 << 19) // BLOCKS // WINDOW * WINDOW + 1
    blocks = np.frombuffer(text, np.uint8, len(text) // BLOCKS * BLOCKS).reshape(BLOCKS, -1)
    if size == 1 or options.validation_share >= 1 or blocks.size - BLOCKS * size <= options.sequence:
        given = f"--validation-share {options.validation_share}, --sequence {options.sequence}"
        raise ValueError(f"--data: {len(text)} bytes are too few for {given}, {BLOCKS} blocks of {WINDOW}")
    return blocks[:, :-size].ravel(), blocks[:, -size:].astype(np.int32)


def batch_at(text: np.ndarray, step: int, options: Options) -> np.ndarray:
    """The tokens [B, T + 1] of a step: a function of seed and step, so a resumed run needs no more state."""
    random = np.random.default_rng((options.seed, step))
    starts = random.integers(0, len(text) - options.sequence, options.batch)
    return text[starts[:, None] + np.arange(options.sequence + 1)].astype(np.int32)


def run(options: Options, text: bytes, folder: RunFolder) -> None:
    """Trains, evaluates and samples."""
    # 1. data, model, optimiser, and the compiled step
    train_text, held_out = split(text, options)
    dtype = compute_dtype(options.precision)
    model = _run.build_model(options, vocab_size=256, dtype=dtype, fp8=options.precision == "fp8")
    rates = options.learning_rate, options.final_learning_rate
    schedule = rwkv_schedule(*rates, options.steps, warmup_steps=min(20, options.steps // 10))
    optimizer = rwkv_optimizer(schedule, weight_decay=options.weight_decay)
    step = TrainStep(model, optimizer, make_mesh(devices=[first_device()]))
    evaluate = jax.jit(lambda params: chunked_loss(model, params, held_out, chunk_size=WINDOW)[0])

    # 2. a new state, or that of the last checkpoint
    facts = _run.facts(options, MAY_CHANGE, dtype=dtype, text=hashlib.sha256(text).hexdigest()[:16])
    checkpoints, state, _ = _run.start(folder, options, facts, step, keep=2)

    # 3. training; losses are read every ten steps, so that the device does not wait for Python
    with (
        checkpoints,
        noted_interrupts() as interrupted,
        _run.Metrics(options, checkpoints, COLUMNS, state) as metrics,
    ):
        for at in range(int(state.step) + 1, options.steps + 1):
            state, loss = step(state, step.shard(batch_at(train_text, at - 1, options)))
            metrics.add(at, loss=loss)
            is_due = at % options.checkpoint_every == 0 or at == options.steps
            if is_due or interrupted or at % 10 == 0:
                metrics.read(options.batch * options.sequence)
                if is_due:
                    metrics.evaluated(float(evaluate(state.params)))
                metrics.write_rows()
            if is_due or interrupted:
                folder.check()
                checkpoints.save(at, state)
            if interrupted and at < options.steps:
                metrics.exit_stopped(at, interrupted[0])

    # 4. a sample, and the curve
    if options.sample_bytes:
        prompt = held_out[3, :100].tolist() if options.prompt is None else [*options.prompt.encode()] or [10]
        sampling = SamplingParams.policy(options.temperature, seed=options.seed)
        (sample,) = generate(model, state.params, [prompt], sampling, max_tokens=options.sample_bytes)
        print(f"---- sample, after the prompt {bytes(prompt).decode(errors='replace')!r}")
        print(bytes(sample.tokens.tolist()).decode(errors="replace"), end="\n----\n")
    _run.plot(options.out, f"{options.model}, {options.num_layers} layers of {options.hidden_size} channels")
    metrics.print_results(f" ({metrics.evaluation_loss / np.log(2):.3f} bits) over {held_out.size:,} bytes")


@program(lower="--batch, --sequence, --hidden-size or --num-layers")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check_numbers(options, "final_learning_rate", "weight_decay", "sample_bytes", "temperature")
    with RunFolder(options.out, data=options.data, resume=options.resume) as folder:
        run(options, read_text(options.data), folder)


if __name__ == "__main__":
    main()
