"""Fine-tunes a model on questions and answers: ``python examples/finetune.py --checkpoint FILE --data FILE``.

A line of --data is ``{"prompt": "...", "answer": "..."}``. Only answers are learned, of packed dialogues.

    python examples/finetune.py --checkpoint some/folder --data dialogues.jsonl --method state
    python examples/finetune.py ... --merged     # one file for examples/generate.py

Dialogues have the format of the checkpoint's chat template, as `fla_jax.serve` reads them.
--method lora trains small matrices beside the frozen weights (adapter/, for Hugging Face PEFT), state the
initial states (states.pth, for RWKV-PEFT), full all weights (model.pth, or model/ with the chat template).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
from _cli import check_numbers, parse, program
from _dialogues import Batch, batches, packed, read
from generate import load_model
from rich.progress import track

from fla_jax import training
from fla_jax.checkpoints import save_checkpoint
from fla_jax.generation import WorldTemplate, chat_template, checkpoint_tokenizer
from fla_jax.parallel import TrainStep, make_mesh

RATES = {"lora": 3e-4, "state": 1.0, "full": 1e-5}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the fine-tuning."""

    checkpoint: Path
    """model to tune: whatever examples/generate.py reads"""
    data: Path
    """JSON lines with the fields prompt and answer; a tenth is held out"""
    method: Literal["lora", "state", "full"] = "lora"
    """what is trained"""
    out: Path = Path("runs/finetune")
    """directory for what was trained"""
    merged: bool = False
    """save a whole model, as --method full does, instead of adapter or states"""
    tokenizer: str | None = None
    """bytes, rwkv_vocab_v20230424, or a tokenizer.json (default: the checkpoint's)"""
    sequence: int = 512
    """tokens per sequence; longer dialogues are cut"""
    batch: int = 8
    """sequences per step"""
    epochs: int = 2
    """passes over the data"""
    learning_rate: float | None = None
    """largest learning rate; it falls to a hundredth (default: 3e-4 for lora, 1 for state, 1e-5 for full)"""
    rank: int = 16
    """of LoRA's matrices"""
    dropout: float = 0.0
    """of LoRA's inputs"""
    base_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """of the frozen weights; --method full trains float32 and saves the checkpoint's dtype"""
    seed: int = 0
    """of LoRA, dropout and the order of the data"""


def build_step(options: Options, model: Any, params: Any, max_segments: int, steps: int) -> tuple[Any, Any]:
    """The training step of the method, and what it trains."""
    key, rate = jax.random.key(options.seed), options.learning_rate or RATES[options.method]
    schedule = training.rwkv_schedule(rate, 0.01 * rate, steps, min(10, steps // 10))

    def of_model(params: Any, batch: Batch, lora: Any = None, key: jax.Array | None = None) -> jax.Array:
        tokens, mask, ids = batch
        fields = tokens[:, :-1], tokens[:, 1:], ids[:, :-1], mask
        return training.packed_loss(model, params, *fields, l2wrap=0.0, lora=lora, dropout_key=key)

    packing = {"every_segment": True, "max_segments": max_segments}
    of_states = lambda states, batch, *, frozen: training.state_loss(model, frozen, states, *batch, **packing)
    of_lora = lambda lora, batch, *, frozen, key=None: of_model(frozen, batch, lora, key)
    common: Any = {"weight": lambda batch: batch[1].sum()}
    if options.method == "full":  # in float32: most of its steps would be rounded away in bfloat16
        model = model.clone(config=dataclasses.replace(model.config, param_dtype="float32"))
        loss, trained = of_model, jax.tree.map(lambda x: x.astype("float32"), params)
    elif options.method == "state":
        loss, trained = of_states, training.zero_states(model)
    else:
        trained = training.init_lora(params, key, rank=options.rank, dropout=options.dropout)
        loss = of_lora
        common["rng"] = key if options.dropout else None
    if options.method != "full":
        common |= {"params": trained, "frozen": jax.tree.map(lambda x: x.astype(options.base_dtype), params)}
    mesh, optimizer = (
        make_mesh(devices=jax.devices()[:1]),
        training.rwkv_optimizer(schedule, weight_decay=0.0),
    )
    return TrainStep(model, optimizer, mesh, loss, **common), trained


def save(options: Options, model: Any, params: Any, trained: Any) -> Path:
    """Writes what was trained, alone or merged; a whole model in the dtypes of ``params``."""
    is_whole = options.merged or options.method == "full"
    # a .pth file has no place for the template in whose format the model was tuned
    is_world = isinstance(chat_template(options.checkpoint), WorldTemplate)
    tokenizer, whole = (None, "model.pth") if is_world else (options.checkpoint, "model")
    path = options.out / (whole if is_whole else {"lora": "adapter"}.get(options.method, "states.pth"))
    if not is_whole and options.method == "lora":
        training.save_lora(path, model, trained)
    elif not is_whole:
        training.save_states(path, trained)
    elif options.method == "state":
        save_checkpoint(path, model, params, states=trained, tokenizer=tokenizer)
    elif options.method == "full":
        rounded = jax.tree.map(lambda x, like: x.astype(like.dtype), trained, params)
        save_checkpoint(path, model, rounded, tokenizer=tokenizer)
    else:
        save_checkpoint(path, model, training.merge_lora(params, trained), tokenizer=tokenizer)
    return path


def run(options: Options) -> None:
    """Tunes and prints."""
    model, params = load_model(options.checkpoint)
    vocab_size = model.config.vocab_size
    tokenizer = checkpoint_tokenizer(options.checkpoint, options.tokenizer, vocab_size=vocab_size)
    if getattr(tokenizer, "end_of_text", None) is None:
        raise ValueError("--tokenizer: it has no token that ends a text, as every answer must")
    template = chat_template(options.checkpoint)
    parts = read(options.data, tokenizer, template, options.sequence + 1, options.seed)
    held_out, data = (packed(part, options.sequence, options.batch) for part in parts)
    number = len(data[0]) // options.batch
    max_segments = int(max(held_out[2].max(), data[2].max())) + 1
    step, trained = build_step(options, model, params, max_segments, number * options.epochs)
    state, sizes = step.start(trained), [sum(x.size for x in jax.tree.leaves(p)) for p in (trained, params)]
    evaluate = lambda: step.evaluate(state, batches(held_out, options.batch))
    print(f"trained     {sizes[0]:,} parameters ({options.method}); the model has {sizes[1]:,}")
    compiled = step.lower(state, step.shard(next(batches(data, options.batch)))).compile()
    print(f"memory      {training.compiled_memory(compiled) / 1e9:.3f} GB per step, as the compiler plans it")
    print(f"before      {evaluate():.4f} nats per token of held-out answers")
    for epoch in range(options.epochs):
        shuffled = batches(data, options.batch, seed=(options.seed, epoch))
        for batch in track(shuffled, description=f"epoch {epoch + 1}", total=number):
            state, _ = step(state, step.shard(batch))
    print(f"after       {evaluate():.4f} nats per token of held-out answers")
    print(f"saved       {save(options, model, params, state.params)}")


@program(lower="--batch or --sequence")
def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    options = parse(Options, arguments, __doc__)
    check_numbers(options, "dropout")
    with training.lock_folder(options.out):
        run(options)


if __name__ == "__main__":
    main()
