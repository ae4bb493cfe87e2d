"""The memory of a device: what a run may keep for its backward pass, and what ``pretrain.py --dry-run`` says
by the compiler's account.
"""

from __future__ import annotations

import os
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from .options import Options
from .program import Trainer, build_model, count_parameters, mesh_of, precision

# Bytes of a step that keeps everything: parameters, gradients, two moments in float32; what a layer keeps of
# a token, by channels and bytes of a number (34 measured on an H200 for RWKV-7, 36 for RWKV-6); a block of
# logits, of a gradient and of what is cast, by words of the vocabulary.
OF_A_PARAMETER, OF_A_TOKEN, OF_A_WORD = 16, 40, 4096 * 8


def rematerialisation(options: Options) -> Literal["none", "dense", "full"]:
    """``--remat``, ``auto`` resolved: ``none``, which is the fastest, where by an estimate from above a
    device has the memory for it, else ``dense``. All processes of a run get the same.
    """
    if options.remat != "auto":
        return options.remat
    there = available(options.memory_gb)
    keeps = there is not None and everything(options) <= there
    if jax.process_count() > 1:
        keeps = bool(multihost_utils.broadcast_one_to_all(np.int32(keeps)))
    return "none" if keeps else "dense"


def everything(options: Options) -> float:
    """Bytes that a device needs at most where nothing is rematerialised."""
    C, L, V = options.hidden_size, options.num_layers, options.vocab_size
    mesh = mesh_of(options).shape
    parameters = (14 * L * C * C + 2 * V * C) / (mesh["fsdp"] * mesh["tensor"])
    share = mesh["data"] * mesh["fsdp"] * mesh["sequence"]
    tokens = options.batch * options.sequence / options.accumulate / share
    width = 2 if precision(options) == "bf16" else 4
    return OF_A_PARAMETER * parameters + OF_A_TOKEN * width * tokens * C * L + OF_A_WORD * V


def report(options: Options, console: Console) -> bool:
    """Compiles the training step without making anything; prints what it needs. Returns whether it fits."""
    dtype = precision(options)
    model = build_model(options, dtype)
    trainer = Trainer(options, model, options.steps or 1_000_000)
    state, batch = trainer.shapes()
    total, counted = count_parameters(state.params)
    mesh = ", ".join(f"{name} {size}" for name, size in trainer.mesh.shape.items())
    device = jax.devices()[0]
    console.print(f"model             {options.model} {options.size}, {dtype}")
    console.print(f"parameters        {total:,}, {counted:,} without the embedding")
    console.print(f"devices           {jax.device_count()} x {device.device_kind} ({mesh})")
    layers = "in a loop" if model.config.scan_layers is True else "written out"
    console.print(f"layers            {layers}, as {device.platform} runs them")
    console.print(f"rematerialised    {options.remat}")
    pieces = f" in {options.accumulate} pieces" if options.accumulate > 1 else ""
    console.print(f"step              {options.batch} rows of {options.sequence} tokens{pieces}")
    with console.status("compiling"):
        found = trainer.step.lower(state, batch).compile().memory_analysis()
    stored = found.argument_size_in_bytes
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    needed = stored + new + found.temp_size_in_bytes + found.generated_code_size_in_bytes
    console.print(f"memory a device   {needed / 1e9:.2f} GB, as {device.platform} compiles it:")
    console.print(f"  state and batch {stored / 1e9:.2f} GB")
    console.print(f"  temporaries     {(needed - stored) / 1e9:.2f} GB")
    there = available(options.memory_gb)
    if there is None:
        console.print("fits              unknown: give --memory-gb")
        return True
    fits = needed <= there
    console.print(f"fits              {'yes' if fits else 'no'}, {there / 1e9:.2f} GB are there")
    return fits


def available(given: float | None) -> float | None:
    """Bytes of a device: as given, as JAX may use, or a share of the machine's."""
    if given is not None:
        return given * 1e9
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.local_devices()[0].platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count()
    return None
