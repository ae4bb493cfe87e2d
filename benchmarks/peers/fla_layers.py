"""FLA's layer operations as its layers call them, by our names: ``load(inputs) -> call(inputs)``.

Where FLA has no kernel, torch's is used, as in its layers. Biases of low-rank products are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from layer_ops.layer_op import VOCABULARY, layer_op_of
from runner import Job, check_torch_device
from timing import torch_ms

from peers.tuning import compile_only

Call = Callable[[dict[str, Any]], tuple[Any, ...]]


def mixes(inputs: dict[str, Any], tokens: bool = False) -> Call:
    """Sum and norm, token shift, mixes; six mixes are one kernel. ``tokens``: also the normalised tokens."""
    import torch
    from fla.modules.layernorm import layer_norm
    from fla.modules.token_shift import token_shift
    from fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7

    M = sum(name.startswith("mu") for name in inputs)

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        h, total = x["x"], ()
        if "scale" in x:
            h, *total = layer_norm(x["y"], x["scale"], x["bias"], residual=h, eps=1e-5, prenorm=True)
        total = (*total, h) if tokens else total
        delta = token_shift(h)
        delta = delta[0] if isinstance(delta, tuple) else delta
        by = [x[f"mu{n}"].view(1, 1, -1) for n in range(M)]
        if M == 6:
            return *fused_addcmul_rwkv7(h, delta, *by), *total
        if "mix_delta" in x:
            by = [mu + x["mix_delta"][n] for n, mu in enumerate(by)]
        return *(torch.addcmul(h, delta, mu) for mu in by), *total

    return call


mixes_and_tokens = functools.partial(mixes, tokens=True)


def keys(inputs: dict[str, Any]) -> Call:
    """Decay, rate, value residual, direction and update of the key."""
    import torch
    from fla.modules.l2norm import l2_norm
    from fla.ops.rwkv7.fused_k_update import fused_k_rwkv7

    B, T, H, N = inputs["k"].shape
    names = ("decay", "rate", "mix", "k", "v", "v_first")

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        decay, rate, mix, k, v, v_first = (x[name].view(B, T, H * N) for name in names)
        w = -math.exp(-0.5) * decay.sigmoid()
        v = torch.lerp(v, v_first, mix.sigmoid())
        rate = rate.sigmoid()
        kk = l2_norm((k * x["k_k"].view(-1)).view(B, T, H, N))
        k = fused_k_rwkv7(k, rate, x["k_a"].view(-1))
        return w, k, v, -kk, kk * rate.view(B, T, H, N)

    return call


def normed(x: dict[str, Any]) -> tuple[Any, Any]:
    """The group-normalised output and the gate, [B, T, C]."""
    from fla.modules.layernorm import group_norm

    B, T, H, N = x["o"].shape
    o, gate = (x[name].view(B, T, H * N) for name in ("o", "gate"))
    return group_norm(o, x["scale"].view(-1), x["bias"].view(-1), eps=N * 1e-5, num_groups=H), gate


def readout7(inputs: dict[str, Any]) -> Call:
    """Group norm, then bonus and gate in one kernel."""
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        o, gate = normed(x)
        return (gate_output_correction(o, x["r"], x["k"], x["r_k"], x["v"], gate),)

    return call


def readout6(inputs: dict[str, Any]) -> Call:
    """Group norm, then the gate."""
    import torch

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        o, gate = normed(x)
        return (o * torch.nn.functional.silu(gate),)

    return call


def head(inputs: dict[str, Any]) -> Call:
    """Head and loss in chunks, with L2Wrap; its weight is [V, C]."""
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    inputs["kernel"] = inputs["kernel"].detach().t().contiguous().requires_grad_()

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        hidden = x["hidden"].view(-1, x["hidden"].shape[-1])
        return (fused_linear_cross_entropy_loss(hidden, x["labels"].view(-1), x["kernel"], use_l2warp=True),)

    return call


def draw(wanted: dict[str, tuple[tuple[int, ...], str | None]], dtype: str) -> dict[str, Any]:
    """Inputs. Parameters have the tokens' dtype, as in FLA's models; FLA takes no booleans."""
    import torch

    made = {}
    for name, (shape, kind) in wanted.items():
        if kind == "int32":
            made[name] = torch.randint(0, VOCABULARY, shape, device="cuda")
        elif kind != "bool":
            made[name] = torch.randn(shape, device="cuda").to(getattr(torch, dtype)).requires_grad_()
    return made


def passes_of(job: Job) -> dict[str, Callable[[], None]]:
    """A function for each pass of a layer operation."""
    import torch

    check_torch_device()
    layer_op, shape = layer_op_of(job["layer_op"]), tuple(job["shape"])
    inputs = draw(layer_op.inputs(shape), job["dtype"])
    call = globals()[layer_op.peer](inputs)
    leaves = [array for array in inputs.values() if array.requires_grad]
    made = call(inputs)
    cotangents = [torch.randn_like(array) for array in made]

    def forward() -> None:
        with torch.no_grad():
            call(inputs)

    def backward() -> None:
        torch.autograd.grad(made, leaves, cotangents, retain_graph=True, allow_unused=True)

    def both() -> None:
        torch.autograd.grad(call(inputs), leaves, cotangents, allow_unused=True)

    passes: dict[str, Callable[[], None]] = {"fwd": forward, "bwd": backward, "fwd+bwd": both}
    return {name: passes[name] for name in layer_op.moved(shape, 1)}


def make(settings: dict[str, Any]) -> Callable[[Job], Any]:
    """Times each pass of a job's layer operation; with ``shares`` runs it once, for what it compiles."""
    if settings["shares"] is None:
        return lambda job: {name: torch_ms(run) for name, run in passes_of(job).items()}
    compile_only(*settings["shares"])

    def compile_passes(job: Job) -> None:
        for run in passes_of(job).values():
            run()

    return compile_passes
