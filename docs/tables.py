"""Tables of what was measured, from ``benchmarks/results``, for the pages: losses stand first."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import history
import records

Rows = list[records.Record]
OPS = ("chunk_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_rwkv6")
DECAYS = {
    "bounded": "bounded",
    "any-weak": "any, weak",
    "any-strong": "any, strong",
    "any-mixed": "any, mixed",
}


def results() -> dict[str, Rows]:
    """The records of each device, by its name."""
    found: dict[str, Rows] = {}
    for path in sorted(records.RESULTS.glob("*.json")):
        rows = records.read(path)
        name = next((row["device"] for row in rows if row.get("device")), path.stem)
        found[name] = rows
    return found


def table(head: tuple[str, ...], lines: list[tuple[Any, ...]]) -> str:
    """A Markdown table; columns after the first words are numbers."""
    text = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(text + ["| " + " | ".join(map(str, line)) + " |" for line in lines])


def number(x: float | None, digits: int = 3) -> str:
    """Three digits that count."""
    return "" if x is None else f"{x:.{digits}g}" if abs(x) < 1000 else f"{x:.0f}"


def shape(row: records.Record) -> str:
    """B T H D, or B T H K V; and the dtype where it is not bfloat16."""
    B, T, H, K, V = row["shape"]
    size = f"{B} {T} {H} {K}" if K == V else f"{B} {T} {H} {K} {V}"
    return size if row["dtype"] == "bfloat16" else f"{size} {row['dtype']}"


def recurrences(rows: Rows) -> str:
    """This library's measurements of the ops beside the fastest peer of the same run."""
    ours = [r for r in rows if r.get("op") in OPS and r.get("library") == "fla_jax" and "ms" in r]
    ours.sort(key=lambda r: (OPS.index(r["op"]), r["form"], -r["shape"][0] * r["shape"][1], r["pass"]))
    lines = []
    for r in ours:
        ratio = r.get("ratio")
        what = f"`{r['op']}`{' decoding' if r['form'] == 'decode' else ''}, {r['implementation']}"
        said = "" if ratio is None else f"**{ratio:.2f}, slower**" if ratio > 1 else f"{ratio:.2f}"
        peer = f"{r['peer']} {number(r['peer_ms'])}" if ratio is not None else "none with these decays"
        if "ratio_to_copy" in r and ratio is None:
            peer = f"a copy of the state {number(r['copy_ms'])} ({r['ratio_to_copy']:.2f} of it)"
        decay = DECAYS.get(r["decay"], r["decay"])
        memory = number(r.get("peak_gb"))
        lines.append((what, shape(r), decay, r["pass"], number(r["ms"]), peer, said, memory))
    return table(("op", "B T H D", "decays", "pass", "ms", "fastest peer, ms", "ratio", "GB"), lines)


def losses(rows: Rows) -> str:
    """Where a peer was faster, in words."""
    lost = [r for r in rows if r.get("library") == "fla_jax" and "ms" in r and (r.get("ratio") or 0) > 1]
    lost = [r for r in lost if r["op"] in OPS]
    if not lost:
        return "No peer was faster than every form of ours in this file."
    lost.sort(key=lambda r: -r["ratio"])
    lines = []
    for r in lost:
        best = min(
            (
                o["ms"]
                for o in rows
                if o.get("library") == "fla_jax"
                and all(o.get(n) == r.get(n) for n in ("op", "form", "shape", "pass", "dtype"))
            ),
        )
        note = "" if best >= r["peer_ms"] else f" (with other settings or decays {number(best)})"
        what = f"`{r['op']}`, {r['implementation']}, B T H D = {shape(r)}, {r['pass']}, {DECAYS[r['decay']]}"
        lines.append(f"* {what}: {number(r['ms'])} ms, {r['peer']} {number(r['peer_ms'])} ms{note}")
    return "\n".join(lines)


def peers(rows: Rows) -> str:
    """Every peer's own measurements, and those that gave none."""
    others = [r for r in rows if r.get("library") not in ("fla_jax", None) and "ms" in r]
    found = [r for r in others if r.get("op") in OPS]
    found.sort(key=lambda r: (OPS.index(r["op"]), r["form"], r["shape"], r["pass"], r["ms"]))
    lines = []
    for r in found:
        decay = DECAYS.get(r["decay"], r["decay"])
        form = "" if r["form"] == "chunk" else f" ({r['form']})"
        memory, note = number(r.get("peak_gb")), r.get("note") or ""
        lines.append((f"`{r['op']}`{form}", shape(r), decay, r["pass"]) + (r["implementation"],))
        lines[-1] += (number(r["ms"]), memory, note)
    text = table(("op", "B T H D", "decays", "pass", "implementation", "ms", "GB", "what differs"), lines)
    skipped = [f"* {r['peer']}, {r['op']}: {str(r['skipped'])[:300]}" for r in rows if "skipped" in r]
    return text + ("\n\nNot measured:\n\n" + "\n".join(skipped) if skipped else "")


