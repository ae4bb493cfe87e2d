"""Options of ``pretrain.py``, and the sizes of models by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

from _cli import check_numbers


class Size(NamedTuple):
    """A model of the official layers and width, and what is usual in its training."""

    num_layers: int
    hidden_size: int
    learning_rate: float  # RWKV-LM's train.py names those of 0.1B, 0.4B and 1.5B; larger models take no more
    vocab_size: int = 65536
    sequence: int = 4096
    batch: int = 32
    steps: int | None = None  # one pass over the data
    held_out: float = 0.001
    save_every: int = 500


SIZES = {
    "tiny": Size(3, 128, 3e-3, 256, 128, 8, 400, 0.05, 100),  # bytes, for a laptop
    "0.1B": Size(12, 768, 6e-4),
    "0.4B": Size(24, 1024, 4e-4),
    "1.5B": Size(24, 2048, 3e-4),
    "2.9B": Size(32, 2560, 3e-4),
    "7B": Size(32, 4096, 2e-4),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a pretraining run."""

    data: Path | None = None
    """binidx pair, text or JSON Lines file, or a folder of those (default: Python's documentation)"""
    eval_data: Path | None = None
    """the same to evaluate on, instead of a part of --data"""
    tokenizer: str | None = None
    """of text: bytes, rwkv_vocab_v20230424, or a tokenizer.json (default: what the vocabulary says)"""
    text_field: str = "text"
    """field of JSON Lines with the text"""
    cache: Path = Path("~/.cache/fla_jax/tokens")
    """folder for the tokens of text, and on GPUs for compiled programs"""
    tokenizing_processes: int | None = None
    """processes that tokenize (default: one a core)"""
    out: Path = Path("runs/pretrain")
    """folder for checkpoints and metrics, shared by all hosts; an earlier run there is moved aside"""
    resume: bool = False
    """go on from the last checkpoint in --out, on any number of devices"""
    export: Path | None = None
    """.pth file or folder for the parameters at the end, with --resume also of an ended run"""
    dry_run: bool = False
    """compile only; print parameters and memory per device, and whether it fits (status 1 if not)"""

    model: Literal["rwkv7", "rwkv6"] = "rwkv7"
    """which architecture"""
    size: Literal["tiny", "0.1B", "0.4B", "1.5B", "2.9B", "7B"] = "tiny"
    """layers and width by the official name"""
    num_layers: int | None = None
    """layers (default: of --size)"""
    hidden_size: int | None = None
    """channels (default: of --size)"""
    head_dim: int = 64
    """channels per head"""
    vocab_size: int | None = None
    """tokens (default: 65536; 256, bytes, for tiny)"""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """compute dtype, fp8: bf16 with FP8 products in training; parameters, decays, states, logits stay float32
    (auto: bf16 on GPUs, fp32 elsewhere)"""
    remat: Literal["auto", "none", "dense", "full"] = "auto"
    """what the backward pass recomputes: nothing, all but dense projections, all (auto: none if it fits)"""
    reshard_after_forward: bool = True
    """gather parameters in the backward pass again, with --mesh-fsdp (no: less communication, more memory)"""
    scan_layers: bool = True
    """stack the layers' parameters; a loop runs them with --mesh-fsdp and on CPUs, else they are unrolled"""

    mesh_data: int | None = None
    """devices that split the batch alone; one size may be -1 (default: all that remain)"""
    mesh_fsdp: int = 1
    """devices that split the batch, the parameters and the optimizer's moments"""
    mesh_tensor: int = 1
    """devices that split heads and channels"""
    mesh_sequence: int = 1
    """devices that split the tokens of each row"""
    overlap: bool = False
    """XLA options that let GPUs communicate while they compute"""
    coordinator: str | None = None
    """address:port of process 0, where several processes train together and no SLURM or Open MPI tells"""
    num_processes: int | None = None
    """processes in all, with --coordinator"""
    process_id: int | None = None
    """this process' number, with --coordinator"""

    sequence: int | None = None
    """tokens in a row (default: 4096; 128 for tiny)"""
    batch: int | None = None
    """rows per optimizer step, over all devices (default: 32; 8 for tiny)"""
    carry_state: bool = False
    """start a row that continues a document from the state at the end of the row before"""
    accumulate: int = 1
    """microbatches that a batch is computed in, one after the other, to save memory of activations"""
    steps: int | None = None
    """optimizer steps in all (default: one pass over the data; 400 for the default text)"""
    learning_rate: float | None = None
    """largest learning rate (default: of --size)"""
    final_learning_rate: float | None = None
    """learning rate at the last step, reached along a cosine (default: a tenth)"""
    warmup_steps: int = 10
    """steps of the linear warm-up"""
    weight_decay: float = 0.1
    """decay of embedding, head and dense projections"""
    seed: int = 0
    """of the initial parameters and the order of the data"""

    held_out: float | None = None
    """part of the rows that is held out (default: 0.001; 0.05 for tiny), without --eval-data"""
    eval_every: int | None = None
    """steps from one evaluation to the next (default: --save-every)"""
    eval_rows: int = 256
    """rows to evaluate on, at most"""
    save_every: int | None = None
    """steps from one checkpoint to the next (default: 500; 100 for tiny)"""
    keep: int = 3
    """checkpoints to keep"""
    log_every: int = 10
    """steps from one look at the losses to the next"""
    peak_tflops: float | None = None
    """of a device, for the share of 6N (default: by its name)"""
    memory_gb: float | None = None
    """of a device, for --dry-run and --remat (default: what it has)"""
    profile: int = 0
    """write a trace of so many steps to --out/trace"""


