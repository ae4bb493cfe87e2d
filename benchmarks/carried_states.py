"""Losses of training with carried states: ``python benchmarks/carried_states.py``, on a CPU.

Documents longer than a row are trained in three ways, on Python's language reference, a byte a token:

* ``carried``: a row starts from the state at the end of the row that it continues;
* ``zeros``: the same batches, each row from a zero state;
* ``shuffled``: the same rows in random order, from zero states.

The first 4096 bytes of held-out documents, every tenth topic, are then read both ways. The table is in
docs/data.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import grain
import jax
import numpy as np
import tyro
from flax.training.train_state import TrainState

from fla_jax.data import pack_documents
from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
from fla_jax.parallel import TrainStep, make_mesh
from fla_jax.training import rwkv_optimizer, rwkv_schedule

Batch = dict[str, np.ndarray]
LONGEST = 4096  # tokens of a held-out document


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes."""

    length: int = 64
    """tokens of a row"""
    tokens: int = 1024
    """tokens of a batch"""
    steps: int = 400
    """optimiser steps"""
    hidden_size: int = 128
    """channels of the two layers"""
    seeds: tuple[int, ...] = (0, 1)
    """of parameters and order"""

    @property
    def size(self) -> int:
        """Rows of a batch."""
        return self.tokens // self.length


def sources() -> tuple[grain.MapDataset, grain.MapDataset]:
    """Documents to train on and to hold out; 0 ends each."""
    from pydoc_data.topics import topics

    texts = [np.frombuffer(topics[name].encode() + b"\0", np.uint8) for name in sorted(topics)]
    training = [text for i, text in enumerate(texts) if i % 10]
    held_out = sorted((text[:LONGEST] for text in texts[::10]), key=len)  # rows of a batch end together
    return grain.MapDataset.source(training), grain.MapDataset.source(held_out)


def from_zeros(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches of which no row continues another."""
    for batch in batches:
        yield {**batch, "continues": np.zeros_like(batch["continues"])}


def shuffled(batches: Iterator[Batch], count: int, seed: int) -> Iterator[Batch]:
    """The rows of ``count`` batches in random order."""
    found = list(itertools.islice(batches, count))
    rows = {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}
    order = np.random.default_rng(seed).permutation(len(rows["mask"]))
    for chosen in np.array_split(order, count):
        yield {name: x[chosen] for name, x in rows.items()}


def make_step(options: Options) -> TrainStep:
    """Compiled once for all ways."""
    model = RWKV7ForCausalLM(RWKV7Config(256, options.hidden_size, 2, head_dim=64))
    optimizer = rwkv_optimizer(rwkv_schedule(3e-3, 3e-4, options.steps, warmup_steps=20))
    return TrainStep(model, optimizer, make_mesh(devices=jax.devices()[:1]), carry_sequences=options.size)


def train(step: TrainStep, options: Options, way: str, seed: int, documents: grain.MapDataset) -> TrainState:
    """A trained state."""
    state = step.init(jax.random.key(seed))
    endless = documents.shuffle(seed=seed).repeat()
    batches = iter(pack_documents(endless, options.length, options.size, carry_state=True))
    if way == "shuffled":
        batches = shuffled(batches, options.steps, seed)
    for batch in itertools.islice(batches if way == "carried" else from_zeros(batches), options.steps):
        state, _ = step(state, step.shard(batch))
    return state


def main() -> None:
    """Prints the table."""
    options = tyro.cli(Options, description=__doc__)
    step, (training, held_out) = make_step(options), sources()
    print("| trained | seed | read from zeros | read with carried states | seconds |\n|---|---|---|---|---|")
    for seed, way in itertools.product(options.seeds, ("carried", "zeros", "shuffled")):
        began = time.perf_counter()
        state = train(step, options, way, seed, training)
        rows = lambda: pack_documents(held_out, options.length, options.size, carry_state=True)
        losses = step.evaluate(state, from_zeros(iter(rows()))), step.evaluate(state, rows())
        seconds = time.perf_counter() - began
        print(f"| {way} | {seed} | {losses[0]:.3f} | {losses[1]:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
