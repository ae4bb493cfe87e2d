"""FLA's pieces as its layers call them, on torch tensors by our names: ``load(inputs) -> call(inputs)``.

What FLA has no kernel for is torch's, and so is the sum in its layers: biases of its low-rank parts are in
their products, so they are left out here, in FLA's favour.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

Call = Callable[[dict[str, Any]], tuple[Any, ...]]


def mixes(inputs: dict[str, Any], tokens: bool = False) -> Call:
    """Sum and norm, shift, mixes; six of them, as RWKV-7 has them, in one kernel. ``tokens``: the normalised
    ones are a result as well.
    """
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
        if "moves" in x:
            by = [mu + x["moves"][n] for n, mu in enumerate(by)]
        return *(torch.addcmul(h, delta, mu) for mu in by), *total

    return call


mixes_and_tokens = functools.partial(mixes, tokens=True)


def keys(inputs: dict[str, Any]) -> Call:
    """Decay, rate, value residual, direction and update of the key."""
    import torch
    from fla.modules.l2norm import l2_norm
    from fla.ops.rwkv7.fused_k_update import fused_k_rwkv7

    B, T, H, N = inputs["k"].shape

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        decay, rate, mix, k, v, v_first = (
            x[name].view(B, T, H * N) for name in ("decay", "rate", "mix", "k", "v", "v_first")
        )
        w = -math.exp(-0.5) * decay.sigmoid()
        v = torch.lerp(v, v_first, mix.sigmoid())
        rate = rate.sigmoid()
        kk = l2_norm((k * x["k_k"].view(-1)).view(B, T, H, N))
        k = fused_k_rwkv7(k, rate, x["k_a"].view(-1))
        return w, k, v, -kk, kk * rate.view(B, T, H, N)

    return call


def readout7(inputs: dict[str, Any]) -> Call:
    """Group norm, then bonus and gate in one kernel."""
    from fla.modules.layernorm import group_norm
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction

    B, T, H, N = inputs["o"].shape

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        o, gate = (x[name].view(B, T, H * N) for name in ("o", "gate"))
        o = group_norm(o, x["scale"].view(-1), x["bias"].view(-1), eps=N * 1e-5, num_groups=H)
        return (gate_output_correction(o, x["r"], x["k"], x["r_k"], x["v"], gate),)

    return call


def readout6(inputs: dict[str, Any]) -> Call:
    """Group norm, then the gate."""
    import torch
    from fla.modules.layernorm import group_norm

    B, T, H, N = inputs["o"].shape

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        o, gate = (x[name].view(B, T, H * N) for name in ("o", "gate"))
        o = group_norm(o, x["scale"].view(-1), x["bias"].view(-1), eps=N * 1e-5, num_groups=H)
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