# between a run and its resumption; the noted ones are printed
MAY_CHANGE = {"data", "eval_data", "cache", "tokenizing_processes", "out", "resume", "export", "dry_run"}
MAY_CHANGE |= {"mesh_data", "mesh_fsdp", "mesh_tensor", "mesh_sequence", "overlap", "coordinator", "remat"}
MAY_CHANGE |= {"reshard_after_forward"}
MAY_CHANGE |= {"num_processes", "process_id", "accumulate", "eval_every", "eval_rows", "save_every", "keep"}
MAY_CHANGE |= {"log_every", "peak_tflops", "memory_gb", "profile", "tokenizer", "text_field"}
NOTED = frozenset({"learning_rate", "final_learning_rate", "warmup_steps", "weight_decay", "steps"})

MAY_BE_0 = ("profile", "warmup_steps", "weight_decay", "final_learning_rate", "held_out", "process_id")


def completed(options: Options) -> Options:
    """The options, with defaults of the size for those that were not given; ``steps`` may stay open."""

    def fill(options: Options, defaults: dict[str, Any]) -> Options:
        missing = {name: x for name, x in defaults.items() if getattr(options, name) is None}
        return dataclasses.replace(options, **missing)

    size = SIZES[options.size] if options.data is None else SIZES[options.size]._replace(steps=None)
    filled: Any = fill(options, size._asdict())
    rest = {"final_learning_rate": filled.learning_rate / 10, "eval_every": filled.save_every}
    filled = fill(filled, rest)
    return filled if options.eval_data is None else dataclasses.replace(filled, held_out=0.0)


def check(options: Options) -> None:
    """Refuses values that no run can have; model, mesh and data check the rest."""
    check_numbers(options, *MAY_BE_0, seed_bits=32)
    if options.held_out is not None and options.held_out >= 1:
        raise ValueError(f"--held-out must be below 1, got {options.held_out}")
    if options.batch is not None and options.batch % options.accumulate:
        raise ValueError(f"--accumulate must divide --batch {options.batch}, got {options.accumulate}")
    if options.steps is not None and options.steps <= options.warmup_steps:
        raise ValueError(f"--steps must be above --warmup-steps {options.warmup_steps}, got {options.steps}")
    if options.export is not None:
        if options.export.suffix not in (".pth", ""):
            raise ValueError(f"--export must name a folder or a .pth file, got {options.export}")
        if not options.export.absolute().parent.is_dir():
            raise ValueError(f"--export: there is no folder {options.export.parent}")
    given = [options.coordinator, options.num_processes, options.process_id]
    if any(x is not None for x in given) and None in given:
        raise ValueError("--coordinator, --num-processes and --process-id must be given together")
