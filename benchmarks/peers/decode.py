"""Decoding with other libraries, for decode.py: each model and batch in a process of its own."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import records
import runner
from runner import Job


def measure(peer: str, options: argparse.Namespace) -> Iterator[records.Record | str]:
    """Records of a peer, or why there is none."""
    start = lambda jobs: runner.Process(
        "peers.decode:make", f"decode {peer}", jobs, paths=(records.ROOT,), python=options.peer_python
    )
    for version in options.versions:
        for size in options.models:
            for batch in options.batches if peer == "fla" else [b for b in options.batches if b == 1]:
                about = {"version": version, "model": size, "batch": batch}
                job = {"peer": peer, **about, "vocab": options.vocab, "tokens": options.tokens}
                [(_, line)] = runner.results(start, [job], options.timeout)
                if "error" in line:
                    yield f"{version} {size} {batch}: {line['error'][-300:]}"
                else:
                    speed = {"tokens_per_s": batch / line["record"]["ms_per_token"] * 1e3}
                    yield {"op": "decode", "library": peer, **about, **line["record"], **speed}


def fla(job: Job) -> dict[str, Any]:
    """flash-linear-attention's ``generate``, which is transformers': greedy, since its sampling is slower."""
    import fla.models as models
    import torch

    runner.check_torch_device()
    version, batch = job["version"], job["batch"]
    layers, width = map(int, job["model"].split("x"))
    config, kind = (getattr(models, f"RWKV{version}{name}") for name in ("Config", "ForCausalLM"))
    head = 64 if width >= 128 else 16
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "vocab_size": job["vocab"]}
    if version == 6:
        sizes |= {"num_heads": width // head, "proj_low_rank_dim": 32, "gate_low_rank_dim": 64}
    else:
        sizes["head_dim"] = head
    model = kind(config(**sizes)).to("cuda", torch.bfloat16).eval()
    prompt = torch.ones((batch, 4), dtype=torch.long, device="cuda")
    options = {"do_sample": False, "use_cache": True}
    run = lambda n: model.generate(prompt, max_new_tokens=n, min_new_tokens=n, **options)
    run(8)
    times = []
    for n in (8, 8 + job["tokens"]):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(n)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"implementation": "generate", "ms_per_token": (times[1] - times[0]) / job["tokens"] * 1e3}


def rwkv(job: Job) -> dict[str, Any]:
    """PyPI's ``rwkv``: batch 1, its PIPELINE's draw of the next token included."""
    os.environ |= {"RWKV_JIT_ON": "1", "RWKV_V7_ON": str(int(job["version"] == 7)), "JAX_PLATFORMS": "cpu"}
    import torch

    on_gpu = torch.cuda.is_available()
    os.environ["RWKV_CUDA_ON"] = str(int(on_gpu))
    from decode_model import make as make_model

    from fla_jax.checkpoints import save_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        save_checkpoint(path, *make_model(job["version"], job["model"], job["vocab"], "bfloat16"))
        from rwkv.model import RWKV
        from rwkv.utils import PIPELINE

        model = RWKV(model=str(path.with_suffix("")), strategy="cuda fp16" if on_gpu else "cpu fp32")
    pipeline = PIPELINE.__new__(PIPELINE)
    token, state = 1, None
    for i in range(8 + job["tokens"]):
        if i == 8:
            began = time.perf_counter()
        logits, state = model.forward([token], state)
        token = pipeline.sample_logits(logits.float(), temperature=1.0, top_p=0.85)
    ms = (time.perf_counter() - began) / job["tokens"] * 1e3
    return {"implementation": "forward", "ms_per_token": ms}


def make(settings: dict[str, Any]) -> Callable[[Job], Any]:
    return lambda job: {"fla": fla, "rwkv": rwkv}[job["peer"]](job)
