"""Decoding with other libraries, for benchmarks/decode.py: each model and batch in a process of its own.

python benchmarks/decode_peers.py rwkv 7 24x1024 1 65536 128     prints MS {...}
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def measure(peer: str, options: argparse.Namespace) -> list[dict[str, Any] | str]:
    """Records of a peer, or why there is none."""
    found: list[dict[str, Any] | str] = []
    for version in options.versions:
        for size in options.models:
            for batch in options.batches:
                if peer == "rwkv" and batch > 1:
                    continue  # it decodes one row
                about = [peer, str(version), size, str(batch), str(options.vocab), str(options.tokens)]
                environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                try:
                    done = subprocess.run(
                        [options.peer_python, __file__, *about],
                        capture_output=True, text=True, timeout=options.timeout, env=environment,
                    )  # fmt: skip
                except subprocess.TimeoutExpired:
                    found.append(f"{' '.join(about[1:4])}: no result within {options.timeout:.0f} s")
                    continue
                lines = [line for line in done.stdout.splitlines() if line.startswith("MS ")]
                if not lines:
                    why = done.stderr.strip().rpartition("\n")[2][-300:] or f"exit status {done.returncode}"
                    found.append(f"{' '.join(about[1:4])}: {why}")
                    continue
                result = json.loads(lines[0][3:])
                speed = {"tokens_per_s": batch / result["ms_per_token"] * 1e3}
                names = {"op": "decode", "library": peer, "version": version, "model": size, "batch": batch}
                found.append(names | result | speed)
    return found


def fla(version: int, size: str, batch: int, vocab: int, tokens: int) -> dict[str, Any]:
    """flash-linear-attention's ``generate``, which is transformers': greedy, since its sampling is slower."""
    import fla.models as models
    import torch

    layers, width = map(int, size.split("x"))
    config, kind = (getattr(models, f"RWKV{version}{name}") for name in ("Config", "ForCausalLM"))
    head = 64 if width >= 128 else 16
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "vocab_size": vocab, "head_dim": head}
    if version == 6:
        sizes = {**sizes, "num_heads": width // head, "proj_low_rank_dim": 32, "gate_low_rank_dim": 64}
        del sizes["head_dim"]
    model = kind(config(**sizes)).to("cuda", torch.bfloat16).eval()
    prompt = torch.ones((batch, 4), dtype=torch.long, device="cuda")
    run = lambda n: model.generate(
        prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True
    )
    run(8)
    times = []
    for n in (8, 8 + tokens):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(n)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"implementation": "generate", "ms_per_token": (times[1] - times[0]) / tokens * 1e3}


def rwkv(version: int, size: str, batch: int, vocab: int, tokens: int) -> dict[str, Any]:
    """PyPI's ``rwkv``: one row, its PIPELINE's draw of the next token included."""
    os.environ |= {"RWKV_JIT_ON": "1", "RWKV_V7_ON": str(int(version == 7)), "JAX_PLATFORMS": "cpu"}
    import torch

    on_gpu = torch.cuda.is_available()
    os.environ["RWKV_CUDA_ON"] = str(int(on_gpu))
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from decode import make

    from fla_jax.checkpoints import save_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        save_checkpoint(path, *make(version, size, vocab, "bfloat16"))
        from rwkv.model import RWKV
        from rwkv.utils import PIPELINE

        model = RWKV(model=str(path.with_suffix("")), strategy="cuda fp16" if on_gpu else "cpu fp32")
    pipeline = PIPELINE.__new__(PIPELINE)
    token, state = 1, None
    for i in range(8 + tokens):
        if i == 8:
            began = time.perf_counter()
        logits, state = model.forward([token], state)
        token = pipeline.sample_logits(logits.float(), temperature=1.0, top_p=0.85)
    return {"implementation": "forward", "ms_per_token": (time.perf_counter() - began) / tokens * 1e3}


def main() -> None:
    name, version, size, *rest = sys.argv[1:]
    print("MS", json.dumps({"fla": fla, "rwkv": rwkv}[name](int(version), size, *map(int, rest))))


if __name__ == "__main__":
    main()
