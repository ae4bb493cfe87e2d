"""The states of a `TrainStep`, and the update of their parameters."""

from __future__ import annotations

import jax
import optax
from flax.training.train_state import TrainState
from jaxtyping import PyTree

from ..layers.state import RWKVState


class CarriedTrainState(TrainState):
    """The state of a `TrainStep` with ``carry_sequences``.

    Attributes:
        carry: the recurrent states at the ends of the last batch's sequences, arrays [B, L, ...].

    Example:
        >>> import jax, optax
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.parallel import TrainStep, make_mesh
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=32, num_layers=1, head_dim=16))
        >>> step = TrainStep(model, optax.sgd(0.1), make_mesh(), carry_sequences=jax.device_count())
        >>> state = step.init(jax.random.key(0))
        >>> type(state).__name__, state.carry.wkv.shape[1:]
        ('CarriedTrainState', (1, 2, 16, 16))
    """

    carry: RWKVState


class FP8TrainState(TrainState):
    """The state of a `TrainStep` of a model with ``fp8=True``.

    Attributes:
        fp8_scales: the collection `fla_jax.layers.FP8_SCALES`, which no optimiser updates. Evaluation,
            generation and checkpoints for other programs take ``params`` alone.

    Example:
        >>> import jax, optax
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.parallel import TrainStep, make_mesh
        >>> model = RWKV7ForCausalLM(RWKV7Config(100, hidden_size=32, num_layers=1, head_dim=16, fp8=True))
        >>> state = TrainStep(model, optax.sgd(0.1), make_mesh()).init(jax.random.key(0))
        >>> type(state).__name__, sorted(state.fp8_scales["blocks_0"]["ffn"])
        ('FP8TrainState', ['key', 'value'])
    """

    fp8_scales: PyTree


class _CarriedFP8TrainState(CarriedTrainState, FP8TrainState):
    """With both."""


def train_state(carry: RWKVState | None, fp8_scales: PyTree | None, **fields: PyTree) -> TrainState:
    """A state, with a carry and scales of FP8 products where these are not None."""
    if fp8_scales is None:
        return TrainState(**fields) if carry is None else CarriedTrainState(carry=carry, **fields)
    if carry is None:
        return FP8TrainState(fp8_scales=fp8_scales, **fields)
    return _CarriedFP8TrainState(carry=carry, fp8_scales=fp8_scales, **fields)


def optimizer_update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    value: jax.Array,
) -> tuple[PyTree, PyTree]:
    """New parameters and optimiser state; ``value`` is the loss."""
    # some transformations read the loss: optax.contrib.reduce_on_plateau, optax.polyak_sgd
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, opt_state, params, value=value)
    return optax.apply_updates(params, updates), opt_state
