"""Compiled programs of a server: the folder that keeps them, and those that it has before it answers."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import jax

from ..generation import Generator, SamplingParams
from ..generation.prefill_plan import chunk_sizes, plan
from ..generation.rows import TOGETHER

# JAX keeps no program that compiles in less than a second; a server has dozens of them
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def keep_programs(folder: str | None) -> None:
    """Keeps compiled programs in JAX's compilation cache, for processes that start later.

    Call it before JAX compiles anything.

    Args:
        folder: of the cache, also a URL that JAX knows; empty for no cache. None for JAX's own setting
            (``JAX_COMPILATION_CACHE_DIR``), else ``fla_jax/programs`` in the user's folder of caches; there
            is no cache where the latter cannot be written.

    Raises:
        OSError: ``folder`` cannot be written.
    """
    if folder == "":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    for name, value in _KEEP_ALL.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if folder is None and jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    path = folder or str(_user_caches() / "fla_jax/programs")
    try:
        if "://" not in path:
            Path(path).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
    except OSError as error:
        if folder:
            raise
        print(f"Compiled programs are not kept for the next start: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", path)


def _user_caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def warm_up(generator: Generator, tokens: int) -> None:
    """Compiles the programs that decode, and those that read prompts of up to ``tokens`` tokens.

    Prompts are read alone or several together, see `fla_jax.generation.rows.TOGETHER`; each number and each
    chunk size is a program. Not compiled are programs for prompts of different lengths that are read
    together, log-probabilities and biases.
    """
    params = generator.engine.params
    width = generator.engine.decoder.model.config.hidden_size
    (device, *_) = jax.tree.leaves(params)[0].devices()
    for batch in sorted({min(number, generator.engine.slots) for number in TOGETHER}):
        sizes = chunk_sizes(width, batch, device)
        shortest: dict[tuple[bool, int], int] = {}  # prompt that needs a program
        for length in range(1, tokens + 1):
            chunks = plan(length, sizes)
            shortest.setdefault((len(chunks) > 1, chunks[-1]), length)
        for length in shortest.values():
            generator.generate([[0] * length] * batch, SamplingParams.policy(0.0, max_tokens=1))
