"""``pretrain.py --dry-run``: parameters, and the memory of a device by the compiler's account."""

from __future__ import annotations

import os

import jax
from rich.console import Console

from .options import Options
from .program import Trainer, build_model, count_parameters, precision


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
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.devices()[0].platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count()
    return None
