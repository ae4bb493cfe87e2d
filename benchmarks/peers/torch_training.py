"""Training steps of the peers, which all run on torch, with equal optimizer, clipping and count of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner import Job
from steps.measuring import measure
from steps.sizes import Size

PACKAGES = ("flash-linear-attention", "fla-core", "torch", "triton", "transformers", "pytorch-lightning")


def train(
    model: Any, loss_of: Callable[[Any, Any], Any], size: Size, job: Job, autocast: bool = False
) -> dict[str, Any]:
    """Steps of ``loss_of(inputs, labels)`` on one batch [B, T], with fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(0, size.vocab, (size.batch, size.tokens + 1), device="cuda")
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch.cuda.reset_peak_memory_stats()

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = loss_of(inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    result = measure(step, size, job)
    return {
        **result,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name(),
        "precision": "autocast" if autocast else "bf16",
    }
