"""Launch options of layer operations, tried one by one: ``python benchmarks/layers.py --sweep``.

An entry of a launch table is replaced, the operation timed, and the table restored.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from layer_ops.layer_op import LayerOp, Shape
from layer_ops.ours import call_ms, programs


class Option(NamedTuple):
    """One launch to try: its entries in tables; an entry None is removed."""

    name: str
    entries: tuple[tuple[dict[Any, Any], Any, Any], ...]


def options(layer_op: LayerOp, shape: Shape, passes: str, quick: bool) -> list[Option]:
    """The launches to try for a pass; none if the layer operation has no kernels."""
    if layer_op.op == "norm_shift_mix":
        return _mixes(layer_op, shape, passes, quick)
    if layer_op.op in ("rwkv7_keys", "rwkv7_readout", "rwkv6_readout"):
        return _heads(layer_op, shape, passes, quick)
    return []


def _mixes(layer_op: LayerOp, shape: Shape, kernel: str, quick: bool) -> list[Option]:
    """Whole tokens, if registers may be enough for them, and tiles of channels."""
    from fla_jax.pallas.layer import norm_shift_mix_variants as mix

    inputs, padded = layer_op.inputs(shape), 1 << (shape[2] - 1).bit_length()
    M = sum(name.startswith("mu") for name in inputs)
    few = "few" if M <= 2 else "many"
    norm = "scale" in inputs  # without it nothing is summed over channels
    blocks, stages, tokens = ((64,), (2,), (1,)) if quick else ((8, 32, 128), (1, 3), (1, 2, 4))
    # equally many warps in all, whatever the token block
    rests = [
        (block, depth, together, (1 << 17) // block)
        for block, depth, together in itertools.product(blocks, stages, tokens)
    ]
    found = []
    if norm:
        # 4, 8 or 16 channels a thread
        for warps in (w for w in (padded // 128, padded // 256, padded // 512) if 1 <= w <= 32):
            for rest in rests:
                launch = mix.MixLaunch(padded, warps, *rest)
                entries = ((mix.MAX_WHOLE, (kernel, few), padded),)
                found.append(
                    Option(f"whole {launch}", (*entries, (mix.WHOLE, ("whole", kernel, few, padded), launch)))
                )
    tiled = "sums" if norm and kernel == "bwd" else kernel
    for channels, rest in itertools.product((256, 512, 1024), rests):
        launch = mix.MixLaunch(channels, channels // 256, *rest)
        tiles: tuple[Any, ...] = ((mix.MAX_WHOLE, (kernel, few), 0), (mix.TILES, ("tiles", tiled), launch))
        found.append(Option(f"tiles {launch}", tiles))
    return found


def _heads(layer_op: LayerOp, shape: Shape, kernel: str, quick: bool) -> list[Option]:
    """Tokens and heads of a tile, warps, stages, programs; for heads of 64 channels."""
    from fla_jax.pallas.common.headwise_host import HeadwiseLaunch
    from fla_jax.pallas.layer import keys_host, readout_host

    table = (keys_host if layer_op.op == "rwkv7_keys" else readout_host).LAUNCHES
    tiles = [(4, 1, 4), (8, 1, 4), (16, 1, 4), (32, 1, 4), (8, 2, 4), (16, 1, 8), (8, 1, 2)]
    stages, programs = ((2,), (2112,)) if quick else ((1, 2, 3), (1056, 2112, 4224))
    made = [
        HeadwiseLaunch(*one, depth, min(depth, 2), count)
        for one, depth, count in itertools.product(tiles, stages, programs)
    ]
    return [Option(str(tile), ((table, (kernel, 64), tile),)) for tile in made]


@contextlib.contextmanager
def taken(option: Option) -> Iterator[None]:
    """The tables with these entries, restored afterwards."""
    import jax

    before = [dict(table) for table, _, _ in option.entries]
    try:
        for table, key, value in option.entries:
            table.pop(key, None)
            if value is not None:
                table[key] = value
        jax.clear_caches()
        yield
    finally:
        for (table, _, _), old in zip(option.entries, before):
            table.clear()
            table.update(old)
        jax.clear_caches()


def sweep(layer_op: LayerOp, shape: Shape, dtype: str, copied: float, quick: bool) -> None:
    """Prints milliseconds and the share of a copy of every launch: the one in the table, then by time."""
    import jax

    moved = layer_op.moved(shape, jax.numpy.dtype(dtype).itemsize)
    for passes in (name for name in moved if name in ("fwd", "bwd")):
        usual, found = Option("as it is", ()), []
        for option in [usual, *options(layer_op, shape, passes, quick)]:
            try:
                with taken(option):
                    compiled, arguments = programs(layer_op, shape, dtype, "triton", (passes,))[passes]
                    found.append((call_ms(layer_op, compiled, arguments), option.name))
            except Exception as error:  # a launch that does not fit the device
                print(f"{option.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        print(f"\n{layer_op.label} {'x'.join(map(str, shape))} {passes}")
        for ms, name in found[:1] + sorted(found[1:]):
            print(f"  {ms:.4f} ms  {moved[passes] / ms / 1e6 / copied:.2f} of copy  {name}", flush=True)
