"""What ``pretrain.py`` compiles: the training step, the evaluation, and what they need of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _cli import first_device

from fla_jax.data import PackedRows, batches
from fla_jax.models import RWKV6Config, RWKV6ForCausalLM, RWKV7Config, RWKV7ForCausalLM
from fla_jax.parallel import (
    TrainStep,
    batch_sharding,
    make_mesh,
    next_token_loss,
    overlap_options,
    parameter_shardings,
)
from fla_jax.training import rwkv_optimizer, rwkv_schedule

from .options import Options

MODELS: dict[str, Any] = {"rwkv6": (RWKV6ForCausalLM, RWKV6Config), "rwkv7": (RWKV7ForCausalLM, RWKV7Config)}
REMAT: dict[str, Any] = {"none": False, "dense": "dense", "full": True}
Batch = dict[str, Any]


def start_processes(options: Options) -> None:
    """Joins the other processes of the run, where there are any."""
    if options.coordinator is not None:
        jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    elif any(int(os.environ.get(name) or 1) > 1 for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")):
        jax.distributed.initialize()  # JAX finds the rest there


def keep_programs(options: Options) -> None:
    """On GPUs, keeps what is compiled: a resumed run starts sooner, and with the very same program.

    Compiled anew, it may get other kernels for its products, of about the same speed, with other last bits.
    """
    if first_device().platform in ("gpu", "cuda") and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache / "compiled"))


def precision(options: Options) -> str:
    """The compute dtype, ``auto`` resolved."""
    auto = "bf16" if first_device().platform in ("gpu", "cuda") else "fp32"
    return auto if options.precision == "auto" else options.precision


def build_model(options: Options, precision: str) -> Any:
    """The model, without parameters."""
    kind, config = MODELS[options.model]
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    run = {"dtype": dtype, "remat": REMAT[options.remat], "scan_layers": options.scan_layers}
    if options.scan_layers and options.mesh_fsdp == 1 and first_device().platform in ("gpu", "cuda"):
        run["scan_layers"] = "unroll"  # the same parameters
    sizes = options.vocab_size, options.hidden_size, options.num_layers, options.head_dim
    try:
        return kind(config(*sizes, **run))
    except ValueError as error:
        flags = f"--hidden-size {options.hidden_size}, --head-dim {options.head_dim}"
        raise ValueError(f"{flags}: {error}") from error


def in_pieces(loss: Callable[[Any, Batch], jax.Array], count: int, shardings: Any) -> Any:
    """``loss`` of a batch whose rows are computed in ``count`` pieces, one after the other.

    Value and gradients are those of the whole batch. A piece's gradients are made right behind its value, so
    that the activations of one piece alone are in memory; their sum lies like the parameters.
    """

    def walk(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        def piece_by_piece(x: jax.Array) -> jax.Array:  # every device takes from its own rows
            return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)

        def add(sums: Any, piece: Batch) -> tuple[Any, None]:
            share = piece["mask"].sum() / labels
            value, grads = jax.value_and_grad(loss)(params, piece)
            grads = jax.tree.map(lambda total, x: total + share * x, sums[1], grads)
            return (sums[0] + share * value, jax.lax.with_sharding_constraint(grads, shardings)), None

        labels = jnp.maximum(batch["mask"].sum(), 1)
        zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, params), shardings)
        sums = jnp.zeros(()), zeros
        return jax.lax.scan(add, sums, jax.tree.map(piece_by_piece, batch))[0]

    @jax.custom_vjp
    def whole(params: Any, batch: Batch) -> jax.Array:
        return walk(params, batch)[0]

    def backward(grads: Any, cotangent: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(lambda x: cotangent * x, grads), None

    whole.defvjp(walk, backward)
    return whole


def mesh_of(options: Options) -> jax.sharding.Mesh:
    """The mesh that the options ask for."""
    try:
        return make_mesh(
            **{name: getattr(options, f"mesh_{name}") for name in ("data", "fsdp", "tensor", "sequence")}
        )
    except ValueError as error:
        raise ValueError(f"--mesh-...: {error}") from error


class Trainer:
    """The compiled programs of a run, and the batches that they take.

    Attributes:
        step: a `TrainStep`.
        learning_rate: that of a step, counted from 0.
    """

    def __init__(self, options: Options, model: Any, steps: int):
        """Checks that model, mesh and batch fit one another; compiles nothing."""
        self.options, self.model = options, model
        self.mesh = mesh_of(options)
        if options.sequence % (parts := self.mesh.shape["sequence"]):
            raise ValueError(
                f"--sequence must be a multiple of --mesh-sequence = {parts}, got {options.sequence}"
            )
        rates = options.learning_rate, options.final_learning_rate
        schedule = rwkv_schedule(*rates, steps, warmup_steps=options.warmup_steps)
        self.learning_rate = jax.jit(schedule)
        optimizer = rwkv_optimizer(schedule, weight_decay=options.weight_decay)
        optimizer = optax.chain(optax.snapshot("gradient_norm", optax.tree.norm), optimizer)
        loss = self.loss = next_token_loss(model)
        if options.accumulate > 1:
            loss = in_pieces(loss, options.accumulate, parameter_shardings(model, self.mesh))
        self.step = TrainStep(model, optimizer, self.mesh, loss, compiler_options=self._compiler_options())
        self._evaluate = jax.jit(self._sums)
        rows, parts = options.batch // options.accumulate, self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if rows % parts:
            raise ValueError(
                f"--batch / --accumulate must be a multiple of --mesh-data * --mesh-fsdp = {parts}, the "
                f"devices that share rows, got {options.batch} / {options.accumulate} = {rows}"
            )

    def _compiler_options(self) -> dict[str, Any]:
        on_gpu = first_device().platform in ("gpu", "cuda")
        overlap = overlap_options() if self.options.overlap and on_gpu else {}
        # a resumed run repeats the losses bit by bit; gradients of the embedding are sums in any order
        # without it
        return {"xla_gpu_exclude_nondeterministic_ops": True, **overlap} if on_gpu else overlap

    def batches(self, rows: PackedRows, numbers: Any, seed: int | None) -> Any:
        """This process' rows of each batch, for `TrainStep.shard`; see `fla_jax.data.batches`."""
        size = self.options.batch
        shape = size, self.options.sequence
        places = batch_sharding(self.mesh).addressable_devices_indices_map(shape)
        mine = sorted({row for place in places.values() for row in range(size)[place[0]]})
        return batches(rows, numbers, size, seed=seed, part=mine)

    def shapes(self) -> tuple[Any, Any]:
        """A state and a batch without values: shapes, dtypes and shardings."""

        def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = jax.tree.map(placed, jax.eval_shape(self.step.init, jax.random.key(0)), self.step.shardings)
        size, rows = (self.options.batch, self.options.sequence), batch_sharding(self.mesh)
        dtypes = {"tokens": np.int32, "labels": np.int32, "segment_ids": np.int32, "mask": np.float32}
        return state, {
            name: jax.ShapeDtypeStruct(size, dtype, sharding=rows) for name, dtype in dtypes.items()
        }

    def evaluate(self, params: Any, found: Iterator[Batch]) -> float:
        """Mean loss, in nats per token, of all labels in some batches."""
        total = np.zeros(2)
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(self.step.rules):
            for batch in found:
                total += np.asarray(self._evaluate(params, self.step.shard(batch)), np.float64)
        return float(total[0] / max(total[1], 1))

    def _sums(self, params: Any, batch: Batch) -> jax.Array:
        """Sum of the losses, and number of labels."""
        pieces = self.options.accumulate
        split = jax.tree.map(lambda x: x.reshape(-1, pieces, *x.shape[1:]).swapaxes(0, 1), batch)

        def sums(piece: Batch) -> jax.Array:
            count = piece["mask"].sum()
            return jnp.stack([self.loss(params, piece) * count, count])

        return jax.lax.map(sums, split).sum(0)


def count_parameters(params: Any) -> tuple[int, int]:
    """All parameters, and those without the embedding."""
    total = sum(x.size for x in jax.tree.leaves(params))
    return total, total - sum(x.size for x in jax.tree.leaves(params["emb"]))
