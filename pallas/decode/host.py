"""The pieces of a decoded token on NVIDIA GPUs, with the arguments of `fla_jax.ops.decode.plain`: the
products (`products_launcher`), the step of every head, and the choice of a token.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..backend.triton import launch
from ..common.shapes import unused
from .projections_host import CODE_ROWS, FEW, layer_code, project
from .sample import sample_choose_kernel, sample_draw_kernel, sample_survey_kernel
from .steps import mix_delta_kernel, rwkv6_kernel, rwkv7_kernel

__all__ = ["project", "rwkv6_mix", "rwkv6_step", "rwkv7_step", "sample_tokens"]
_IN_PLACE = {"state_": "new_", "att_": "new_att_", "ffn_": "new_ffn_"}
_PART = 2048  # tokens of the vocabulary for a program of `sample_survey_kernel` and `sample_draw_kernel`
_GROUP_EPS, _KEY_EPS, _DECAY_SCALE = 64e-5, 1e-12, -math.exp(-0.5)


def rwkv7_step(
    p: Any,
    made: Any,
    first: Any,
    state: Any,
    new: Any,
    layer: int,
    active: Any,
    rate_scale: float,
    dtype: Any,
) -> tuple[jax.Array, Any]:
    """See `fla_jax.ops.decode.plain.rwkv7_step`; the state is written in place."""
    R, (B, H, N) = p.second.shape[2], state.wkv.shape[1:4]
    few, second = B <= FEW, unused()
    if not few:
        second = jnp.einsum("bpr,pcr->pbc", p.low(made), p.second, preferred_element_type=jnp.float32)
    results = launch(
        rwkv7_kernel,
        _states(state, new)
        | dict(
            made_=made,
            first_=first,
            second_=second,
            w2_=p.second,
            w0_=p.w0,
            a0_=p.a0,
            v0_=p.v0,
            k_k_=p.k_k,
            k_a_=p.k_a,
            r_k_=p.r_k,
            scale_=p.group_norm[0],
            bias_=p.group_norm[1],
            active_=active,
            layer=layer_code(layer),
        ),
        _step_results(state, dtype),
        aliases=_IN_PLACE,
        grid=(H, B),
        num_warps=16 if few else _warps(H * B),
        num_stages=1,
        B=B,
        H=H,
        N=N,
        R=R,
        R_DECAY=p.ranks[0],
        R_RATE=p.ranks[1],
        R_MIX=p.ranks[2],
        R_GATE=p.ranks[3],
        BR=CODE_ROWS,
        WIDTH=made.shape[1],
        FIRST=first.shape[1],
        LOW_RANK=few,
        RESIDUAL=layer > 0,
        DECAY_SCALE=_DECAY_SCALE,
        RATE_SCALE=float(rate_scale),
        EPS=_KEY_EPS,
        NORM_EPS=_GROUP_EPS,
    )
    return results["y_"], _written(state, results)


def _states(state: Any, new: Any) -> dict[str, jax.Array]:
    """The stacked states, and the shifts that are put into them."""
    shift, before = new
    arrays = dict(state_=state.wkv, att_=state.att_shift, ffn_=state.ffn_shift)
    return arrays | dict(shift_=shift, before_=shift if before is None else before)


def _step_results(state: Any, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Of a head's step: outputs [B, C], and the stacked states, written in place."""
    _, B, H, N, _ = state.wkv.shape
    arrays = dict(new_=state.wkv, new_att_=state.att_shift, new_ffn_=state.ffn_shift)
    results = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    return dict(y_=jax.ShapeDtypeStruct((B, H * N), dtype)) | results


def _written(state: Any, results: dict[str, jax.Array]) -> Any:
    """``state`` after a head's step."""
    return state.replace(wkv=results["new_"], att_shift=results["new_att_"], ffn_shift=results["new_ffn_"])


def _warps(programs: int) -> int:
    """For a head's step with many rows: two where there are programs enough to fill a GPU with them, measured
    on an H200 (4096 programs: 42 microseconds, with four 53).
    """
    return 2 if programs >= 2048 else 4


