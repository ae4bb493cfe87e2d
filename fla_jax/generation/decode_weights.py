"""Parameters as the fast path of decoding reads them: made once, outside the loop.

What differs from the model's parameters, for hidden size C:

* Matrices are [out, in] in the compute dtype, so that the weights of a result lie side by side; those that
  read the same token are one matrix. RWKV-7's receptance, key, value and four first low-rank stages are one
  of 3 C rows and the four ranks, each filled up with zeros to a multiple of 64; its four second stages are
  one [4, C, R], R the largest of these. RWKV-6's receptance, key, value, gate and decay likewise, and so the
  key and receptance of its feed-forward.
* The norm behind the embedding is applied to the whole table.
* Vectors stay as they are, in the parameters' dtype; layers are not stacked.
* In int8 (``group``) all these matrices have a float16 factor for every ``group`` weights of a row; the
  table, the second low-rank stages and RWKV-6's moves stay in the compute dtype.

It is as large as the parameters in the compute dtype. Prompts are read with the parameters themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..layers.base import LAYER_NORM_EPS
from ..models import RWKV7ForCausalLM
from ..ops.decode import Layer6, Layer7, Matrix, quantised
from ..ops.decode.plain import layer_norm
from ..ops.decode.weights import CODE_ROWS, NONE, NORM_EPS, SIGMOID, SQUARE, TANH

assert NORM_EPS == LAYER_NORM_EPS


class DecodeWeights(struct.PyTreeNode):
    """The weights of the fast path.

    Attributes:
        table: [V, C], the embedding of every token, normalised.
        layers: one for each layer.
        norm: scale and bias [C] before the head.
        head: [V, C].
    """

    table: jax.Array
    layers: tuple[Layer6 | Layer7, ...]
    norm: tuple[jax.Array, jax.Array]
    head: Matrix


def prepare_decode_weights(model: Any, params: Any, group: int | None = None) -> DecodeWeights:
    """The parameters of a model as the fast path reads them.

    Layer by layer, in programs that all layers share.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters, layers stacked or not.
        group: weights in int8, with a factor for so many of them along a row; None for the compute dtype.
    """
    params, dtype = nn.meta.unbox(params), model.config.dtype
    of_layer = _layer7 if isinstance(model, RWKV7ForCausalLM) else _layer6
    make = functools.partial(_layer, of_layer, dtype, group)
    numbers = range(model.config.num_layers)
    if "blocks" in params:
        layers = tuple(make(params["blocks"], np.int32(i)) for i in numbers)
    else:
        layers = tuple(make(params[f"blocks_{i}"]) for i in numbers)
    table, head = _ends(dtype, group, params["emb"]["embedding"], params["ln0"], params["head"]["kernel"])
    return DecodeWeights(table, layers, _affine(params["ln_out"]), head)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(of_layer: Any, dtype: Any, group: int | None, block: Any, number: Any = None) -> Any:
    """A layer, the one with a number where they are stacked."""
    if number is not None:
        block = jax.tree.map(lambda x: x[number], block)
    return of_layer(block, functools.partial(_matrix, dtype, group), dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ends(
    dtype: Any, group: int | None, embedding: jax.Array, ln0: Any, head: jax.Array
) -> tuple[jax.Array, Matrix]:
    """The normalised table, and the head."""
    table = layer_norm(embedding.astype(dtype), _affine(ln0)).astype(dtype)
    return table, _matrix(dtype, group, (head, 0, NONE))


def _matrix(dtype: Any, group: int | None, *kernels: tuple[jax.Array, int, int]) -> Matrix:
    """Of kernels [in, out], the planes that they read and what is done with their sums."""
    *some, (last, plane, kind) = kernels
    filled = [(_filled(kernel, CODE_ROWS), plane, kind) for kernel, plane, kind in some]
    every = [*filled, (last, plane, kind)]
    weight = jnp.concatenate([kernel.astype(dtype).T for kernel, _, _ in every])
    matrix = Matrix(weight, None, tuple((x.shape[1], plane, kind) for x, plane, kind in every))
    return matrix if group is None else quantised(matrix, group)


def _affine(norm: Any) -> tuple[jax.Array, jax.Array]:
    return norm["scale"], norm["bias"]


def _filled(x: jax.Array, multiple: int, axis: int = 1, least: int = 0) -> jax.Array:
    """``x``, an axis filled up with zeros to a multiple of ``multiple``, at least ``least``."""
    size = -(-max(x.shape[axis], least) // multiple) * multiple
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths)


def _layer7(block: Any, matrix: Any, dtype: Any) -> Layer7:
    att, ffn = block["att"], block["ffn"]
    if "v1" not in att:  # layer 0 has no value residual: nothing reads these
        C = att["w0"].shape[0]
        nothing = {
            "v0": jnp.zeros_like(att["w0"]),
            "v1": att["w1"][:, :1] * 0,
            "v2": jnp.zeros((1, C), dtype),
        }
        att = {**att, **nothing}
    kinds = {"w": (1, TANH), "a": (4, NONE), "v": (3, NONE), "g": (5, SIGMOID)}
    first = [(_filled(att[f"{name}1"], CODE_ROWS), *kind) for name, kind in kinds.items()]
    ranks = tuple(kernel.shape[1] for kernel, _, _ in first)
    second = [_filled(att[f"{name}2"].astype(dtype).T, CODE_ROWS, least=max(ranks)) for name in kinds]
    planes = {"receptance": 0, "key": 2, "value": 3}
    into = [(att[name]["kernel"], plane, NONE) for name, plane in planes.items()]
    return Layer7(
        norm=_affine(block["ln1"]),
        mixes=jnp.stack([att[f"x_{name}"] for name in "rwkvag"]),
        into=matrix(*into, *first),
        second=jnp.stack(second),
        **{name: att[name] for name in ("w0", "a0", "v0", "k_k", "k_a")},
        r_k=att["r_k"].reshape(-1),
        group_norm=_affine(att["ln_x"]),
        output=matrix((att["output"]["kernel"], 0, NONE)),
        ffn_norm=_affine(block["ln2"]),
        ffn_mixes=ffn["x_k"][None],
        key=matrix((ffn["key"]["kernel"], 0, SQUARE)),
        value=matrix((ffn["value"]["kernel"], 0, NONE)),
        ranks=ranks,
    )


def _layer6(block: Any, matrix: Any, dtype: Any) -> Layer6:
    att, ffn = block["att"], block["ffn"]
    planes = {"receptance": 3, "key": 1, "value": 2, "gate": 4}
    into = [(att[name]["kernel"], plane, NONE) for name, plane in planes.items()]
    decay = _filled(att["time_decay_w1"], CODE_ROWS)
    value = ffn["value"]["kernel"]
    return Layer6(
        norm=_affine(block["ln1"]),
        mix_x=att["time_maa_x"][None],
        first=matrix((_filled(att["time_maa_w1"], CODE_ROWS), 0, TANH)),
        moves=att["time_maa_w2"].astype(dtype),
        mixes=jnp.stack([att[f"time_maa_{name}"] for name in "wkvrg"]),
        into=matrix(*into, (decay, 0, TANH)),
        second=_filled(att["time_decay_w2"].astype(dtype).T, CODE_ROWS),
        base=att["time_decay"],
        bonus=att["time_faaaa"].reshape(-1),
        group_norm=_affine(att["ln_x"]),
        output=matrix((att["output"]["kernel"], 0, NONE)),
        ffn_norm=_affine(block["ln2"]),
        ffn_mixes=jnp.stack([ffn["time_maa_k"], ffn["time_maa_r"]]),
        key=matrix((ffn["key"]["kernel"], 0, SQUARE), (ffn["receptance"]["kernel"], 1, SIGMOID)),
        value=matrix((value, 0, NONE)),
    )
