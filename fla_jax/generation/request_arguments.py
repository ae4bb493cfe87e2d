"""Arguments of many requests: rules and states of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arguments import shown
from ..layers.state import RWKVState, check_state
from ..models.causal_lm import RWKVForCausalLM
from .deleted import check_deleted
from .prompts import take_rows
from .rows import GenerationState
from .sampling_params import SamplingParams

State = RWKVState | GenerationState
States = State | Sequence[State | None] | None


def states_of_each(model: RWKVForCausalLM, state: States, batch: int) -> list[State | None]:
    """The state before each prompt."""
    if state is None or isinstance(state, GenerationState):
        return [state] * batch
    if not isinstance(state, RWKVState):
        states = list(state)
        if len(states) != batch:
            raise ValueError(f"state must be one for each of the {batch} prompts, got {len(states)}")
        return states
    if np.ndim(state.wkv) == 5 and state.wkv.shape[1] == 1:
        return [state] * batch
    check_state(state, jax.eval_shape(lambda: model.init_state(batch)))
    check_deleted(state=state)
    return [take_rows(state, jnp.array([i])) for i in range(batch)]


def rules_of_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, batch: int
) -> list[SamplingParams | None]:
    """The rules of each prompt."""
    if sampling is None:
        return [None] * batch
    if isinstance(sampling, SamplingParams):
        if sampling.seed is None:
            return [sampling] * batch
        seeds = (sampling.seed + i * sampling.n for i in range(batch))
        return [dataclasses.replace(sampling, seed=seed) for seed in seeds]
    if not isinstance(sampling, Sequence) or len(sampling) != batch:
        raise TypeError(
            f"sampling must be a SamplingParams, one for each of the {batch} prompts or None, got "
            f"{shown(sampling)}"
        )
    return list(sampling)
