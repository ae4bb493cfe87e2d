"""Processes, mesh, model and step of ``pretrain.py``, and the memory that they need."""

from __future__ import annotations

import os
from typing import Any

import _run
import jax
import numpy as np
from _cli import compute_dtype, first_device, on_gpu

from fla_jax.parallel import TrainStep, batch_sharding, make_mesh, overlap_options
from fla_jax.training import (
    available_memory,
    choose_remat,
    compiled_memory,
    count_parameters,
    rwkv_optimizer,
    rwkv_schedule,
)

from .options import Options

REMAT: dict[str, Any] = {"none": False, "dense": "dense", "full": True}


def start_processes(options: Options) -> None:
    """Joins the other processes of the run, if any."""
    if options.coordinator is not None:
        jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    elif any(int(os.environ.get(name) or 1) > 1 for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")):
        jax.distributed.initialize()  # JAX finds the rest there


def keep_programs(options: Options) -> None:
    """On GPUs, caches compiled programs: a resumed run starts sooner, and with the same program.

    Compiled anew, it may get other kernels for its products, with other last bits.
    """
    if on_gpu() and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache / "compiled"))


def build_model(options: Options, mesh: jax.sharding.Mesh) -> Any:
    """The model, without parameters; ``--remat auto`` resolved."""
    run: dict[str, Any] = {"dtype": compute_dtype(options.precision), "scan_layers": options.scan_layers}
    if options.scan_layers and options.mesh_fsdp == 1 and on_gpu():
        run["scan_layers"] = "unroll"  # the same parameters
    run |= {"vocab_size": options.vocab_size, "fp8": options.precision == "fp8"}
    run["reshard_after_forward"] = options.reshard_after_forward
    if options.remat != "auto":
        return _run.build_model(options, remat=REMAT[options.remat], **run)
    memory = None if options.memory_gb is None else options.memory_gb * 1e9
    sizes = dict(batch=options.batch, sequence=options.sequence, accumulate=options.accumulate)
    config = _run.build_model(options, **run).config
    return _run.build_model(options, remat=choose_remat(config, mesh, **sizes, memory=memory), **run)


def mesh_of(options: Options) -> jax.sharding.Mesh:
    """The mesh of the options."""
    try:
        sizes = {name: getattr(options, f"mesh_{name}") for name in ("data", "fsdp", "tensor", "sequence")}
        mesh = make_mesh(**sizes)
    except ValueError as error:
        raise ValueError(f"--mesh-...: {error}") from error
    if options.sequence % (parts := mesh.shape["sequence"]):
        wanted = f"--sequence must be a multiple of --mesh-sequence = {parts}"
        raise ValueError(f"{wanted}, got {options.sequence}")
    size, parts = options.batch // options.accumulate, mesh.shape["data"] * mesh.shape["fsdp"]
    if size % parts:
        wanted = f"--batch / --accumulate must be a multiple of --mesh-data * --mesh-fsdp = {parts}"
        raise ValueError(f"{wanted}, got {options.batch} / {options.accumulate} = {size}")
    return mesh


def build_step(options: Options, steps: int) -> tuple[TrainStep, Any]:
    """The training step, and the learning rate of a step, counted from 0; compiles nothing."""
    mesh = mesh_of(options)
    rates = options.learning_rate, options.final_learning_rate
    schedule = rwkv_schedule(*rates, steps, warmup_steps=options.warmup_steps)
    optimizer = rwkv_optimizer(schedule, weight_decay=options.weight_decay)
    # with one at a time, data parallelism keeps what the gradients of all layers are summed from
    in_flight = 16 if mesh.size == mesh.shape["data"] else 1
    compiler_options = overlap_options(in_flight) if options.overlap and on_gpu() else {}
    if on_gpu():  # else sums of the embedding's gradients have any order, and a resumed run other last bits
        compiler_options["xla_gpu_exclude_nondeterministic_ops"] = True
    run: dict[str, Any] = {"accumulate": options.accumulate, "compiler_options": compiler_options}
    run |= {
        "metrics": ("loss", "grad_norm"),
        "carry_sequences": options.batch if options.carry_state else None,
    }
    return TrainStep(build_model(options, mesh), optimizer, mesh, **run), jax.jit(schedule)


def report(options: Options) -> bool:
    """Compiles the training step without arrays; prints the memory that it needs. Returns whether it fits."""
    step, _ = build_step(options, options.steps or 1_000_000)
    state, config, device = step.abstract_state(), step.model.config, first_device()
    shape, sharding = (options.batch, options.sequence), batch_sharding(step.mesh)
    dtypes = {"tokens": np.int32, "labels": np.int32, "segment_ids": np.int32, "mask": np.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, x, sharding=sharding) for name, x in dtypes.items()}
    if options.carry_state:
        batch["continues"] = jax.ShapeDtypeStruct(shape[:1], np.bool_, sharding=sharding)
    compiled = step.lower(state, batch).compile()
    stored, needed = compiled.memory_analysis().argument_size_in_bytes, compiled_memory(compiled)
    there = available_memory() if options.memory_gb is None else options.memory_gb * 1e9
    fits = there is None or needed <= there
    if jax.process_index() > 0:
        return fits
    total, counted = count_parameters(state.params)
    has = "unknown" if there is None else f"{'yes' if fits else 'no'}, of {there / 1e9:.2f} GB"
    layers = "in a loop" if config.scan_layers is True else "unrolled"
    mesh = ", ".join(f"{name} {size}" for name, size in step.mesh.shape.items())
    print(f"model             {options.model} {options.size}, {config.dtype}")
    print(f"parameters        {total:,}, {counted:,} without the embedding")
    print(f"devices           {jax.device_count()} x {device.device_kind} ({mesh})")
    print(f"layers            {layers}, as {device.platform} runs them; remat={config.remat!r}")
    print(f"step              {shape[0]} sequences of {shape[1]} tokens, accumulate {options.accumulate}")
    print(f"memory per device {needed / 1e9:.2f} GB, as {device.platform} compiles it:")
    print(f"  state and batch {stored / 1e9:.2f} GB")
    print(f"  temporaries     {(needed - stored) / 1e9:.2f} GB")
    print(f"fits              {has}")
    return fits
