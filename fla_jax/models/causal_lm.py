"""Language models; the two versions differ in their blocks only."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.mesh import check_mesh, is_explicit, mesh_axes, reshard, spec_of, vary_alike
from ..core.names import remat_policy
from ..layers import RWKVState
from ..layers.base import LAYER_NORM_EPS, before_end, check_lengths, with_axes
from ..layers.init import head_gain, orthogonal, symmetric_uniform
from ..layers.norm import Norm
from ..layers.sharding import beyond, check_sequence, constrain, is_sharded, product, save_all_but_unsharded
from ..layers.state import check_state, zero_state
from .block import Carry, RWKV6Block, RWKV7Block, residual
from .config import RWKV6Config, RWKV7Config, RWKVConfig


def _layer_norm(config: RWKVConfig, name: str | None = None) -> Norm:
    boxed = functools.partial(with_axes, axes=(None,), logical_axes=config.logical_axes)
    return Norm(
        LAYER_NORM_EPS,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        scale_init=boxed(nn.initializers.ones),
        bias_init=boxed(nn.initializers.zeros),
        name=name,
    )


class _Embed(nn.Embed):
    """`flax.linen.Embed`, which on a mesh with explicit axes reads the rows of each device's own tokens."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] -> [B, T, C]."""
        if not is_explicit():
            table = self.embedding if self.dtype is None else self.embedding.astype(self.dtype)
            table = constrain(constrain(table, "vocab", "embed"), "activation_vocab", None)
            return residual(jnp.take(table, tokens, axis=0))
        table = self.embedding.astype(self.dtype)
        rows = spec_of(tokens)
        channels = beyond(spec_of(table)[1], [axis for entry in rows for axis in mesh_axes(entry)])
        return reshard(table, None, channels).at[tokens].get(out_sharding=P(*rows, channels))