def training(rows: Rows) -> str:
    """Whole training steps."""
    lines = []
    for r in rows:
        if r.get("op") == "train_step" and "ms" in r:
            who = {"fla": "FLA"}.get(r["implementation"], r["implementation"])
            size = r["shape"] if isinstance(r.get("shape"), dict) else {}
            model = ", ".join([r["model"], *(f"{name} {value}" for name, value in size.items())])
            everything = r.get("remat") in (None, False, "none")
            kept = "nothing rematerialised" if everything else f"remat={r['remat']!r}"
            speed, memory = number(r.get("tokens_per_s"), 6), number(r.get("peak_gb"))
            compiled = number(r.get("first_step_s"))
            lines.append((who, model, kept, number(r["ms"]), speed, memory, compiled, r["commit"]))
    head = ("library", "model", "settings", "ms", "tokens/s", "GB", "first step, s", "commit")
    return table(head, lines) if lines else "None in this file."


def decoding(rows: Rows) -> str:
    """Decoded tokens, and the time in which a copy moves as many bytes."""
    lines = []
    for r in rows:
        if r.get("op") == "decode" and "ms_per_token" in r:
            model, floor = f"RWKV-{r['version']} {r['model']}", r.get("floor_ms")
            who = r["implementation"] if r.get("library") == "fla_jax" else r["library"]
            settings = f"{r['weights']} weights, {r['state']} states"
            speed = number(r["tokens_per_s"], 6)
            lines.append((who, model, r["batch"], settings, number(r["ms_per_token"]), number(floor), speed))
    lines.sort(key=lambda line: (line[1], line[2], line[0]))
    head = ("who", "layers x width", "rows", "settings", "ms a token", "floor, ms", "tokens/s")
    return table(head, lines) if lines else "None in this file."


def scaling(rows: Rows) -> str:
    """Training on several devices against one of them with the work of one."""
    lines = []
    for r in rows:
        if r.get("op") == "scaling" and r["devices"] > 1 and "ms" in r:
            size = r["shape"]
            layers, heads = f"{size['layers']} x {size['C']}", f"chunk_rwkv7, {size['C'] // 64} heads"
            moved = ", ".join(f"{count} {kind}" for kind, count in r["collectives"].items())
            line = (
                r["mode"],
                r["devices"],
                f"{layers if size['layers'] else heads}, B {size['B']}, T {size['T']}",
                number(r["ms"]),
                *(f"{r[name]:.1%}" if name in r else "" for name in ("efficiency", "share_6n")),
                number(r["tokens_per_s"], 6),
                number(r["peak_gb"]),
                moved,
            )
            lines.append(line)
    lines.sort(key=lambda line: line[:2])
    head = ("mode", "devices", "what", "ms", "efficiency", "6 N", "tokens/s", "GB a device", "in the program")
    return table(head, lines) if lines else "None in this file."


def pieces(rows: Rows) -> str:
    """The fused pieces of the layers."""
    lines = []
    for r in rows:
        if r.get("op") not in OPS and r.get("gbs") and "ms" in r:
            ratio = r.get("ratio")
            said = "" if ratio is None else f"**{ratio:.2f}, slower**" if ratio > 1 else f"{ratio:.2f}"
            size, copy = " ".join(map(str, r["shape"])), f"{r['of_copy']:.2f}"
            lines.append((f"`{r['op']}`", r["form"], size, r["pass"], r["implementation"]))
            lines[-1] += (number(r["ms"]), copy, said)
    head = ("op", "piece", "B T C", "pass", "implementation", "ms", "of a copy's rate", "ratio")
    return table(head, lines) if lines else "None in this file."


def by_device(draw: Any) -> str:
    """One part for each GPU."""
    parts = []
    for device, rows in results().items():
        ours = (r for r in rows if r.get("library") == "fla_jax")
        versions = next((r["versions"] for r in ours if r.get("versions")), {})
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts.append(f"**{device}**, {said}\n\n{draw(rows)}")
    return "\n\n".join(parts)


def over_time() -> str:
    """This library's times by commit, one column for each, the oldest first."""
    parts = []
    for path in sorted(Path(records.RESULTS).glob("*.history.jsonl")):
        rows = [r for r in history.read(path) if r.get("library", "fla_jax") == "fla_jax" and r["op"] in OPS]
        dates: dict[str, str] = {}
        times: dict[str, dict[str, float]] = defaultdict(dict)
        titles = {}
        for r in rows:
            one = history.key(r)
            titles[one] = f"`{r['op']}` {r['form']}, {r['implementation']}"
            titles[one] += f", {shape(r)}, {r['pass']}, {DECAYS.get(r['decay'], r['decay'])}"
            dates[r["commit"]] = min(dates.get(r["commit"], r["run"]), r["run"])
            times[one][r["commit"]] = min(times[one].get(r["commit"], r["ms"]), r["ms"])
        commits = sorted(dates, key=dates.get)  # type: ignore[arg-type]
        head = ("measurement, ms", *(f"{dates[c][:10]} {c}" for c in commits))
        lines = [(titles[o], *(number(times[o].get(c)) for c in commits)) for o in sorted(titles)]
        parts.append(f"**{rows[0]['device']}**\n\n" + table(head, lines))
    return "\n\n".join(parts)


TABLES = {
    "losses": lambda: by_device(losses),
    "recurrences": lambda: by_device(recurrences),
    "peers": lambda: by_device(peers),
    "pieces": lambda: by_device(pieces),
    "training": lambda: by_device(training),
    "decoding": lambda: by_device(decoding),
    "scaling": lambda: by_device(scaling),
    "history": over_time,
}
