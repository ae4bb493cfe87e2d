"""Digests of what the library compiles and computes, to prove that a change of the code changes neither.

    python tests/nets record nets.json            digests of this commit
    python tests/nets check nets.json             whether they are the same now; says what differs
    python tests/nets check nets.json --quick     a part, in two minutes
    python tests/nets check nets.json --dump DIR  texts of what differs, DIR/new and, from the recorded
                                                  commit, DIR/old, for `diff -r`
    options: --only ptx|hlo|params|interpret, --match TEXT, --workers N

Four nets: the PTX of every Triton kernel with its registers (launches.py), StableHLO of ops, models and
decoding (programs.py), initial parameters, and results of every kernel variant in interpreters (values.py).
Every call is described by its public arguments; adapter.py alone names internals. Digests hold for one
version of JAX, Triton and NumPy and for one kind of CPU: record and check in one environment.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

TESTS = pathlib.Path(__file__).parents[1]
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(TESTS)]

from nets.work import keys as keys_of  # noqa: E402
from nets.work import processes, work  # noqa: E402

NETS = ("ptx", "hlo", "params", "interpret")
PACKAGES = ("jax", "jaxlib", "triton", "numpy", "flax", "optax")


def run(net: str, args: argparse.Namespace, known: dict[str, list[str]], texts: bool) -> dict[str, Any]:
    """What to record of a net's calls, and their texts."""
    found, begin = {}, time.perf_counter()
    with processes(net, args.workers) as pool:
        wanted = pool.submit(keys_of, net, args.quick).result()
        wanted = [key for key in wanted if args.match in key]
        tasks = [pool.submit(work, (net, key, known.get(key), texts)) for key in wanted]
        for i, task in enumerate(tasks):
            key, made, text, seconds = task.result()
            found[key] = made, text
            if seconds > args.slow:
                print(f"{seconds:6.1f} s  {net}: {key}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{net} {i + 1}/{len(tasks)}", end="", file=sys.stderr, flush=True)
    print(f"{net}: {len(found)} calls in {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def versions() -> dict[str, str]:
    """What digests depend on besides the code."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"python": ".".join(map(str, sys.version_info[:2]))}


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def differences(old: list[str], new: list[str]) -> list[str]:
    """What is to be said of a call that differs."""
    if Counter(old) == Counter(new):
        return ["the same, in another order"]
    gone, come = Counter(old) - Counter(new), Counter(new) - Counter(old)
    return [f"  - {x}" for x in gone.elements()] + [f"  + {x}" for x in come.elements()]


def dump(folder: pathlib.Path, side: str, net: str, key: str, texts: dict[str, str]) -> None:
    name = "".join(c if c.isalnum() or c in "=-_." else "_" for c in key)[:150]
    place = folder / side / net / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:4]}"
    place.mkdir(parents=True, exist_ok=True)
    for i, (title, text) in enumerate(texts.items()):  # the title may have names: the file's name is a number
        (place / f"{i}.txt").write_text(f"{title}\n{text}\n")


def dump_old(recorded: dict[str, Any], folder: pathlib.Path, wrong: list[tuple[str, str]]) -> None:
    """The texts of what differs as the recorded commit has them, by its own nets."""
    with tempfile.TemporaryDirectory() as place:
        tree = pathlib.Path(place) / "tree"
        git("worktree", "add", "--detach", str(tree), recorded["commit"])
        try:
            keys_file = pathlib.Path(place) / "keys.json"
            keys_file.write_text(json.dumps(wrong))
            command = [
                sys.executable,
                str(tree / "tests/nets"),
                "dump",
                str(keys_file),
                "--dump",
                str(folder),
            ]
            subprocess.run(command, check=True, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)})
        finally:
            git("worktree", "remove", "--force", str(tree))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="nets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "check", "dump"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--only", action="append", choices=NETS)
    parser.add_argument("--match", default="", help="only calls whose description has this in it")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dump", type=pathlib.Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow", type=float, default=1e9, help="print calls that take so many seconds")
    args = parser.parse_args()
    nets = args.only or NETS
    if args.command == "dump":  # for `dump_old`: the given calls alone
        wrong = json.loads(args.file.read_text())
        for net in sorted({net for net, _ in wrong}):
            with processes(net, args.workers) as pool:
                for key, _, texts, _ in pool.map(work, [(net, k, None, True) for n, k in wrong if n == net]):
                    dump(args.dump, "old", net, key, texts)
        return 0
    if args.command == "record":
        return record(args, nets)
    return check(args, nets)


def record(args: argparse.Namespace, nets: Any) -> int:
    """Writes the digests of this commit; of other nets than those that run the file's stay."""
    recorded = json.loads(args.file.read_text()) if args.file.exists() else {"nets": {}}
    if git("status", "--porcelain"):
        print("warning: the tree has changes that no commit has; --dump will not find them")
    recorded |= {"commit": git("rev-parse", "HEAD"), "versions": versions()}
    for net in nets:
        found = run(net, args, {}, args.dump is not None)
        recorded["nets"][net] = recorded["nets"].get(net, {}) if args.match or args.quick else {}
        recorded["nets"][net] |= {key: made for key, (made, _) in found.items()}
        for key, (made, text) in found.items():
            if made[0].startswith("error"):
                print(f"{net}: {key}: {made[0]}")
            if args.dump is not None:
                dump(args.dump, "old", net, key, text)
    args.file.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")
    return 0


def check(args: argparse.Namespace, nets: Any) -> int:
    """Compares; 1 where something differs."""
    recorded = json.loads(args.file.read_text())
    if recorded["versions"] != versions():
        print(f"warning: recorded with {recorded['versions']}, this is {versions()}")
    wrong = []
    for net in nets:
        old = recorded["nets"].get(net, {})
        found = run(net, args, old, args.dump is not None)
        missing = [] if args.quick or args.match else sorted(old.keys() - found.keys())
        for key in missing:
            print(f"{net}: {key}: no such call any more")
        wrong += [(net, key) for key in missing]
        for key, (made, text) in found.items():
            if made != old.get(key):
                said = differences(old[key], made) if key in old else ["is not recorded"]
                print(f"{net}: {key}: differs", *said, *(f"    {t}" for t in text if net == "ptx"), sep="\n")
                wrong.append((net, key))
                if args.dump is not None:
                    dump(args.dump, "new", net, key, text)
    if wrong and args.dump is not None:
        dump_old(recorded, args.dump, wrong)
        print(f"diff -r {args.dump}/old {args.dump}/new")
    print(f"{len(wrong)} calls differ from {recorded['commit'][:10]}" if wrong else "all as recorded")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
