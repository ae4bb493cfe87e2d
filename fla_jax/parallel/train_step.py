"""Training steps on a mesh: one compiled program for sharded parameters, gradients and optimiser states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

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
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..core.arguments import check_integer
from ..models import initial_params
from ..models.causal_lm import check_layers
from ..training.next_token import Loss, label_weight, next_token_loss
from .accumulate import accumulated_value_and_grad, microbatches
from .mesh import BATCH_AXES, batch_parts, is_explicit_mesh
from .rules import axis_rules, batch_sharding, optimizer_shardings, parameter_shapes, parameter_shardings


class TrainStep:
    """One optimiser step on a mesh, compiled once.

    Parameters, their gradients and the optimiser's moments are sharded as `parameter_shardings` says, the
    batch over data and fsdp. The input state is donated: its memory is reused for the new one.

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
        >>> tokens = jnp.zeros((jax.device_count(), 9), jnp.int32)
        >>> state, loss = step(state, step.shard(tokens))
        >>> int(state.step), round(step.evaluate(state.params, [tokens]), 1) < 5
        (1, True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        loss: Loss | None = None,
        *,
        weight: Callable[[PyTree], jax.Array] | None = None,
        accumulate: int = 1,
        has_aux: bool = False,
        compiler_options: Mapping[str, bool | int | str] | None = None,
    ):
        """Checks that the mesh fits the model; compiles nothing.

        Args:
            model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
            optimizer: any optax transformation, such as `fla_jax.training.rwkv_optimizer`'s. Its ``update``
                gets the loss as ``value``.
            mesh: from `make_mesh`.
            loss: ``loss(params, batch) -> scalar``, a mean over the whole batch, written as for a single
                device; None for `fla_jax.training.next_token_loss`.
            weight: ``weight(batch) -> scalar``, the divisor of the mean, which weighs several batches. None:
                the sum of the mask, or the number of labels, with the default loss, else the number of
                sequences.
            accumulate: number of microbatches that a batch is computed in, to save memory.
                Loss and gradient stay those of the whole batch, but for rounding.
            has_aux: whether the loss returns ``(scalar, aux)``; with ``accumulate``, aux is stacked.
            compiler_options: of XLA, for the step's program alone, such as `overlap_options`.

        Raises:
            ValueError: see `axis_rules`, or ``accumulate`` is not an integer >= 1.
        """
        self.model, self.mesh, self.rules = model, mesh, axis_rules(model, mesh)
        self._optimizer, self._loss, self._has_aux = optimizer, loss or next_token_loss(model), has_aux
        self._weight = weight or (label_weight if loss is None else _num_sequences)
        self._accumulate = check_integer("accumulate", accumulate, 1)
        shapes, params = parameter_shapes(model), parameter_shardings(model, mesh)
        stored = {"step": NamedSharding(mesh, P()), "params": params}
        stored["opt_state"] = optimizer_shardings(optimizer, shapes, params, mesh)
        self.shardings = TrainState(apply_fn=model.apply, tx=optimizer, **stored)
        # with explicit axes the types already have the shardings
        out: dict[str, PyTree] = {} if is_explicit_mesh(mesh) else {"out_shardings": (self.shardings, None)}
        options = None if compiler_options is None else dict(compiler_options)
        self._compiled = jax.jit(self._step, donate_argnums=(0,), compiler_options=options, **out)
        self._evaluate = jax.jit(self._weighted_losses)

    def init(self, key: jax.Array) -> TrainState:
        """A new state, initialised on the devices that store it. ``key``: from `jax.random.key`."""

        def create(key: jax.Array) -> TrainState:
            return self._state(nn.meta.unbox(initial_params(self.model, key)))

        # XLA then divides the work; with explicit axes every device would first make whole parameters
        devices, names = self.mesh.devices, self.mesh.axis_names
        automatic = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        shardings = jax.tree.map(lambda s: NamedSharding(automatic, s.spec), self.shardings)
        return jax.device_put(jax.jit(create, out_shardings=shardings)(key), self.shardings)

    def start(self, params: PyTree) -> TrainState:
        """A new state from existing parameters, such as a checkpoint's, which are copied.

        Raises:
            ValueError: a parameter is missing, surplus, or has another shape than the model's; the message
                names it.
        """
        params = unfreeze(nn.meta.unbox(params))
        _check_params(self.model, params)
        params = jax.device_put(params, self.shardings.params, may_alias=False)
        with jax.set_mesh(self.mesh):
            return jax.jit(self._state, out_shardings=self.shardings)(params)

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct` with shardings: for `lower`, or to restore a checkpoint."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        with_sharding = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(with_sharding, shapes, self.shardings)

    def local_batch_rows(self, size: int) -> list[int]:
        """Which sequences of a batch of ``size`` this process passes to `shard`: ``part`` of
        `fla_jax.data.batches`.

        Raises:
            ValueError: ``size`` is not a multiple of data * fsdp * accumulate.
        """
        self._check_batch(size)
        indices: PyTree = batch_sharding(self.mesh).addressable_devices_indices_map((size,))
        return sorted({i for index in indices.values() for i in range(size)[index[0]]})

    def shard(self, batch: PyTree) -> PyTree:
        """A batch on its devices: arrays [B, ...], B split over data and fsdp.

        Where several processes train together, each passes its own sequences, `local_batch_rows`.

        Raises:
            ValueError: B is not a multiple of data * fsdp * accumulate.
        """
        sharding = batch_sharding(self.mesh)

        def put(x: ArrayLike) -> jax.Array:
            if jax.process_count() == 1:
                self._check_batch(np.shape(x)[0])
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        return jax.tree.map(put, batch)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        """One step.

        Args:
            state: from `init` or `start`, or from the step before. Donated: it cannot be used again.
            batch: from `shard`: what the loss takes.

        Returns:
            ``(state, loss)``, or ``(state, (loss, aux))``.
        """
        with jax.set_mesh(self.mesh):
            return self._compiled(state, batch)

    def evaluate(self, params: PyTree, batches: Iterable[PyTree]) -> float:
        """The loss over several batches, each weighed by its `weight`: with the default loss the mean over
        all labels, in nats per token. Batches are computed in ``accumulate`` microbatches, like a step.

        Args:
            params: such as ``state.params``.
            batches: what `shard` takes.
        """
        sums = np.zeros(2)
        with jax.set_mesh(self.mesh):
            for batch in batches:
                sums += np.asarray(self._evaluate(params, self.shard(batch)), np.float64)
        return float(sums[0] / (sums[1] or 1))

    def lower(self, state: TrainState, batch: PyTree) -> PyTree:
        """The lowered program, as `jax.jit`'s ``lower``: for ``.compile().as_text()`` or
        ``memory_analysis()``. Shapes are enough (`abstract_state`).
        """
        with jax.set_mesh(self.mesh):
            return self._compiled.lower(state, batch)

    def _state(self, params: PyTree) -> TrainState:
        state = TrainState.create(apply_fn=self.model.apply, params=params, tx=self._optimizer)
        return state.replace(step=jnp.int32(0))

    def _check_batch(self, size: int) -> None:
        parts = batch_parts(self.mesh)
        if size % (parts * self._accumulate):
            sizes = [self.mesh.shape[axis] for axis in BATCH_AXES]
            what = f"mesh axes {' * '.join(BATCH_AXES)} = {' * '.join(map(str, sizes))} = {parts}"
            if self._accumulate > 1:
                what += f", times accumulate = {self._accumulate}"
            raise ValueError(f"batch must have a size B that is a multiple of {what}, got {size}")

    def _axis_rules(self) -> contextlib.AbstractContextManager[None]:
        """The logical axis rules in context; with explicit axes the types decide."""
        return contextlib.nullcontext() if is_explicit_mesh(self.mesh) else nn.logical_axis_rules(self.rules)

    def _value_and_grad(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        if self._accumulate == 1:
            return jax.value_and_grad(self._loss, has_aux=self._has_aux)(params, batch)

        def constrain(grads: PyTree) -> PyTree:
            if is_explicit_mesh(self.mesh):  # the types shard them like the parameters
                return grads
            return jax.lax.with_sharding_constraint(grads, self.shardings.params)

        args = self._loss, self._weight, self._accumulate, self._has_aux, constrain
        return accumulated_value_and_grad(*args)(params, batch)

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        for x in jax.tree.leaves(batch):
            self._check_batch(x.shape[0])
        with self._axis_rules():
            loss, grads = self._value_and_grad(state.params, batch)
        update = self._update
        if is_explicit_mesh(self.mesh):  # optax's products do not say how their results are sharded
            stored = self.shardings.params, self.shardings.opt_state
            update = jax.sharding.auto_axes(update, out_sharding=stored)
        params, opt_state = update(grads, state.opt_state, state.params, loss[0] if self._has_aux else loss)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    def _update(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, value: jax.Array
    ) -> tuple[PyTree, PyTree]:
        # some transformations read the loss: optax.contrib.reduce_on_plateau, optax.polyak_sgd
        update = optax.with_extra_args_support(self._optimizer).update
        updates, opt_state = update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    def _weighted_losses(self, params: PyTree, batch: PyTree) -> jax.Array:
        """Sum of weighted losses, and of weights, over the microbatches of a batch."""

        def one(microbatch: PyTree) -> jax.Array:
            weight, loss = self._weight(microbatch), self._loss(params, microbatch)
            return jnp.stack([(loss[0] if self._has_aux else loss) * weight, weight])

        with self._axis_rules():
            if self._accumulate == 1:
                return one(batch)
            return jax.lax.map(one, microbatches(batch, self._accumulate)).sum(0)


def _num_sequences(batch: PyTree) -> jax.Array:
    return jnp.float32(jax.tree.leaves(batch)[0].shape[0])


def _check_params(model: nn.Module, params: PyTree) -> None:
    """Raises unless ``params`` have the names and shapes of the model's."""
    check_layers(params, model.config)
    given, wanted = flatten_dict(params, sep="/"), flatten_dict(parameter_shapes(model), sep="/")
    for name in [*wanted, *given]:
        if name not in given:
            raise ValueError(f"params must contain {name}")
        if name not in wanted:
            raise ValueError(f"params contain {name}, which the model does not have")
        shape, want = np.shape(given[name]), wanted[name].shape
        if shape != want:
            raise ValueError(f"params: {name} must have shape {list(want)}, got {list(shape)}")
