"""Pretrains RWKV-6 or RWKV-7 on any number of devices: ``python examples/pretrain.py``.

Without arguments it trains a tiny model of bytes on Python's own documentation, in two minutes on two CPU
cores. Real runs look like this:

    python examples/pretrain.py --size 0.4B --data corpus.idx --batch 64 --out runs/mine  # on all GPUs
    python examples/pretrain.py --size 7B --data corpus.idx --mesh-fsdp -1 --dry-run      # does it fit?
    python examples/pretrain.py --size 0.1B --data texts.jsonl --tokenizer tokenizer.json --vocab-size 50277
    python examples/pretrain.py ... --resume    # after a crash, a kill, SIGTERM; on any number of devices
    srun python examples/pretrain.py ...        # several processes, as SLURM or Open MPI start them
    python examples/pretrain.py --help

Data are official binidx pairs, or text, which is tokenized once into --cache. Documents are packed, and the
state restarts at each. --out gets options.json, checkpoints/ (parameters, optimizer, step, data iterator),
metrics.csv, tensorboard/ and, with --profile, trace/. Resumed on the same mesh, losses repeat bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import _run
import jax
import jax.numpy as jnp
import optax
from _cli import claimed, compute_dtype, noted_interrupts, parse, program
from _pretrain import corpus, setup
from _pretrain.options import MAY_CHANGE, NOTED, Options, check, completed
from jax.experimental import multihost_utils
from rich.console import Console

from fla_jax.checkpoints import save_checkpoint
from fla_jax.data import batches

COLUMNS = ("step", "loss", "gradient_norm", "learning_rate", "evaluation_loss", "tokens_per_second")
COLUMNS += ("share_of_6n", "memory_gb")


@program(lower="--batch (or raise --accumulate), --sequence or --size, or raise --mesh-fsdp")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check(options)
    options = completed(options)
    check(options)
    setup.start_processes(options)
    setup.keep_programs(options)
    if options.dry_run:
        sys.exit(0 if setup.report(options) else 1)
    _run.check_folders(options.out, options.data, options.resume)
    with contextlib.ExitStack() as stack:
        check_claim = lambda: None
        if jax.process_index() == 0:
            check_claim = stack.enter_context(claimed(options.out, _run.lock_file(options.out)))
        run(options, check_claim)


def run(options: Options, check_claim: _run.Check) -> None:
    """Trains, with ``--out`` for this run alone, and reports."""
    console = Console(highlight=False, soft_wrap=True, quiet=jax.process_index() > 0)
    data = corpus.read(options, console)
    examples, numbers = data.training
    if options.steps is None:
        options = dataclasses.replace(options, steps=len(numbers) // options.batch)
        if options.steps <= options.warmup_steps:
            found = f"--data has {len(numbers)} rows, {options.steps} steps of --batch {options.batch}"
            raise ValueError(f"{found}: give --steps, above --warmup-steps {options.warmup_steps}")
    step, learning_rate = setup.build_step(options, options.steps)
    facts = _run.facts(options, MAY_CHANGE, dtype=compute_dtype(options.precision), text=data.identity)
    part = step.local_batch_rows(options.batch)
    iterator = iter(batches(examples, numbers, options.batch, seed=options.seed, part=part))
    checkpoints, state, position = _run.start_or_resume(options, facts, step, options.keep, NOTED)
    first = int(state.step)
    if options.resume:
        iterator.set_state(position)
    if first >= options.steps:
        if options.export is None:
            at = f"the run in {options.out} is at step {first}, and --steps {options.steps}"
            raise ValueError(f"--resume: {at}; with --export its parameters are written")
        checkpoints.close()
        return export(options.export, step.model, state.params, console)
    epochs = f"{options.steps * options.batch / len(numbers):.2f} epochs"
    console.print(f"{len(numbers):,} rows of {options.sequence} tokens, {options.batch} a step, {epochs}")
    with _run.Metrics(options, checkpoints, COLUMNS, state, options.peak_tflops) as metrics:
        saver = lambda at, state: checkpoints.save(at, state, iterator.get_state())
        training = Training(options, step, learning_rate, data, metrics, saver, check_claim)
        state, interrupted = training.go(state, iterator)
    if interrupted:
        metrics.exit_stopped(int(state.step), interrupted)
    checkpoints.close()
    if jax.process_index() == 0:
        metrics.print_results()
    if options.export:
        export(options.export, step.model, state.params, console)


@dataclasses.dataclass
class Training:
    """The loop, and what it does every so many steps."""

    options: Options
    step: Any
    learning_rate: Any  # of a step, counted from 0
    data: corpus.Corpus
    metrics: _run.Metrics
    save: Any
    check_claim: _run.Check

    def go(self, state: Any, iterator: Any) -> tuple[Any, int]:
        """Trains to the last step, or the first signal. Returns the state, and the signal's number or 0."""
        options = self.options
        first = int(state.step)
        traced = range(first + 5, first + 5 + options.profile)
        with noted_interrupts() as interrupted, contextlib.ExitStack() as trace:
            for at in range(first + 1, options.steps + 1):
                if options.profile and at == traced.start + 1:
                    trace.enter_context(jax.profiler.trace(str(options.out / "trace")))
                state, loss = self.step(state, self.step.shard(next(iterator)))
                # a copy: the next step overwrites the state
                norm = jnp.copy(optax.tree.get(state.opt_state, "gradient_norm"))
                self.metrics.add(at, loss=loss, gradient_norm=norm, learning_rate=self.learning_rate(at - 1))
                if options.profile and at == traced.stop:
                    jax.block_until_ready(loss)
                    trace.close()
                last = at == options.steps
                log, evaluate, save = (
                    last or at % every == 0
                    for every in (options.log_every, options.eval_every, options.save_every)
                )
                stopping = jax.process_count() == 1 and interrupted
                if not (log or evaluate or save or at == first + 1 or stopping):
                    continue
                number = _agreed(interrupted)
                self.metrics.read(options.batch * options.sequence)
                if self.data.evaluation and evaluate:
                    self.metrics.evaluated(self.evaluate(state.params))
                self.metrics.write_rows()
                if save or number:
                    self.check_claim()
                    self.save(at, state)
                if number and not last:
                    return state, number
        return state, 0

    def evaluate(self, params: Any) -> float:
        """The loss on the held-out examples."""
        size = self.options.batch
        part = self.step.local_batch_rows(size)
        return self.step.evaluate(params, batches(*self.data.evaluation, size, part=part))


def _agreed(interrupted: list[int]) -> int:
    """The signal that any of the processes has got, or 0."""
    number = interrupted[0] if interrupted else 0
    if jax.process_count() > 1:
        number = int(multihost_utils.process_allgather(jnp.int32(number)).max())
    return number


def export(path: Path, model: Any, params: Any, console: Console) -> None:
    """Writes the parameters for other programs."""
    if jax.process_count() > 1:
        params = multihost_utils.process_allgather(params, tiled=True)
    if jax.process_index() == 0:
        save_checkpoint(path, model, jax.device_get(params))
        console.print(f"parameters        {path}")


if __name__ == "__main__":
    main()
