"""Which array axes are split over which mesh axes: logical axis rules and shardings."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core.mesh import Entry
from ..layers.fp8 import FP8_SCALES
from ..layers.state import RWKVState
from ..models.causal_lm import check_params
from .mesh import BATCH_AXES, batch_parts, check_axes

Rules = tuple[tuple[str, Entry], ...]


def axis_rules(model: nn.Module, mesh: Mesh, *, batch: int | None = None) -> Rules:
    """The logical axis rules (`flax.linen.logical_axis_rules`) that train ``model`` on ``mesh``, or run it.

    Parameters: ``embed`` over fsdp; ``heads``, ``mlp`` and ``vocab`` over tensor. Activations:
    ``activation_batch`` over data and fsdp, ``activation_length`` over sequence,
    ``activation_{heads,mlp,vocab}`` over tensor.
    A vocabulary that is not a multiple of tensor, and ranks of low-rank pairs that are not multiples of fsdp,
    are replicated.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        mesh: from `make_mesh`.
        batch: the number of sequences, for inference such as `fla_jax.generation.generate` with prompts of
            any length: these are then not split, and the batch only if the mesh divides it. None for
            training.

    Returns:
        Pairs of a logical axis and a mesh axis, or several, or None.

    Raises:
        ValueError: the model's channels, heads or hidden channels are not a multiple of their mesh axis; the
            message names both.

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.parallel import axis_rules, make_mesh
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> dict(axis_rules(model, make_mesh()))["embed"]
        'fsdp'
    """
    check_axes(mesh)
    config, fsdp, tensor = model.config, mesh.shape["fsdp"], mesh.shape["tensor"]
    widths = _widths(model)
    heads = config.hidden_size // config.head_dim
    for what, size, axis in (
        ("hidden_size", config.hidden_size, "fsdp"),
        (f"hidden_size / head_dim = {config.hidden_size} / {config.head_dim}, the heads,", heads, "tensor"),
        *(("intermediate_size", size, "tensor") for size in sorted(widths["mlp"])),
    ):
        if size % mesh.shape[axis]:
            raise ValueError(
                f"{what} must be a multiple of mesh axis {axis} = {mesh.shape[axis]}, got {size}"
            )
    vocab = None if config.vocab_size % tensor else "tensor"
    return (
        ("activation_batch", BATCH_AXES if batch is None or batch % batch_parts(mesh) == 0 else None),
        ("activation_length", "sequence" if batch is None else None),
        ("embed", "fsdp"),
        ("heads", "tensor"),
        ("mlp", "tensor"),
        ("vocab", vocab),
        ("rank", None if any(size % fsdp for size in widths["rank"]) else "fsdp"),
        ("kv", None),
        ("layers", None),
        ("activation_embed", None),
        ("activation_kv", None),
        ("activation_heads", "tensor"),
        ("activation_mlp", "tensor"),
        ("activation_vocab", vocab),
    )


def parameter_shardings(model: nn.Module, mesh: Mesh) -> PyTree:
    """How each parameter is stored: a tree of `jax.sharding.NamedSharding` like
    ``model.init(...)["params"]``.

    Raises:
        ValueError: see `axis_rules`.

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from jax.sharding import PartitionSpec as P
        >>> from fla_jax.parallel import make_mesh, parameter_shardings
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> shardings = parameter_shardings(model, make_mesh())
        >>> shardings["blocks_0"]["att"]["key"]["kernel"].spec == P("fsdp", "tensor")
        True
    """
    rules = axis_rules(model, mesh)

    def one(box: nn.LogicallyPartitioned) -> NamedSharding:
        return NamedSharding(mesh, nn.logical_to_mesh_axes(box.names, rules) or P())

    return jax.tree.map(one, _boxed(model), is_leaf=_is_box)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: PyTree, shardings: PyTree, mesh: Mesh
) -> PyTree:
    """How the state of an optax transformation is stored: moments like their parameters, the rest replicated.

    Args:
        optimizer: the transformation.
        params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
        shardings: of the parameters, from `parameter_shardings`.
        mesh: of the shardings.

    Returns:
        A tree of shardings like ``optimizer.init(params)``.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from fla_jax.parallel import make_mesh, optimizer_shardings
        >>> mesh = make_mesh()
        >>> params = {"kernel": jnp.zeros((8, 8))}
        >>> shardings = {"kernel": NamedSharding(mesh, PartitionSpec("fsdp"))}
        >>> made = optimizer_shardings(optax.adam(1e-3), params, shardings, mesh)
        >>> tuple(made[0].mu["kernel"].spec), tuple(made[0].count.spec)
        (('fsdp',), ())
    """
    replicated = NamedSharding(mesh, P())
    given, wanted = jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings)
    owners = {path: (param.shape, sharding) for (path, param), sharding in zip(given, wanted, strict=True)}

    def stored(path: PyTree, x: jax.Array) -> NamedSharding:
        # the state of one parameter may be a tree: sm3 has a list of vectors
        for end in range(len(path), -1, -1):
            if path[:end] in owners:
                shape, sharding = owners[path[:end]]
                return sharding if x.shape == shape else replicated
        return replicated

    # maps each mirrored parameter tree as a whole: `optax.masked` replaces subtrees by nodes without leaves
    mirrored = functools.partial(jax.tree_util.tree_map_with_path, stored)
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_map_params(
        optimizer, mirrored, state, transform_non_params=lambda _: replicated, is_leaf=lambda _: True
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of tokens, masks and other arrays [B, ...] of a batch: B over data and fsdp.

    Example:
        >>> from fla_jax.parallel import batch_sharding, make_mesh
        >>> batch_sharding(make_mesh()).spec[0]
        ('data', 'fsdp')
    """
    check_axes(mesh)
    return NamedSharding(mesh, P(BATCH_AXES))


