"""Trains a byte-level RWKV language model: ``python examples/train_lm.py``.

Without arguments it reads the language reference that ships inside Python, on whatever device jax finds: no
download, no GPU needed, minutes on two CPU cores. It prints the loss on held-out text and a sample, and
leaves checkpoints, a log and a picture of the loss curve in ``runs/train_lm``.

    python examples/train_lm.py --data my_texts/ --out runs/mine     # your text: a file, or a folder of files
    python examples/train_lm.py --data my_texts/ --out runs/mine --resume     # go on from the last checkpoint
    python examples/train_lm.py --model rwkv6
    python examples/train_lm.py --help
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import _run
import jax
import jax.numpy as jnp
import numpy as np
from _cli import claimed, first_device, noted_interrupts, parse, program
from _text import read_text
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

MODELS = {"rwkv6": (RWKV6ForCausalLM, RWKV6Config), "rwkv7": (RWKV7ForCausalLM, RWKV7Config)}
VALIDATION_BLOCKS = 8  # held-out pieces, spread evenly over the text and read side by side
VALIDATION_BYTES = 1 << 19  # at most, all pieces together
STEPS_PER_CALL = 10  # optimiser steps per call of the compiled function: how often the progress bar moves


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a training run."""

    data: Path | None = None
    """text to learn: a file, or a directory whose text files are all read (default: Python's reference)"""
    out: Path = Path("runs/train_lm")
    """directory for checkpoints, log.csv and loss.png; a run that is there already is moved aside"""
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
    """compute dtype; parameters, decays, states, logits stay float32 (auto: bf16 on CUDA, fp32 elsewhere)"""
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


# between a run and its resumption; data may lie elsewhere, with the same bytes
MAY_CHANGE = {"data", "out", "resume", "checkpoint_every", "sample_bytes", "prompt", "temperature"}


def check(options: Options) -> None:
    """Refuses values that no run can have; the model's configuration checks the rest."""
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), "--" + field.name.replace("_", "-")
        may_be_0 = field.type == "float" or field.name in ("seed", "sample_bytes")
        if field.type == "int" and not may_be_0 and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
        if field.type == "int" and value >= 2 ** (bits := 63 if field.name == "seed" else 31):
            raise ValueError(f"{flag} must be below 2**{bits}, got {value}")
        if may_be_0 and not 0 <= value < float("inf"):
            raise ValueError(f"{flag} must be a finite number and not negative, got {value}")
    if options.learning_rate == 0 or not 0 < options.validation_share < 1:
        raise ValueError("--learning-rate must be above 0, and --validation-share between 0 and 1")


