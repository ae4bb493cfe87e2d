"""Training steps on a mesh: one compiled program for sharded parameters, gradients and optimiser states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import unfreeze
from flax.training.train_state import TrainState
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..core.arguments import check_integer, shown
from ..layers.state import RWKVState
from ..models import initial_params
from ..training.carry import carried_loss, zero_carry
from ..training.next_token import Loss, WeightedLoss, next_token_loss
from .accumulate import LossAndAux, Trained, accumulated_value_and_grad, num_sequences, weighted_losses
from .carry import carry_shardings, stored_carry, with_carry
from .mesh import check_batch_size, is_explicit_mesh
from .rules import (
    axis_rules,
    batch_sharding,
    check_dtypes,
    check_parameter_shapes,
    initial_fp8_scales,
    optimizer_shardings,
    parameter_shapes,
    parameter_shardings,
    sharding_on,
)
from .train_state import CarriedTrainState, FP8TrainState, optimizer_update, train_state

METRICS = ("loss", "grad_norm", "tokens")


class TrainStep:
    """One optimiser step on a mesh, compiled once.

    Parameters, their gradients and the optimiser's moments are sharded as `parameter_shardings` says, the
    batch over data and fsdp. The input state is donated: its memory is reused for the new one.

    With ``params=`` other arrays are trained than the model's parameters, such as adapters or initial states,
    while ``frozen=`` ones, such as the model's parameters, are an argument of the loss.

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
        >>> step = TrainStep(model, rwkv_optimizer(6e-4), make_mesh(), metrics=("loss", "tokens"))
        >>> state = step.init(jax.random.key(0))
        >>> tokens = jnp.zeros((jax.device_count(), 9), jnp.int32)
        >>> state, metrics = step(state, step.shard(tokens))
        >>> int(state.step), int(metrics["tokens"]) == tokens[:, 1:].size
        (1, True)
        >>> step.evaluate(state, [tokens]) < 5
        True
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
        carry_sequences: int | None = None,
        metrics: Sequence[str] | None = None,
        rng: jax.Array | None = None,
        params: PyTree = None,
        frozen: PyTree = None,
        donate: bool = True,
        compiler_options: Mapping[str, bool | int | str] | None = None,
    ):
        """Checks that the mesh fits the model; compiles nothing.

        Args:
            model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
            optimizer: any optax transformation, such as `fla_jax.training.rwkv_optimizer`'s. Its ``update``
                gets the loss as ``value``.
            mesh: from `make_mesh`.
            loss: ``loss(params, batch) -> scalar``, a mean over the whole batch, written as for a single
                device; None for `fla_jax.training.next_token_loss`. With a model's ``fp8=True`` a step calls
                ``loss(params, batch, fp8_scales=scales)`` (see `FP8TrainState`); `evaluate` does not.
            weight: ``weight(batch) -> scalar``, the divisor of the mean, which weighs several batches; where
                it is 0, the loss must be the undivided sum, as `fla_jax.training.cross_entropy` is. None:
                ``loss.weight`` if the loss has one, as that of `fla_jax.training.next_token_loss` (the sum of
                the mask, or the number of labels), else the number of sequences.
            accumulate: number of microbatches that a batch is computed in, to save memory.
                Loss and gradient stay those of the whole batch, but for rounding.
            has_aux: whether the loss returns ``(scalar, aux)``; with ``accumulate``, aux is stacked.
            carry_sequences: the number B of a batch's sequences, whose recurrent states are then carried to
                the next batch, for documents longer than a sequence: batches are those of
                `fla_jax.data.pack_documents` with ``carry_state=True``. States are `CarriedTrainState`, the
                default loss is `fla_jax.training.carried_loss`; another one has its form.
            metrics: names of what a step returns in a dict: ``"loss"``, ``"grad_norm"`` (global norm of the
                gradient, before the optimiser clips it), ``"tokens"`` (the batch's `weight`). None: the loss
                alone, without a dict.
            rng: a key. A step then calls ``loss(params, batch, key=key)``, with another key in every step and
                microbatch, for dropout; it follows from ``rng`` and ``state.step``, so that a resumed run
                repeats it. `evaluate` passes none.
            params: what is trained: a pytree of arrays, or of `jax.ShapeDtypeStruct`, stored as their
                shardings on the mesh say, without one on every device. None: the model's parameters, in its
                ``param_dtype``; to train a checkpoint's parameters in the dtypes of its file, pass them.
            frozen: arrays, which the loss gets as ``loss(params, batch, frozen=frozen)``.
            donate: whether the memory of a step's input state is reused.
            compiler_options: of XLA, for the step's program alone, such as `overlap_options`.

        Raises:
            ValueError: see `axis_rules`, ``accumulate`` is not an integer >= 1, a metric is unknown,
                ``carry_sequences`` does not fit the mesh, or is given with ``has_aux``, or ``params`` are
                given and the model has ``fp8=True``.
        """
        self.model, self.mesh, self.rules = model, mesh, axis_rules(model, mesh)
        if unknown := sorted({*(metrics or ())} - {*METRICS}):
            raise ValueError(f"metrics must be of {', '.join(METRICS)}, got {unknown[0]!r}")
        self._carry_sequences = carry_sequences
        if carry_sequences is not None and has_aux:
            raise ValueError("has_aux must be False with carry_sequences, whose losses return the carry")
        default = next_token_loss(model) if carry_sequences is None else carried_loss(model)
        self._optimizer, self._loss, self._has_aux = optimizer, loss or default, has_aux
        of_loss = self._loss.weight if isinstance(self._loss, WeightedLoss) else num_sequences
        self._weight = of_loss if weight is None else weight
        self._accumulate = check_integer("accumulate", accumulate, 1)
        self._check_batch = functools.partial(check_batch_size, mesh, self._accumulate)
        if carry_sequences is not None:
            self._check_batch(check_integer("carry_sequences", carry_sequences, 1))
        self._metrics, self._rng = metrics, rng
        self._frozen = () if frozen is None else (frozen,)
        self._trains_model = params is None
        if model.config.fp8 and not self._trains_model:
            raise ValueError("fp8 must be False in the model's config where params= are trained")
        self._fp8_scales = initial_fp8_scales(model) if model.config.fp8 else None
        if params is None:
            shapes, shardings = parameter_shapes(model), parameter_shardings(model, mesh)
        else:
            params = unfreeze(nn.meta.unbox(params))
            shapes, shardings = params, jax.tree.map(functools.partial(sharding_on, mesh), params)
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        stored = {"step": NamedSharding(mesh, P()), "params": shardings}
        stored["opt_state"] = optimizer_shardings(optimizer, self._shapes, shardings, mesh)
        carry = self._carry_shardings = None if carry_sequences is None else carry_shardings(mesh)
        scales = jax.tree.map(lambda _: NamedSharding(mesh, P()), self._fp8_scales)
        self.shardings = train_state(carry, scales, apply_fn=model.apply, tx=optimizer, **stored)
        out: dict[str, PyTree] = {"out_shardings": (self.shardings, None)}
        out_evaluate: dict[str, PyTree] = {"out_shardings": (None, carry)}
        if is_explicit_mesh(mesh):  # the types already have the shardings
            out, out_evaluate = {}, {}
        options = None if compiler_options is None else dict(compiler_options)
        donated = (0,) if donate else ()
        self._compiled = jax.jit(self._step, donate_argnums=donated, compiler_options=options, **out)
        self._evaluate = jax.jit(self._weighted_losses, **out_evaluate)
        self._zero_carry = jax.jit(self._carry, out_shardings=carry)

    def init(self, key: jax.Array) -> TrainState:
        """A new state, initialised on the devices that store it. ``key``: from `jax.random.key`.

        Raises:
            ValueError: other arrays are trained than the model's parameters: pass them to `start`.
        """
        if not self._trains_model:
            raise ValueError("init draws the model's parameters, and params= are trained: use start(params)")

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
            ValueError: a parameter is missing, surplus, or has another shape or dtype than the model's (or
                than the argument ``params`` of `__init__`); the message names it.
        """
        params = unfreeze(nn.meta.unbox(params))
        if self._trains_model:
            check_parameter_shapes(self.model, params)
            dtype = self.model.config.param_dtype
            hint = f"use load_checkpoint(..., param_dtype={dtype!r}), or TrainStep(..., params=params)"
        else:
            chex.assert_trees_all_equal_shapes(params, self._shapes, exception_type=ValueError)
            hint = "the dtypes are those of TrainStep's argument params"
        check_dtypes(params, self._shapes, hint)  # else `abstract_state` would differ from the state
        params = jax.device_put(params, self.shardings.params, may_alias=False)
        with jax.set_mesh(self.mesh):
            return jax.jit(self._state, out_shardings=self.shardings)(params)

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct` with shardings: for `lower`, or to restore a checkpoint."""
        shapes = jax.eval_shape(self._state, self._shapes)
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
            ValueError: B is not a multiple of data * fsdp * accumulate, or an array has no axes.
        """
        sharding = batch_sharding(self.mesh)

        def put(x: ArrayLike) -> jax.Array:
            if not np.ndim(x):
                raise ValueError(f"batch must contain arrays [B, ...] alone, got {shown(x)}")
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
            ``(state, loss)``, or ``(state, (loss, aux))``; with ``metrics`` ``(state, metrics)``, a dict that
            contains ``"aux"`` too if the loss has one.
        """
        with jax.set_mesh(self.mesh):
            return self._compiled(state, batch, *self._frozen)

    def evaluate(self, state: TrainState, batches: Iterable[PyTree]) -> float:
        """The loss over several batches, each weighed by its `weight`: with the default loss the mean over
        all labels, in nats per token. Batches are computed in ``accumulate`` microbatches, like a step. With
        ``carry_sequences``, recurrent states are zeros before the first one.

        Args:
            state: of which the parameters alone are read.
            batches: what `shard` takes.

        Raises:
            ValueError: there is no batch.
        """
        sums, found = np.zeros(2), None
        with jax.set_mesh(self.mesh):
            carry = self._zero_carry()
            for batch in batches:
                found, carry = self._evaluate(state.params, self.shard(batch), carry, *self._frozen)
                sums += np.asarray(found, np.float64)
        if found is None:
            raise ValueError("batches must have at least one batch, got none")
        return float(sums[0] / (sums[1] or 1))

    def lower(self, state: TrainState, batch: PyTree) -> PyTree:
        """The lowered program, as `jax.jit`'s ``lower``: for ``.compile().as_text()`` or
        ``memory_analysis()``. Shapes are enough (`abstract_state`).
        """
        with jax.set_mesh(self.mesh):
            return self._compiled.lower(state, batch, *self._frozen)

    def _state(self, params: PyTree) -> TrainState:
        optimizer, opt_state = self._optimizer, self._optimizer.init(params)
        stored = {"step": jnp.int32(0), "params": params, "opt_state": opt_state}
        return train_state(self._carry(), self._fp8_scales, apply_fn=self.model.apply, tx=optimizer, **stored)

    def _carry(self) -> RWKVState | None:
        """The carry before the first batch."""
        return None if self._carry_sequences is None else zero_carry(self.model, self._carry_sequences)

    def _axis_rules(self) -> contextlib.AbstractContextManager[None]:
        """The logical axis rules in context; with explicit axes the types decide."""
        return contextlib.nullcontext() if is_explicit_mesh(self.mesh) else nn.logical_axis_rules(self.rules)

    def _loss_of(self, frozen: tuple[PyTree, ...]) -> LossAndAux:
        """The loss of parameters and scales, a batch, and a key or None; aux is None without one."""
        more = {"frozen": frozen[0]} if frozen else {}
        has_aux = self._has_aux or self._carry_sequences is not None

        def loss(trained: Trained, batch: PyTree, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
            params, scales = trained
            given = {name: x for name, x in (("key", key), ("fp8_scales", scales)) if x is not None}
            found: PyTree = self._loss(params, batch, **more, **given)
            return found if has_aux else (found, None)

        return loss

    def _value_and_grad(self, state: TrainState, batch: PyTree, frozen: tuple[PyTree, ...]) -> PyTree:
        key = None if self._rng is None else jax.random.fold_in(self._rng, state.step)

        def constrain(grads: PyTree) -> PyTree:
            if is_explicit_mesh(self.mesh):  # the types shard them like the parameters
                return grads
            return jax.lax.with_sharding_constraint(grads, self.shardings.params)

        args = self._loss_of(frozen), self._weight, self._accumulate, constrain
        scales = state.fp8_scales if isinstance(state, FP8TrainState) else None
        return accumulated_value_and_grad(*args)((state.params, scales), batch, key)

    def _step(self, state: TrainState, batch: PyTree, *frozen: PyTree) -> tuple[TrainState, PyTree]:
        if isinstance(state, CarriedTrainState):
            batch = with_carry(batch, state.carry)
        for x in jax.tree.leaves(batch):
            self._check_batch(x.shape[0])
        with self._axis_rules():
            (loss, aux), (grads, scales) = self._value_and_grad(state, batch, frozen)
            if isinstance(state, CarriedTrainState):
                state = state.replace(carry=stored_carry(aux, self._accumulate, self._carry_shardings))
            if isinstance(state, FP8TrainState):  # their gradients are their next values
                state = state.replace(fp8_scales=scales)
            metrics = self._reported(loss, aux, grads, batch)
        if self.mesh.shape["fsdp"] > 1:
            specs = jax.tree.map(lambda sharding: sharding.spec, self.shardings.params)
            grads = jax.shard_map(_row_major, mesh=self.mesh, in_specs=(specs,), out_specs=specs)(grads)
        update = functools.partial(optimizer_update, self._optimizer)
        if is_explicit_mesh(self.mesh):  # optax's products do not say how their results are sharded
            stored = self.shardings.params, self.shardings.opt_state
            update = jax.sharding.auto_axes(update, out_sharding=stored)
        params, opt_state = update(grads, state.opt_state, state.params, loss)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    def _reported(self, loss: jax.Array, aux: PyTree, grads: PyTree, batch: PyTree) -> PyTree:
        """The second result of a step."""
        if self._metrics is None:
            return (loss, aux) if self._has_aux else loss
        made = {"loss": lambda: loss, "grad_norm": lambda: optax.tree.norm(grads)}
        made["tokens"] = lambda: self._weight(batch)
        return {name: made[name]() for name in self._metrics} | ({"aux": aux} if self._has_aux else {})

    def _weighted_losses(
        self, params: PyTree, batch: PyTree, carry: RWKVState | None, *frozen: PyTree
    ) -> tuple[jax.Array, RWKVState | None]:
        """See `weighted_losses`; and the carry after the batch."""
        batch = batch if carry is None else with_carry(batch, carry)
        args = self._loss_of(frozen), self._weight, self._accumulate, (params, None), batch
        with self._axis_rules():
            sums, aux = weighted_losses(*args)
            return sums, None if carry is None else stored_carry(aux, self._accumulate, self._carry_shardings)


def _row_major(grads: PyTree) -> PyTree:
    """Gradients with their last axis contiguous.

    Where that axis is sharded, XLA scatters their sums in another order. It would update parameters and
    moments in that order too, and transpose and copy them for it.
    """
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), grads)
