"""Tables of measurements from ``benchmarks/results`` for the pages; peers that are faster come first."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import records

Records = list[records.Record]
OPS = ("chunk_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_rwkv6")
DECAYS = {
    "bounded": "safe gate",
    "any-weak": "unsafe gate, weak",
    "any-strong": "unsafe gate, strong",
    "any-mixed": "unsafe gate, mixed",
}
# what warps wait for, by ncu's names
WAITS = {
    "long_scoreboard": "global memory and spilled registers",
    "short_scoreboard": "shared memory and exponentials",
    "barrier": "barriers",
    "wait": "fixed latency",
    "mio_throttle": "queue to shared memory",
    "math_pipe_throttle": "arithmetic units",
    "no_instruction": "instructions",
    "not_selected": "other warps",
}
NOTHING = "Not measured."


def results() -> dict[str, Records]:
    """The records of each device, by its name."""
    found: dict[str, Records] = {}
    for path in sorted(records.RESULTS.glob("*.json")):
        read = records.read(path)
        found[next((r["device"] for r in read if r.get("device")), path.stem)] = read
    return found


def table(head: tuple[str, ...], lines: list[tuple[Any, ...]]) -> str:
    """A Markdown table; `NOTHING` without lines."""
    if not lines:
        return NOTHING
    text = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(text + ["| " + " | ".join(map(str, line)) + " |" for line in lines])


def number(x: float | None, digits: int = 3) -> str:
    """Three significant digits."""
    return "" if x is None else f"{x:.{digits}g}" if abs(x) < 1000 else f"{x:.0f}"


def shape(r: records.Record) -> str:
    """B T H D, or B T H K V; the dtype if it is not bfloat16, and how its products are rounded."""
    B, T, H, K, V = r["shape"]
    size = f"{B} {T} {H} {K}" if K == V else f"{B} {T} {H} {K} {V}"
    size += "" if r["dtype"] == "bfloat16" else f" {r['dtype']}"
    return " ".join(filter(None, [size, {"tensorfloat32": "as TF32"}.get(r.get("precision", ""))]))


def decay(r: records.Record) -> str:
    """The gate and the decays of a record."""
    return DECAYS.get(r["decay"], r["decay"])


def ratio(r: records.Record) -> str:
    """Our time over the fastest peer's, in bold if the peer is faster."""
    value = r.get("ratio")
    return "" if value is None else f"**{value:.2f}, slower**" if value > 1 else f"{value:.2f}"


def is_ours(r: records.Record) -> bool:
    """Whether it is a measurement of this library."""
    return r.get("library") == "fla_jax" and "ms" in r


def has_peers(found: Records) -> bool:
    """Whether other libraries' ops were measured."""
    return any(r.get("library") not in ("fla_jax", None) and r.get("op") in OPS and "ms" in r for r in found)


def recurrences(found: Records) -> str:
    """This library's measurements of the ops beside the fastest peer of the same run."""
    ours = [r for r in found if r.get("op") in OPS and is_ours(r)]
    ours.sort(key=lambda r: (OPS.index(r["op"]), r["form"], -r["shape"][0] * r["shape"][1], r["pass"]))
    lines, without_peer = [], "none with these decays" if has_peers(found) else "not measured"
    for r in ours:
        what = f"`{r['op']}`{' decoding' if r['form'] == 'decode' else ''}, {r['implementation']}"
        peer = without_peer
        if r.get("ratio") is not None:
            peer = f"{r['peer']} {number(r['peer_ms'])}"
        elif "ratio_to_copy" in r:
            peer = f"a copy of the state {number(r['copy_ms'])} ({r['ratio_to_copy']:.2f} of it)"
        times = (r["pass"], number(r["ms"]), peer, ratio(r), number(r.get("peak_gb")))
        lines.append((what, shape(r), decay(r), *times))
    return table(("op", "B T H D", "decays", "pass", "ms", "fastest peer, ms", "ratio", "GB"), lines)


def losses(found: Records) -> str:
    """The measurements in which a peer is faster, as sentences."""
    ours = [r for r in found if r.get("op") in OPS and is_ours(r)]
    lost = [r for r in ours if (r.get("ratio") or 0) > 1]
    if not ours or not has_peers(found):
        return NOTHING
    if not lost:
        return "In no measurement of the ops is a peer faster."
    lines = []
    for r in sorted(lost, key=lambda r: -r["ratio"]):
        task = lambda r: [r.get(name) for name in ("op", "form", "shape", "pass", "dtype", "precision")]
        best = min(o["ms"] for o in found if is_ours(o) and task(o) == task(r))
        note = "" if best >= r["peer_ms"] else f" (with other settings or decays {number(best)})"
        what = f"`{r['op']}`, {r['implementation']}, B T H D = {shape(r)}, {r['pass']}, {decay(r)}"
        lines.append(f"* {what}: {number(r['ms'])} ms, {r['peer']} {number(r['peer_ms'])} ms{note}")
    return "\n".join(lines)


