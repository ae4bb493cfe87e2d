"""Trains a byte-level RWKV language model: ``python examples/train_lm.py``.

Without arguments it reads the language reference that ships inside Python, on whatever device jax finds: no download, no GPU needed, minutes on two CPU
cores. It prints the loss on held-out text and a sample, and leaves checkpoints, a log and a picture of the loss curve in ``runs/train_lm``.

    python examples/train_lm.py --data my_texts/ --out runs/mine     # your own text: a file, or all text files below a directory
    python examples/train_lm.py --data my_texts/ --out runs/mine --resume     # go on from the last checkpoint
    python examples/train_lm.py --model rwkv6
    python examples/train_lm.py --help
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import orbax.checkpoint as ocp
import tyro
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM
from fla_jax.training import cross_entropy, rwkv_optimizer, rwkv_schedule

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MODELS = {"rwkv6": (RWKV6ForCausalLM, RWKV6Config), "rwkv7": (RWKV7ForCausalLM, RWKV7Config)}
VALIDATION_BLOCKS = 8  # held-out pieces, spread evenly over the text and read side by side
VALIDATION_BYTES = 1 << 19  # at most, all pieces together
STEPS_PER_CALL = 10  # optimiser steps per call of the compiled function: how often the progress bar moves


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a training run."""

    data: Path | None = None
    """text to learn: a file, or a directory whose text files are all read (default: the language reference inside Python)"""
    out: Path = Path("runs/train_lm")
    """directory for checkpoints, log.csv and loss.png; a run that is there already is moved aside, not overwritten"""
    resume: bool = False
    """go on from the last checkpoint in --out, with the same options as before"""
    model: Literal["rwkv7", "rwkv6"] = "rwkv7"
    """which architecture"""
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
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """compute dtype; parameters, decays, states and logits are float32 in any case (auto: bf16 on CUDA, fp32 elsewhere)"""
    validation_share: float = 0.1
    """part of the text that is held out for validation (half a megabyte at most)"""
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


MAY_CHANGE = {"data", "out", "resume", "checkpoint_every", "sample_bytes", "prompt", "temperature"}  # between a run and its resumption (data: same bytes)


def fail(message: str) -> Any:
    """Ends the program with a message."""
    sys.exit(f"train_lm.py: {message}")


def check(options: Options) -> None:
    """Refuses values that no run can have; the model's configuration checks the rest."""
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), "--" + field.name.replace("_", "-")
        if field.type == "int" and field.name not in ("seed", "sample_bytes") and value < 1:
            fail(f"{flag} must be at least 1, got {value}")
        if (field.type == "float" or field.name in ("seed", "sample_bytes")) and not 0 <= value < float("inf"):
            fail(f"{flag} must be a finite number and not negative, got {value}")
    if options.learning_rate == 0 or not 0 < options.validation_share < 1:
        fail("--learning-rate must be above 0, and --validation-share between 0 and 1")


def python_reference() -> bytes:
    """The topics of Python's ``help()``. Some repeat sections of others; a paragraph is kept once, or else training would see much of the held-out text."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        if len(paragraph) <= 80 or paragraph not in seen:
            kept.append(paragraph)
            seen.add(paragraph)
    return "\n\n".join(kept).encode()


def read_text(path: Path | None) -> bytes:
    """The bytes to learn, and to be tested on."""
    if path is None:
        return python_reference()
    if not path.exists():
        fail(f"--data: there is no {path}")
    hidden = lambda file: any(part.startswith(".") for part in file.relative_to(path).parts)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file() and not hidden(file))
    texts = [text for text in (f.read_bytes() for f in files) if text and (b"\0" not in text or len(files) == 1)]
    if not texts:
        fail(f"--data: {path} holds no text")
    return b"\n\n".join(texts)


def split(text: bytes, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Training bytes [N] and held-out bytes [blocks, M]: the last M of every 1/blocks of the text."""
    data = np.frombuffer(text, np.uint8)
    held = min(int(len(data) * options.validation_share), VALIDATION_BYTES) // VALIDATION_BLOCKS
    if held < 64 or len(data) - VALIDATION_BLOCKS * held <= options.sequence:
        fail(
            f"--data: {len(data)} bytes are too few, with --validation-share {options.validation_share} and --sequence {options.sequence}: "
            f"{VALIDATION_BLOCKS} held-out blocks of at least 64 bytes and more than one training sequence are needed"
        )
    ends = [len(data) * (i + 1) // VALIDATION_BLOCKS for i in range(VALIDATION_BLOCKS)]
    kept = np.ones(len(data), bool)
    for end in ends:
        kept[end - held : end] = False
    return data[kept], np.stack([data[end - held : end] for end in ends])


def batch_at(text: np.ndarray, step: int, options: Options) -> np.ndarray:
    """The batch of one step, [batch, sequence + 1] bytes from random places: a function of seed and step only, so that a resumed run needs no more state."""
    starts = np.random.default_rng((options.seed, step)).integers(0, len(text) - options.sequence, options.batch)
    return text[starts[:, None] + np.arange(options.sequence + 1)]


@functools.partial(jax.jit, donate_argnums=0)
def train_steps(state: TrainState, batches: jax.Array, count: int) -> tuple[TrainState, jax.Array]:
    """``count`` optimiser steps, one on each of the first batches [STEPS_PER_CALL, B, T + 1]; also their losses."""

    def step(i: jax.Array, carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, losses = carry
        tokens = batches[i].astype(jnp.int32)
        loss_fn = lambda params: cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1])[0], tokens[:, 1:])
        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), losses.at[i].set(loss)

    return jax.lax.fori_loop(0, count, step, (state, jnp.zeros(len(batches))))


