"""What decodes: a model, its weights in the form that is read fastest, the dtype of its states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..core.arguments import check_integer, shown
from ..core.gpu import platform_of
from ..core.implementation import Candidate, Registry, Unsupported
from ..layers.state import RWKVState, check_state
from ..models import FAMILIES
from ..models.causal_lm import RWKVForCausalLM
from ..ops import decode
from ..ops.decode import Quantisation
from ..pallas.backend import triton
from .array_checks import check_deleted, explain_deleted
from .decode_steps import DECODE, FastStep, ModelStep, decode_family
from .decode_weights import prepare_decode_weights
from .prompts import check_params

_STATE_DTYPES = ("float32", "bfloat16", "float16")
_QUANTISED = {"int8": (8, 128), "int4": (4, 32)}  # bits, and the largest group that is chosen


class Decoder:
    """One token of every row at a time: what a `Generator` runs, for loops of one's own.

    A call of the model with one token is the definition. On an NVIDIA GPU a fast path computes the same, to
    rounding, in six kernels a layer (RWKV-6: seven) from weights that are laid out anew here, once, as
    `fla_jax.generation.decode_weights` says: they take as much memory as the parameters in the compute
    dtype, and are made anew by every `Decoder`. The fast path needs parameters on one device, no mesh in
    context, and float32, bfloat16 or float16. It is selected automatically where it can run and the device's
    memory has room for its weights.

    States of 16 bits halve what a large batch reads and writes; weights of 8 or 4 bits reduce what a small
    one reads. Their errors (``benchmarks/decode_precision.py``: RWKV-7, 3 x 128, trained on the reference
    that Python ships, 4096 held-out bytes read one by one; error of the logits in units of their spread,
    loss in nats per byte):

    ===================  =====  ===============  ======  ===================
    option               error  last 512 tokens  loss    other greedy tokens
    ===================  =====  ===============  ======  ===================
    float32                                      1.3722
    state float16        1e-4   1e-4             1.3722  0.00 %
    state bfloat16       2e-3   3e-3             1.3721  0.10 %
    int8, groups of 128  4e-3   4e-3             1.3727  0.49 %
    int8, groups of 64   3e-3   3e-3             1.3723  0.29 %
    int4, groups of 32   5e-2   5e-2             1.3802  4.22 %
    int4, groups of 16   4e-2   4e-2             1.3761  2.39 %
    ===================  =====  ===============  ======  ===================

    RWKV-6 of that size: 2e-4 in float16, 3e-3 in bfloat16, the same loss. The error does not grow with the
    tokens read: decays forget what was rounded. float16 overflows above
    65504; where a model's states come near that, take bfloat16.

    Attributes:
        model: as given.
        implementation: ``"triton"`` or ``"plain"`` (the fast path), or ``"model"``.
        weights: what the step reads.
        step: the step, `fla_jax.generation.decode_steps`.
        state_dtype: of the states [L, B, H, K, V].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Decoder, prefill
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> decoder = Decoder(model, params)
        >>> logits, state = prefill(model, params, [[1, 2, 3], [4]])
        >>> logits, state = decoder(jnp.argmax(logits, -1), state)
        >>> logits.shape
        (2, 100)
    """

    def __init__(
        self,
        model: RWKVForCausalLM,
        params: PyTree,
        *,
        implementation: str | None = None,
        state_dtype: DTypeLike | None = None,
        weight_dtype: Literal["int8", "int4"] | None = None,
        weight_group: int | None = None,
    ) -> None:
        """Prepares the weights.

        Args:
            model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
            params: its parameters.
            implementation: ``"triton"`` (NVIDIA GPUs), ``"plain"`` (the same in plain JAX), ``"model"``; None
                for "triton" where it can run and has room, else "model", and with ``weight_dtype`` "plain".
            state_dtype: float32, bfloat16 or float16; None for the model's own, at least float32. Arithmetic
                is float32 in any case: states are rounded when they are written, once a token.
            weight_dtype: ``"int8"`` or ``"int4"`` rounds the weights of all large matrices, with a float16
                factor for each group of them along a row; None for the compute dtype. The factor's range
                limits the largest weight of a group: int8 is less exact below 1e-4 and 0 below 4e-6; from
                8e6 on (int4: 4e5) logits are NaN. With up to 32 sequences int8 is faster than bfloat16 (24 x
                2048 on an H200: 0.79 and 1.06 ms a token of one, 1.69 and 1.75 of 32; int4 0.74 of one);
                with more it is smaller. On a GPU the activations of a single sequence in bfloat16 or float16
                are rounded to 16-bit integers, with one scale, for these products.
            weight_group: size of a group, a power of two from 16 on that divides the widths, which must be
                multiples of 64 for either dtype; None for the largest up to 128, or 32 with "int4".

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_params(model, params)
        check_deleted(params=params)
        quantisation = quantisation_of(weight_dtype, weight_group, model, params)
        selected = _IMPLEMENTATIONS.select(_Context(model, params, weight_dtype), implementation)
        self.model, self.implementation = model, selected.name
        self.state_dtype = _state_dtype(state_dtype, model)
        self.step = selected.load()(model)
        if self.implementation == "model":
            self.weights = jax.tree.map(lambda x: x, params)  # the caller may change the dictionaries
        else:
            self.weights = prepare_decode_weights(model, params, quantisation)

    def state(self, state: RWKVState) -> RWKVState:
        """``state`` with the dtype that is decoded with.

        Raises:
            TypeError: ``state`` is not an `RWKVState`.
        """
        if not isinstance(state, RWKVState):
            raise TypeError(f"state must be an RWKVState, got {type(state).__name__}")
        if state.wkv.dtype == self.state_dtype:
            return state
        return state.replace(wkv=state.wkv.astype(self.state_dtype))

    def init_state(self, batch: int) -> RWKVState:
        """The state before the first token."""
        return self.state(self.model.init_state(batch))

    def __call__(
        self, tokens: jax.Array, state: RWKVState, active: jax.Array | None = None
    ) -> tuple[jax.Array, RWKVState]:
        """Reads one token of every row.

        Args:
            tokens: [B] integers.
            state: of the tokens before. It is donated: its memory is that of the new one.
            active: [B] booleans: other requests keep their state, and their logits are undefined. None for
                all.

        Returns:
            ``(logits [B, V], state)``; logits are NaN where a token is not one of the model's.

        Raises:
            ValueError: ``tokens``, ``state`` or ``active`` has another shape or dtype, or ``state`` or the
                parameters hold deleted arrays: they were donated to an earlier call.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers [B], got {tokens.dtype}{list(tokens.shape)}")
        check_state(state, jax.eval_shape(lambda: self.model.init_state(tokens.shape[0])))
        active = jnp.ones(tokens.shape, bool) if active is None else jnp.asarray(active)
        if active.shape != tokens.shape or active.dtype != bool:
            want = f"active must be booleans {list(tokens.shape)}, one for each of tokens"
            raise ValueError(f"{want}, got {active.dtype}{list(active.shape)}")
        check_deleted(state=state)
        with explain_deleted(params=self.weights):
            return _call(self.step, self.weights, tokens, self.state(state), active)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _call(step: Any, weights: PyTree, tokens: jax.Array, state: RWKVState, active: jax.Array) -> Any:
    # a table is read from its end on for negative numbers; only beyond it there is NaN
    tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))
    return step(weights, jnp.where(tokens < 0, step.model.config.vocab_size, tokens), state, active)


def _state_dtype(dtype: Any, model: RWKVForCausalLM) -> Any:
    own = jnp.promote_types(model.config.dtype, jnp.float32)
    if dtype is None:
        return own
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in _STATE_DTYPES:
        raise TypeError(f"state_dtype must be float32, bfloat16, float16 or None, got {shown(dtype)}")
    return dtype


def quantisation_of(
    dtype: str | None, group: int | None, model: RWKVForCausalLM, params: PyTree
) -> Quantisation | None:
    """Of ``weight_dtype`` and ``weight_group``."""
    if dtype is None:
        if group is not None:
            raise ValueError(f"weight_group must be None without weight_dtype, got {shown(group)}")
        return None
    if dtype not in _QUANTISED:
        raise ValueError(f"weight_dtype must be 'int8', 'int4' or None, got {shown(dtype)}")
    bits, largest = _QUANTISED[dtype]
    widths = model.config.hidden_size, _intermediate_size(params)
    named = f"that divides the widths {widths[0]} and {widths[1]}"
    if group is None:
        fitting = [n for n in (128, 64, 32, 16) if n <= largest and not any(width % n for width in widths)]
        if not fitting:
            raise ValueError(f"weight_dtype={dtype!r} needs a power of two from 16 on {named}, there is none")
        return Quantisation(bits, fitting[0])
    group = check_integer("weight_group", group, 16)
    if group & (group - 1) or any(width % group for width in widths):
        raise ValueError(f"weight_group must be a power of two {named}, got {group}")
    return Quantisation(bits, group)


def unsupported(implementation: str, model: RWKVForCausalLM, params: PyTree) -> Unsupported | None:
    """None where an implementation of the fast path can decode with ``model``, else the reason."""
    if decode_family(model) is None:
        known = " and ".join(FAMILIES[name].model.__name__ for name in DECODE)
        return Unsupported(f"it knows {known} only")
    config = model.config
    if config.implementation not in (None, "triton"):
        return Unsupported(f"the model asks for implementation={config.implementation!r}")
    if config.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return Unsupported(f"it has no {config.dtype}")
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    if any(len(x.sharding.device_set) > 1 for x in arrays) or not jax.sharding.get_abstract_mesh().empty:
        return Unsupported("the parameters lie on several devices")
    widths = config.hidden_size, config.head_dim, _intermediate_size(params)
    ctx = decode.DecodeContext(platform_of(arrays), *widths)
    return decode.STEPS.named(implementation).refusal(ctx)


def has_room(model: RWKVForCausalLM, params: PyTree, device: jax.Device | None = None) -> bool:
    """Whether the memory of a device, that of the parameters, holds them once more, in the compute dtype."""
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    device = device or next((device for x in arrays for device in x.devices()), None)
    stats = (device and device.memory_stats()) or {}
    if "bytes_limit" not in stats:
        return True
    needed = sum(x.size for x in arrays) * jnp.dtype(model.config.dtype).itemsize
    return needed <= stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _intermediate_size(params: PyTree) -> int:
    """Width of the feed-forward's hidden layer."""
    block = params["blocks"] if "blocks" in params else params["blocks_0"]
    (kernel,) = jax.tree.leaves(block["ffn"]["key"])
    return kernel.shape[-1]


class _Context(NamedTuple):
    """What the selection of an implementation depends on."""

    model: RWKVForCausalLM
    params: PyTree
    weight_dtype: str | None


def _model_supports(ctx: _Context) -> Unsupported | None:
    if ctx.weight_dtype is None:
        return None
    return Unsupported(f"it has no {ctx.weight_dtype} weights")


_IMPLEMENTATIONS: Registry[Candidate[_Context, Callable[[Any], FastStep | ModelStep]]] = Registry(
    "Decoder",
    [
        Candidate(
            "triton",
            lambda: functools.partial(FastStep, implementation="triton"),
            lambda ctx: unsupported("triton", ctx.model, ctx.params),
            # an interpreter is for tests, which select it by name
            lambda ctx: not triton.INTERPRET and has_room(ctx.model, ctx.params),
        ),
        Candidate("model", lambda: ModelStep, _model_supports),
        Candidate(
            "plain",
            lambda: functools.partial(FastStep, implementation="plain"),
            lambda ctx: unsupported("plain", ctx.model, ctx.params),
        ),
    ],
)