def peers(found: Records) -> str:
    """Every peer's measurements, and the reasons of missing ones."""
    others = [
        r for r in found if r.get("library") not in ("fla_jax", None) and r.get("op") in OPS and "ms" in r
    ]
    others.sort(key=lambda r: (OPS.index(r["op"]), r["form"], r["shape"], r["pass"], r["ms"]))
    lines = []
    for r in others:
        op = f"`{r['op']}`" if r["form"] == "chunk" else f"`{r['op']}` ({r['form']})"
        numbers = (number(r["ms"]), number(r.get("peak_gb")), r.get("note") or "")
        lines.append((op, shape(r), decay(r), r["pass"], r["implementation"], *numbers))
    text = table(("op", "B T H D", "decays", "pass", "implementation", "ms", "GB", "what differs"), lines)
    skipped = [f"* {r['peer']}, {r['op']}: {str(r['skipped'])[:300]}" for r in found if "skipped" in r]
    return text + ("\n\nNot measured:\n\n" + "\n".join(skipped) if skipped else "")


def training(found: Records) -> str:
    """Whole training steps."""
    lines = []
    for r in found:
        if r.get("op") == "train_step" and "ms" in r:
            library = {"fla": "FLA"}.get(r["implementation"], r["implementation"])
            size = r["shape"] if isinstance(r.get("shape"), dict) else {}
            model = ", ".join([r["model"], *(f"{name} {value}" for name, value in size.items())])
            nothing = r.get("remat") in (None, False, "none")
            remat = "nothing rematerialised" if nothing else f"remat={r['remat']!r}"
            remat += ", FP8" if r.get("precision") == "fp8" else ""
            numbers = (
                number(r.get("tokens_per_s"), 6),
                number(r.get("peak_gb")),
                number(r.get("first_step_s")),
            )
            lines.append((library, model, remat, number(r["ms"]), *numbers, r["commit"]))
    head = ("library", "model", "settings", "ms", "tokens/s", "GB", "first step, s", "commit")
    return table(head, lines)


def decoding(found: Records) -> str:
    """Decoded tokens, and the time in which a copy moves as many bytes."""
    lines = []
    for r in found:
        if r.get("op") == "decode" and "ms_per_token" in r:
            model = f"RWKV-{r['version']} {r['model']}"
            library = r["implementation"] if r.get("library") == "fla_jax" else r["library"]
            settings = f"{r['weights']} weights, {r['state']} states"
            numbers = (number(r["ms_per_token"]), number(r.get("floor_ms")), number(r["tokens_per_s"], 6))
            lines.append((library, model, r["batch"], settings, *numbers))
    lines.sort(key=lambda line: (line[1], line[2], line[0]))
    head = ("implementation", "layers x width", "batch", "settings", "ms a token", "floor, ms", "tokens/s")
    return table(head, lines)


def serving(found: Records) -> str:
    """The server with many clients, and its `Generator` alone."""
    lines = []
    for r in found:
        if r.get("op") in ("serve", "generator"):
            model, seconds = f"RWKV-{r['version']} {r['model']}", (r["first_token_s"], r["first_token_95_s"])
            rates = (number(r["full_per_s"], 6), number(r["tokens_per_s"], 6))
            lines.append((r["op"], model, r["what"], *rates, *map(number, seconds), r["commit"]))
    rates_of = ("every client has a request", "whole run")
    head = ("what", "layers x width", "load", *rates_of, "first token, s", "95 % within, s", "commit")
    return table(head, lines)


def scaling(found: Records) -> str:
    """Training on several devices against one of them with the work of one."""
    lines = []
    for r in found:
        if r.get("op") == "scaling" and r["devices"] > 1 and "ms" in r:
            size = r["shape"]
            model = (
                f"{size['layers']} x {size['C']}"
                if size["layers"]
                else f"chunk_rwkv7, {size['C'] // 64} heads"
            )
            moved = ", ".join(f"{count} {kind}" for kind, count in r["collectives"].items())
            shares = (f"{r[name]:.1%}" if name in r else "" for name in ("efficiency", "share_6n"))
            numbers = (number(r["ms"]), *shares, number(r["tokens_per_s"], 6), number(r["peak_gb"]))
            what = f"{model}, B {size['B']}, T {size['T']}"
            what += "" if r["scan"] or not size["layers"] else ", no scan over layers"
            what += "" if r.get("reshard_after_forward", True) else ", weights stay gathered"
            in_flight = r.get("collectives_in_flight", 1)
            what += "" if in_flight == 1 else f", {in_flight} collectives in flight"
            lines.append((r["mode"], r["devices"], what, *numbers, moved, r["commit"]))
    lines.sort(key=lambda line: line[:2])
    numbers_of = ("ms", "efficiency", "6 N", "tokens/s", "GB a device")
    return table(("mode", "devices", "what", *numbers_of, "collectives", "commit"), lines)


def layers(found: Records) -> str:
    """The layer operations."""
    lines = []
    for r in found:
        if r.get("op") not in OPS and r.get("gbs") and "ms" in r:
            task = (f"`{r['op']}`", r["form"], " ".join(map(str, r["shape"])), r["pass"], r["implementation"])
            lines.append((*task, number(r["ms"]), f"{r['of_copy']:.2f}", ratio(r)))
    head = ("op", "layer", "B T C", "pass", "implementation", "ms", "share of a copy's rate", "ratio")
    return table(head, lines)