def split(text: bytes, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Training bytes [N] and held-out bytes [blocks, M]: the last M of every 1/blocks of the text."""
    data = np.frombuffer(text, np.uint8)
    held = min(int(len(data) * options.validation_share), VALIDATION_BYTES) // VALIDATION_BLOCKS
    if held < 64 or len(data) - VALIDATION_BLOCKS * held <= options.sequence:
        raise ValueError(
            f"--data: {len(data)} bytes are too few, with --validation-share {options.validation_share} and "
            f"--sequence {options.sequence}: {VALIDATION_BLOCKS} held-out blocks of at least 64 bytes "
            "and more than one training sequence are needed"
        )
    ends = [len(data) * (i + 1) // VALIDATION_BLOCKS for i in range(VALIDATION_BLOCKS)]
    kept = np.ones(len(data), bool)
    for end in ends:
        kept[end - held : end] = False
    return data[kept], np.stack([data[end - held : end] for end in ends])


def batch_at(text: np.ndarray, step: int, options: Options) -> np.ndarray:
    """The batch of one step, [batch, sequence + 1] bytes from random places.

    A function of seed and step only, so that a resumed run needs no more state.
    """
    random = np.random.default_rng((options.seed, step))
    starts = random.integers(0, len(text) - options.sequence, options.batch)
    return text[starts[:, None] + np.arange(options.sequence + 1)]


@functools.partial(jax.jit, donate_argnums=0)
def train_steps(state: TrainState, batches: jax.Array, count: int) -> tuple[TrainState, jax.Array]:
    """``count`` optimiser steps, one on each of the first batches [STEPS_PER_CALL, B, T + 1]; also losses."""

    def step(i: jax.Array, carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, losses = carry
        tokens = batches[i].astype(jnp.int32)

        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1])[0], tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), losses.at[i].set(loss)

    return jax.lax.fori_loop(0, count, step, (state, jnp.zeros(len(batches))))


@functools.partial(jax.jit, static_argnums=0)
def sum_of_losses(model: Any, params: Any, tokens: jax.Array, mask: jax.Array, state: Any) -> Any:
    """Sum of the losses on tokens [B, T + 1] where the mask [T] holds, and the recurrent state after them."""
    tokens = tokens.astype(jnp.int32)
    logits, state = model.apply({"params": params}, tokens[:, :-1], state)
    mask = jnp.broadcast_to(mask, tokens[:, 1:].shape)
    return cross_entropy(logits, tokens[:, 1:], mask) * mask.sum(), state


def validate(model: Any, params: Any, blocks: np.ndarray, window: int = 256) -> float:
    """Nats per byte over all held-out bytes but the first of each block; windows hand the state on."""
    state, total, count = model.init_state(len(blocks)), 0.0, blocks.shape[1] - 1
    padded = np.pad(blocks, ((0, 0), (0, -count % window)))
    for start in range(0, count, window):
        mask = np.arange(start, start + window) < count
        loss, state = sum_of_losses(model, params, padded[:, start : start + window + 1], mask, state)
        total += float(loss)
    return total / (len(blocks) * count)


@functools.partial(jax.jit, static_argnums=(0, 4))
def generate(model: Any, params: Any, prompt: Any, key: Any, length: int, temperature: float) -> jax.Array:
    """Continues prompt [P] by ``length`` bytes.

    The prompt is read at once, then each byte by one step of the recurrent form on the explicit state.
    """

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        logits, state = carry
        token = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))  # [1]
        logits, state = model.apply({"params": params}, token[:, None], state)
        return (logits[:, -1], state), token[0]

    logits, state = model.apply({"params": params}, prompt[None].astype(jnp.int32))
    return jax.lax.scan(step, (logits[:, -1], state), jax.random.split(key, length))[1]


def build(options: Options, precision: str) -> tuple[Any, TrainState]:
    """The model, and its state before the first step."""
    kind, config = MODELS[options.model]
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    model = kind(config(256, options.hidden_size, options.num_layers, options.head_dim, dtype=dtype))
    warmup = min(20, options.steps // 10)
    rates = (options.learning_rate, options.final_learning_rate)
    schedule = rwkv_schedule(*rates, options.steps, warmup_steps=warmup)
    optimizer = rwkv_optimizer(schedule, weight_decay=options.weight_decay)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer).replace(step=jnp.int32(0))

    try:
        return model, jax.jit(create)(jax.random.key(options.seed))
    except ValueError as error:  # from deep inside the model, which knows no options
        sizes = f"--hidden-size {options.hidden_size}, --head-dim {options.head_dim}"
        raise ValueError(f"{sizes}: {error}") from error


def train(
    options: Options,
    model: Any,
    state: TrainState,
    texts: tuple[np.ndarray, np.ndarray],
    log: list[list[float]],
    save: Callable[[TrainState], None],
    console: Console,
) -> tuple[TrainState, float, int]:
    """Trains to the last step, or to the first signal; appends to the log, and saves with each validation.

    Returns the state, the speed in tokens/s, and the number of the signal or 0.
    """
    train_text, held_out = texts
    step = first = int(state.step)
    rate, busy, timed = 0.0, 0.0, 0  # rate: tokens/s, measured over `busy` seconds and `timed` steps
    speed = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s")
    columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), speed]
    columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    with noted_interrupts() as interrupted, Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=options.steps, completed=step, loss=float("nan"), rate=0.0)
        stopping = False
        while step < options.steps and not stopping:
            started = time.perf_counter()
            every = options.checkpoint_every
            until = min(*(step + n - step % n for n in (STEPS_PER_CALL, every)), options.steps)
            steps = [min(step + i, until - 1) for i in range(STEPS_PER_CALL)]
            batches = np.stack([batch_at(train_text, at, options) for at in steps])
            state, losses = train_steps(state, batches, until - step)
            loss = float(np.mean(np.asarray(losses)[: until - step]))
            if step > first:  # the first call compiles
                busy, timed = busy + time.perf_counter() - started, timed + until - step
                rate = timed * options.batch * options.sequence / busy
            step, validation, stopping = until, float("nan"), bool(interrupted)
            if not np.isfinite(loss):
                raise ValueError(f"the loss is {loss} at step {step}: try a lower --learning-rate")
            if step % every == 0 or step == options.steps:
                validation = validate(model, state.params, held_out)
                losses_now = f"training loss {loss:.4f}, held out {validation:.4f} nats per byte"
                progress.print(f"step {step:6}: {losses_now}")
            log.append([step, loss, validation])
            progress.update(bar, completed=step, loss=loss, rate=rate)
            if not np.isnan(validation) or stopping:
                save(state)
        return state, rate, interrupted[0] if step < options.steps else 0


def show_sample(options: Options, model: Any, params: Any, held_out: np.ndarray, console: Console) -> None:
    """Prints how the model continues the prompt."""
    prompt = held_out[3, :100]
    if options.prompt is not None:
        prompt = np.frombuffer((options.prompt or "\n").encode(), np.uint8)
    key = jax.random.key(options.seed)
    length, temperature = options.sample_bytes, options.temperature
    sample = np.asarray(generate(model, params, prompt, key, length, temperature), np.uint8)
    console.rule("sample (the prompt is bold)")
    console.print(prompt.tobytes().decode(errors="replace"), style="bold", end="", markup=False)
    console.print(sample.tobytes().decode(errors="replace"), markup=False)
    console.rule()


@program(lower="--batch, --sequence, --hidden-size or --num-layers")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check(options)
    _run.check_folders(options.out, options.data, options.resume)
    text = read_text(options.data)
    with claimed(options.out, _run.lock_file(options.out)) as check_claim:
        run(options, text, check_claim)


def run(options: Options, text: bytes, check_claim: Callable[[], None]) -> None:
    """Trains, with ``--out`` for this process alone, and reports."""
    began = time.perf_counter()
    out, console = options.out, Console(highlight=False, soft_wrap=True)
    texts = split(text, options)
    device = first_device()
    auto = "bf16" if device.platform in ("gpu", "cuda") else "fp32"
    precision = auto if options.precision == "auto" else options.precision
    facts = {name: value for name, value in dataclasses.asdict(options).items() if name not in MAY_CHANGE}
    facts |= {"precision": precision, "text": hashlib.sha256(text).hexdigest()[:16]}
    manager, log = _run.resume(out, facts) if options.resume else None, []
    model, state = build(options, precision)
    if manager is None:
        manager = _run.begin(out, facts)  # no sooner: a run that cannot be built moves nothing aside
    else:
        state = _run.restore(manager, out, state)
        log = _run.read_log(out, int(state.step))
    first, count = int(state.step), sum(x.size for x in jax.tree.leaves(state.params))
    sizes = f"{texts[0].size:,} bytes to learn, {texts[1].size:,} held out"
    console.print(f"{options.model}, {count:,} parameters, {precision} on {device.device_kind}; {sizes}")
    console.print(f"resuming at step {first}" if first else "compiling, then training")

    def save(state: TrainState) -> None:
        check_claim()
        _run.save(manager, out, log, state)

    state, rate, interrupted = train(options, model, state, texts, log, save, console)
    manager.close()
    step, _, validation = log[-1]
    if interrupted:
        again = shlex.join([*sys.argv, *([] if options.resume else ["--resume"])])
        done = f"stopped at step {step} of {options.steps}, checkpoint saved"
        console.print(f"{done}. Go on with: python {again}")
        sys.exit(128 + interrupted)

    _run.plot_log(out, log, STEPS_PER_CALL, f"{options.model}, {count / 1e6:.2f} M parameters")
    held_out = texts[1]
    if options.sample_bytes:
        show_sample(options, model, state.params, held_out, console)
    bits, seconds = validation / np.log(2), time.perf_counter() - began
    over = f"({bits:.3f} bits), over {held_out.size:,} held-out bytes"
    console.print(f"validation loss   {validation:.4f} nats per byte {over}")
    console.print(f"time              {seconds:.0f} s in all, {rate:,.0f} tokens/s in training")
    console.print(f"loss curve        {out / 'loss.png'}")
    console.print(f"checkpoint        {out / 'checkpoints' / str(step)}")


if __name__ == "__main__":
    main()
