r"""Continues a text with a trained model: ``python examples/generate.py --checkpoint FILE --prompt "Once upon
a time"``.

    # official weights, RWKV-6 or RWKV-7
    python examples/generate.py --checkpoint RWKV-x070-World-0.1B.pth --prompt "The Eiffel tower"
    python examples/generate.py --checkpoint some/safetensors/directory --tokenizer tokenizer.json \
        --prompt "The Eiffel tower"
    # what examples/train_lm.py has trained
    python examples/generate.py --checkpoint runs/train_lm --prompt "The "
    # several at once
    python examples/generate.py --checkpoint runs/train_lm --prompt "The " "A class" "If"

One prompt is continued token by token, as they come; several are continued together and printed at the end.
Tokens/s, without the first one, come last, on the error output.
World models need ``pip install rwkv`` for their vocabulary, a tokenizer.json needs
``pip install tokenizers``, models on bytes need nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from _cli import first_device, parse, program

from fla_jax.checkpoints import load_checkpoint
from fla_jax.generation import Sampling, decode_stream, load_tokenizer, stream, uncounted
from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM
from fla_jax.training import initial_state, load_states

MODELS = {"rwkv6": (RWKV6ForCausalLM, RWKV6Config), "rwkv7": (RWKV7ForCausalLM, RWKV7Config)}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


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
    """factor by which that is forgotten at every step"""
    stop: tuple[int, ...] | None = None
    """tokens that end the text (default: 0, the end of a document, for the World vocabulary, none
    otherwise)
    """
    ban: tuple[int, ...] = ()
    """tokens that never come"""
    seed: int = 0
    """of the random choices; the same seed gives the same text"""
    states: Path | None = None
    """tuned initial states, a .pth of examples/state_tuning.py or RWKV-PEFT"""
    tokenizer: str | None = None
    """bytes, rwkv_vocab_v20230424, or a tokenizer.json (default: by the size of the vocabulary)"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """compute dtype (auto: bf16 on CUDA, fp32 elsewhere)"""


def load_model(path: Path, precision: str = "auto") -> tuple[Any, Any]:
    """Model and parameters of a checkpoint of any kind that this repository reads."""
    on_gpu = first_device().platform in ("gpu", "cuda")
    dtype = DTYPES["bf16" if on_gpu else "fp32"] if precision == "auto" else DTYPES[precision]
    if not (path / "options.json").exists():
        return load_checkpoint(path, dtype=dtype)
    import _run  # only here: Orbax takes a while to import

    options = _run.described(path)
    try:
        kind, config = MODELS[options["model"]]
        sizes = [options[name] for name in ("hidden_size", "num_layers", "head_dim")]
    except KeyError as error:
        raise ValueError(f"{path / 'options.json'} is not that of a run of train_lm.py: no {error}") from None
    params = _run.read_last(path)["params"]
    return kind(config(256, *sizes, dtype=dtype)), params


def run(options: Options) -> None:
    """Generates and prints."""
    model, params = load_model(options.checkpoint, options.precision)
    vocab_size = model.config.vocab_size
    tokenizer = options.tokenizer and os.path.expanduser(options.tokenizer)
    tokenizer = load_tokenizer(tokenizer, vocab_size=vocab_size)
    stop = ((0,) if vocab_size > 65000 else ()) if options.stop is None else options.stop
    names = ("temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "penalty_decay")
    sampling = Sampling(
        **{name: getattr(options, name) for name in names},
        banned=options.ban,
        stop=stop,
        uncounted=uncounted(tokenizer, vocab_size),
    )
    prompts = [tokenizer.encode(text) for text in options.prompt]
    if not all(prompts):
        raise ValueError("--prompt must not be empty")
    state = (
        None
        if options.states is None
        else initial_state(model, load_states(options.states, model), len(prompts))
    )
    rows = [list[int]() for _ in prompts]
    began = 0.0

    def steps() -> Iterator[Any]:
        """The next token of each row, -1 for those that are over."""
        nonlocal began
        for new in stream(model, params, prompts, options.tokens, sampling, seed=options.seed, state=state):
            began = began or time.perf_counter()  # the first one waits for the compiler
            for row, token in zip(rows, new.tolist()):
                row += [token] * (token >= 0)
            yield new

    if len(prompts) == 1:
        pieces = decode_stream(tokenizer, (int(new[0]) for new in steps()))
        first = next(pieces, "")  # with it, all arguments have proved good: an error gets a line of its own
        for piece in itertools.chain((options.prompt[0], first), pieces):
            print(piece, end="", flush=True)
        print("\n\n", end="", flush=True, file=sys.stderr)
    else:
        for _ in steps():
            pass
        texts = (text + tokenizer.decode(row) for text, row in zip(options.prompt, rows))
        print("\n\n---\n\n".join(texts), flush=True)
    count, late = sum(map(len, rows)), time.perf_counter() - began
    timed = count - sum(bool(row) for row in rows)
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
