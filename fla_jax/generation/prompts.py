"""Reading prompts: the logits and the state after them, for rows of any lengths, in few programs."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core.arguments import shown
from ..layers.state import RWKVState, check_state
from ..models.causal_lm import RWKVForCausalLM
from ..models.config import check_model
from .array_checks import explain_deleted
from .decode_steps import of_rows
from .prefill_plan import UNMASKED_TOKENS, chunk_overhead, chunk_sizes, grouped, plan

# For the programs that read. One call of a model of 24 x 1024 for 8192 tokens takes an H200 17.5 ms with all
# three, 18.2 with the first alone, and 20 with none.
COMPILER_OPTIONS = {
    # XLA's own products in Triton: each is tuned while it compiles, and they do not read a layer's weights
    # where these are stacked, as the library's do.
    "xla_gpu_enable_triton_gemm": False,
    # What does not wait for each other in a CUDA graph runs at the same time: the products of low rank, which
    # fill half a GPU, beside the large ones. It takes more memory: 0.5 GB in place of 0.3 there.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    # Products of one operand as one: the weights would be put beside each other and the results taken apart.
    "xla_gpu_dot_merger_threshold_mb": 0,
}


def prefill(
    model: RWKVForCausalLM, params: PyTree, prompts: Sequence[object], state: RWKVState | None = None
) -> tuple[jax.Array, RWKVState]:
    """Reads prompts of any lengths; every row's result is that of the row alone.

    Each row starts at the first position, from its own initial state, and takes part as long as it has
    tokens; behind its end the model leaves the state as it is (``lengths`` of the model's call). So no
    padding ever reaches a result, whatever the initial states are. Rows are read together with rows of
    similar lengths where that saves a fifth of the time or more (`grouped`); rows that lie on several devices
    all together, which costs what the longest row costs in all rows.

    The prompts are read in pieces of a few sizes (`chunk_sizes`): the largest as often as it fits, then one
    piece that holds the rest. Every piece costs the launch of all kernels once more, which takes a GPU as
    long as thousands of tokens do, so the pieces are few and large; and every size is a program to compile,
    so the sizes are few, too. They grow so that from one to the next the time of a piece, launches included,
    grows by 15 %: no prompt takes more than about 1.15 of the time of one call of its very length. On a GPU,
    with one row and a width of 1024, one program reads up to 128 tokens, six more serve all lengths up to
    1024 and three to five more each doubling up to 16384; longer prompts, and those that go on from a given
    state, need others of the same sizes, and one prompt at most two. Programs of a model with
    ``scan_layers=True`` compile in the time of one layer, and JAX's compilation cache
    (``jax_compilation_cache_dir``) keeps those that take a second or more for the next process;
    ``jax_persistent_cache_min_compile_time_secs=0`` keeps all.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        prompts: B sequences of at least one token each: lists or integer arrays.
        state: before the first token of each row (it is left as it is); None for zeros.

    Returns:
        ``(logits, state)``: logits [B, V] for the token after each prompt, in float32 (float64 for a float64
        model), and the state there. NaN in the parameters or in ``state`` gives NaN.

    Raises:
        ValueError, TypeError: a prompt is empty, or is not made of integers from 0 to V - 1, ``state`` does
            not fit, or ``params`` or ``state`` holds deleted arrays; the message names it.

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
    check_params(model, params)
    rows = check_prompts(prompts, model.config.vocab_size)
    with explain_deleted(params=params, state=state):
        if state is not None:
            like = jax.eval_shape(lambda: model.init_state(len(rows)))
            check_state(state, like)
            state = jax.tree.map(lambda x, zero: jnp.asarray(x, zero.dtype), state, like)
        *_, result = prefill_chunks(model, params, rows, len(rows), state)
    assert result is not None
    return result


def check_params(model: RWKVForCausalLM, params: PyTree) -> None:
    """Raises unless ``model`` is a language model and ``params`` may be its parameters."""
    check_model(model)
    if not isinstance(params, Mapping) or not _some_leaves(params) or set(params) == {"params"}:
        raise ValueError("params must be the parameters alone: variables['params'] and not variables")


def _some_leaves(params: PyTree) -> list[jax.Array]:
    """Those of the embedding, which models begin with: to look through all of them takes a host 0.1 ms, in
    which the device waits.
    """
    return jax.tree.leaves(params.get("emb", params))


def prefill_chunks(
    model: RWKVForCausalLM, params: PyTree, rows: Sequence[np.ndarray], batch: int, initial: RWKVState | None
) -> Iterator[tuple[jax.Array, RWKVState] | None]:
    """Reads checked rows from their ``initial`` state, which is left as it is; from zero with None.

    ``batch`` may be larger than the number of prompts, so that a few programs serve any number of them; what
    comes back in the rows behind means nothing.

    Yields:
        None as often as there are pieces but for the last, so that other work can be started between them;
        then the logits [B, V] and the state after every row.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    place = _some_leaves(params)[0]
    device = _device(place)

    def sizes(batch: int) -> tuple[int, ...]:
        return chunk_sizes(model.config.hidden_size, batch, device)

    groups = [np.arange(len(rows))]
    if len(rows) > 1 and _on_one_device(place, initial):
        groups = grouped(lengths, sizes, chunk_overhead(model.config.hidden_size, device)) or groups
    size = batch if len(groups) == 1 else len(groups[0])
    ends: list[tuple[jax.Array, RWKVState]] = []
    for group in groups:
        filled = np.pad(group, (0, size - len(group)), mode="edge") if size > len(group) else group
        own = initial if initial is None or len(groups) == 1 else take_rows(initial, filled)
        now = lengths[filled]
        now[len(group) :] = 0  # filled up with rows of no tokens
        pieces = plan(int(now.max()), sizes(size))
        # Behind a row's end stands its own first token: nothing of another token, were it NaN, ever comes
        # near the row.
        tokens = np.empty((size, sum(pieces)), np.int32)
        for row, length, padded in zip(filled, now, tokens):
            padded[:length], padded[length:] = rows[row][:length], rows[row][0]
        # One piece starts from zeros in its own program, and ends with the head there: programs of their own
        # make a prompt wait for the host.
        carry: Any = None if own is None and len(pieces) == 1 else _start(model, size, place, own)
        for start, length in zip(itertools.accumulate(pieces, initial=0), pieces):
            if ends or start:
                yield None
            here = np.minimum(np.maximum(now - start, 0), length)
            whole = size * length >= UNMASKED_TOKENS and (here == length).all()
            piece, alone = tokens[:, start : start + length], carry is None and len(groups) == 1
            carry = _read(model, alone, params, carry, piece, None if whole else here)
            if alone:
                yield carry
                return
        ends.append(carry)
    hidden, state = ends[0]
    if len(groups) > 1:
        back = np.zeros(batch, np.int32)
        back[: len(rows)] = np.argsort(np.concatenate(groups))  # what fills the last group stands behind
        hidden, state = _joined(ends, back)
    # no layers: hundreds of arrays take a millisecond to hand over
    rest = {name: value for name, value in params.items() if not name.startswith("blocks")}
    yield _head(model, rest, hidden), state


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
        if row.dtype.kind not in "iu":
            raise TypeError(f"prompts[{i}] must be integers, got {row.dtype}")
        low, high = row.min(), row.max()
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"prompts[{i}] must hold tokens from 0 to {vocab_size - 1}, got {wrong}")
    return [row.astype(np.int32) for row in rows]


def check_prompt(prompt: object, vocab_size: int, name: str = "prompt") -> np.ndarray:
    """A single prompt as an int32 array; raises as `check_prompts` does, with the argument's ``name``."""
    is_one = not hasattr(prompt, "__len__") or getattr(prompt, "ndim", 1) == 0
    if is_one or isinstance(prompt, str | bytes):
        raise TypeError(f"{name} must be a sequence of tokens, got {shown(prompt)}")
    try:
        (row,) = check_prompts([prompt], vocab_size)
    except (ValueError, TypeError) as error:
        raise type(error)(str(error).replace("prompts[0]", name)) from None
    return row


def check_texts(name: str, texts: Sequence[object]) -> list[object]:
    """A sequence of texts as a list. A single text is an error: its characters would be taken for texts."""
    if isinstance(texts, str | bytes):
        raise TypeError(f"{name} must be a sequence of prompts, got text: pass [text]")
    try:
        return list(texts)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of prompts, got {shown(texts)}") from None


def put_like(params: PyTree, tree: PyTree) -> PyTree:
    """A copy of ``tree`` where the parameters are, and committed to that place if they are.

    Results of programs that read the parameters come back the same way, and a program whose own results
    differ in this from its first arguments is compiled twice.
    """
    return _copy(jax.tree.leaves(params)[0], tree)


@functools.partial(jax.jit, keep_unused=True)
def _copy(place: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


@functools.partial(jax.jit, static_argnums=(0, 1), keep_unused=True)
def _start(
    model: RWKVForCausalLM, batch: int, place: jax.Array, state: RWKVState | None
) -> tuple[jax.Array, RWKVState]:
    """The first carry of `_read`, where ``place`` is (see `beside`): with a copy of the state, or zeros."""
    state = model.init_state(batch) if state is None else jax.tree.map(jnp.copy, state)
    return jnp.zeros_like(state.att_shift[0]), state


def _device(leaf: Any) -> Any:
    """A device that holds a parameter; the one that JAX would take where it is not on any yet."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return min(leaf.sharding.addressable_devices, key=operator.attrgetter("id"))
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3, compiler_options=COMPILER_OPTIONS)
def _read(
    model: RWKVForCausalLM,
    with_head: bool,
    params: PyTree,
    carry: tuple[jax.Array, RWKVState] | None,
    tokens: jax.Array,
    lengths: jax.Array | None,
) -> Any:
    """Reads the first ``lengths`` [B] of tokens [B, T], or all of them.

    ``carry`` is the hidden state [B, C] at the last token of each row, and the state there; so is the result,
    with the logits [B, V] for the hidden state ``with_head``. None are zeros.
    """
    last, state = carry or _start(model, tokens.shape[0], tokens, None)
    hidden, new = model.apply({"params": params}, tokens, state, lengths=lengths, method="hidden")
    new = jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)
    if lengths is None:
        last, state = hidden[:, -1], new
    else:
        # a row that has no tokens here keeps what it has to the last bit
        state = jax.tree.map(lambda x, old: jnp.where(of_rows(lengths > 0, x), x, old), new, state)
        at = jnp.maximum(lengths - 1, 0)[:, None, None]
        last = jnp.where(lengths[:, None] > 0, jnp.take_along_axis(hidden, at, 1)[:, 0], last)
    return (_head(model, params, last) if with_head else last), state


def _on_one_device(*trees: PyTree) -> bool:
    arrays = [x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    return all(len(x.sharding.device_set) == 1 for x in arrays)


@jax.jit
def take_rows(state: RWKVState, rows: jax.Array) -> RWKVState:
    """The state of some rows."""
    return jax.tree.map(lambda x: x[:, rows], state)


@jax.jit
def _joined(ends: list[tuple[jax.Array, RWKVState]], back: jax.Array) -> tuple[jax.Array, RWKVState]:
    """The rows of several groups as one batch, in the order ``back``."""
    hidden, states = zip(*ends)
    state = jax.tree.map(lambda *xs: jnp.concatenate(xs, 1)[:, back], *states)
    return jnp.concatenate(hidden)[back], state


@functools.partial(jax.jit, static_argnums=0)
def _head(model: RWKVForCausalLM, params: PyTree, hidden: jax.Array) -> jax.Array:
    B = hidden.shape[0]
    if B == 1:
        # Without its own Triton products (COMPILER_OPTIONS) XLA converts the weights of a one-row product
        # to float32 first. More rows it pads to eight, and reads the weights as they are.
        hidden = jnp.pad(hidden, ((0, 7), (0, 0)))
    logits: PyTree = model.apply({"params": params}, hidden, method="logits")
    return logits[:B]