def counters(found: Records) -> str:
    """Hardware counters of the kernels of forward and backward passes."""
    lines = []
    for r in (r for r in found if r.get("op") == "counters"):
        case = f"`{r['form'].split()[0]}` {shape(r)}, {decay(r)}"
        waits = ", ".join(f"{WAITS.get(name, name)} {share:.0%}" for name, share in r["stalls"].items())
        shares = (f"{r[name]:.0f} %" for name in ("issue", "tensor", "memory"))
        lines.append((case, f"`{r['implementation']}`", number(r["ms"]), *shares, waits))
    head = ("op, B T H D", "kernel", "ms", "issue slots", "tensor cores", "memory", "largest waits")
    return table(head, lines)


def tasks(found: Records) -> str:
    """The best accuracy on each synthetic task, in brackets that of whole sequences."""
    cells: dict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    for r in sorted((r for r in found if r.get("op") == "task"), key=lambda r: r["accuracy"]):
        size = r["shape"]
        model = f"{size['hidden_size']} x {size['num_layers']}"
        task = (size["task"] != "recall", size["task"], size["length"], size["pairs"])
        parts = ", ".join(f"1/{divisor}" for divisor in size.get("curriculum") or ())
        curriculum = f", curriculum {parts}" if parts else ""
        shift = f", decay shift {size['decay_shift']:g}" if size.get("decay_shift") else ""
        right = f"{r['accuracy']:.1%} ({r['sequences']:.1%}), {r['steps']} steps{curriculum}{shift}"
        cells[*task, size["hidden_size"], size["num_layers"], model][r["implementation"]] = right
    lines = []
    for (_, name, length, pairs, _, _, model), by in sorted(cells.items()):
        size = f"{length}, {pairs} pairs" if pairs else str(length)
        lines.append((name, size, model, *(by.get(one, "not measured") for one in ("rwkv6", "rwkv7"))))
    return table(("task", "length", "width x layers", "RWKV-6", "RWKV-7"), lines)


def over_time() -> str:
    """This library's times by commit, one column each, the oldest first."""
    parts = []
    for path in sorted(records.RESULTS.glob("*.history.jsonl")):
        found = [
            r for r in records.read_history(path) if r["op"] in OPS and is_ours({"library": "fla_jax", **r})
        ]
        dates: dict[str, str] = {}
        times: dict[str, dict[str, float]] = defaultdict(dict)
        titles = {}
        for r in found:
            one, commit = records.measurement(r), r["commit"]
            what = f"`{r['op']}` {r['form']}, {r['implementation']}, {shape(r)}"
            titles[one] = f"{what}, {r['pass']}, {decay(r)}"
            dates[commit] = min(dates.get(commit, r["run"]), r["run"])
            times[one][commit] = min(times[one].get(commit, r["ms"]), r["ms"])
        commits = sorted(dates, key=dates.__getitem__)
        head = ("measurement, ms", *(f"{dates[c][:10]} {c}" for c in commits))
        lines = [(titles[one], *(number(times[one].get(c)) for c in commits)) for one in sorted(titles)]
        if found:
            parts.append(f"**{found[0]['device']}**\n\n" + table(head, lines))
    return "\n\n".join(parts)


def experiments() -> str:
    """Variants that were tried, a table for each kernel or program."""
    kernels: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for line in (records.RESULTS / "experiments.jsonl").read_text().splitlines():
        r = json.loads(line)
        taken = {True: "yes", False: "no", None: ""}[r["taken"]]
        numbers = (number(r["before"], 4), number(r["after"], 4), r["unit"])
        noted = f"{r['date'] or ''} {r['commit'] or ''}".strip()
        kernels[r["kernel"]].append((r["change"], r["shape"] or "", *numbers, taken, noted))
    head = ("variant", "shape", "before", "after", "unit", "taken", "noted")
    return "\n\n".join(f"## {kernel}\n\n{table(head, lines)}" for kernel, lines in kernels.items())


def by_device(draw: Callable[[Records], str]) -> Callable[[], str]:
    """One part for each GPU that has been measured."""

    def parts_of_page() -> str:
        parts = []
        for device, found in results().items():
            versions = next((r["versions"] for r in found if is_ours(r) and r.get("versions")), {})
            said = ", ".join(f"{name} {version}" for name, version in versions.items())
            if (drawn := draw(found)) != NOTHING:
                parts.append(f"**{device}**, {said}\n\n{drawn}")
        return "\n\n".join(parts) or NOTHING

    return parts_of_page


OF_DEVICES = (losses, recurrences, counters, peers, layers, training, decoding, serving, scaling)
TABLES = {draw.__name__: by_device(draw) for draw in OF_DEVICES}
TABLES |= {"history": over_time, "experiments": experiments}
TABLES["tasks"] = lambda: tasks([r for found in results().values() for r in found])
