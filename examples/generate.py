r"""Continues a text with a trained model:
``python examples/generate.py --checkpoint FILE --prompt "Once upon a time"``.

    # official weights, RWKV-6 or RWKV-7, or a folder of safetensors
    python examples/generate.py --checkpoint RWKV-x070-World-0.1B.pth --prompt "The Eiffel tower"
    python examples/generate.py --checkpoint some/folder --tokenizer tokenizer.json --prompt "The tower"
    # a model of examples/train_lm.py; several prompts at once
    python examples/generate.py --checkpoint runs/train_lm --prompt "The " "A class" "If"

A single prompt is continued token by token; several are continued together and printed at the end. The error
output gets tokens/s, without the first token. World models need ``pip install rwkv`` for their vocabulary, a
tokenizer.json needs ``pip install tokenizers``, models of bytes need neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from pathlib import Path
from typing import Any, Literal

from _cli import compute_dtype, parse, program

from fla_jax.checkpoints import load_checkpoint
from fla_jax.generation import Generator, SamplingParams, checkpoint_tokenizer, uncounted
from fla_jax.training import TrainingCheckpoints, initial_state, load_states, run_description


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a generation."""

    checkpoint: Path
    """an official .pth file, a directory of safetensors, or the --out of examples/train_lm.py"""
    prompt: tuple[str, ...]
    """one text to continue, or several"""
    tokens: int = 200
    """new tokens, at most"""
    temperature: float = 1.0
    """0 always takes the most probable token"""
    top_k: int = 0
    """only so many of the most probable tokens; 0 for all"""
    top_p: float = 0.85
    """only the most probable tokens that together reach this probability; 1 for all"""
    presence_penalty: float = 0.2
    """against tokens that came before"""
    frequency_penalty: float = 0.2
    """against tokens, as often as they came before"""
    penalty_decay: float = 0.996
    """factor on these counts at every step"""
    stop: tuple[int, ...] | None = None
    """tokens that end the text (default: the tokenizer's end of text)"""
    ban: tuple[int, ...] = ()
    """tokens that never come"""
    seed: int = 0
    """of the random choices; the same seed gives the same text"""
    states: Path | None = None
    """tuned initial states, a .pth of examples/state_tuning.py or RWKV-PEFT"""
    tokenizer: str | None = None
    """bytes, rwkv_vocab_v20230424, or a tokenizer.json (default: the checkpoint's)"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """compute dtype (auto: bf16 on CUDA, fp32 elsewhere)"""


def load_model(path: Path, precision: str = "auto") -> tuple[Any, Any]:
    """Model and parameters of any checkpoint that this repository reads."""
    dtype = compute_dtype(precision)
    if not (path / "options.json").exists():
        return load_checkpoint(path, dtype=dtype, fp8=False)  # which only training has a use for
    import _run  # only for runs of train_lm.py: it imports a lot

    options = run_description(path)
    try:
        model = _run.build_model(argparse.Namespace(**options), vocab_size=256, dtype=dtype)
    except AttributeError as error:
        raise ValueError(
            f"{path / 'options.json'} is not that of a run of train_lm.py: no {error.name!r}"
        ) from None
    state, _ = TrainingCheckpoints(path / "checkpoints", read_only=True).restore()
    return model, state["params"]


def run(options: Options) -> None:
    """Generates and prints."""
    model, params = load_model(options.checkpoint, options.precision)
    vocab_size = model.config.vocab_size
    tokenizer = checkpoint_tokenizer(options.checkpoint, options.tokenizer, vocab_size=vocab_size)
    names = ("temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "penalty_decay")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given |= {"banned": options.ban, "stop_tokens": options.stop or (), "max_tokens": options.tokens}
    given |= {"uncounted": uncounted(tokenizer, vocab_size), "ignore_eos": options.stop is not None}
    if not options.prompt or not all(options.prompt):
        raise ValueError("--prompt must not be empty")
    state = None
    if options.states is not None:
        state = initial_state(model, load_states(options.states, model), batch=1)
    generator = Generator(model, params, slots=len(options.prompt), tokenizer=tokenizer)
    streams = [
        generator.stream(prompt, SamplingParams(**given, seed=options.seed + i), state=state)
        for i, prompt in enumerate(options.prompt)
    ]
    rounds = itertools.zip_longest(*streams)  # one token of each text that has not ended
    first = next(rounds)  # before anything is printed: an error gets a line for itself
    began = time.perf_counter()  # the first token waits for the compiler
    texts, is_single = [*options.prompt], len(streams) == 1
    if is_single:
        print(texts[0], end="")
    for events in itertools.chain([first], rounds):
        for i, event in enumerate(events):
            texts[i] += event.text if event else ""
        if is_single:
            print(events[0].text, end="", flush=True)
    late = time.perf_counter() - began
    if is_single:
        print("\n\n", end="", flush=True, file=sys.stderr)
    else:
        print("\n\n---\n\n".join(texts), flush=True)
    count = sum(len(one.completion.tokens) for one in streams)
    timed = count - sum(len(event.tokens) for event in first)
    print(f"{count} tokens" + (f", {timed / late:.1f} tokens/s" if timed else ""), file=sys.stderr)


@program(lower="the number of prompts, or take a smaller model")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    try:
        run(options)
    except FloatingPointError as error:
        raise ValueError(f"{options.checkpoint}: {error}") from error


if __name__ == "__main__":
    main()
