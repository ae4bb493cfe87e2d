"""The training step of RWKV-LM's own trainer, RWKV-v7/train_temp of a checkout: nothing of it is here.

It is imported, given the official initial values in bfloat16 and called as its trainer calls it; optimiser
and clipping are torch's, as for the other peer. Its module compiles CUDA extensions one after another when it
is imported: `compile_share`, in several processes at once before, leaves them in torch's folder of
extensions.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

from running.processes import Job, importable

from steps import torch_training
from steps.rows import Row

EXTENSIONS = 8
VARIABLES = {
    "RWKV_JIT_ON": "1",  # without, its code fails
    "RWKV_HEAD_SIZE": "64",
    "RWKV_MY_TESTING": "x070",
    "RWKV_KERNEL": "@rwkv3",
    "RWKV_HEAD_L2WRAP_CE_CHUNK": "0",
    "RWKV_FLOAT_MODE": "bf16",
}


def trainer_of(checkout: str) -> Path:
    """The folder that its module is imported from: of a checkout, or named itself.

    Raises:
        FileNotFoundError: there is no src/model.py in it.
    """
    folder = Path(checkout).resolve()
    folder = next((x for x in (folder / "RWKV-v7" / "train_temp", folder) if x.is_dir()), folder)
    if not (folder / "src" / "model.py").is_file():
        raise FileNotFoundError(f"--rwkv-lm: {folder} has no src/model.py: give a checkout of RWKV-LM")
    return folder


def _stand_in_for_lightning() -> None:
    """pytorch_lightning is no more than a base class here: where it is missing, torch's will do."""
    if importable("pytorch_lightning"):
        return
    import torch

    def module(name: str, **members: Any) -> Any:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        sys.modules[name] = made
        return made

    utilities = module("pytorch_lightning.utilities", rank_zero_info=print, rank_zero_only=lambda f: f)
    strategies = module("pytorch_lightning.strategies", DeepSpeedStrategy=type("DeepSpeedStrategy", (), {}))
    module(
        "pytorch_lightning",
        LightningModule=torch.nn.Module,
        utilities=utilities,
        strategies=strategies,
        __version__="none",
    )


def _module(checkout: str) -> Any:
    """Its module, imported in its folder, for it names its sources relative to that."""
    folder = trainer_of(checkout)
    os.environ.update(VARIABLES)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    _stand_in_for_lightning()
    return importlib.import_module("src.model")


def compile_share(checkout: str, share: int, shares: int) -> None:
    """Compiles the extensions whose number is ``share`` modulo ``shares``; the others are passed over, and so
    is what the module does with them when it is imported.
    """
    import torch
    from torch.utils import cpp_extension

    load, seen = cpp_extension.load, 0

    def some(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        return load(*arguments, **options) if (seen - 1) % shares == share else None

    def as_it_is(function: Any, *rest: Any, **options: Any) -> Any:
        return function

    cpp_extension.load = some
    torch.library.register_autograd = lambda *arguments, **options: None  # type: ignore[assignment]
    torch.jit.script = as_it_is  # type: ignore[assignment]
    _module(checkout)


def train(row: Row, job: Job) -> dict[str, Any]:
    """Its model of the row.

    Raises:
        ValueError: the row is none of RWKV-7.
    """
    import torch

    if row.model != "rwkv7":
        raise ValueError(f"its trainer is RWKV-7's, the row is {row.model}'s")
    torch_training.check_device()
    module = _module(job["checkout"])
    torch.backends.cuda.matmul.allow_tf32 = True
    arguments = argparse.Namespace(
        n_layer=row.layers,
        n_embd=row.width,
        dim_att=row.width,
        dim_ffn=4 * row.width,
        vocab_size=row.vocab,
        ctx_len=row.tokens,
        head_size=64,
        my_testing="x070",
        grad_cp=0,
        weight_decay=0.1,
        lr_init=6e-4,
        betas=(0.9, 0.99),
        adam_eps=1e-18,
        accelerator="GPU",
        train_stage=0,
    )
    torch.manual_seed(0)
    model = module.RWKV(arguments)
    model.load_state_dict(model.generate_init_weight())
    model = model.to("cuda", torch.bfloat16).train()

    def loss_of(inputs: Any, labels: Any) -> Any:
        return model.training_step((inputs, labels), 0)

    return torch_training.train(model, loss_of, row, job)
