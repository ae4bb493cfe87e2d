"""Parameters as the fast path of decoding reads them: made once, outside the loop.

What differs from the model's parameters, for hidden size C:

* Matrices are [out, in] in the compute dtype, so that the weights of a result lie side by side; those that
  read the same token are one matrix. RWKV-7's receptance, key, value and four first low-rank stages are one
  of 3 C rows and the four ranks, each filled up with zeros to a multiple of 64; its four second stages are
  one [4, C, R], R the largest of these. RWKV-6's receptance, key, value, gate and decay likewise, and so the
  key and receptance of its feed-forward.
* The norm behind the embedding is applied to the whole table.
* Vectors stay as they are, in the parameters' dtype; layers are not stacked.
* In 8 or 4 bits (`Quantisation`) all these matrices have a float16 factor for every ``group`` weights of a
  row; the table, the second low-rank stages and RWKV-6's mix_delta stays in the compute dtype.

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

from ..core.decode_layers import CODE_ROWS, NONE, NORM_EPS, layer_norm
from ..layers.base import LAYER_NORM_EPS
from ..models import head_kernel
from ..ops.decode import Layer6, Layer7, Matrix, Quantisation, quantised
from .decode_steps import affine, decode_family, padded

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


def prepare_decode_weights(
    model: Any, params: Any, quantisation: Quantisation | None = None
) -> DecodeWeights:
    """The parameters of a model as the fast path reads them.

    Layer by layer, in programs that all layers share.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters, layers stacked or not.
        quantisation: of the matrices; None for the compute dtype.

    Raises:
        TypeError: the model is of a family without a row in `DECODE`.
    """
    params, dtype = nn.meta.unbox(params), model.config.dtype
    family = decode_family(model)
    if family is None:
        raise TypeError(f"model must be of a family in DECODE, got {type(model).__name__}")
    make = functools.partial(_layer, family.weights, dtype, quantisation)
    numbers = range(model.config.num_layers)
    if "blocks" in params:
        layers = tuple(make(params["blocks"], np.int32(i)) for i in numbers)
    else:
        layers = tuple(make(params[f"blocks_{i}"]) for i in numbers)
    ends = params["emb"]["embedding"], params.get("ln0"), head_kernel(params)
    table, head = _ends(dtype, quantisation, *ends)
    return DecodeWeights(table, layers, affine(params["ln_out"]), head)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    of_layer: Any, dtype: Any, quantisation: Quantisation | None, block: Any, number: Any = None
) -> Any:
    """A layer, the one with a number where they are stacked."""
    if number is not None:
        block = jax.tree.map(lambda x: x[number], block)
    return of_layer(block, functools.partial(_matrix, dtype, quantisation), dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ends(
    dtype: Any, quantisation: Quantisation | None, embedding: jax.Array, ln0: Any, head: jax.Array
) -> tuple[jax.Array, Matrix]:
    """The table, normalised unless ``ln0`` is None, and the head."""
    table = embedding.astype(dtype)
    if ln0 is not None:
        table = layer_norm(table, affine(ln0)).astype(dtype)
    return table, _matrix(dtype, quantisation, (head, 0, NONE))


def _matrix(dtype: Any, quantisation: Quantisation | None, *kernels: tuple[jax.Array, int, int]) -> Matrix:
    """Of kernels [in, out], the planes that they read and what is done with their sums."""
    *some, (last, plane, kind) = kernels
    filled = [(padded(kernel, CODE_ROWS), plane, kind) for kernel, plane, kind in some]
    every = [*filled, (last, plane, kind)]
    weight = jnp.concatenate([kernel.astype(dtype).T for kernel, _, _ in every])
    matrix = Matrix(weight, None, tuple((x.shape[1], plane, kind) for x, plane, kind in every))
    return matrix if quantisation is None else quantised(matrix, quantisation)
