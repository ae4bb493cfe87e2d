"""Pretrains RWKV-6 or RWKV-7 on any number of devices: ``python examples/pretrain.py``.

Without arguments it trains a tiny model of bytes on Python's own documentation, on whatever device JAX finds:
no download, no GPU needed, two minutes on two CPU cores. What one really starts looks like this:

    python examples/pretrain.py --size 0.4B --data corpus.idx --batch 64 --out runs/mine  # on all GPUs
    python examples/pretrain.py --size 7B --data corpus.idx --mesh-fsdp -1 --dry-run      # does it fit?
    python examples/pretrain.py --size 0.1B --data texts.jsonl --tokenizer tokenizer.json --vocab-size 50277
    python examples/pretrain.py ... --resume    # after a crash, a kill, SIGTERM; on any number of devices
    srun python examples/pretrain.py ...        # several processes, as SLURM or Open MPI start them
    python examples/pretrain.py --help

Data are the official binidx pairs, or text, whose tokens are made once and kept in --cache. Rows hold packed
documents, and the state restarts at each. --out gets options.json, checkpoints/ (written while training goes
on: parameters, optimizer, step, data iterator), metrics.csv, tensorboard/ and, with --profile, trace/. A run
that is resumed on the same mesh repeats the losses bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _run
import jax
import jax.numpy as jnp
import optax
from _cli import claimed, noted_interrupts, parse, program
from _pretrain import corpus, memory
from _pretrain.checkpoints import Checkpoints, last_good
from _pretrain.metrics import Metrics, peak_flops
from _pretrain.options import MAY_CHANGE, NOTED, Options, check, completed
from _pretrain.program import (
    Trainer,
    build_model,
    count_parameters,
    keep_programs,
    precision,
    start_processes,
)
from jax.experimental import multihost_utils
from rich.console import Console


@program(lower="--batch (or raise --accumulate), --sequence or --size, or raise --mesh-fsdp")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check(options)
    options = completed(options)
    check(options)
    start_processes(options)
    keep_programs(options)
    options = dataclasses.replace(options, remat=memory.rematerialisation(options))
    console = Console(highlight=False, soft_wrap=True, quiet=jax.process_index() > 0)
    if options.dry_run:
        sys.exit(0 if memory.report(options, console) else 1)
    _run.check_folders(options.out, options.data, options.resume)
    with contextlib.ExitStack() as stack:
        check_claim = None
        if jax.process_index() == 0:
            check_claim = stack.enter_context(claimed(options.out, _run.lock_file(options.out)))
        run(options, console, check_claim)


def run(options: Options, console: Console, check_claim: Callable[[], None] | None) -> None:
    """Trains, with ``--out`` for this run alone, and reports."""
    dtype = precision(options)
    model = build_model(options, dtype)
    data = corpus.read(options, console)
    rows, numbers = data.training
    if options.steps is None:
        options = dataclasses.replace(options, steps=len(numbers) // options.batch)
        if options.steps <= options.warmup_steps:
            found = f"--data has {len(numbers)} rows, {options.steps} steps of --batch {options.batch}"
            raise ValueError(f"{found}: give --steps, above --warmup-steps {options.warmup_steps}")
    trainer = Trainer(options, model, options.steps)
    facts = {name: x for name, x in dataclasses.asdict(options).items() if name not in MAY_CHANGE}
    facts |= {"precision": dtype, "text": data.identity}

    iterator = iter(trainer.batches(rows, numbers, options.seed))
    checkpoints, state = prepare(options, trainer, facts, iterator, console)
    first = int(state.step)
    if first == options.steps:  # a run at its end that is asked for its parameters
        checkpoints.close()
        export(options.export, model, state.params, console)
        return
    total, counted = count_parameters(state.params)
    mesh = ", ".join(f"{name} {size}" for name, size in trainer.mesh.shape.items() if size > 1)
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}" + (f" ({mesh})" if mesh else "")
    console.print(f"{options.model} {options.size}, {total:,} parameters, {dtype} on {devices}")
    tokens = f"{len(numbers):,} rows of {options.sequence} tokens to learn, {options.batch} a step"
    console.print(f"{tokens}, {options.steps * options.batch / len(numbers):.2f} epochs")
    console.print(f"resuming at step {first}" if first else "compiling, then training")
    peak = peak_flops(options.peak_tflops)
    share = (6 * counted, peak and peak * jax.device_count())
    with Metrics(options.out, first, options.steps, *share, console) as metrics:
        training = Training(options, trainer, data, checkpoints, metrics, check_claim)
        state, interrupted = training.go(state, iterator)
    checkpoints.close()
    if interrupted:
        again = shlex.join([*sys.argv, *([] if options.resume else ["--resume"])])
        done = f"stopped at step {int(state.step)} of {options.steps}, checkpoint saved"
        console.print(f"{done}. Go on with: python {again}")
        sys.exit(128 + interrupted)
    if training.evaluated is not None:
        console.print(f"held-out loss     {training.evaluated:.4f} nats per token")
    console.print(f"speed             {metrics.rate:,.0f} tokens/s")
    console.print(f"checkpoint        {checkpoints.folder / str(options.steps)}")
    if options.export:
        export(options.export, model, state.params, console)


def prepare(
    options: Options, trainer: Trainer, facts: dict[str, Any], iterator: Any, console: Console
) -> tuple[Checkpoints, Any]:
    """The run's checkpoints and its state: a new one, or the last one saved, with the iterator set to it."""
    out = options.out
    if options.resume:
        earlier = _run.described(out)
        if last_good(out / "checkpoints").startswith("there is no"):
            raise ValueError(f"--resume: there is no checkpoint in {out} (--out) yet; start without --resume")
        checkpoints = Checkpoints(out, options.keep)
        state, where = checkpoints.restore(trainer.shapes()[0])
        noted = {name: earlier[name] for name in NOTED if name in earlier}
        _run.check_same(out, {**facts, **noted})
        iterator.set_state(where)
        for name, before in noted.items():
            if before != facts[name]:
                console.print(
                    f"--{name.replace('_', '-')} was {before} before and is {facts[name]} from now on"
                )
        at_end = options.export is not None and int(state.step) == options.steps
        if int(state.step) >= options.steps and not at_end:
            raise ValueError(
                f"--resume: the run in {out} is at step {int(state.step)}, and --steps {options.steps}; with "
                "--export its parameters are written"
            )
        if jax.process_index() == 0:
            _run.describe(out, facts)
        return checkpoints, state
    state = trainer.step.init(jax.random.key(options.seed))
    if jax.process_index() == 0:
        _run.make_run(out, facts)  # no sooner: a run that cannot be built moves nothing aside
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the folder is made")
    return Checkpoints(out, options.keep), state


