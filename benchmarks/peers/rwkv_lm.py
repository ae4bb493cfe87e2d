"""The training step of RWKV-LM's trainer, imported from RWKV-v7/train_temp of a checkout.

Called as its trainer calls it, with its initial values in bfloat16; optimizer and clipping are torch's. Its
CUDA extensions are compiled at import, or by several processes before: `compile_share`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

from runner import Job, check_torch_device, is_importable
from steps.sizes import Size

from peers import torch_training

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
    """The folder of its module: in a checkout, or named itself.

    Raises:
        FileNotFoundError: it has no src/model.py.
    """
    folder = Path(checkout).resolve()
    folder = next((x for x in (folder / "RWKV-v7" / "train_temp", folder) if x.is_dir()), folder)
    if not (folder / "src" / "model.py").is_file():
        raise FileNotFoundError(f"--rwkv-lm: {folder} has no src/model.py: give a checkout of RWKV-LM")
    return folder


def _stand_in_for_lightning() -> None:
    """pytorch_lightning is only a base class here: if it is missing, torch's replaces it."""
    if is_importable("pytorch_lightning"):
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
    """Its module, imported from its folder, since it names its sources relative to that."""
    folder = trainer_of(checkout)
    os.environ.update(VARIABLES)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    _stand_in_for_lightning()
    return importlib.import_module("src.model")


def compile_share(checkout: str, share: int, shares: int) -> None:
    """Compiles the extensions whose number is ``share`` modulo ``shares`` and skips everything else."""
    import torch
    from torch.utils import cpp_extension

    load, seen = cpp_extension.load, 0

    def load_share(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        return load(*arguments, **options) if (seen - 1) % shares == share else None

    def unchanged(function: Any, *rest: Any, **options: Any) -> Any:
        return function

    cpp_extension.load = load_share
    torch.library.register_autograd = lambda *arguments, **options: None  # type: ignore[assignment]
    torch.jit.script = unchanged  # type: ignore[assignment]
    _module(checkout)


def train(size: Size, job: Job) -> dict[str, Any]:
    """Its model of the size.

    Raises:
        ValueError: the model is not RWKV-7.
    """
    import torch

    if size.model != "rwkv7":
        raise ValueError(f"its trainer supports rwkv7, got {size.model}")
    check_torch_device()
    module = _module(job["checkout"])
    torch.backends.cuda.matmul.allow_tf32 = True
    arguments = argparse.Namespace(
        n_layer=size.layers,
        n_embd=size.width,
        dim_att=size.width,
        dim_ffn=4 * size.width,
        vocab_size=size.vocab,
        ctx_len=size.tokens,
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

    return torch_training.train(model, loss_of, size, job)
