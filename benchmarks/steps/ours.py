"""This library's training step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from running.processes import Job

from steps.measuring import measure
from steps.rows import Row

PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-triton", "triton")
REMAT = {"none": False, "dense": "dense", "blocks": True}


def train(row: Row, job: Job) -> dict[str, Any]:
    """Forward, loss, backward, clipping and AdamW, in one compiled function whose arrays are donated."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import jax
    import optax

    from fla_jax import models
    from fla_jax.training import chunked_cross_entropy, rwkv_optimizer

    version = row.model[-1]
    config = getattr(models, f"RWKV{version}Config")(
        row.vocab,
        row.width,
        row.layers,
        head_dim=64,
        dtype="bfloat16",
        scan_layers=job["scan"] if row.layers > 1 else False,
        remat=REMAT[job["remat"]],
        implementation=job["implementation"],
    )
    model, optimizer = getattr(models, f"RWKV{version}ForCausalLM")(config), rwkv_optimizer(6e-4)
    tokens = jax.random.randint(jax.random.key(1), (row.batch, row.tokens + 1), 0, row.vocab)
    params = models.initial_params(model, jax.random.key(0))

    def train_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            hidden, _ = model.apply({"params": params}, tokens[:, :-1], method="hidden")
            head, labels = params["head"]["kernel"], tokens[:, 1:]
            return chunked_cross_entropy(hidden, head, labels, block_tokens=job["block_tokens"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    carry = jax.block_until_ready((params, jax.jit(optimizer.init)(params)))
    count = sum(x.size for x in jax.tree.leaves(params))
    del params
    began = time.perf_counter()
    compiled = jax.jit(train_step, donate_argnums=(0, 1)).lower(*carry, tokens).compile()
    compile_s = time.perf_counter() - began

    def step() -> jax.Array:
        nonlocal carry
        *carry, loss = compiled(*carry, tokens)
        return loss

    result = measure(step, row, job)
    result["first_step_s"] += compile_s
    planned = compiled.memory_analysis()
    stats = jax.devices()[0].memory_stats() or {}
    # without the allocator's count (on CPU): what the compiler planned
    peak = stats.get("peak_bytes_in_use") or planned.temp_size_in_bytes + planned.argument_size_in_bytes
    result |= {
        "peak_gb": peak / 1e9,
        "compile_s": compile_s,
        "parameters": count,
        "device": jax.devices()[0].device_kind,
        "scan": config.scan_layers,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if job["profile"]:
        from steps.kernel_times import profiled

        result["kernels_ms"] = profiled(Path(job["profile"]), step)
    return result
