"""State tuning: a frozen model learns a task through its initial states alone.

Source: RWKV-PEFT, ``--train_type state``: one state a layer, zero at first, learning rate from 1 to 0.01. Its
files, and those of the ``rwkv`` package, have ``blocks.{i}.att.time_state`` as [H, V, K], transposed relative
to the states here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ..checkpoints import load_extras, read_pth, write_pth
from ..checkpoints.hub import located
from ..core.arguments import check_integer, check_number, shown
from ..layers.state import RWKVState, SegmentState
from ..models import head_kernel
from ..models.config import check_model
from .losses import chunked_cross_entropy, mask_where
from .next_token import check_segment_ids
from .recipe import rwkv_optimizer, rwkv_schedule

_NAME = re.compile(r"(?:.*\.)?(?:blocks\.(\d+)\.att|layers\.(\d+)\.attn)\.time_state")


def zero_states(model: nn.Module) -> Float[Array, "L H K V"]:
    """The states that tuning starts from: zeros [L, H, K, V], one state a layer, in float32.

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import zero_states
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> zero_states(model).shape
        (2, 4, 16, 16)
    """
    check_model(model)
    return model.init_state(1).wkv[:, 0]


def initial_state(model: nn.Module, states: Float[Array, "L H K V"], batch: int) -> RWKVState:
    """The model's initial state: ``states`` [L, H, K, V] for every sequence, and no token before the first.

    Raises:
        ValueError: ``states`` does not have the model's shape, or ``batch`` is not a positive integer.
        TypeError: ``states`` is not an array of numbers.

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import initial_state, zero_states
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> initial_state(model, zero_states(model), batch=3).wkv.shape
        (2, 3, 4, 16, 16)
    """
    check_model(model)
    zeros = model.init_state(check_integer("batch", batch, 1))
    _check_states(states, (zeros.wkv.shape[0], *zeros.wkv.shape[2:]))
    return zeros.replace(wkv=jnp.broadcast_to(jnp.asarray(states, zeros.wkv.dtype)[:, None], zeros.wkv.shape))


def _check_states(states: Array, want: tuple[int, ...] | None) -> None:
    if not jnp.issubdtype(getattr(states, "dtype", object), jnp.floating):
        raise TypeError(f"states must be an array of floating-point numbers, got {shown(states)}")
    if want is None and states.ndim != 4:
        raise ValueError(f"states must have shape [L, H, K, V], got {list(states.shape)}")
    if want is not None and states.shape != want:
        raise ValueError(f"states must have shape [L, H, K, V] = {list(want)}, got {list(states.shape)}")


def _check_batch(where: str, tokens: Array, mask: Array | None) -> None:
    """Raises unless shapes and dtypes are those of a batch; ``where`` is put before the argument's name."""
    if not jnp.issubdtype(getattr(tokens, "dtype", object), jnp.integer):
        raise TypeError(f"{where}tokens must be an integer array, got {shown(tokens)}")
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(f"{where}tokens must have shape [B, T + 1] with B, T >= 1, got {list(tokens.shape)}")
    if mask is None:
        return
    dtype = getattr(mask, "dtype", object)
    if not jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.bool_):
        raise TypeError(f"{where}mask must be an array of booleans or numbers, got {shown(mask)}")
    want = (tokens.shape[0], tokens.shape[1] - 1)
    if mask.shape != want:
        raise ValueError(f"{where}mask must have shape [B, T] = {list(want)}, got {list(mask.shape)}")


