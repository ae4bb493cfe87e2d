"""flash-linear-attention's training step, of the same sizes."""

from __future__ import annotations

from typing import Any

from running.processes import Job

from steps import torch_training
from steps.rows import Row, low_ranks


def train(row: Row, job: Job) -> dict[str, Any]:
    """FLA's model of the row; the loss never holds all logits either."""
    import torch

    torch_training.check_device()
    from fla import models

    version = row.model[-1]
    if version == "7":
        sizes = {"head_dim": 64, **low_ranks(row.width)}
    else:  # gate_low_rank_dim is the rank of its decay
        sizes = {"num_heads": row.width // 64, "expand_k": 1.0}
        sizes |= {"proj_low_rank_dim": 32, "gate_low_rank_dim": 64}
    config = getattr(models, f"RWKV{version}Config")(
        hidden_size=row.width,
        num_hidden_layers=row.layers,
        vocab_size=row.vocab,
        max_position_embeddings=row.tokens,
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
        # it shifts them itself: the last token has no label then
        return model(input_ids=inputs, labels=inputs, use_cache=False).loss

    return torch_training.train(model, loss_of, row, job, autocast)