def state_shardings(mesh: Mesh) -> PyTree:
    """The shardings of a model's recurrent state: batch over data and fsdp, heads over tensor.

    Returns:
        An `RWKVState` of shardings, for ``jax.device_put(model.init_state(batch), state_shardings(mesh))``.

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> import jax
        >>> from fla_jax.parallel import make_mesh, state_shardings
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> state = jax.device_put(model.init_state(jax.device_count()), state_shardings(make_mesh()))
        >>> state.wkv.sharding.spec[2]
        'tensor'
    """
    check_axes(mesh)
    shift, wkv = NamedSharding(mesh, P(None, BATCH_AXES)), NamedSharding(mesh, P(None, BATCH_AXES, "tensor"))
    fields: dict[str, PyTree] = {"att_shift": shift, "ffn_shift": shift, "wkv": wkv}
    return RWKVState(**fields)


def parameter_shapes(model: nn.Module) -> PyTree:
    """Shapes and dtypes of the parameters, without boxes."""
    return jax.tree.map(lambda box: box.value, _boxed(model), is_leaf=_is_box)


def sharding_on(mesh: Mesh, x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
    """The sharding of ``x`` if it is on the mesh, else that of an array which every device has whole."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    return NamedSharding(mesh, P())


def initial_fp8_scales(model: nn.Module) -> PyTree:
    """The collection of scales before the first step, as ``model.init`` makes it."""
    shapes = _variables(model)[FP8_SCALES]
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full(x.shape, path[-1].key.endswith("_scale"), x.dtype), shapes
    )


def check_parameter_shapes(model: nn.Module, params: PyTree) -> None:
    """Raises unless ``params`` have the names and shapes of the model's."""
    check_params(params, model.config)
    given, wanted = flatten_dict(params, sep="/"), flatten_dict(parameter_shapes(model), sep="/")
    for name in [*wanted, *given]:
        if name not in given:
            raise ValueError(f"params must contain {name}")
        if name not in wanted:
            raise ValueError(f"params contain {name}, which the model does not have")
        shape, want = np.shape(given[name]), wanted[name].shape
        if shape != want:
            raise ValueError(f"params: {name} must have shape {list(want)}, got {list(shape)}")


def check_dtypes(params: PyTree, wanted: PyTree, hint: str) -> None:
    """Raises unless the arrays have the wanted dtypes."""
    for (path, x), want in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(wanted)):
        if (dtype := jnp.result_type(x)) != jnp.result_type(want.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"params: {name} must have dtype {want.dtype}, got {dtype}; {hint}")


def _boxed(model: nn.Module) -> PyTree:
    """The parameters' shapes, boxed with the names of their axes."""
    return _variables(model)["params"]


@functools.lru_cache(maxsize=4)
def _variables(model: nn.Module) -> PyTree:
    """The shapes of all collections; those of parameters boxed with the names of their axes."""
    named = model.clone(config=dataclasses.replace(model.config, logical_axes=True))
    return jax.eval_shape(named.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))


def _is_box(x: object) -> bool:
    return isinstance(x, nn.LogicallyPartitioned)


def _widths(model: nn.Module) -> dict[str, set[int]]:
    """Sizes of the model's hidden channels, and of ranks in matrices with no other axis over fsdp."""
    found: dict[str, set[int]] = {"mlp": set(), "rank": set()}
    for box in jax.tree.leaves(_boxed(model), is_leaf=_is_box):
        for name, size in zip(box.names, box.value.shape):
            if name == "mlp" or (name == "rank" and "embed" not in box.names):
                found[name].add(size)
    return found