@functools.partial(jax.jit, static_argnums=0)
def sum_of_losses(model: Any, params: Any, tokens: jax.Array, mask: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Sum of the losses on tokens [B, T + 1] where the mask [T] holds, and the recurrent state after them."""
    tokens = tokens.astype(jnp.int32)
    logits, state = model.apply({"params": params}, tokens[:, :-1], state)
    mask = jnp.broadcast_to(mask, tokens[:, 1:].shape)
    return cross_entropy(logits, tokens[:, 1:], mask) * mask.sum(), state


def validate(model: Any, params: Any, blocks: np.ndarray, window: int = 256) -> float:
    """Nats per byte over all held-out bytes but the first of each block, the recurrent state carried from window to window."""
    state, total, count = model.init_state(len(blocks)), 0.0, blocks.shape[1] - 1
    padded = np.pad(blocks, ((0, 0), (0, -count % window)))
    for start in range(0, count, window):
        mask = np.arange(start, start + window) < count
        loss, state = sum_of_losses(model, params, padded[:, start : start + window + 1], mask, state)
        total += float(loss)
    return total / (len(blocks) * count)


@functools.partial(jax.jit, static_argnums=(0, 4))
def generate(model: Any, params: Any, prompt: jax.Array, key: jax.Array, length: int, temperature: float) -> jax.Array:
    """Continues prompt [P] by ``length`` bytes: the prompt is read at once, then each byte by one step of the recurrent form on the explicit state."""

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        logits, state = carry
        token = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))  # [1]
        logits, state = model.apply({"params": params}, token[:, None], state)
        return (logits[:, -1], state), token[0]

    logits, state = model.apply({"params": params}, prompt[None].astype(jnp.int32))
    return jax.lax.scan(step, (logits[:, -1], state), jax.random.split(key, length))[1]


def open_run(options: Options, facts: dict[str, Any]) -> tuple[ocp.CheckpointManager, list[list[float]]]:
    """The checkpoints and the log of ``--out``: an earlier run's with ``--resume``, otherwise new ones."""
    out, described = options.out, options.out / "options.json"
    if options.resume:
        if not described.exists():
            fail(f"--resume: there is no run in {out} (--out); start it without --resume")
        for name, then in json.loads(described.read_text()).items():
            if facts.get(name) != then:
                what = "the text (--data)" if name == "text" else "--" + name.replace("_", "-")
                fail(f"--resume: {what} was {then} in {out} and is {facts.get(name)} now; resume with the same options, or start another run with --out")
    else:
        if out.exists():
            aside = next(p for p in (out.with_name(f"{out.name}-{i}") for i in itertools.count(1)) if not p.exists())
            out.rename(aside)
            print(f"moved the earlier run to {aside}")
        out.mkdir(parents=True)
        described.write_text(json.dumps(facts, indent=2) + "\n")
    keep = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    manager = ocp.CheckpointManager((out / "checkpoints").absolute(), options=keep)
    step = manager.latest_step()
    if options.resume and step is None:
        fail(f"--resume: there is no checkpoint in {out} (--out) yet; start without --resume")
    if not options.resume:
        return manager, []
    with open(out / "log.csv", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return manager, [[int(at), float(train), float(held)] for at, train, held in rows if int(at) <= step]


def write_log(out: Path, log: list[list[float]]) -> None:
    """Writes log.csv, whole or not at all."""
    with open(out / "log.csv.new", "w", newline="") as file:
        csv.writer(file).writerows([["step", "train_loss", "validation_loss"], *log])
    os.replace(out / "log.csv.new", out / "log.csv")


def plot(path: Path, log: list[list[float]], title: str) -> None:
    """Draws the loss curve."""
    steps, train, held = np.array(log).T
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, train, color="tab:blue", alpha=0.6, lw=1, label=f"training (mean of {STEPS_PER_CALL} steps)")
    known = ~np.isnan(held)
    axes.plot(steps[known], held[known], "o-", color="tab:orange", label=f"held out: {held[known][-1]:.3f} at the end")
    axes.set(xlabel="optimiser step", ylabel="loss, nats per byte", title=title, ylim=(0, min(6, train.max() * 1.05)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    began = time.perf_counter()
    options = tyro.cli(Options, args=arguments, description=__doc__)
    check(options)
    console = Console(highlight=False, soft_wrap=True)
    text = read_text(options.data)
    train_text, held_out = split(text, options)
    device = jax.devices()[0]
    precision = {"auto": "bf16" if device.platform in ("gpu", "cuda") else "fp32"}.get(options.precision, options.precision)
    facts = {name: value for name, value in dataclasses.asdict(options).items() if name not in MAY_CHANGE}
    facts |= {"precision": precision, "text": hashlib.sha256(text).hexdigest()[:16]}
    kind, config = MODELS[options.model]
    try:
        model = kind(config(256, options.hidden_size, options.num_layers, options.head_dim, dtype={"fp32": "float32", "bf16": "bfloat16"}[precision]))
    except ValueError as error:
        fail(str(error))
    manager, log = open_run(options, facts)

    schedule = rwkv_schedule(options.learning_rate, options.final_learning_rate, options.steps, warmup_steps=min(20, options.steps // 10))
    optimizer = rwkv_optimizer(schedule, weight_decay=options.weight_decay)
    init = lambda key: model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]
    create = lambda key: TrainState.create(apply_fn=model.apply, params=init(key), tx=optimizer).replace(step=jnp.int32(0))
    state = jax.jit(create)(jax.random.key(options.seed))
    if options.resume:
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
    step = first = int(state.step)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    console.print(f"{options.model}, {count:,} parameters, {precision} on {device.device_kind}; {train_text.size:,} bytes to learn, {held_out.size:,} held out")
    console.print(f"resuming at step {first}" if first else "compiling, then training")

    interrupted: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupted.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)

    columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s")]
    stopping, rate, busy, timed = False, 0.0, 0.0, 0  # rate: tokens/s, measured over `busy` seconds and `timed` steps
    validation = log[-1][2] if log else float("nan")
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=options.steps, completed=step, loss=float("nan"), rate=0.0)
        while step < options.steps and not stopping:
            started = time.perf_counter()
            until = min(step + STEPS_PER_CALL - step % STEPS_PER_CALL, step + options.checkpoint_every - step % options.checkpoint_every, options.steps)
            batches = np.stack([batch_at(train_text, min(step + i, until - 1), options) for i in range(STEPS_PER_CALL)])
            state, losses = train_steps(state, batches, until - step)
            loss = float(np.mean(np.asarray(losses)[: until - step]))
            if step > first:  # the first call compiles
                busy, timed = busy + time.perf_counter() - started, timed + until - step
                rate = timed * options.batch * options.sequence / busy
            step, validation, stopping = until, float("nan"), bool(interrupted)
            if not np.isfinite(loss):
                fail(f"the loss is {loss} at step {step}: try a lower --learning-rate")
            if step % options.checkpoint_every == 0 or step == options.steps:
                validation = validate(model, state.params, held_out)
                progress.print(f"step {step:6}: training loss {loss:.4f}, held out {validation:.4f} nats per byte")
            log.append([step, loss, validation])
            progress.update(bar, completed=step, loss=loss, rate=rate)
            if not np.isnan(validation) or stopping:
                write_log(options.out, log)
                manager.save(step, args=ocp.args.StandardSave(state))
    manager.close()
    if stopping and step < options.steps:
        again = [*sys.argv, *([] if options.resume else ["--resume"])]
        console.print(f"stopped at step {step} of {options.steps}, checkpoint saved. Go on with: python {shlex.join(again)}")
        sys.exit(128 + interrupted[0])

    plot(options.out / "loss.png", log, f"{options.model}, {count / 1e6:.2f} M parameters")
    if options.sample_bytes:
        prompt = held_out[3, :100] if options.prompt is None else np.frombuffer((options.prompt or "\n").encode(), np.uint8)
        sample = np.asarray(generate(model, state.params, prompt, jax.random.key(options.seed), options.sample_bytes, options.temperature), np.uint8)
        console.rule("sample (the prompt is bold)")
        console.print(prompt.tobytes().decode(errors="replace"), style="bold", end="", markup=False)
        console.print(sample.tobytes().decode(errors="replace"), markup=False)
        console.rule()
    console.print(f"validation loss   {validation:.4f} nats per byte ({validation / np.log(2):.3f} bits), over {held_out.size:,} held-out bytes")
    console.print(f"time              {time.perf_counter() - began:.0f} s in all, {rate:,.0f} tokens/s in training")
    console.print(f"loss curve        {options.out / 'loss.png'}")
    console.print(f"checkpoint        {options.out / 'checkpoints' / str(step)}")


if __name__ == "__main__":
    main()