def rwkv6_mix(p: Any, x: Any, last: Any, layer: int, z: Any, dtype: Any) -> jax.Array:
    """See `fla_jax.ops.decode.plain.rwkv6_mix`."""
    (_, R, C), B = p.moves.shape, x.shape[0]
    if B > FEW:
        low = z[:, : 5 * R].reshape(B, 5, R).astype(p.moves.dtype)
        by = jnp.einsum("bpr,prc->pbc", low, p.moves, preferred_element_type=jnp.float32)
        x, before = x.astype(jnp.float32), last[layer].astype(jnp.float32)
        return (x + (before - x) * (p.mixes.astype(jnp.float32)[:, None] + by)).astype(dtype)
    BC = 128
    made = launch(
        mix_delta_kernel,
        dict(x_=x, last_=last, z_=z, w_=p.moves, mixes_=p.mixes, layer=layer_code(layer)),
        dict(planes_=jax.ShapeDtypeStruct((5, B, C), dtype)),
        grid=(-(-C // BC), 5, B),
        num_warps=4,
        num_stages=1,
        B=B,
        C=C,
        R=R,
        WIDTH=z.shape[1],
        BC=BC,
        BR=1 << (R - 1).bit_length(),
    )
    return made["planes_"]


def rwkv6_step(
    p: Any, made: Any, state: Any, new: Any, layer: int, active: Any, dtype: Any
) -> tuple[jax.Array, Any]:
    """See `fla_jax.ops.decode.plain.rwkv6_step`; the state is written in place."""
    (C, R), (B, H, N) = p.second.shape, state.wkv.shape[1:4]
    few, second = B <= FEW, unused()
    if not few:
        low = made[:, 4 * C :].astype(p.second.dtype)
        second = jnp.einsum("br,cr->bc", low, p.second, preferred_element_type=jnp.float32)
    results = launch(
        rwkv6_kernel,
        _states(state, new)
        | dict(
            made_=made,
            second_=second,
            w2_=p.second,
            base_=p.base,
            bonus_=p.bonus,
            scale_=p.group_norm[0],
            bias_=p.group_norm[1],
            active_=active,
            layer=layer_code(layer),
        ),
        _step_results(state, dtype),
        aliases=_IN_PLACE,
        grid=(H, B),
        num_warps=4 if few else _warps(H * B),
        num_stages=1,
        B=B,
        H=H,
        N=N,
        R=R,
        BR=CODE_ROWS,
        WIDTH=made.shape[1],
        LOW_RANK=few,
        NORM_EPS=_GROUP_EPS,
    )
    return results["y_"], _written(state, results)


def sample_tokens(
    rules: Any, logits: jax.Array, seen: jax.Array, count: jax.Array, keys: jax.Array, undefined: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next token of each row, and what has occurred with it, see `sample_choose_kernel`. All that is [B,
    V] is written in place.

    Args:
        rules: a `fla_jax.generation.sampling.SamplingParams`.
        logits: [B, V] float32.
        seen: [B, V] booleans, the tokens that have occurred.
        count: [B, V] float32, how often; 0 where they have not.
        keys: [B, 2] uint32, Threefry keys.
        undefined: instead of a token where there is no finite largest logit, or NaN.

    Returns:
        ``(tokens [B] int32, seen, count)``.
    """
    (B, V), one = logits.shape, lambda x: jnp.asarray(x).reshape(1)
    # a token for every thread: two with the same one would take penalties off twice
    part = min(_PART, max(128, 1 << (V - 1).bit_length()))
    parts = -(-V // part)
    of_parts = jax.ShapeDtypeStruct((B, parts), jnp.float32)
    numbers = jax.ShapeDtypeStruct((B, parts), jnp.int32)
    sizes: dict[str, Any] = dict(V=V, P=parts, BV=part)
    padded = 1 << (parts - 1).bit_length()
    surveyed = launch(
        sample_survey_kernel,
        dict(
            logits_=logits,
            seen_=seen,
            count_=count,
            banned_=jnp.asarray(rules.banned),
            presence_=one(rules.presence_penalty),
            frequency_=one(rules.frequency_penalty),
            decay_=one(rules.penalty_decay),
        ),
        dict(
            high_=of_parts,
            mass_=of_parts,
            roots_=of_parts,
            x_=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
            decayed_=jax.ShapeDtypeStruct(count.shape, count.dtype),
        ),
        aliases={"logits_": "x_", "count_": "decayed_"},
        grid=(parts, B),
        num_warps=4,
        num_stages=1,
        **sizes,
    )
    x, count, roots = (surveyed.pop(name) for name in ("x_", "decayed_", "roots_"))
    surveyed |= dict(top_p_=one(rules.top_p))
    drawn = launch(
        sample_draw_kernel,
        surveyed
        | dict(
            x_=x,
            roots_=roots,
            keys_=jax.lax.bitcast_convert_type(keys, jnp.int32),
            temperature_=one(rules.temperature),
        ),
        dict(
            token_=jax.ShapeDtypeStruct((B, V), jnp.int32),
            kept_=jax.ShapeDtypeStruct((B, V), jnp.float32),
            score_=jax.ShapeDtypeStruct((B, V), jnp.float32),
            number_=numbers,
            best_=of_parts,
            found_=of_parts,
            place_=numbers,
        ),
        grid=(parts, B),
        num_warps=4,
        num_stages=1,
        BP=padded,
        BK=min(128, part),
        **sizes,
    )
    made = launch(
        sample_choose_kernel,
        surveyed
        | drawn
        | dict(
            top_k_=one(rules.top_k),
            uncounted_=jnp.asarray(rules.uncounted),
            seen_=seen,
            count_=count,
        ),
        dict(
            chosen_=jax.ShapeDtypeStruct((B,), jnp.int32),
            new_seen_=jax.ShapeDtypeStruct(seen.shape, seen.dtype),
            new_count_=jax.ShapeDtypeStruct(count.shape, count.dtype),
        ),
        aliases={"seen_": "new_seen_", "count_": "new_count_"},
        grid=(B,),
        num_warps=8,
        num_stages=1,
        BP=padded,
        BK=max(1, min(part, 2048 // padded)),
        UNDEFINED=undefined,
        **sizes,
    )
    return made["chosen_"], made["new_seen_"], made["new_count_"]
