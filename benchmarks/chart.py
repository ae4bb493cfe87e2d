"""Draws the results of a device: ``python benchmarks/chart.py benchmarks/results/nvidia-h200.json``.

``<device>.png`` has a panel for each op, shape, dtype and pass, ``<device>-layers.png`` one for each layer
operation and pass, at the smallest width. A panel has a bar for each implementation, fastest first: green if
ours is faster than the fastest peer, red if slower, blue without a peer (of equal decays). The dotted line is
the time in which a copy moves the bytes that must move.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import records
from records import Record

PEER, WON, LOST, ALONE = "#9aa0a6", "#1a7f37", "#c5221f", "#1a5fb4"
ORDER = ("chunk_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_rwkv6")
PIECES = ("norm_shift_mix", "rwkv7_keys", "rwkv7_readout", "rwkv6_readout", "chunked_cross_entropy")
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
MEANING = {
    "fla_jax, faster than every peer": WON,
    "fla_jax, slower than the best peer": LOST,
    "fla_jax, no peer in its run": ALONE,
    "peers": PEER,
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """Records of one task, fastest first, and the milliseconds that memory traffic alone takes."""

    title: str
    records: list[Record]
    floor: float | None


def grouped(results: list[Record], names: tuple[str, ...], order: Any) -> list[list[Record]]:
    """Measurements of ops with these names, by op, form, shape, pass and dtype, in an order of these keys."""
    found = defaultdict(list)
    for r in results:
        if r.get("op") in names and "skipped" not in r:
            found[r["op"], r["form"], tuple(r["shape"]), r["pass"], r["dtype"]].append(r)
    return [sorted(found[key], key=lambda r: r["ms"]) for key in sorted(found, key=order)]


def panels(results: list[Record]) -> list[Panel]:

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        op, form, (B, T, H, K, V), passes, dtype = key
        return ORDER.index(op), form, dtype, -B * T * H * K, (B, T, H, K, V), passes == "fwd+bwd"

    made = []
    for group in grouped(results, ORDER, order):
        first = group[0]
        B, T, H, K, V = first["shape"]
        size = f"D{K}" if K == V else f"K{K} V{V}"
        op = f"{first['op']}{' decoding' if first['form'] == 'decode' else ''}"
        title = f"{op}  B{B} T{T} H{H} {size}  {first['dtype']}  {PASSES[first['pass']]}"
        made.append(Panel(title, group, first["roofline_ms"]))
    return made


def piece_panels(results: list[Record]) -> list[Panel]:
    found = [r for r in results if r.get("op") in PIECES]
    narrow = min((r["shape"][2] for r in found), default=0)

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return PIECES.index(key[0]), key[1], key[2], key[3] != "fwd", key[4]

    made = []
    for group in grouped([r for r in found if r["shape"][2] == narrow], PIECES, order):
        first = group[0]
        B, T, C = first["shape"]
        task = f"{first['op']}, {first['form']}  B{B} T{T} C{C}"
        title = f"{task}  {first['dtype']}  {PASSES[first['pass']]}"
        made.append(Panel(title, group, first["ms"] * first["of_copy"]))
    return made


def color(r: Record) -> str:
    """Green or red for ours beside a peer, blue without one, grey for a peer."""
    if r["library"] != "fla_jax":
        return PEER
    return ALONE if r["ratio"] is None else WON if r["ratio"] < 1 else LOST


def label(r: Record) -> str:
    ours = r["library"] == "fla_jax"
    name = f"fla_jax {r['implementation']}" if ours else r["implementation"]
    return f"{name}, {r['decay']}" if "decay" in r and (ours or r["decay"] == "any-strong") else name


def remark(r: Record) -> str:
    """The text behind a bar of ours, after its time."""
    if r["library"] != "fla_jax":
        return ""
    text = "" if r["ratio"] is None else f"  {r['ratio']:.2f} x the best peer"
    if "ratio_to_copy" in r:
        text += f"  {r['ratio_to_copy']:.2f} x a copy of the state"
    if "tflops" in r:
        return f"{text}  {r['tflops']:.0f} TFLOP/s"
    return f"{text}  {r['of_copy']:.0%} of a copy's rate" if "of_copy" in r else text


def draw_panel(axis: Any, panel: Panel) -> None:
    times = [max(r["ms"], r.get("ms_end", 0.0)) for r in panel.records]
    axis.barh(range(len(times)), times, color=[color(r) for r in panel.records])
    for i, (r, ms) in enumerate(zip(panel.records, times)):
        text = remark(r)
        weight = "bold" if text else "normal"
        axis.text(ms, i, f" {ms:.3g} ms{text}", va="center", fontsize=8, fontweight=weight)
    axis.set_yticks(range(len(times)), [label(r) for r in panel.records], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(times))
    if panel.floor is not None:
        axis.axvline(panel.floor, color="black", linestyle=":", linewidth=1)
    axis.set_title(panel.title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=8)


def draw(found: list[Panel], path: Path) -> None:
    """Writes the picture, two panels a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    lines = [found[i : i + 2] for i in range(0, len(found), 2)]
    heights = [max(len(panel.records) for panel in line) + 2.2 for line in lines]
    figure, axes = plt.subplots(
        len(lines),
        2,
        figsize=(17, 0.27 * sum(heights) + 1.2),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, found):
        draw_panel(axis, panel)
    patches = [Patch(color=c) for c in MEANING.values()]
    figure.legend(patches, list(MEANING), loc="outside lower center", ncols=4, frameon=False)
    commits = ", ".join(sorted({r["commit"] for panel in found for r in panel.records}))
    device = found[0].records[0]["device"]
    title = f"{device}, milliseconds (less is better), commits {commits}; dotted: memory's limit"
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def pictures(results: list[Record], path: Path) -> list[Path]:
    """Draws the measurements of a results file beside it."""
    each = {path.with_suffix(".png"): panels(results)}
    each[path.with_name(f"{path.stem}-layers.png")] = piece_panels(results)
    for picture, found in each.items():
        if found:
            draw(found, picture)
    return [picture for picture, found in each.items() if found]


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__, out=False)
    parser.add_argument("files", nargs="*", type=Path, help="results; default: all of benchmarks/results")
    for path in parser.parse_args(arguments).files or sorted(records.RESULTS.glob("*.json")):
        made = pictures(records.read(path), path)
        nothing = f"chart.py: {path} has no measurement of an op or a layer operation"
        print("\n".join(map(str, made)) or nothing)


if __name__ == "__main__":
    main()
