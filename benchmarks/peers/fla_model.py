"""flash-linear-attention's training step, of the same sizes."""

from __future__ import annotations

from typing import Any

from runner import Job, check_torch_device
from steps.sizes import Size

from peers import torch_training


def low_ranks(width: int) -> dict[str, int]:
    """RWKV-7's official ranks, which are not FLA's defaults."""
    factors = {"decay": 2.5, "a": 2.5, "v": 1.7, "gate": 5}
    rank = lambda factor: max(32, round(factor * width**0.5 / 32) * 32)
    return {f"{name}_low_rank_dim": rank(factor) for name, factor in factors.items()}


def train(size: Size, job: Job) -> dict[str, Any]:
    """FLA's model of the size; its loss never has all logits either."""
    import torch

    check_torch_device()
    from fla import models

    version = size.model[-1]
    if version == "7":
        sizes = {"head_dim": 64, **low_ranks(size.width)}
    else:  # gate_low_rank_dim is the rank of its decay
        sizes = {"num_heads": size.width // 64, "expand_k": 1.0}
        sizes |= {"proj_low_rank_dim": 32, "gate_low_rank_dim": 64}
    config = getattr(models, f"RWKV{version}Config")(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        vocab_size=size.vocab,
        max_position_embeddings=size.tokens,
        fuse_cross_entropy=False,
        fuse_linear_cross_entropy=True,
        use_l2warp=True,
        use_cache=False,
        **sizes,
    )
    torch.manual_seed(0)
    autocast = job["precision"] == "autocast"
    model = getattr(models, f"RWKV{version}ForCausalLM")(config)
    model = model.to("cuda", torch.float32 if autocast else torch.bfloat16).train()
    if job["remat"] == "blocks":
        model.gradient_checkpointing_enable()

    def loss_of(inputs: Any, labels: Any) -> Any:
        if version == "7":
            return model(input_ids=inputs, shift_labels=labels, use_cache=False).loss
        # its RWKV-6 shifts labels: the last token has none
        return model(input_ids=inputs, labels=inputs, use_cache=False).loss

    return torch_training.train(model, loss_of, size, job, autocast)
