"""Configurations: frozen, hashable, checked when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import jax.numpy as jnp

from ..core.arguments import shown
from ..layers import fields

_RUN = ("num_layers", "dtype", "param_dtype", "logical_axes", "hidden_size")


@dataclasses.dataclass(frozen=True)
class RWKVConfig:
    """What RWKV-6 and RWKV-7 have in common; use `RWKV6Config` or `RWKV7Config`.

    Attributes:
        vocab_size: number of tokens, V.
        hidden_size: channels, C.
        num_layers: layers, L.
        head_dim: channels per head, at most 256; a divisor of ``hidden_size``.
        intermediate_size: width of the feed-forward; None for the official one.
        dtype: compute dtype: float16, bfloat16, float32, or float64, which needs ``jax_enable_x64`` when the
            configuration is made. Stored as its name, such as ``'float32'``, which JAX takes for a dtype and
            which equals it. Arithmetic on decays and norms, wkv states and logits have at least float32.
        param_dtype: dtype of the parameters, one of the same. For training keep float32, also with
            ``dtype=bfloat16``: the optimizer's small steps vanish in bfloat16.
        scan_layers: run the layers with `flax.linen.scan`: compile time independent of L; parameters lie
            stacked under ``blocks`` instead of ``blocks_0``, ``blocks_1``, ... (`stack_layers` and
            `unstack_layers` convert). The state is the same in both forms. ``"unroll"`` has the parameters of
            ``True`` and writes the layers out one after the other: the loop's copies are gone, so that it is
            as fast as False, compiles sooner, for there are L times fewer arrays to update, and takes up to a
            sixth more memory.
        remat: recompute each block in the backward pass instead of keeping its activations; the op's forward
            still runs once (`fla_jax.remat_policy`). ``"dense"`` keeps the outputs of the dense projections
            as well: nearly as fast as keeping everything, at a fraction of its memory.
        logical_axes: ``model.init`` returns parameters boxed with logical axis names
            (`flax.linen.LogicallyPartitioned`), to be sharded by `flax.linen.logical_to_mesh_sharding`;
            otherwise plain arrays. ``model.apply`` takes both. Names: vocab, embed, heads, kv, mlp, rank,
            layers, and, of activations, batch, length.
        chunk_size: tokens per chunk of the op, a power of two from 1 to 256; None: the implementation's own.
        implementation: name of the op's implementation that runs; None for the best that qualifies.

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
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    scan_layers: bool | Literal["unroll"] = False
    remat: bool | Literal["dense"] = False
    logical_axes: bool = False
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

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the version as ``model_type``; `json.dumps` takes all of them."""
        kind = {} if self.model_type is None else {"model_type": self.model_type}
        return {**kind, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration that `to_dict` or `dataclasses.asdict` made ``values`` of.

        Fields that ``values`` lacks have their default values. `RWKVConfig.from_dict` finds the version by
        ``model_type``, which is optional for `RWKV6Config.from_dict` and `RWKV7Config.from_dict`.

        Raises:
            ValueError, TypeError: ``values`` is not a mapping, has another ``model_type``, has a field that
                there is not or lacks one without a default value, or a field does not fit; the message names
                it.

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
        return {name: getattr(self, name) for name in (*_RUN, *names)}

    @property
    def attention(self) -> dict[str, Any]:
        """Fields of the attention layers."""
        ranks = (field.name for field in dataclasses.fields(self) if field.name.endswith("_low_rank_dim"))
        return self._pick("head_dim", "chunk_size", "implementation", *ranks)

    @property
    def feed_forward(self) -> dict[str, Any]:
        """Fields of the feed-forward layers."""
        return self._pick("intermediate_size")


@dataclasses.dataclass(frozen=True)
class RWKV6Config(RWKVConfig):
    """RWKV-6 ("Finch", x060). Official widths: ``intermediate_size = floor(3.5 C / 32) * 32``.

    Attributes:
        proj_low_rank_dim: rank of the token shift's low-rank part; None: official, 32 (64 from C = 4096).
        decay_low_rank_dim: rank of the decay's low-rank part; None: official, 64 (128 from C = 4096).

    The other fields: `RWKVConfig`.

    Example:
        >>> from fla_jax.models import RWKV6Config
        >>> RWKV6Config(vocab_size=65536, hidden_size=768, num_layers=12).head_dim
        64
    """

    model_type = "rwkv6"

    proj_low_rank_dim: int | None = None
    decay_low_rank_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class RWKV7Config(RWKVConfig):
    """RWKV-7 ("Goose", x070). Official widths: ``intermediate_size = 4 C``.

    Attributes:
        decay_low_rank_dim: rank of the decay's low-rank part; None for the official
            ``max(32, round(2.5 sqrt(C) / 32) * 32)``.
        a_low_rank_dim: the same of the in-context rate; None for the official one, factor 2.5.
        v_low_rank_dim: the same of the value residual; None for the official one, factor 1.7.
        gate_low_rank_dim: the same of the gate; None for the official one, factor 5.
        rate_scale: factor on the in-context rate in the state transition: 1 official, 2 for state tracking, 0
            for none; see `RWKV7Attention`.

    The other fields: `RWKVConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config
        >>> RWKV7Config(vocab_size=65536, hidden_size=768, num_layers=12, dtype=jnp.bfloat16).dtype
        'bfloat16'
    """

    model_type = "rwkv7"

    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    rate_scale: float = 1.0

    @property
    def attention(self) -> dict[str, Any]:
        """Fields of the attention layers."""
        return {**super().attention, "rate_scale": self.rate_scale}


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

    def __ne__(self, other: Any) -> bool:
        return not self == other


def check_model(model: Any) -> None:
    """Raises a TypeError unless ``model`` is one of the language models, or has what is used of them."""
    if not hasattr(model, "config") or not hasattr(model, "init_state"):
        raise TypeError(f"model must be an RWKV6ForCausalLM or RWKV7ForCausalLM, got {shown(model)}")
