"""Tries launches of norm, shift and mixes on a GPU, for the tables in pallas/layer/norm_mix/launcher.py.

    python benchmarks/layers_sweep.py --shapes 8x4096x1024 4x4096x2048 --pieces 'rwkv7 attention'

Prints milliseconds and the part of a copy's rate for every launch that was tried, the fastest first. A pass
is tried on whole tokens (where a program's registers may hold them) and by tiles of channels.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import sys

import layers
import records
from peers_run import timed

SPANS, STAGES, HOISTS = (32, 64, 128), (1, 2, 3), (True, False)


def whole(C: int, quick: bool):
    """Launches on whole tokens: 4 or 8 channels a thread."""
    from fla_jax.pallas.layer.norm_mix.launcher import Launch

    BC = 1 << (C - 1).bit_length()
    warps = [w for w in (BC // 128, BC // 256) if 1 <= w <= 32]
    spans, stages, hoists = (SPANS[1:], STAGES[1:2], HOISTS[:1]) if quick else (SPANS, STAGES, HOISTS)
    return [Launch(BC, *rest) for rest in itertools.product(warps, spans, stages, hoists)]


def tiled(quick: bool):
    """Launches by tiles of channels: one warp and 128 channels, or a few."""
    from fla_jax.pallas.layer.norm_mix.launcher import Launch

    spans, stages = (SPANS[1:2], STAGES[1:2]) if quick else (SPANS, STAGES)
    return [
        Launch(BC, BC // 128, *rest) for BC, *rest in itertools.product((128, 256, 512, 1024), spans, stages)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=layers.shape_of, default=layers.SHAPES, metavar="BxTxC")
    parser.add_argument("--pieces", type=re.compile, default="rwkv7 attention", help="regular expression")
    parser.add_argument("--passes", nargs="+", choices=layers.PASSES, default=layers.PASSES)
    parser.add_argument("--ways", nargs="+", choices=("whole", "tiles"), default=("whole", "tiles"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--warps", nargs="+", type=int, help="values of the launcher's WARPS to try as well")
    parser.add_argument("--quick", action="store_true", help="a tenth of the launches")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.path.insert(0, str(records.ROOT))
    import jax

    from fla_jax.pallas.layer.norm_mix import launcher

    copied = layers.copy_rate(1 << 30)
    print(f"{jax.devices()[0].device_kind}: a copy moves {copied:.0f} GB/s", flush=True)
    table, tiles = dict(launcher.WHOLE), dict(launcher.TILES)
    kernels = {"fwd": "forward", "bwd": "backward"}
    for piece, shape in itertools.product(layers.PIECES, options.shapes):
        if piece.op != "norm_shift_mix" or not re.search(options.pieces, piece.label):
            continue
        (B, T, C), M = shape, sum(name.startswith("mu") for name in piece.inputs(*shape))
        array = B * T * C * jax.numpy.dtype(options.dtype).itemsize
        for passes, way in itertools.product(options.passes, options.ways):
            if way == "whole" and "scale" not in piece.inputs(*shape):
                continue  # without a norm nothing is summed over channels
            key = (kernels[passes], "few" if M <= launcher.FEW else "many", 1 << (C - 1).bit_length())
            found = []
            for launch in whole(C, options.quick) if way == "whole" else tiled(options.quick):
                for warps in options.warps or [launcher.WARPS]:
                    launcher.WARPS, launcher.WHOLE, launcher.TILES = warps, dict(table), dict(tiles)
                    if way == "whole":
                        launcher.WHOLE[key] = launch
                    else:
                        launcher.WHOLE.pop(key, None)
                        launcher.TILES[kernels[passes]] = launch
                    jax.clear_caches()
                    try:
                        made = layers.functions(piece, shape, options.dtype, "triton")[passes]
                        ms = timed(functools.partial(layers.queue, *made))
                    except Exception as error:
                        print(f"{launch}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                        continue
                    found.append((ms, warps, launch))
            moved = piece.moved[layers.PASSES.index(passes)] * array
            print(f"\n{piece.label} {'x'.join(map(str, shape))} {passes} {way}")
            for ms, warps, launch in sorted(found, key=lambda one: one[0]):
                print(f"  {ms:.4f} ms {moved / ms / 1e6 / copied:.2f} of copy  WARPS {warps} {launch}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
