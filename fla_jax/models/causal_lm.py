"""The language model of every family: embedding, blocks, head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..core.mesh import check_mesh, is_explicit, mesh_axes, reshard, spec_of, vary_alike
from ..core.names import GATHERED, remat_policy
from ..layers import RWKVState
from ..layers.base import LAYER_NORM_EPS, check_integers, check_lengths, with_axes, zero_beyond
from ..layers.fp8 import FP8_SCALES, save_all_but_rounded
from ..layers.lora import check_lora, projection_paths
from ..layers.norm import Norm
from ..layers.sharding import (
    TOKEN_AXES,
    ActivationSharding,
    check_length,
    constrain,
    is_sharded,
    save_all_but_unsharded,
    without,
)
from ..layers.state import check_state, zero_state
from ..ops.array_checks import floating
from .block import Carry, RWKVBlock, residual
from .config import RWKVConfig
from .embedding import embedding_of, head_of
from .families import family_of

_STACKED = ("params", "intermediates", "lora", "segment_states", FP8_SCALES)  # collections of scanned layers


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


def _checkpoint_policy(config: RWKVConfig) -> Callable[..., bool]:
    """The policy of `jax.checkpoint` for a block: which of its arrays the backward pass finds saved."""
    saves_all = save_all_but_rounded if config.fp8 else save_all_but_unsharded
    policy = remat_policy(dense=config.remat == "dense") if config.remat else saves_all
    if config.reshard_after_forward or not is_sharded():
        return policy
    gathered = jax.checkpoint_policies.save_only_these_names(GATHERED)
    return jax.checkpoint_policies.save_from_both_policies(policy, gathered)


class RWKVForCausalLM(nn.Module):
    """The language model of any family; use `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.

    Parameters: emb/embedding, ln0 (with ``norm_first``), blocks_{i}/{ln1,att,ln2,ffn} (stacked under
    ``blocks`` with ``scan_layers``), ln_out, head/kernel (without ``tie_embeddings``; see `head_kernel`).

    Attributes:
        config: of a class that a row of `FAMILIES` has.

    Example:
        >>> from fla_jax.models import RWKV7ForCausalLM, RWKVForCausalLM
        >>> issubclass(RWKV7ForCausalLM, RWKVForCausalLM)
        True
    """

    config: Any

    def setup(self) -> None:
        """Creates the submodules.

        Raises:
            TypeError: the configuration is of another family.
        """
        config, model = self.config, family_of(self.config).model
        if not isinstance(self, model):
            got = f"{type(config).__name__} in {type(self).__name__}"
            raise TypeError(f"a config of {model.__name__} needs that class, got {got}")
        self.emb = embedding_of(config)
        if config.norm_first:
            self.ln0 = _layer_norm(config)
        block: Any = RWKVBlock
        if config.remat or is_sharded():
            # layer_index (argument 4) is a Python int unless the scan counts it; inside a loop XLA cannot
            # eliminate the recomputation, which prevent_cse prevents
            static = () if config.scan_layers else (4,)
            block = nn.remat(
                block,
                prevent_cse=config.scan_layers is not True,
                policy=_checkpoint_policy(config),
                static_argnums=static,
            )
        if config.scan_layers:
            # initial parameters are drawn in a loop: unrolled, the draws compile for minutes
            unroll = config.scan_layers == "unroll" and not self.is_initializing()
            self.blocks = nn.scan(
                block,
                methods=["scan_step"],
                variable_axes=dict.fromkeys(_STACKED, 0),
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, 0, nn.broadcast, nn.broadcast),
                length=config.num_layers,
                unroll=config.num_layers if unroll else 1,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(config)
        else:
            self.blocks = [block(config) for _ in range(config.num_layers)]
        self.ln_out = _layer_norm(config)
        if not config.tie_embeddings:
            self.head = head_of(config)

    @nn.nowrap
    def init_state(self, batch: int) -> RWKVState:
        """The state before the first token: zeros, arrays with a leading layer axis. Needs no parameters."""
        config = self.config
        return zero_state(
            batch, config.hidden_size, config.head_dim, config.dtype, num_layers=config.num_layers
        )

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T C"]:
        """The embeddings of tokens, [B, T, C] in the compute dtype; ``embeddings`` of `__call__`."""
        return self.emb(tokens)

    def hidden(
        self,
        tokens: Int[Array, "B T"] | None = None,
        state: RWKVState | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        *,
        embeddings: Float[Array, "B T C"] | None = None,
    ) -> tuple[Float[Array, "B T C"], RWKVState]:
        """Like calling the model, but returns the input of the head, [B, T, C] in the compute dtype.

        ``model.apply({"params": p}, tokens, state, method="hidden")``; `logits` takes any of its positions.
        """
        config = self.config
        read = _check_tokens(tokens, embeddings, segment_ids, lengths, config.hidden_size)
        if not self.is_initializing():
            params = self.variables.get("params", {})
            check_params(params, config)
            if lora := self.variables.get("lora"):
                check_lora(lora, {*projection_paths(params)})
        zeros = self.init_state(read.shape[0])
        if state is None:
            state = zeros
        check_state(state, zeros)
        check_mesh(type(self).__name__, read, self.variables, state, segment_ids, lengths)
        # the dtype of the result is that of the zero state, also for a float32 state of a bfloat16 model
        state = jax.tree.map(lambda x, zero: x.astype(zero.dtype), state, zeros)
        x = self.emb(read) if embeddings is None else residual(embeddings.astype(config.dtype))
        x = zero_beyond(x, lengths)
        if config.norm_first:
            x = self.ln0(x)
        if is_explicit():
            state = jax.tree.map(functools.partial(_with_batch_of, read), state)
        v_first = self._zero_v_first(x) if family_of(config).carries_v_first else None
        if config.scan_layers:
            carry: Carry = vary_alike((x, v_first), self.variables, state, segment_ids, lengths)
            indices = jnp.arange(config.num_layers)
            (x, _), state = self.blocks.scan_step(carry, state, indices, segment_ids, lengths)
        else:
            states = []
            for i, block in enumerate(self.blocks):
                layer = jax.tree.map(lambda x, i=i: x[i], state)
                x, layer, v_first = block(x, layer, v_first, i, segment_ids, lengths)
                states.append(layer)
            state = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
        return self.ln_out(x), state

    def _zero_v_first(self, x: jax.Array) -> jax.Array:
        """The v_first that layer 0 ignores, of the type that a scan carries: that of the value projection."""
        zeros = constrain(jnp.zeros_like(x), *TOKEN_AXES, "activation_heads")
        sharding = ActivationSharding.of(x)
        if sharding.mode != "explicit" or not self.config.scan_layers or self.is_initializing():
            return zeros
        (kernel,) = jax.tree.leaves(self.variables["params"]["blocks"]["att"]["value"])
        return reshard(zeros, *spec_of(x)[:2], without(spec_of(kernel)[-1], sharding.batch_axes))

    def logits(self, hidden: Float[Array, "*B C"]) -> Float[Array, "*B V"]:
        """The head: [..., C] -> float32 logits [..., V]."""
        check_mesh(type(self).__name__, hidden, self.variables)
        logits = self.emb.attend(hidden) if self.config.tie_embeddings else self.head(hidden)
        # not sharded along V: losses index it and sampling sorts it
        return reshard(logits, *spec_of(logits)[:-1], None) if is_explicit() else logits

    def __call__(
        self,
        tokens: Int[Array, "B T"] | None = None,
        state: RWKVState | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        *,
        embeddings: Float[Array, "B T C"] | None = None,
    ) -> tuple[Float[Array, "B T V"], RWKVState]:
        """Reads tokens.

        Args:
            tokens: [B, T] integers in [0, V), T >= 1. One token runs the recurrent op, more run the chunked
                one; a text may be split over several calls.
            state: of the tokens before; None for zeros.
            segment_ids: [B, T] integers, for packed documents: state and token shift restart wherever the id
                changes. ``state`` is that before each example's first segment, the new state that after its
                last.
            lengths: [B] integers from 0 to T: number of tokens of each example. Positions at or beyond
                ``lengths`` are ignored; their logits are undefined. Not together with ``segment_ids``.
            embeddings: [B, T, C], read instead of the embeddings of ``tokens``, which is None then; those of
                tokens are ``method="embed"``.

        Returns:
            ``(logits, state)``: logits [B, T, V] in float32 for the token after each, and the state after the
            last token.

        Raises:
            ValueError, TypeError: an argument or the parameters do not fit; the message names it.
        """
        hidden, state = self.hidden(tokens, state, segment_ids, lengths, embeddings=embeddings)
        return self.logits(hidden), state


def _with_batch_of(tokens: jax.Array, x: jax.Array) -> jax.Array:
    """An array [L, B, ...] of a state with its batch on the devices of the tokens' batch."""
    batch = spec_of(tokens)[0]
    return reshard(x, None, batch, *(without(entry, mesh_axes(batch)) for entry in spec_of(x)[2:]))


def check_params(params: PyTree, config: RWKVConfig) -> None:
    """Raises ValueError where layers are stacked and should not be, or the other way round; so for a head."""
    if "blocks_0" in params and config.scan_layers:
        raise ValueError(
            f"params has separate layers, but the model's scan_layers={config.scan_layers!r} needs them "
            "stacked: use stack_layers(params)"
        )
    if "blocks" in params and not config.scan_layers:
        raise ValueError(
            "params has stacked layers, but the model's scan_layers=False needs them separate: use "
            "unstack_layers(params), or scan_layers='unroll'"
        )
    if "emb" in params and ("head" in params) == config.tie_embeddings:
        must = "have no head" if config.tie_embeddings else "contain head/kernel"
        raise ValueError(f"params must {must}: the model's tie_embeddings={config.tie_embeddings}")


def _check_tokens(
    tokens: Array | None,
    embeddings: Array | None,
    segment_ids: Array | None,
    lengths: Array | None,
    C: int,
) -> Array:
    """Tokens or embeddings, whichever are given; raises unless the arguments fit each other."""
    read, name = (tokens, "tokens") if embeddings is None else (embeddings, "embeddings")
    if read is None or (tokens is not None and embeddings is not None):
        raise ValueError(f"tokens or embeddings must be given, got {'none' if read is None else 'both'}")
    for what, ids in (("tokens", tokens), ("segment_ids", segment_ids), ("lengths", lengths)):
        if ids is not None:
            check_integers(what, ids)
    if embeddings is not None:
        floating("embeddings", embeddings)
    ndim, shape = (2, "[B, T]") if embeddings is None else (3, f"[B, T, C = {C}]")
    if read.ndim != ndim or 0 in read.shape or (ndim == 3 and read.shape[2] != C):
        raise ValueError(f"{name} must have shape {shape} with B, T >= 1, got {list(read.shape)}")
    check_length(name, read, lengths)
    if segment_ids is not None and segment_ids.shape != read.shape[:2]:
        raise ValueError(
            f"segment_ids must have the shape of tokens, {list(read.shape[:2])}, got "
            f"{list(segment_ids.shape)}"
        )
    check_lengths(lengths, read)
    return read
