"""This library's training step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from runner import Job

from steps.measuring import measure
from steps.sizes import Size

PACKAGES = ("jax", "jaxlib", "flax", "optax", "triton")
REMAT = {"none": False, "dense": "dense", "blocks": True}


def train(size: Size, job: Job) -> dict[str, Any]:
    """Forward, loss, backward, clipping and AdamW in one compiled function whose arrays are donated."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import jax
    import optax

    from fla_jax import models
    from fla_jax.layers import FP8_SCALES
    from fla_jax.parallel.rules import initial_fp8_scales
    from fla_jax.training import chunked_cross_entropy, rwkv_optimizer

    config = getattr(models, f"RWKV{size.model[-1]}Config")(
        size.vocab,
        size.width,
        size.layers,
        head_dim=64,
        dtype="bfloat16",
        scan_layers=job["scan"] if size.layers > 1 else False,
        remat=REMAT[job["remat"]],
        implementation=job["implementation"],
        fp8=job["fp8"],
    )
    model = getattr(models, f"RWKV{size.model[-1]}ForCausalLM")(config)
    optimizer = rwkv_optimizer(6e-4)
    tokens = jax.random.randint(jax.random.key(1), (size.batch, size.tokens + 1), 0, size.vocab)
    variables = {"params": models.initial_params(model, jax.random.key(0))}
    if config.fp8:
        variables[FP8_SCALES] = initial_fp8_scales(model)

    def train_step(variables: Any, state: Any, tokens: jax.Array) -> Any:
        def loss_fn(variables: Any) -> jax.Array:
            hidden, _ = model.apply(variables, tokens[:, :-1], method="hidden")
            head, labels = models.head_kernel(variables["params"]), tokens[:, 1:]
            return chunked_cross_entropy(hidden, head, labels, block_tokens=job["block_tokens"])

        loss, grads = jax.value_and_grad(loss_fn)(variables)
        updates, state = optimizer.update(grads["params"], state, variables["params"])
        return {**grads, "params": optax.apply_updates(variables["params"], updates)}, state, loss

    carry = jax.block_until_ready((variables, jax.jit(optimizer.init)(variables["params"])))
    count = sum(x.size for x in jax.tree.leaves(variables["params"]))
    del variables
    began = time.perf_counter()
    compiled = jax.jit(train_step, donate_argnums=(0, 1)).lower(*carry, tokens).compile()
    compile_s = time.perf_counter() - began

    def step() -> jax.Array:
        nonlocal carry
        *carry, loss = compiled(*carry, tokens)
        return loss

    result = measure(step, size, job)
    result["first_step_s"] += compile_s
    planned, device = compiled.memory_analysis(), jax.devices()[0]
    # a CPU has no count of its allocator: what the compiler planned
    planned_bytes = planned.temp_size_in_bytes + planned.argument_size_in_bytes
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use") or planned_bytes
    result |= {"peak_gb": peak / 1e9, "compile_s": compile_s, "parameters": count}
    result |= {"device": device.device_kind, "scan": config.scan_layers}
    result["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    if job["profile"]:
        from steps.kernel_times import profiled

        result["kernels_ms"] = profiled(Path(job["profile"]), step)
    return result
