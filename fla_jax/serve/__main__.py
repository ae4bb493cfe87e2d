"""``python -m fla_jax.serve CHECKPOINT``: a checkpoint behind OpenAI's API."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import tyro
import uvicorn

from ..checkpoints import load_checkpoint
from ..generation import Generator, chat_template, checkpoint_tokenizer
from .app import Limits, create_app
from .programs import keep_programs, warm_up

# Longest time that the event loop keeps the interpreter's lock while the generator's thread waits for it: in
# Python's 5 ms the device runs out of work.
_SWITCH_SECONDS = 0.0005


@dataclasses.dataclass(frozen=True)
class Options:
    """Serves a checkpoint to OpenAI's clients. SIGTERM ends the server once all requests are answered."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """file or folder that `fla_jax.checkpoints.load_checkpoint` reads"""
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 answers other machines too: set an API key first"""
    port: int = 8000
    """port to listen on; 0 for any free one"""
    name: str | None = None
    """name of the model for clients (default: the checkpoint's name)"""
    tokenizer: str | None = None
    """as `fla_jax.generation.load_tokenizer` takes it (default: the checkpoint's)"""
    api_key_env: str = "FLA_JAX_API_KEY"
    """environment variable with the key that clients must send; not set: none"""
    slots: int = 64
    """completions that decode together"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """compute dtype"""
    weights: Literal["int8", "int4"] | None = None
    """precision of the decoding weights (default: the compute dtype)"""
    state_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the states (default: float32)"""
    warm_up: int = 32
    """longest prompt, in tokens, whose programs are compiled before the server answers; 0 to compile when
    requests come"""
    compilation_cache: str | None = None
    """folder that keeps compiled programs for the next start; empty for none (default: that of
    JAX_COMPILATION_CACHE_DIR, else fla_jax/programs in XDG_CACHE_HOME or ~/.cache)"""
    limits: Annotated[Limits, tyro.conf.OmitArgPrefixes] = dataclasses.field(default_factory=Limits)


def main(options: Options) -> None:
    """Loads the checkpoint and serves until a signal ends it."""
    try:
        keep_programs(options.compilation_cache)
    except OSError as error:
        sys.exit(f"--compilation-cache: {error}")
    model, params = load_checkpoint(options.checkpoint, dtype=options.dtype)
    vocab_size = model.config.vocab_size
    tokenizer = checkpoint_tokenizer(options.checkpoint, options.tokenizer, vocab_size=vocab_size)
    generator = Generator(
        model,
        params,
        slots=options.slots,
        weights=options.weights,
        state_dtype=options.state_dtype,
        tokenizer=tokenizer,
    )
    if options.warm_up:
        began = time.monotonic()
        warm_up(generator, options.warm_up)
        took = time.monotonic() - began
        print(
            f"Programs for prompts of up to {options.warm_up} tokens are ready after {took:.1f} s", flush=True
        )
    key = os.environ.get(options.api_key_env)
    name, template = options.name or _default_name(options.checkpoint), chat_template(options.checkpoint)
    app = create_app(generator, name, template=template, limits=options.limits, api_key=key)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # uvloop keeps the interpreter's lock while it sends, and the generator's thread waits for it
    uvicorn.run(app, host=options.host, port=options.port, log_level="info", loop="asyncio")


def _default_name(checkpoint: Path) -> str:
    """The name of a folder, or of a file without its suffix."""
    return checkpoint.resolve().name if checkpoint.is_dir() else checkpoint.stem


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m fla_jax.serve"))