class RWKVForCausalLM(nn.Module):
    """What the language models of both versions share; use `RWKV6ForCausalLM` or `RWKV7ForCausalLM`."""

    config: Any
    block: ClassVar[type[nn.Module]]

    def setup(self) -> None:
        """Makes the submodules."""
        config = self.config
        boxed = functools.partial(with_axes, logical_axes=config.logical_axes)
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.emb = _Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=boxed(symmetric_uniform(1e-4), ("vocab", "embed")),
            **dtypes,
        )
        self.ln0 = _layer_norm(config)
        block: Any = self.block
        if config.remat or is_sharded():
            policy = remat_policy(dense=config.remat == "dense") if config.remat else save_all_but_unsharded
            # layer_index (argument 3) stays a Python int unless the scan counts it; a loop rules out the
            # elimination that prevent_cse is about
            static = () if config.scan_layers else (3,)
            block = nn.remat(
                block,
                prevent_cse=config.scan_layers is not True,
                policy=policy,
                static_argnums=static,
            )
        if config.scan_layers:
            # a loop draws the parameters: a program with the draws of all layers compiles for minutes
            unroll = config.scan_layers == "unroll" and not self.is_initializing()
            self.blocks = nn.scan(
                block,
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True},
                in_axes=(0, 0, nn.broadcast, nn.broadcast),
                length=config.num_layers,
                unroll=config.num_layers if unroll else 1,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(config)
        else:
            self.blocks = [block(config) for _ in range(config.num_layers)]
        self.ln_out = _layer_norm(config)
        wide = jnp.promote_types(config.dtype, jnp.float32)
        self.head = nn.Dense(
            config.vocab_size,
            use_bias=False,
            kernel_init=boxed(
                orthogonal(head_gain(config.vocab_size, config.hidden_size)), ("embed", "vocab")
            ),
            dot_general=functools.partial(_head_product, preferred_element_type=wide),
            **dtypes,
        )

    @nn.nowrap
    def init_state(self, batch: int) -> RWKVState:
        """The state before the first token: zeros, arrays with a leading layer axis. Needs no parameters."""
        config = self.config
        return zero_state(
            batch, config.hidden_size, config.head_dim, config.dtype, num_layers=config.num_layers
        )

    def hidden(
        self,
        tokens: jax.Array,
        state: RWKVState | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, RWKVState]:
        """Like calling the model, but returns what the head would read, [B, T, C] in the compute dtype,
        instead of logits.

        ``model.apply({"params": p}, tokens, state, method="hidden")``; `logits` does the rest, for as many
        positions as wanted.
        """
        config = self.config
        _check_tokens(tokens, segment_ids, lengths)
        if not self.is_initializing():
            check_layers(self.variables.get("params", {}), config)
        zeros = self.init_state(tokens.shape[0])
        if state is None:
            state = zeros
        check_state(state, zeros)
        check_mesh(type(self).__name__, tokens, self.variables, state, segment_ids, lengths)
        # one dtype in and out, whatever came (float32 states under a bfloat16 model, say)
        state = jax.tree.map(lambda x, zero: x.astype(zero.dtype), state, zeros)
        x = self.ln0(before_end(self.emb(tokens), lengths))
        if is_explicit():
            state = jax.tree.map(functools.partial(_beside_rows, tokens), state)
        carry: Carry = (x, self._no_values(x) if isinstance(config, RWKV7Config) else None)
        if config.scan_layers:
            carry = vary_alike(carry, self.variables, state, segment_ids, lengths)
            carry, state = self.blocks(carry, state, jnp.arange(config.num_layers), segment_ids, lengths)
        else:
            states = []
            for i, block in enumerate(self.blocks):
                carry, layer = block(carry, jax.tree.map(lambda x, i=i: x[i], state), i, segment_ids, lengths)
                states.append(layer)
            state = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
        return self.ln_out(carry[0]), state

    def _no_values(self, x: jax.Array) -> jax.Array:
        """The v_first that layer 0 ignores, of the type of the one that it makes: what a scan carries keeps
        its type.
        """
        zeros = constrain(jnp.zeros_like(x), "batch", "length", "activation_heads")
        if not is_explicit() or not self.config.scan_layers or self.is_initializing():
            return zeros
        (kernel,) = jax.tree.leaves(self.variables["params"]["blocks"]["att"]["value"])
        rows = spec_of(x)[:2]
        return reshard(
            zeros, *rows, beyond(spec_of(kernel)[-1], [axis for entry in rows for axis in mesh_axes(entry)])
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: [..., C] -> float32 logits [..., V]."""
        check_mesh(type(self).__name__, hidden, self.variables)
        logits = self.head(hidden)
        # whole along V: losses pick from them and sampling sorts them
        return reshard(logits, *spec_of(logits)[:-1], None) if is_explicit() else logits

    def __call__(
        self,
        tokens: jax.Array,
        state: RWKVState | None = None,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, RWKVState]:
        """Reads tokens.

        Args:
            tokens: [B, T] integers in [0, V), T >= 1. One token runs the recurrent op, more run the chunked
                one; any split of a text into calls that hand the state on gives the same logits.
            state: of the tokens before; None for zeros.
            segment_ids: [B, T] integers, for rows of several packed documents: state and token shift restart
                wherever the id changes. ``state`` belongs to each row's first segment, the new state to its
                last.
            lengths: [B] integers from 0 to T, for rows of different lengths in one call: how many tokens
                each row has. What stands behind them is not read: the new state is the one after ``lengths``
                tokens, as if the row were alone, and the logits there mean nothing. Not together with
                ``segment_ids``.

        Returns:
            ``(logits, state)``: logits [B, T, V] in float32 for the token after each, and the state after the
            last token.

        Raises:
            ValueError: a shape does not fit, or parameters have layers stacked where the model takes them one
                by one, or the other way round. TypeError: a dtype does not fit. The message names the
                argument.
        """
        hidden, state = self.hidden(tokens, state, segment_ids, lengths)
        return self.logits(hidden), state


class RWKV6ForCausalLM(RWKVForCausalLM):
    """RWKV-6 language model.

    Parameters: emb/embedding, ln0, blocks_{i}/{ln1,att,ln2,ffn} (stacked under ``blocks`` with
    ``scan_layers``), ln_out, head/kernel.

    Attributes:
        config: `RWKV6Config`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV6Config, RWKV6ForCausalLM
        >>> model = RWKV6ForCausalLM(RWKV6Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(10)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> logits, state = model.apply({"params": params}, tokens)
        >>> logits.shape, state.wkv.shape
        ((1, 10, 100), (2, 1, 4, 16, 16))
    """

    config: RWKV6Config
    block = RWKV6Block


class RWKV7ForCausalLM(RWKVForCausalLM):
    """RWKV-7 language model.

    Parameters: emb/embedding, ln0, blocks_{i}/{ln1,att,ln2,ffn} (stacked under ``blocks`` with
    ``scan_layers``), ln_out, head/kernel.

    Attributes:
        config: `RWKV7Config`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(10)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> logits, state = model.apply({"params": params}, tokens)
        >>> next_logits, state = model.apply({"params": params}, tokens[:, :1], state)
        >>> next_logits.shape, state.wkv.shape
        ((1, 1, 100), (2, 1, 4, 16, 16))
    """

    config: RWKV7Config
    block = RWKV7Block


def _head_product(x: jax.Array, kernel: jax.Array, _: Any, **options: Any) -> jax.Array:
    return product(x, kernel, ("embed", "vocab"), **options)


def _beside_rows(tokens: jax.Array, x: jax.Array) -> jax.Array:
    """A state's array [L, B, ...] with its rows on the devices that have those of the tokens."""
    rows = spec_of(tokens)[0]
    return reshard(x, None, rows, *(beyond(entry, mesh_axes(rows)) for entry in spec_of(x)[2:]))


def check_layers(params: Any, config: RWKVConfig) -> None:
    """Raises ValueError where layers are stacked and should not be, or the other way round; Flax would say
    that a parameter is missing, or that shapes differ.
    """
    if "blocks_0" in params and config.scan_layers:
        raise ValueError(
            f"params has layers one by one, but the model's scan_layers={config.scan_layers!r} takes them "
            "stacked: stack_layers(params) makes them so"
        )
    if "blocks" in params and not config.scan_layers:
        raise ValueError(
            "params has layers stacked, but the model's scan_layers=False takes them one by one: "
            "unstack_layers(params) makes them so; scan_layers='unroll' takes them as they are"
        )


def _check_tokens(tokens: Any, segment_ids: Any, lengths: Any) -> None:
    for name, ids in (("tokens", tokens), ("segment_ids", segment_ids), ("lengths", lengths)):
        if name != "tokens" and ids is None:
            continue
        if not hasattr(ids, "dtype") or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(
                f"{name} must be an integer array, got {getattr(ids, 'dtype', type(ids).__name__)}"
            )
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens must have shape [B, T] with B, T >= 1, got {list(tokens.shape)}")
    check_sequence("tokens", tokens, lengths)
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(
            f"segment_ids must have the shape of tokens, {list(tokens.shape)}, got {list(segment_ids.shape)}"
        )
    check_lengths(lengths, tokens)