class Training:
    """The loop, and what it does every so many steps."""

    def __init__(
        self,
        options: Options,
        trainer: Trainer,
        data: corpus.Corpus,
        checkpoints: Checkpoints,
        metrics: Metrics,
        check_claim: Callable[[], None] | None,
    ):
        self.options, self.trainer, self.data = options, trainer, data
        self.checkpoints, self.metrics, self.check_claim = checkpoints, metrics, check_claim
        self.evaluated: float | None = None
        self.waiting: list[tuple[int, Any, Any]] = []  # steps whose losses nobody has looked at

    def go(self, state: Any, iterator: Any) -> tuple[Any, int]:
        """Trains to the last step, or the first signal. Returns the state, and the signal's number or 0."""
        options = self.options
        first = at = int(state.step)
        traced = range(first + 5, first + 5 + options.profile)
        with noted_interrupts() as interrupted, contextlib.ExitStack() as trace:
            while at < options.steps:
                if options.profile and at == traced.start:
                    trace.enter_context(jax.profiler.trace(str(options.out / "trace")))
                state, loss = self.trainer.step(state, self.trainer.step.shard(next(iterator)))
                at += 1
                # a copy: the state itself is the next step's to overwrite
                norm = jnp.copy(optax.tree.get(state.opt_state, "gradient_norm"))
                self.waiting.append((at, loss, norm))
                every = [options.log_every, options.eval_every, options.save_every, options.steps]
                is_due = [at % n == 0 for n in every[:-1]]
                last = at == options.steps
                if options.profile and at == traced.stop:
                    jax.block_until_ready(loss)
                    trace.close()
                alone = jax.process_count() == 1
                if not (any(is_due) or last or at == first + 1 or (alone and interrupted)):
                    continue
                number = self.agreed(interrupted)
                _, evaluate, save = is_due
                rows = self.look(counted=at > first + 1)
                if self.data.evaluation and (evaluate or last):
                    rows[-1]["evaluation_loss"] = self.evaluate(at, state, rows[-1]["loss"])
                self.metrics.write(rows)
                if save or last or number:
                    self.save(at, state, iterator)
                self.metrics.restart()
                if number and not last:
                    return state, number
        return state, 0

    def agreed(self, interrupted: list[int]) -> int:
        """The signal that any of the processes has got, or 0."""
        number = interrupted[0] if interrupted else 0
        if jax.process_count() > 1:
            number = int(multihost_utils.process_allgather(jnp.int32(number)).max())
        return number

    def look(self, counted: bool) -> list[dict[str, float]]:
        """Rows for the metrics, of the steps since the last look; refuses to go on from NaN and inf."""
        found = jax.device_get(self.waiting)
        if counted:
            self.metrics.measured(len(found) * self.options.batch * self.options.sequence)
        rows = []
        for step, loss, norm in found:
            rate = float(self.trainer.learning_rate(step - 1))
            rows.append(
                {"step": step, "loss": float(loss), "gradient_norm": float(norm), "learning_rate": rate}
            )
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.metrics.write(rows)
                self.checkpoints.finish()
                wrong = f"the loss is {loss} and the norm of its gradient {norm} at step {step}"
                raise ValueError(
                    f"{wrong}; {last_good(self.checkpoints.folder)}, perhaps with a lower --learning-rate"
                )
        self.waiting = []
        return rows

    def evaluate(self, at: int, state: Any, loss: float) -> float:
        """The loss on the rows that are held out."""
        rows, numbers = self.data.evaluation
        found = iter(self.trainer.batches(rows, numbers, None))
        self.evaluated = self.trainer.evaluate(state.params, found)
        self.metrics.say(
            f"step {at:6}: training loss {loss:.4f}, held out {self.evaluated:.4f} nats per token"
        )
        return self.evaluated

    def save(self, at: int, state: Any, iterator: Any) -> None:
        """Begins to write a checkpoint."""
        if self.check_claim is not None:
            self.check_claim()
        if not (self.options.out / "options.json").exists():
            raise ValueError(f"--out: {self.options.out} is gone, deleted or moved while the run went on")
        self.checkpoints.save(at, state, iterator.get_state())


def export(path: Path, model: Any, params: Any, console: Console) -> None:
    """Writes the parameters as other programs read them."""
    from fla_jax.checkpoints import save_checkpoint

    if jax.process_count() > 1:
        params = multihost_utils.process_allgather(params, tiled=True)
    if jax.process_index() == 0:
        save_checkpoint(path, model, jax.device_get(params))
        console.print(f"parameters        {path}")


if __name__ == "__main__":
    main()
