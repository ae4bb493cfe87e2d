"""RWKV-7, chunked backward in the layout of `key_major`: the tiles of a chunk, and where its gradients go."""

from typing import NamedTuple

from ..backend.types import Tensor
from .chunk_tokens import KeyGrads


class ChunkTiles(NamedTuple):
    """A chunk as loaded.

    Attributes:
        w: [K, 16].
        ra, kb: r beside a and k beside b, [K, 32].
        v, do: [16, V].
        h: the state at the start, [K, V].
        A_ab_inv, Aak: [16, 16].
        Aq: A_qk beside A_qb, [16, 32].
    """

    w: Tensor
    ra: Tensor
    kb: Tensor
    v: Tensor
    do: Tensor
    h: Tensor
    A_ab_inv: Tensor
    Aak: Tensor
    Aq: Tensor


class Places(NamedTuple):
    """Where gradients of a chunk are stored.

    Attributes:
        grads: pointers to the gradients.
        scale: under an unsafe gate what multiplies them, see `cotangent_scale`.
        start: offset of the chunk's first token in gradients of keys.
        at_k, at_w: offsets from there, of tiles [K, 32] and [K, 16].
        mask_k, mask_w: their elements that exist.
    """

    grads: KeyGrads
    scale: Tensor
    start: Tensor
    at_k: Tensor
    at_w: Tensor
    mask_k: Tensor
    mask_w: Tensor


class ValuePlace(NamedTuple):
    """Where the gradient of v is stored: pointer to the chunk's first token, and offsets [V, 16] from there
    and the mask of those that exist.
    """

    first: Tensor
    offsets: Tensor
    mask: Tensor
