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
state restarts at each; with --carry-state it continues where a document does. --out gets options.json,
checkpoints/ (parameters, optimizer, step, data iterator), metrics.csv, tensorboard/ and, with --profile,
trace/. Resumed on the same mesh, losses repeat bit by bit.
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
from _cli import compute_dtype, noted_interrupts, parse, program
from _pretrain import corpus, setup
from _pretrain.options import MAY_CHANGE, NOTED, Options, check, completed
from jax.experimental import multihost_utils
from rich.console import Console

from fla_jax.checkpoints import save_checkpoint
from fla_jax.training import RunFolder

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
    with RunFolder(options.out, data=options.data, resume=options.resume) as folder:
        run(options, folder)


def run(options: Options, folder: RunFolder) -> None:
    """Trains, with ``--out`` for this run alone, and reports."""
    console = Console(highlight=False, soft_wrap=True, quiet=jax.process_index() > 0)
    data = corpus.read(options, console)
    if options.steps is None:
        options = dataclasses.replace(options, steps=data.num_rows // options.batch)
        if options.steps <= options.warmup_steps:
            found = f"--data has {data.num_rows} rows, {options.steps} steps of --batch {options.batch}"
            raise ValueError(f"{found}: give --steps, above --warmup-steps {options.warmup_steps}")
    step, learning_rate = setup.build_step(options, options.steps)
    facts = _run.facts(options, MAY_CHANGE, dtype=compute_dtype(options.precision), text=data.identity)
    part = step.local_batch_rows(options.batch)
    iterator = iter(data.batches(part))
    checkpoints, state, position = _run.start(
        folder, options, facts, step, may_change=NOTED, keep=options.keep
    )
    if options.resume:
        iterator.set_state(position)
    if (first := int(state.step)) >= options.steps:
        if options.export is None:
            at = f"the run in {options.out} is at step {first}, and --steps {options.steps}"
            raise ValueError(f"--resume: {at}; with --export its parameters are written")
        return export(options.export, step.model, state.params, console)
    epochs = f"{options.steps * options.batch / data.num_rows:.2f} epochs"
    console.print(
        f"{data.num_rows:,} sequences of {options.sequence} tokens, {options.batch} per step, {epochs}"
    )

    every = options.log_every, options.eval_every, options.save_every
    traced = range(first + 6, first + 6 + options.profile)
    with (
        checkpoints,
        _run.Metrics(options, checkpoints, COLUMNS, state, options.peak_tflops) as metrics,
        noted_interrupts() as interrupted,
        contextlib.ExitStack() as trace,
    ):
        for at in range(first + 1, options.steps + 1):
            if options.profile and at == traced.start:
                trace.enter_context(jax.profiler.trace(str(options.out / "trace")))
            state, found = step(state, step.shard(next(iterator)))
            rate = learning_rate(at - 1)
            metrics.add(at, loss=found["loss"], gradient_norm=found["grad_norm"], learning_rate=rate)
            if options.profile and at == traced.stop - 1:
                jax.block_until_ready(found)
                trace.close()
            log, evaluate, save = (at == options.steps or at % n == 0 for n in every)
            stopping = interrupted and jax.process_count() == 1
            if not (log or evaluate or save or stopping or at == first + 1):
                continue
            number = _agreed(interrupted)
            metrics.read(options.batch * options.sequence)
            if evaluate and data.evaluation:
                metrics.evaluated(step.evaluate(state, data.held_out(part)))
            metrics.write_rows()
            if save or number:
                folder.check()
                checkpoints.save(at, state, data.place(iterator, part))
            if number and at < options.steps:
                metrics.exit_stopped(at, number)
    metrics.print_results()
    if options.export:
        export(options.export, step.model, state.params, console)


def _agreed(interrupted: list[int]) -> int:
    """The signal that any of the processes has got, or 0."""
    number = interrupted[0] if interrupted else 0
    if jax.process_count() > 1:
        number = int(multihost_utils.process_allgather(jnp.int32(number)).max())
    return number


def export(path: Path, model: Any, params: Any, console: Console) -> None:
    """Writes the parameters: a .pth file for other programs, or a folder, to which every process writes."""
    if path.suffix and jax.process_count() > 1:
        params = multihost_utils.process_allgather(params, tiled=True)
    if not path.suffix or jax.process_index() == 0:
        save_checkpoint(path, model, params)
    if jax.process_index() == 0:
        console.print(f"parameters        {path}")


if __name__ == "__main__":
    main()
