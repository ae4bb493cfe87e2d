"""Launch options of the pieces' Triton kernels, tried one by one: ``python benchmarks/layers.py --sweep``.

Host code has tables of launches by pass and size. An entry is replaced, the piece compiled and timed, and the
table restored. Copy the fastest launch into the table.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pieces.ours import call_ms, programs
from pieces.piece import Piece, Shape


class Option(NamedTuple):
    """One launch to try: its entries in tables; an entry None is removed."""

    name: str
    entries: tuple[tuple[dict[Any, Any], Any, Any], ...]


def options(piece: Piece, shape: Shape, passes: str, quick: bool) -> list[Option]:
    """The launches to try for a pass; none if the piece has no kernels."""
    if piece.op == "norm_shift_mix":
        return _mixes(piece, shape, passes, quick)
    if piece.op in ("rwkv7_keys", "rwkv7_readout", "rwkv6_readout"):
        return _heads(piece, shape, passes, quick)
    return []


def _mixes(piece: Piece, shape: Shape, kernel: str, quick: bool) -> list[Option]:
    """Whole tokens, if registers may be enough for them, and tiles of channels."""
    from fla_jax.pallas.layer import norm_shift_mix_variants as mix

    M, padded = sum(name.startswith("mu") for name in piece.inputs(shape)), 1 << (shape[2] - 1).bit_length()
    few = "few" if M <= 2 else "many"
    norm = "scale" in piece.inputs(shape)  # without it nothing is summed over channels
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


def _heads(piece: Piece, shape: Shape, kernel: str, quick: bool) -> list[Option]:
    """Tokens and heads of a tile, warps, stages, programs; for heads of 64 channels."""
    from fla_jax.pallas.common.headwise_host import HeadwiseLaunch
    from fla_jax.pallas.layer import keys_host, readout_host

    table = (keys_host if piece.op == "rwkv7_keys" else readout_host).LAUNCHES
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


def sweep(piece: Piece, shape: Shape, dtype: str, copied: float, quick: bool) -> None:
    """Prints milliseconds and the share of a copy's rate of every launch, first the one in the table, then by
    time.
    """
    import jax

    moved = piece.moved(shape, jax.numpy.dtype(dtype).itemsize)
    for passes in (name for name in moved if name in ("fwd", "bwd")):
        usual, found = Option("as it is", ()), []
        for option in [usual, *options(piece, shape, passes, quick)]:
            try:
                with taken(option):
                    compiled, arguments = programs(piece, shape, dtype, "triton", (passes,))[passes]
                    found.append((call_ms(piece, compiled, arguments), option.name))
            except Exception as error:  # a launch that does not fit the device
                print(f"{option.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        print(f"\n{piece.label} {'x'.join(map(str, shape))} {passes}")
        for ms, name in found[:1] + sorted(found[1:]):
            print(f"  {ms:.4f} ms  {moved[passes] / ms / 1e6 / copied:.2f} of copy  {name}", flush=True)
