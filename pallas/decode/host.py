"""A decoded token on NVIDIA GPUs, with the arguments of `fla_jax.ops.decode.plain`: the products
(`projections_host`), the step of every head, and the choice of a token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...core.decode_layers import DECAY_SCALE, GROUP_EPS, KEY_EPS, Layer6, Layer7, Shifts, States
from ..backend.triton import Launch, triton_call
from ..backend.types import Tensor
from ..common.shapes import like, next_power_of_two, shaped
from .head_step import StepConfig, StepInputs, StepOut, StepState
from .projections_host import MAX_GEMV, layer_code, project
from .rwkv6_step import (
    MixDeltaConfig,
    MixDeltaInputs,
    MixDeltaOut,
    RWKV6Params,
    RWKV6StepConfig,
    mix_delta_kernel,
    rwkv6_kernel,
)
from .rwkv7_step import (
    LowRankConfig,
    LowRankInputs,
    LowRankOut,
    RWKV7Params,
    RWKV7StepConfig,
    low_rank_kernel,
    rwkv7_kernel,
)
from .sample import (
    Candidates,
    ChooseOut,
    DrawOut,
    PartSums,
    SampleConfig,
    SampleInputs,
    SurveyOut,
    sample_choose_kernel,
    sample_draw_kernel,
    sample_survey_kernel,
)

__all__ = ["project", "rwkv6_mix", "rwkv6_step", "rwkv7_step", "sample_tokens"]
LOW_RANK_ROWS = 16  # channels of a program of `low_rank_kernel`
PART = 2048  # tokens of the vocabulary for a program of `sample_survey_kernel` and `sample_draw_kernel`
GROUP = 128  # tokens of a part whose largest logit the kernels keep
State = TypeVar("State", bound=States)
Tree = TypeVar("Tree")


def _step(
    kernel: Tensor,
    x: StepInputs,
    p: RWKV6Params | RWKV7Params,
    state: State,
    config: StepConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, State]:
    """``(y [B, C], state)``; the states are written in place."""
    arrays = StepState(state.wkv, state.att_shift, state.ffn_shift)
    names = [f"state.{name}" for name in StepState._fields]
    out = triton_call(
        kernel,
        x,
        p,
        arrays,
        out=StepOut(shaped((config.B, config.H * config.N), dtype), _shapes(arrays)),
        config=config,
        grid=(config.H, config.B, 1),
        # 4096 programs take 42 microseconds on an H200, with four warps 53
        launch=Launch(2 if config.H * config.B >= 2048 else 4),
        aliases=dict(zip(names, names, strict=True)),
        in_place=True,
    )
    return out.y, state.replace(**out.state._asdict())


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(like, tree)


def _low_rank(p: Layer7, projections: jax.Array) -> jax.Array:
    """The second low-rank stages of a few batch elements, [4, B, C] float32."""
    (B, width), (stages, C, R) = projections.shape, p.second.shape
    config = LowRankConfig(
        C=C,
        BN=LOW_RANK_ROWS,
        width=width,
        R=R,
        BR=next_power_of_two(R),
        ranks=p.ranks,
    )
    return triton_call(
        low_rank_kernel,
        LowRankInputs(projections, p.second),
        out=LowRankOut(shaped((stages, B, C), jnp.float32)),
        config=config,
        grid=(-(-C // LOW_RANK_ROWS), stages, B),
        launch=Launch(4),
    ).y


def rwkv7_step(
    p: Layer7,
    projections: jax.Array,
    first_projections: jax.Array,
    state: State,
    shifts: Shifts,
    layer: int,
    active: jax.Array,
    rate_scale: float,
    dtype: DTypeLike,
) -> tuple[jax.Array, State]:
    """See `fla_jax.ops.decode.plain.rwkv7_step`; the state is written in place."""
    B, H, N = state.wkv.shape[1:4]
    (att_shift, ffn_shift), has_first = shifts, layer > 0
    if B <= MAX_GEMV:
        second = _low_rank(p, projections)
    else:
        second = jnp.einsum(
            "bpr,pcr->pbc", p.low_rank_inputs(projections), p.second, preferred_element_type=jnp.float32
        )
    x = StepInputs(
        projections=projections,
        first_projections=first_projections if has_first else None,
        second=second,
        att_shift=att_shift,
        ffn_shift=att_shift if ffn_shift is None else ffn_shift,
        active=active,
        layer=layer_code(layer),
    )
    params = RWKV7Params(
        w0=p.w0,
        a0=p.a0,
        v0=p.v0 if has_first else None,
        k_k=p.k_k,
        k_a=p.k_a,
        r_k=p.r_k,
        scale=p.group_norm[0],
        bias=p.group_norm[1],
    )
    config = RWKV7StepConfig(
        B=B,
        H=H,
        N=N,
        width=projections.shape[1],
        norm_eps=GROUP_EPS,
        first_width=first_projections.shape[1],
        decay_scale=DECAY_SCALE,
        rate_scale=float(rate_scale),
        key_eps=KEY_EPS,
    )
    return _step(rwkv7_kernel, x, params, state, config, dtype)


def rwkv6_mix(
    p: Layer6, x: jax.Array, last: jax.Array, layer: int, z: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """See `fla_jax.ops.decode.plain.rwkv6_mix`."""
    (_, R, C), B = p.mix_delta.shape, x.shape[0]
    if B > MAX_GEMV:
        low = z[:, : 5 * R].reshape(B, 5, R).astype(p.mix_delta.dtype)
        delta = jnp.einsum("bpr,prc->pbc", low, p.mix_delta, preferred_element_type=jnp.float32)
        x, before = x.astype(jnp.float32), last[layer].astype(jnp.float32)
        return (x + (before - x) * (p.mixes.astype(jnp.float32)[:, None] + delta)).astype(dtype)
    config = MixDeltaConfig(B, C, R, z.shape[1], 128, next_power_of_two(R))
    return triton_call(
        mix_delta_kernel,
        MixDeltaInputs(x, last, z, p.mix_delta, p.mixes, layer_code(layer)),
        out=MixDeltaOut(shaped((5, B, C), dtype)),
        config=config,
        grid=(-(-C // config.BC), 5, B),
        launch=Launch(4),
    ).planes


def rwkv6_step(
    p: Layer6,
    projections: jax.Array,
    state: State,
    shifts: Shifts,
    layer: int,
    active: jax.Array,
    dtype: DTypeLike,
) -> tuple[jax.Array, State]:
    """See `fla_jax.ops.decode.plain.rwkv6_step`; the state is written in place."""
    (C, R), (B, H, N) = p.second.shape, state.wkv.shape[1:4]
    second, (att_shift, ffn_shift) = None, shifts
    if B > MAX_GEMV:
        low = projections[:, 4 * C :].astype(p.second.dtype)
        second = jnp.einsum("br,cr->bc", low, p.second, preferred_element_type=jnp.float32)
    x = StepInputs(
        projections=projections,
        first_projections=None,
        second=second,
        att_shift=att_shift,
        ffn_shift=att_shift if ffn_shift is None else ffn_shift,
        active=active,
        layer=layer_code(layer),
    )
    params = RWKV6Params(p.second if second is None else None, p.base, p.bonus, *p.group_norm)
    config = RWKV6StepConfig(B, H, N, projections.shape[1], GROUP_EPS, R, BR=next_power_of_two(R))
    return _step(rwkv6_kernel, x, params, state, config, dtype)


def sample_tokens(
    rules: Any, logits: jax.Array, seen: jax.Array, count: jax.Array, keys: jax.Array, undefined: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next token of each batch element, see `sample`. All arrays [B, V] are written in place.

    Args:
        rules: a `fla_jax.generation.sampling_params.SamplingArrays`.
        logits: [B, V] float32.
        seen: [B, V] booleans, the tokens that have occurred.
        count: [B, V] float32, how often; 0 where they have not.
        keys: [B, 2] uint32, Threefry keys.
        undefined: the result where the largest logit is infinite or a logit is NaN.

    Returns:
        ``(tokens [B] int32, seen, count)``.
    """
    B, V = logits.shape
    of_rows = lambda x: jnp.broadcast_to(jnp.asarray(x), (B, *x.shape[1:]))
    # a token for every thread: two threads with one token would apply its penalties twice
    part = min(PART, max(128, next_power_of_two(V)))
    P = -(-V // part)
    padded = next_power_of_two(P)
    config = SampleConfig(
        V=V, P=P, BP=padded, BV=part, BG=max(1, part // GROUP), BK=min(128, part), undefined=undefined
    )
    floats, ints = (shaped((B, P), dtype) for dtype in (jnp.float32, jnp.int32))
    parts = PartSums(floats, floats, floats, shaped((B, P * config.BG), jnp.float32))
    of_tokens = lambda dtype: shaped((B, V), dtype)
    survey = triton_call(
        sample_survey_kernel,
        SampleInputs(
            logits=logits,
            seen=seen,
            counts=count,
            bias=None if rules.bias is None else of_rows(rules.bias),
            repetition=of_rows(rules.repetition),
            inverse_repetition=of_rows(rules.inverse_repetition),
            presence=of_rows(rules.presence_penalty),
            frequency=of_rows(rules.frequency_penalty),
            decay=of_rows(rules.penalty_decay),
        ),
        out=SurveyOut(parts, *_shapes((logits, count))),
        config=config,
        grid=(P, B, 1),
        launch=Launch(4),
        aliases={"x.logits": "logits", "x.counts": "counts"},
        in_place=True,
    )
    top_p, top_k = of_rows(rules.top_p), of_rows(rules.top_k)
    drawn = triton_call(
        sample_draw_kernel,
        SampleInputs(
            logits=survey.logits,
            keys=jax.lax.bitcast_convert_type(keys, jnp.int32),
            top_p=top_p,
            top_k=top_k,
            min_logit=of_rows(rules.min_logit),
            temperature=of_rows(rules.temperature),
        ),
        survey.parts,
        out=DrawOut(Candidates(*map(of_tokens, ("int32", "float32", "float32"))), ints, floats, floats, ints),
        config=config,
        grid=(P, B, 1),
        launch=Launch(4),
    )
    chosen = triton_call(
        sample_choose_kernel,
        SampleInputs(
            seen=seen,
            counts=survey.counts,
            uncounted=of_rows(rules.uncounted),
            top_p=top_p,
            top_k=top_k,
        ),
        drawn,
        survey.parts,
        out=ChooseOut(shaped((B,), jnp.int32), *_shapes((seen, count))),
        config=dataclasses.replace(config, BK=max(1, min(part, 2048 // padded))),
        grid=(B, 1, 1),
        launch=Launch(8),
        aliases={"x.seen": "seen", "x.counts": "counts"},
        in_place=True,
    )
    return chosen.token, chosen.seen, chosen.counts
