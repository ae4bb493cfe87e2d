"""Configurations: frozen, hashable, checked when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..core.arguments import shown
from ..layers import fields

_OF_ALL_LAYERS = ("num_layers", "dtype", "param_dtype", "logical_axes", "fp8", "hidden_size")


@dataclasses.dataclass(frozen=True)
class RWKVConfig:
    """Fields of the configurations of all families; use `RWKV6Config` or `RWKV7Config`.

    Attributes:
        vocab_size: number of tokens, V.
        hidden_size: channels, C.
        num_layers: layers, L.
        head_dim: channels per head, at most 256; a divisor of ``hidden_size``.
        intermediate_size: width of the feed-forward; None for the official one.
        dtype: compute dtype: float16, bfloat16, float32, or float64, which needs ``jax_enable_x64``. Stored
            as its name, such as ``'float32'``. Arithmetic on decays and norms, wkv states and logits have at
            least float32.
        param_dtype: dtype of the parameters, one of the same. Train with float32, also with
            ``dtype=bfloat16``: the optimizer's small steps vanish in bfloat16.
        scan_layers: run the layers with `flax.linen.scan`: compile time independent of L; parameters are
            stacked under ``blocks`` (`stack_layers` and `unstack_layers` convert). ``"unroll"`` takes the
            parameters of ``True`` and unrolls the loop: as fast as False, with up to a sixth more memory.
        remat: recompute each block in the backward pass; the forward of the op still runs once
            (`fla_jax.remat_policy`). ``"dense"`` also saves the outputs of the dense projections.
        reshard_after_forward: whether the backward pass gathers sharded parameters again. With False it uses
            those that the forward pass gathered. FSDP then communicates a third less, but every device keeps
            the weights of all layers, in ``dtype``, until the backward pass.
        norm_first: whether a layer norm, ``ln0``, follows the embedding, as in all official models.
        tie_embeddings: whether the head is the transposed embedding; the parameters then have no ``head``
            (see `head_kernel`), and the initial embedding is that of a head. False in all official models.
        logical_axes: ``model.init`` returns parameters boxed with logical axis names
            (`flax.linen.LogicallyPartitioned`), otherwise plain arrays; ``model.apply`` takes both. Names:
            vocab, embed, heads, kv, mlp, layers, as MaxText has them, and rank; for those of activations see
            `fla_jax.parallel.axis_rules`.
        fp8: train with FP8 products of the layers' dense projections (receptance, key, value, gate, output
            and those of the feed-forward). Low-rank pairs, embedding and head keep ``dtype``: the former are
            too small to gain, and the loss is sensitive to rounded logits. Parameters stay in
            ``param_dtype``. ``model.init`` also returns the collection of scales
            (`fla_jax.layers.FP8_SCALES`), and products are in FP8 where ``apply`` gets it, as in
            `fla_jax.parallel.TrainStep`. Without it, as in generation, the model computes in ``dtype``, which
            must be bfloat16 or float32. GPUs multiply FP8 from compute capability 8.9 on; other devices
            round alike and gain no speed.
        chunk_size: tokens per chunk of the op, a power of two from 1 to 256; None: the implementation's own.
        implementation: name of the op's implementation; None for the best that qualifies.

    Raises:
        ValueError, TypeError: a field does not fit; the message names it.

    Example:
        >>> import dataclasses
        >>> from fla_jax.models import RWKV7Config, RWKVConfig
        >>> config = RWKV7Config(vocab_size=65536, hidden_size=768, num_layers=12)
        >>> isinstance(config, RWKVConfig), dataclasses.replace(config, remat=True).remat
        (True, True)
    """

    model_type: ClassVar[str | None] = None

    vocab_size: int
    hidden_size: int
    num_layers: int
    head_dim: int = 64
    intermediate_size: int | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    scan_layers: bool | Literal["unroll"] = False
    remat: bool | Literal["dense"] = False
    reshard_after_forward: bool = True
    norm_first: bool = True
    tie_embeddings: bool = False
    logical_axes: bool = False
    fp8: bool = False
    chunk_size: int | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        fields.check_fields(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        # one spelling of a dtype, so that equal configurations are equal
        for name in ("dtype", "param_dtype"):
            dtype = fields.check_dtype(name, getattr(self, name))
            object.__setattr__(self, name, DtypeName(dtype.name))
        for name, word in (("remat", "dense"), ("scan_layers", "unroll")):
            value = getattr(self, name)
            if not isinstance(value, bool | str) or value not in (False, True, word):
                raise ValueError(f"{name} must be False, True or {word!r}, got {value!r}")

    def to_dict(self) -> dict[str, object]:
        """The fields, and the family as ``model_type``; `json.dumps` takes all of them."""
        model_type = {} if self.model_type is None else {"model_type": self.model_type}
        return {**model_type, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict` and `dataclasses.asdict`.

        Fields that ``values`` lacks have their default values. `RWKVConfig.from_dict` selects the class by
        ``model_type``, which is optional for `RWKV6Config.from_dict` and `RWKV7Config.from_dict`.

        Raises:
            ValueError, TypeError: ``values`` is not a mapping, has another ``model_type`` or an unknown
                field, lacks one without a default value, or a field does not fit; the message names it.

        Example:
            >>> import json
            >>> from fla_jax.models import RWKV7Config, RWKVConfig
            >>> config = RWKV7Config(vocab_size=65536, hidden_size=768, num_layers=12, dtype="bfloat16")
            >>> text = json.dumps(config.to_dict())
            >>> RWKVConfig.from_dict(json.loads(text)) == config
            True
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values must be a mapping such as to_dict makes, got {shown(values)}")
        values = dict(values)
        kind = values.pop("model_type", cls.model_type)
        known = {sub.model_type: sub for sub in (cls, *cls.__subclasses__()) if sub.model_type is not None}
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"model_type must be {' or '.join(map(repr, known))}, got {shown(kind)}")
        made = known[kind]
        names = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(made)}
        if unknown := sorted(map(str, values.keys() - names.keys())):
            raise ValueError(f"values must have only fields of {made.__name__}, got {', '.join(unknown)}")
        if missing := [name for name, needed in names.items() if needed and name not in values]:
            raise ValueError(f"values must have {', '.join(missing)}: {made.__name__} has no default")
        return made(**values)

    def _pick(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_OF_ALL_LAYERS, *names)}

    @property
    def attention(self) -> dict[str, Any]:
        """Fields of the attention layers."""
        ranks = (field.name for field in dataclasses.fields(self) if field.name.endswith("_low_rank_dim"))
        return self._pick("head_dim", "chunk_size", "implementation", *ranks)

    @property
    def feed_forward(self) -> dict[str, Any]:
        """Fields of the feed-forward layers."""
        return self._pick("intermediate_size")


class DtypeName(str):
    """The name of a dtype: text for JSON, a dtype for JAX and NumPy, and equal to that dtype."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, str) or other is None:  # NumPy takes None for float64
            return str.__eq__(self, other)
        try:
            return jnp.dtype(other) == jnp.dtype(str(self))
        except (TypeError, ValueError):
            return False

    def __ne__(self, other: object) -> bool:
        return not self == other


def check_model(model: object) -> None:
    """Raises TypeError unless ``model`` is a language model, or has its ``config`` and ``init_state``."""
    if not hasattr(model, "config") or not hasattr(model, "init_state"):
        raise TypeError(f"model must be an RWKV6ForCausalLM or RWKV7ForCausalLM, got {shown(model)}")
