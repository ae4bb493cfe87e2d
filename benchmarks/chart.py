"""Draws a device's results as ``<device>.png`` beside the JSON file:
``python benchmarks/chart.py benchmarks/results/nvidia-h200.json``.

One panel for each op, shape and pass, one bar for each implementation, fastest first. Ours are green where
they are faster than the fastest peer, red where they are slower, blue where there is no peer with the same
decays; the dotted line is the time in which memory alone could move what must move.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import records

PEER, WON, LOST, ALONE = "#9aa0a6", "#1a7f37", "#c5221f", "#1a5fb4"
ORDER = ("chunk_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_rwkv6")


def panels(rows: list[records.Record]) -> dict[tuple[Any, ...], list[records.Record]]:
    """Measurements by op, form, shape and pass, fastest first."""
    found = defaultdict(list)
    for row in rows:
        if row.get("op") in ORDER and "skipped" not in row:
            found[row["op"], row["form"], tuple(row["shape"]), row["pass"]].append(row)
    place = lambda key: (
        ORDER.index(key[0]),
        key[1],
        -key[2][0] * key[2][1] * key[2][2] * key[2][3],
        key[2],
        key[3] == "fwd+bwd",
    )
    return {key: sorted(found[key], key=lambda row: row["ms"]) for key in sorted(found, key=place)}


def color(row: records.Record) -> str:
    """Whether ours won is the colour's whole meaning."""
    if row["library"] != "fla_jax":
        return PEER
    return ALONE if row["ratio"] is None else WON if row["ratio"] < 1 else LOST


def label(row: records.Record) -> str:
    name = f"fla_jax {row['implementation']}" if row["library"] == "fla_jax" else row["implementation"]
    return f"{name}, {row['decay']}" if row["library"] == "fla_jax" or row["decay"] == "any-strong" else name


def draw(rows: list[records.Record], path: Path) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    found = panels(rows)
    if not found:
        raise SystemExit("chart.py: the file has no measurement of an op")
    columns = 2
    lines = [list(found)[i : i + columns] for i in range(0, len(found), columns)]
    heights = [max(len(found[key]) for key in line) + 2.2 for line in lines]
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
    for axis, (key, group) in zip(axes.flat, found.items()):
        op, form, (B, T, H, K, V), passes = key
        times = [max(row["ms"], row.get("ms_end", 0.0)) for row in group]
        axis.barh(range(len(group)), times, color=[color(row) for row in group])
        for i, (row, ms) in enumerate(zip(group, times)):
            ratio = (
                f"  {row['ratio']:.2f} x the best peer"
                if row["library"] == "fla_jax" and row["ratio"] is not None
                else ""
            )
            if "ratio_to_copy" in row:
                ratio += f"  {row['ratio_to_copy']:.2f} x a copy of the state"
            axis.text(
                ms,
                i,
                f" {ms:.3g} ms{ratio}",
                va="center",
                fontsize=8,
                fontweight="bold" if ratio else "normal",
            )
        axis.set_yticks(range(len(group)), [label(row) for row in group], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.5 * max(times))
        if group[0]["roofline_ms"] is not None:
            axis.axvline(group[0]["roofline_ms"], color="black", linestyle=":", linewidth=1)
        size = f"D{K}" if K == V else f"K{K} V{V}"
        axis.set_title(
            f"{op}{' decoding' if form == 'decode' else ''}  B{B} T{T} H{H} {size}  "
            f"{'forward + backward' if passes != 'fwd' else 'forward'}",
            fontsize=10,
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
    first = next(iter(found.values()))[0]
    meaning = {
        "fla_jax, faster than every peer": WON,
        "fla_jax, slower than the best peer": LOST,
        "fla_jax, no peer with these decays": ALONE,
        "peers": PEER,
    }
    figure.legend(
        [Patch(color=c) for c in meaning.values()],
        list(meaning),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle(
        f"{first['device']}, {first['dtype']}, milliseconds (less is better), commit {first['commit']}; "
        "dotted: memory's limit"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Draws the files that were named, or all of benchmarks/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="results; default: all of benchmarks/results")
    for path in parser.parse_args(arguments).files or sorted(records.RESULTS.glob("*.json")):
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
