"""Draws a device's results beside the JSON file:
``python benchmarks/chart.py benchmarks/results/nvidia-h200.json``.

``<device>.png`` has one panel for each op, shape, dtype and pass, ``<device>-layers.png`` one for each fused
piece of the layers and pass, at the narrowest width. A panel has a bar for each implementation, fastest
first. Ours are green where they are faster than the fastest peer, red where they are slower, blue where there
is no peer (with the same decays); the dotted line is the time in which memory alone could move what must.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import records

PEER, WON, LOST, ALONE = "#9aa0a6", "#1a7f37", "#c5221f", "#1a5fb4"
ORDER = ("chunk_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_rwkv6")
PIECES = ("norm_shift_mix", "rwkv7_keys", "rwkv7_readout", "rwkv6_readout", "chunked_cross_entropy")
Row = records.Record


@dataclasses.dataclass(frozen=True)
class Panel:
    """Implementations of one thing: rows, fastest first, and the milliseconds that memory alone takes."""

    title: str
    rows: list[Row]
    floor: float | None


def grouped(rows: list[Row], names: tuple[str, ...], place: Any) -> list[list[Row]]:
    """The measurements of ops with these names, by op, form, shape, pass and dtype, ordered by ``place``."""
    found = defaultdict(list)
    for row in rows:
        if row.get("op") in names and "skipped" not in row:
            key = row["op"], row["form"], tuple(row["shape"]), row["pass"], row["dtype"]
            found[key].append(row)
    return [sorted(found[key], key=lambda row: row["ms"]) for key in sorted(found, key=place)]


def panels(rows: list[Row]) -> list[Panel]:
    """Those of the ops."""

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        op, form, (B, T, H, K, V), passes, dtype = key
        return ORDER.index(op), form, dtype, -B * T * H * K, (B, T, H, K, V), passes == "fwd+bwd"

    made = []
    for group in grouped(rows, ORDER, place):
        B, T, H, K, V = group[0]["shape"]
        size = f"D{K}" if K == V else f"K{K} V{V}"
        op = f"{group[0]['op']}{' decoding' if group[0]['form'] == 'decode' else ''}"
        passes = "forward + backward" if group[0]["pass"] != "fwd" else "forward"
        title = f"{op}  B{B} T{T} H{H} {size}  {group[0]['dtype']}  {passes}"
        made.append(Panel(title, group, group[0]["roofline_ms"]))
    return made


def piece_panels(rows: list[Row]) -> list[Panel]:
    """Those of the fused pieces."""
    narrow = min((row["shape"][2] for row in rows if row.get("op") in PIECES), default=0)
    chosen = [row for row in rows if row.get("op") in PIECES and row["shape"][2] == narrow]

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return PIECES.index(key[0]), key[1], key[2], key[3] != "fwd", key[4]

    names = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
    made = []
    for group in grouped(chosen, PIECES, place):
        one = group[0]
        B, T, C = one["shape"]
        title = f"{one['op']}, {one['form']}  B{B} T{T} C{C}  {one['dtype']}  {names[one['pass']]}"
        made.append(Panel(title, group, one["ms"] * one["of_copy"]))
    return made


def color(row: Row) -> str:
    """Whether ours won is the colour's whole meaning."""
    if row["library"] != "fla_jax":
        return PEER
    return ALONE if row["ratio"] is None else WON if row["ratio"] < 1 else LOST


def label(row: Row) -> str:
    ours = row["library"] == "fla_jax"
    name = f"fla_jax {row['implementation']}" if ours else row["implementation"]
    return f"{name}, {row['decay']}" if "decay" in row and (ours or row["decay"] == "any-strong") else name


def remark(row: Row) -> str:
    """What stands behind a bar of ours, beside its time."""
    if row["library"] != "fla_jax":
        return ""
    text = "" if row["ratio"] is None else f"  {row['ratio']:.2f} x the best peer"
    if "ratio_to_copy" in row:
        text += f"  {row['ratio_to_copy']:.2f} x a copy of the state"
    if "tflops" in row:
        return f"{text}  {row['tflops']:.0f} TFLOP/s"
    return f"{text}  {row['of_copy']:.0%} of a copy's rate" if "of_copy" in row else text


def draw(found: list[Panel], path: Path) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    columns = 2
    lines = [found[i : i + columns] for i in range(0, len(found), columns)]
    heights = [max(len(panel.rows) for panel in line) + 2.2 for line in lines]
    figure, axes = plt.subplots(
        len(lines),
        columns,
        figsize=(17, 0.27 * sum(heights) + 1.2),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, found):
        times = [max(row["ms"], row.get("ms_end", 0.0)) for row in panel.rows]
        axis.barh(range(len(times)), times, color=[color(row) for row in panel.rows])
        for i, (row, ms) in enumerate(zip(panel.rows, times)):
            text = remark(row)
            weight = "bold" if text else "normal"
            axis.text(ms, i, f" {ms:.3g} ms{text}", va="center", fontsize=8, fontweight=weight)
        axis.set_yticks(range(len(times)), [label(row) for row in panel.rows], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.5 * max(times))
        if panel.floor is not None:
            axis.axvline(panel.floor, color="black", linestyle=":", linewidth=1)
        axis.set_title(panel.title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
    first = found[0].rows[0]
    commits = sorted({row["commit"] for panel in found for row in panel.rows})
    meaning = {
        "fla_jax, faster than every peer": WON,
        "fla_jax, slower than the best peer": LOST,
        "fla_jax, no peer in its run": ALONE,
        "peers": PEER,
    }
    patches = [Patch(color=c) for c in meaning.values()]
    figure.legend(patches, list(meaning), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"{first['device']}, milliseconds (less is better), commits {', '.join(commits)}; "
        "dotted: memory's limit"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def pictures(rows: list[Row], results: Path) -> list[Path]:
    """Draws what a results file has measurements of, beside it."""
    each = {results.with_suffix(".png"): panels(rows)}
    each[results.with_name(f"{results.stem}-layers.png")] = piece_panels(rows)
    for path, found in each.items():
        if found:
            draw(found, path)
    return [path for path, found in each.items() if found]


def main(arguments: list[str] | None = None) -> None:
    """Draws the files that were named, or all of benchmarks/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="results; default: all of benchmarks/results")
    for path in parser.parse_args(arguments).files or sorted(records.RESULTS.glob("*.json")):
        made = pictures(json.loads(path.read_text()), path)
        print(
            "\n".join(map(str, made)) if made else f"chart.py: {path} has no measurement of an op or a piece"
        )


if __name__ == "__main__":
    main()