def state_loss(
    model: nn.Module,
    params: PyTree,
    states: Float[Array, "L H K V"],
    tokens: Int[Array, "B T+1"],
    mask: Shaped[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T+1"] | None = None,
    *,
    every_segment: bool = False,
    max_segments: int = 32,
) -> Float[Array, ""]:
    """Next-token loss from given initial states, differentiable in ``states``.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters, as plain arrays.
        states: [L, H, K, V].
        tokens: [B, T + 1] integers: the first T are the input, the last T the labels.
        mask: [B, T] booleans, or weights of the labels (answers, say, and not questions); None for all.
        segment_ids: [B, T + 1] integers, for packed documents: the state restarts where the number changes,
            and a document's last token predicts nothing. None for one document a sequence.
        every_segment: whether every document starts from ``states``; otherwise the first of each sequence
            does, and others start from zeros. Not where a mesh splits batch or tokens.
        max_segments: with ``every_segment``, the number of documents that memory is for, a sequence on
            average: each has a state in every layer. The loss is NaN if there are more.

    Returns:
        A scalar, float32, or float64 for a model of that dtype.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import state_loss, zero_states
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(33)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> jax.grad(lambda states: state_loss(model, params, states, tokens))(zero_states(model)).shape
        (2, 4, 16, 16)
    """
    _check_batch("", tokens, mask)
    check_segment_ids(tokens, segment_ids)
    state, ids = initial_state(model, states, tokens.shape[0]), None
    variables = {"params": params}
    if segment_ids is not None:
        ids, same = segment_ids[:, :-1], segment_ids[:, 1:] == segment_ids[:, :-1]
        mask = mask_where(same, mask)
        if every_segment:
            max_segments = check_integer("max_segments", max_segments, 1)
            variables["segment_states"] = _segment_states(model, states, max_segments)
    hidden, _ = model.apply(variables, tokens[:, :-1], state, ids, method="hidden")
    return chunked_cross_entropy(hidden, head_kernel(params), tokens[:, 1:], mask, l2wrap=0.0)


def _segment_states(model: nn.Module, states: jax.Array, max_segments: int) -> dict[str, PyTree]:
    """The collection of the states from which the attentions start every segment."""
    of = lambda wkv: {"att": {"wkv": SegmentState(wkv, max_segments)}}
    if model.config.scan_layers:
        return {"blocks": of(states)}
    return {f"blocks_{i}": of(wkv) for i, wkv in enumerate(states)}


def tune_states(
    model: nn.Module,
    params: PyTree,
    batches: Iterable[PyTree],
    steps: int,
    *,
    learning_rate: optax.ScalarOrSchedule | None = None,
    states: Float[Array, "L H K V"] | None = None,
    every_segment: bool = False,
    max_segments: int = 32,
) -> tuple[Float[Array, "L H K V"], Float[np.ndarray, " steps"]]:
    """Tunes initial states; the parameters do not change.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters, as plain arrays.
        batches: at least ``steps`` batches, each tokens [B, T + 1] or a tuple ``(tokens, mask)`` or
            ``(tokens, mask, segment_ids)`` as `state_loss` takes them, compiled once for each shape.
        steps: optimiser steps.
        learning_rate: a number or an optax schedule; None for the official one, from 1 along a cosine to
            0.01. States need far larger steps than weights.
        states: [L, H, K, V] to start from; None for zeros.
        every_segment, max_segments: see `state_loss`.

    Returns:
        ``(states, losses)``: the tuned states [L, H, K, V], and the loss [steps] before each step.

    Raises:
        ValueError, TypeError: an argument, a batch or a token does not fit, or there are fewer batches than
            ``steps``; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import tune_states
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(33)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> states, losses = tune_states(model, params, [tokens] * 5, steps=5)
        >>> states.shape, losses.shape
        ((2, 4, 16, 16), (5,))
    """
    steps = check_integer("steps", steps, 1)
    if learning_rate is None:
        learning_rate = rwkv_schedule(1.0, 0.01, steps, warmup_steps=min(10, steps // 10))
    elif not callable(learning_rate):
        learning_rate = check_number("learning_rate", learning_rate, 0)
    optimizer = rwkv_optimizer(learning_rate, weight_decay=0.0)
    zeros = zero_states(model)
    if states is not None:
        _check_states(states, zeros.shape)
    states = zeros if states is None else jnp.array(states, zeros.dtype)
    try:
        source = iter(batches)
    except TypeError:
        raise TypeError(f"batches must be iterable, got {shown(batches)}") from None

    @jax.jit
    def step(
        states: jax.Array, opt_state: PyTree, params: PyTree, batch: tuple[jax.Array | None, ...]
    ) -> PyTree:
        options = {"every_segment": every_segment, "max_segments": max_segments}
        loss, grads = jax.value_and_grad(state_loss, 2)(model, params, states, *batch, **options)
        updates, opt_state = optimizer.update(grads, opt_state, states)
        return optax.apply_updates(states, updates), opt_state, loss

    opt_state, losses = optimizer.init(states), []
    for i in range(steps):
        batch = next(source, None)
        if batch is None:
            raise ValueError(f"batches must have at least steps = {steps} batches, got {i}")
        if isinstance(batch, tuple) and len(batch) not in (2, 3):
            what = "tokens or (tokens, mask), with segment_ids third"
            raise ValueError(f"batches[{i}] must be {what}, got a tuple of {len(batch)}")
        tokens, mask, *ids = batch if isinstance(batch, tuple) else (batch, None)
        where = f"batches must hold tokens or (tokens, mask); of batches[{i}] "
        _check_batch(where, tokens, mask)
        values = np.asarray(tokens)  # on the host, so that the check waits for no earlier step
        low, high = values.min(), values.max()
        if low < 0 or high >= model.config.vocab_size:
            span = f"from 0 to {model.config.vocab_size - 1}"
            raise ValueError(f"{where}tokens must be {span}, got {low if low < 0 else high}")
        states, opt_state, loss = step(states, opt_state, params, (tokens, mask, *ids))
        losses.append(loss)
    return states, np.asarray(jnp.stack(losses))


def save_states(path: str | os.PathLike[str], states: Float[Array, "L H K V"]) -> None:
    """Writes states [L, H, K, V] as a ``.pth`` file that RWKV-PEFT and programs around ``rwkv`` read.

    The file has ``blocks.{i}.att.time_state`` [H, V, K] in float32.

    Raises:
        ValueError: ``states`` does not have four axes. TypeError: it is not an array of numbers.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from fla_jax.checkpoints import read_pth
        >>> from fla_jax.training import save_states
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_states(folder + "/states.pth", jnp.ones((2, 4, 16, 16)))
        ...     sorted(read_pth(folder + "/states.pth"))
        ['blocks.0.att.time_state', 'blocks.1.att.time_state']
    """
    _check_states(states, None)
    transposed = np.asarray(states, np.float32).swapaxes(2, 3)
    write_pth(path, {f"blocks.{i}.att.time_state": np.ascontiguousarray(x) for i, x in enumerate(transposed)})


def load_states(path: str | os.PathLike[str], model: nn.Module) -> Float[Array, "L H K V"]:
    """Reads states from a ``.pth`` of `save_states` or RWKV-PEFT, or from a whole model with states in it.

    Args:
        path: of a ``.pth`` file, or of a checkpoint in any format (`fla_jax.checkpoints.load_checkpoint`).
        model: whose states they are.

    Returns:
        [L, H, K, V] float32.

    Raises:
        ValueError: the file has no states, or those of other layers and shapes; the message names the file
            and the tensor.

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> import tempfile
        >>> from fla_jax.training import load_states, save_states, zero_states
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_states(folder + "/states.pth", zero_states(model))
        ...     load_states(folder + "/states.pth", model).shape
        (2, 4, 16, 16)
    """
    path = located(path)
    tensors = load_extras(path) if path.is_dir() or path.suffix == ".safetensors" else read_pth(path)
    found = {name: match for name in tensors if (match := _NAME.fullmatch(name))}
    layers = {int(match[1] or match[2]): name for name, match in found.items()}
    L, H, K, V = zero_states(model).shape
    for i in sorted(set(layers) | set(range(L))):
        if i not in layers:
            raise ValueError(f"{path}: the time_state of layer {i} is missing; the model has {L} layers")
        name = layers[i]
        if i >= L:
            raise ValueError(f"{path}: {name} is surplus; the model has {L} layers")
        if tensors[name].shape != (H, V, K):
            got = list(tensors[name].shape)
            raise ValueError(f"{path}: {name} must have shape [H, V, K] = {[H, V, K]}, got {got}")
    return jnp.stack([jnp.asarray(tensors[layers[i]], jnp.float32).swapaxes(1, 2) for i in range(L)])
