"""Reading prompts: the logits and the state after them, for rows of any lengths, in few programs."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arguments import check_model, shown
from ..layers.state import RWKVState, check_state

# What a piece costs besides its tokens, as a number of tokens of all rows. Launching the kernels of a layer
# takes an accelerator 0.1 ms at least, in which a layer of width 1024 reads about a thousand tokens, other
# widths in inverse proportion to C^2; and fetching the weights from memory takes as long as 128 tokens or
# more at any width, on a CPU as long as some thirty.
_OVERHEAD, _LEAST_OVERHEAD, _MOST_OVERHEAD, _CPU_OVERHEAD = 2**30, 128, 4096, 32
# The largest piece, in tokens of all rows. A CPU gains nothing from longer ones. An accelerator shall not
# give more than a sixteenth of its memory to what a layer makes of a piece, some 25 float32 numbers for a
# token and channel.
_LARGEST, _CPU_LARGEST, _MEMORY_SHARE, _BYTES = 2**14, 512, 1 / 16, 100
_CHUNK = 16  # tokens in a chunk of the ops
_GROWTH = 1.15


def prefill(
    model: Any, params: Any, prompts: Sequence[Any], state: RWKVState | None = None
) -> tuple[jax.Array, RWKVState]:
    """Reads prompts of any lengths; every row's result is that of the row alone.

    Each row starts at the first position, from its own initial state, and takes part as long as it has
    tokens; behind its end the model leaves the state as it is (``lengths`` of the model's call). So no
    padding ever reaches a result, whatever the initial states are, and a batch costs what its longest row
    costs in all rows.

    The prompts are read in pieces of a few sizes (`piece_sizes`): the largest as often as it fits, then one
    piece that holds the rest. Every piece costs the launch of all kernels once more, which takes a GPU as
    long as thousands of tokens do, so the pieces are few and large; and every size is a program to compile,
    so the sizes are few, too. They grow so that from one to the next the time of a piece, launches included,
    grows by 15 %: no prompt takes more than about 1.15 of the time of one call of its very length. On a GPU,
    with one row and a width of 1024, one program reads up to 128 tokens, six more serve all lengths up to
    1024 and three to five more each doubling up to 16384; longer prompts need no others, and one prompt at
    most two. Programs of a model with ``scan_layers`` compile in the time of one layer, and JAX's compilation
    cache (``jax_compilation_cache_dir``) keeps all of them for the next process.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        prompts: B sequences of at least one token each: lists or integer arrays.
        state: before the first token of each row (it is left as it is); None for zeros.

    Returns:
        ``(logits, state)``: logits [B, V] for the token after each prompt, in float32 (float64 for a float64
        model), and the state there. NaN in the parameters or in ``state`` gives NaN.

    Raises:
        ValueError, TypeError: a prompt is empty, or is not made of integers from 0 to V - 1, or ``state``
            does not fit; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import prefill
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> logits, state = prefill(model, params, [[1, 2, 3], [4]])
        >>> logits.shape, state.wkv.shape
        ((2, 100), (2, 2, 4, 16, 16))
    """
    check_model(model)
    if not isinstance(params, Mapping) or not jax.tree.leaves(params) or set(params) == {"params"}:
        raise ValueError("params must be the parameters alone: variables['params'] and not variables")
    rows = check_prompts(prompts, model.config.vocab_size)
    initial = model.init_state(len(rows))
    if state is not None:
        check_state(state, initial)
        initial = jax.tree.map(lambda x, zero: jnp.asarray(x, zero.dtype), state, initial)
    lengths = np.array([len(row) for row in rows], np.int32)
    pieces = plan(int(lengths.max()), piece_sizes(model.config.hidden_size, len(rows), _device(params)))
    # Behind a row's end stands its own first token: nothing of another token, were it NaN, ever comes near
    # the row.
    tokens = np.tile(np.array([row[:1] for row in rows]), (1, sum(pieces)))
    for row, padded in zip(rows, tokens):
        padded[: len(row)] = row
    hidden = jnp.zeros(initial.att_shift.shape[1:], initial.att_shift.dtype)
    carry = beside(params, (hidden, initial))
    for start, size in zip(itertools.accumulate(pieces, initial=0), pieces):
        carry = _read(
            model, params, carry, tokens[:, start : start + size], np.clip(lengths - start, 0, size)
        )
    hidden, state = carry
    return _head(model, params, hidden), state


@functools.lru_cache
def piece_sizes(hidden_size: int, batch: int, device: Any) -> tuple[int, ...]:
    """The lengths of the pieces that `prefill` reads, rising. It compiles a program for each that it needs.

    All are whole chunks of the ops, and from the smallest on all powers of two are among them.

    Args:
        hidden_size: C, width of the model.
        batch: number of rows, B.
        device: a `jax.Device`; its platform and the size of its memory count, not what is free at the moment.
    """
    if device.platform == "cpu":
        overhead, largest = float(_CPU_OVERHEAD), _CPU_LARGEST
    else:
        overhead, largest = _OVERHEAD / hidden_size**2, _LARGEST
        overhead = min(max(overhead, _LEAST_OVERHEAD), _MOST_OVERHEAD)
        memory = (device.memory_stats() or {}).get("bytes_limit")
        if memory:
            largest = min(largest, int(memory * _MEMORY_SHARE / (_BYTES * hidden_size)))
    overhead /= batch
    last = _power_of_two(largest // batch)
    sizes = [min(_power_of_two(int((_GROWTH - 1) * overhead)), last)]
    while sizes[-1] < last:
        size = sizes[-1]
        low, high = overhead + size, overhead + 2 * size
        steps = math.ceil(math.log(high / low, _GROWTH))
        between = (low * (high / low) ** (i / steps) - overhead for i in range(1, steps))
        sizes += sorted({2 * size, *(math.ceil(n / _CHUNK) * _CHUNK for n in between)})
    return tuple(sizes)


def _power_of_two(n: int) -> int:
    """The largest one up to ``n``, and at least a chunk."""
    return max(_CHUNK, 1 << max(n, 1).bit_length() - 1)


def plan(length: int, sizes: Sequence[int]) -> list[int]:
    """The pieces that ``length`` tokens are read in; the last one may be longer than what is left for it."""
    whole, rest = divmod(length, sizes[-1])
    return [sizes[-1]] * whole + [size for size in sizes if size >= rest > 0][:1]


def check_prompts(prompts: Any, vocab_size: int) -> list[np.ndarray]:
    """The prompts as int32 arrays.

    Raises:
        ValueError, TypeError: there are none, or one is not made of at least one token; the message names it.
    """
    is_text = (
        "must be sequences of tokens, got text: a tokenizer turns it into tokens "
        "(fla_jax.generation.load_tokenizer)"
    )
    if isinstance(prompts, str | bytes):
        raise TypeError(f"prompts {is_text}")
    try:
        rows = list(np.asarray(prompts) if hasattr(prompts, "shape") else prompts)
    except TypeError:
        raise TypeError(f"prompts must be a sequence of sequences of tokens, got {shown(prompts)}") from None
    if not rows:
        raise ValueError("prompts must hold at least one row")
    for i, row in enumerate(rows):
        if isinstance(row, str | bytes):
            raise TypeError(f"prompts[{i}] {is_text}")
        try:
            rows[i] = row = np.asarray(row)
        except ValueError:
            raise ValueError(f"prompts[{i}] must be a sequence of tokens, got {shown(row)}") from None
        if row.ndim != 1 or row.size == 0:
            raise ValueError(
                f"prompts[{i}] must be a sequence of at least one token, got shape {list(row.shape)}"
            )
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"prompts[{i}] must be integers, got {row.dtype}")
        low, high = row.min(), row.max()
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"prompts[{i}] must hold tokens from 0 to {vocab_size - 1}, got {wrong}")
    return [row.astype(np.int32) for row in rows]


def beside(params: Any, tree: Any) -> Any:
    """A copy of ``tree`` where the parameters are, and committed to that place if they are.

    Results of programs that read the parameters come back the same way, and a program whose own results
    differ in this from its first arguments is compiled twice.
    """
    return _copy(jax.tree.leaves(params)[0], tree)


@functools.partial(jax.jit, keep_unused=True)
def _copy(place: jax.Array, tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _device(params: Any) -> Any:
    """A device that holds parameters; the one that JAX would take where they are not on any yet."""
    leaf = jax.tree.leaves(params)[0]
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return min(leaf.sharding.addressable_devices, key=operator.attrgetter("id"))
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(
    model: Any, params: Any, carry: tuple[jax.Array, RWKVState], tokens: jax.Array, lengths: jax.Array
) -> Any:
    """Reads the first ``lengths`` [B] of tokens [B, T].

    ``carry`` is the hidden state [B, C] at the last token of each row, and the state there; so is the result.
    """
    last, state = carry
    hidden, new = model.apply({"params": params}, tokens, state, lengths=lengths, method="hidden")
    # a row that has no tokens here keeps what it has to the last bit
    state = jax.tree.map(
        lambda x, old: jnp.where(of_rows(lengths > 0, x), x.astype(old.dtype), old), new, state
    )
    at = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.where(lengths[:, None] > 0, jnp.take_along_axis(hidden, at, 1)[:, 0], last), state


def of_rows(rows: jax.Array, x: jax.Array) -> jax.Array:
    """[B] as something that goes with a leaf [L, B, ...] of a state."""
    return rows.reshape(1, -1, *(1,) * (x.ndim - 2))


@functools.partial(jax.jit, static_argnums=0)
def _head(model: Any, params: Any, hidden: jax.Array) -> jax.Array:
    return model.apply({"params": params}, hidden, method="logits")
