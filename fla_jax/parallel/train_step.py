"""Training steps on a mesh: one compiled program that owns parameters, moments and gradients in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import unfreeze
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models import initial_params
from ..models.causal_lm import check_layers
from ..training import chunked_cross_entropy
from .mesh import ROWS, is_explicit_mesh, row_parts
from .rules import (
    axis_rules,
    batch_sharding,
    optimizer_shardings,
    over_sequence,
    parameter_shapes,
    parameter_shardings,
)

Loss = Callable[[Any, Any], Any]


def next_token_loss(model: Any, *, l2wrap: float = 1e-4, block_tokens: int = 4096) -> Loss:
    """The loss of the official recipe: mean cross-entropy of the next token, with L2Wrap, without all logits
    in memory.

    A batch is one of:

    * tokens [B, T + 1] integers: each predicts the next one;
    * a pair of those and a mask [B, T] of the labels ``tokens[:, 1:]``: booleans or weights;
    * a dict as `fla_jax.data.batches` yields it: ``tokens`` [B, T], ``labels`` [B, T] and, if present,
      ``segment_ids`` [B, T], where the state restarts, and ``mask`` [B, T].

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        l2wrap: see `fla_jax.training.chunked_cross_entropy`.
        block_tokens: see `fla_jax.training.chunked_cross_entropy`.

    Returns:
        ``loss(params, batch)``. It raises a TypeError or ValueError for a batch of another form.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.parallel import next_token_loss
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(9)[None]
        >>> params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]  # shapes will do here
        >>> jax.eval_shape(next_token_loss(model), params, tokens).shape
        ()
    """

    def loss(params: Any, batch: Any) -> jax.Array:
        tokens, labels, ids, mask = _parts(batch)
        ids = None if ids is None else over_sequence(ids)
        hidden, _ = model.apply({"params": params}, over_sequence(tokens), segment_ids=ids, method="hidden")
        head = params["head"]["kernel"]
        return chunked_cross_entropy(hidden, head, labels, mask, l2wrap, block_tokens=block_tokens)

    return loss


def _parts(batch: Any) -> tuple[Any, Any, Any, Any]:
    """Tokens [B, T], labels, segment_ids and mask, the last two or None, of a batch in any form."""
    if isinstance(batch, Mapping):
        if not {"tokens", "labels"} <= set(batch) <= {"tokens", "labels", "segment_ids", "mask"}:
            raise ValueError(
                "batch must be a dict of tokens, labels and perhaps segment_ids and mask, got one of "
                f"{', '.join(map(str, batch))}"
            )
        return batch["tokens"], batch["labels"], batch.get("segment_ids"), batch.get("mask")
    if isinstance(batch, tuple | list):
        if len(batch) != 2:
            raise ValueError(f"batch must be a pair of tokens and a mask, got {len(batch)} arrays")
        tokens, mask = batch
    else:
        tokens, mask = batch, None
    if np.ndim(tokens) != 2:
        raise TypeError(
            "batch must be tokens [B, T + 1], a pair of them and a mask, or a dict of arrays, got "
            f"{type(tokens).__name__}"
        )
    return tokens[:, :-1], tokens[:, 1:], None, mask


class TrainStep:
    """One optimiser step on a mesh, compiled once.

    Parameters, their gradients and the optimiser's moments are stored as `parameter_shardings` says; rows are
    split over data and fsdp. The state that goes in is donated: its memory becomes the new one's.

    Attributes:
        mesh: the mesh.
        rules: its `axis_rules` for the model.
        shardings: a `flax.training.train_state.TrainState` of shardings, that of its states.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.parallel import TrainStep, make_mesh
        >>> from fla_jax.training import rwkv_optimizer
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=32, num_layers=1, head_dim=16))
        >>> step = TrainStep(model, rwkv_optimizer(6e-4), make_mesh())
        >>> state = step.init(jax.random.key(0))
        >>> state, loss = step(state, step.shard(jnp.zeros((jax.device_count(), 9), jnp.int32)))
        >>> int(state.step)
        1
    """

    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        loss: Loss | None = None,
        *,
        has_aux: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        """Checks that the mesh fits the model; compiles nothing.

        Args:
            model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
            optimizer: any optax transformation, such as `fla_jax.training.rwkv_optimizer`'s. Its ``update``
                gets the loss as ``value``, which `optax.contrib.reduce_on_plateau` reads.
            mesh: from `make_mesh`.
            loss: ``loss(params, batch) -> scalar``, a mean over the whole batch; None for `next_token_loss`.
                It is written for whole arrays, as on one device.
            has_aux: whether the loss returns ``(scalar, anything)``.
            compiler_options: of XLA, for the step's program alone, such as `overlap_options`.

        Raises:
            ValueError: see `axis_rules`.
        """
        self.model, self.mesh, self.rules = model, mesh, axis_rules(model, mesh)
        self._optimizer, self._loss, self._has_aux = optimizer, loss or next_token_loss(model), has_aux
        shapes, params = parameter_shapes(model), parameter_shardings(model, mesh)
        stored: Any = {"step": NamedSharding(mesh, P()), "params": params}
        stored["opt_state"] = optimizer_shardings(optimizer, shapes, params, mesh)
        self.shardings = TrainState(apply_fn=model.apply, tx=optimizer, **stored)
        # on a mesh with explicit axes the types say it already
        out: Any = {} if is_explicit_mesh(mesh) else {"out_shardings": (self.shardings, None)}
        options = None if compiler_options is None else dict(compiler_options)
        self._compiled = jax.jit(self._step, donate_argnums=(0,), compiler_options=options, **out)

    def init(self, key: jax.Array) -> TrainState:
        """A new state, made in parts where it will lie. ``key``: from `jax.random.key`."""

        def create(key: jax.Array) -> TrainState:
            return self._state(nn.meta.unbox(initial_params(self.model, key)))

        # XLA splits the work by what is wanted in the end; on a mesh with explicit axes the whole would come
        # first
        devices, names = self.mesh.devices, self.mesh.axis_names
        automatic = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        shardings = jax.tree.map(lambda s: NamedSharding(automatic, s.spec), self.shardings)
        return jax.device_put(jax.jit(create, out_shardings=shardings)(key), self.shardings)

    def start(self, params: Any) -> TrainState:
        """A new state from existing parameters, such as a checkpoint's; they stay as they are.

        Raises:
            ValueError: a parameter is missing, surplus, or has another shape than the model's; the message
                names it.
        """
        params = unfreeze(nn.meta.unbox(params))
        _check_params(self.model, params)
        params = jax.device_put(params, self.shardings.params, may_alias=False)
        with jax.set_mesh(self.mesh):
            return jax.jit(self._state, out_shardings=self.shardings)(params)

    def shard(self, batch: Any) -> Any:
        """A batch on its devices: arrays [B, ...], each with its rows over data and fsdp.

        Where several processes train together, each gives its own rows.

        Raises:
            ValueError: the mesh does not divide the rows.
        """
        sharding = batch_sharding(self.mesh)

        def put(x: Any) -> jax.Array:
            if jax.process_count() == 1:
                self._check_rows(np.shape(x)[0])
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        return jax.tree.map(put, batch)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """One step.

        Args:
            state: from `init` or `sees_h0`, or from the step before. Donated: it cannot be used again.
            batch: from `shard`: what the loss takes.

        Returns:
            ``(state, loss)``, or ``(state, (loss, aux))``.
        """
        with jax.set_mesh(self.mesh):
            return self._compiled(state, batch)

    def lower(self, state: TrainState, batch: Any) -> Any:
        """What `jax.jit` calls lower: for ``.compile().as_text()``, ``memory_analysis()``. Shapes will do."""
        with jax.set_mesh(self.mesh):
            return self._compiled.lower(state, batch)

    def _state(self, params: Any) -> TrainState:
        state = TrainState.create(apply_fn=self.model.apply, params=params, tx=self._optimizer)
        return state.replace(step=jnp.int32(0))

    def _check_rows(self, rows: int) -> None:
        if rows % row_parts(self.mesh):
            sizes = [self.mesh.shape[axis] for axis in ROWS]
            what = f"{' * '.join(ROWS)} = {' * '.join(map(str, sizes))} = {row_parts(self.mesh)}"
            raise ValueError(
                f"batch must have a number of rows that is a multiple of mesh axes {what}, got {rows}"
            )

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        for x in jax.tree.leaves(batch):
            self._check_rows(x.shape[0])
        explicit = is_explicit_mesh(self.mesh)
        with contextlib.nullcontext() if explicit else nn.logical_axis_rules(self.rules):
            loss, grads = jax.value_and_grad(self._loss, has_aux=self._has_aux)(state.params, batch)
        update = self._update
        if explicit:  # the optimiser is optax's code, whose products do not say how their results are sharded
            stored = self.shardings.params, self.shardings.opt_state
            update = jax.sharding.auto_axes(update, out_sharding=stored)
        params, opt_state = update(grads, state.opt_state, state.params, loss[0] if self._has_aux else loss)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    def _update(self, grads: Any, opt_state: Any, params: Any, value: jax.Array) -> tuple[Any, Any]:
        # some transformations read the loss: optax.contrib.reduce_on_plateau, optax.polyak_sgd
        update = optax.with_extra_args_support(self._optimizer).update
        updates, opt_state = update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state


def _check_params(model: Any, params: Any) -> None:
    """Raises unless ``params`` are the model's in names and shapes."""
    check_layers(params, model.config)
    given, wanted = flatten_dict(params, sep="/"), flatten_dict(parameter_shapes(model), sep="/")
    for name in [*wanted, *given]:
        if name not in given:
            raise ValueError(f"params lack {name}, which the model has")
        if name not in wanted:
            raise ValueError(f"params hold {name}, which the model has not")
        shape, want = np.shape(given[name]), wanted[name].shape
        if shape != want:
            raise ValueError(f"params: {name} must have shape {list(want)}, got {list(shape)}")
