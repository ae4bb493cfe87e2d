"""The commands of the learning path run in order, and print the lines that the pages show.

Sizes are smaller than in the pages, so numbers differ.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys

import blocks
import pretraining
import pytest
from server_process import running

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

PATH = ["start", "tutorial", "tuning", "serving", "pretraining", "ops"]
SMALLER = {
    "train_lm.py": ["--steps", "20", "--checkpoint-every", "10", "--num-layers", "1", "--hidden-size", "64"],
    "finetune.py": ["--epochs", "1"],
    "state_tuning.py": ["--steps", "2", "--base-steps", "2", "--base-size", "64"],
}
_FENCE = re.compile(r"^```(\w+)(?: title=\"(.*?)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(page):
    """The language, the title and the text of each block."""
    return _FENCE.findall((blocks.ROOT / "docs" / f"{page}.md").read_text())


def commands(page):
    """Pairs of a page: the lines of a block of commands, and the output that the page shows below it."""
    found = fences(page)
    return [
        (text.replace("\\\n", "").splitlines(), after[2])
        for (language, _, text), after in itertools.pairwise(found)
        if language == "bash" and after[0] in ("text", "json")
    ]


def write_files(page, folder, **replaced):
    for _, title, text in fences(page):
        if title.endswith(".py"):
            for old, new in replaced.items():
                text = text.replace(old, new)
            (folder / title).write_text(text)


def shell(command, folder):
    """The output of a command of a page, with this Python and this checkout."""
    command = re.sub(r"^(.*?\| )?python ", lambda match: f"{match[1] or ''}{sys.executable} ", command)
    for program, options in SMALLER.items():
        command += f" {shlex.join(options)}" if program in command else ""
    variables = {**os.environ, "PYTHONPATH": str(blocks.ROOT)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=variables, timeout=300, **pipes)
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def without_values(output):
    """Lines whose wording the program decides: no bars, and no text that a model wrote."""
    lines = [line for line in output.splitlines() if re.match(r"[a-z\-]+ .*\d|[\d,]+ \w", line)]
    return "\n".join(line for line in lines if "━" not in line)


def assert_shown(output, shown):
    missing = blocks.lines_missing(output, without_values(shown), tolerance=math.inf)
    assert not missing, f"{missing} of the page is not in\n{output}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a user who has come as far as the model of start.md."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "examples").symlink_to(blocks.ROOT / "examples")
    for lines, shown in commands("start"):
        for line in lines:
            if line.startswith("python examples/"):
                assert_shown(shell(line, folder), shown)
    return folder


@pytest.fixture(scope="module")
def tuned(folder):
    write_files("tuning", folder)
    for lines, shown in commands("tuning"):
        output = "".join(shell(line, folder) for line in lines)
        assert_shown(output, shown)
        if "head" in lines[-1]:
            assert output == shown
    return folder / "runs" / "sums" / "model.pth"


def test_versions(tmp_path, monkeypatch):
    """Without the interpreter of kernels that these tests use."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (shown,) = (text for _, title, text in fences("start") if title == "on a CPU")
    said = shell("python -c 'import fla_jax; fla_jax.show_versions()'", tmp_path)
    assert not blocks.lines_missing(said, shown)


def test_tuning(tuned):
    assert tuned.exists() and (tuned.parents[1] / "states" / "states.pth").exists()


def test_serving(tuned, folder):
    """Answers have the fields that the page shows, and metrics the names."""
    pytest.importorskip("openai")
    address, found = "http://127.0.0.1:8000", commands("serving")
    options = shlex.split(found[0][0][-1].partition("fla_jax.serve ")[2])[1:]
    with running(tuned, *options) as (_, url):
        write_files("serving", folder, **{address: url})
        said = [(shell(lines[0].replace(address, url), folder), shown) for lines, shown in found[1:]]
    whole, stream, client, metrics = said
    assert fields(json.loads(whole[0])) == fields(json.loads(whole[1]))
    event, shown = (json.loads(text.split("\n")[0].removeprefix("data: ")) for text in stream)
    assert fields(event) == fields(shown) and stream[0].endswith("data: [DONE]\n\n")
    assert [line.split(" = ")[0] for line in client[0].splitlines()] == ["37 + 45", "88 + 77"]
    assert_shown(metrics[0], metrics[1])


def fields(value):
    """The names in an object of JSON."""
    if isinstance(value, dict):
        return {name: fields(one) for name, one in value.items() if name != "finish_reason"}
    return [fields(one) for one in value] if isinstance(value, list) else None


def test_pretraining(tmp_path, monkeypatch):
    """Stopped and resumed, as on the page."""
    monkeypatch.chdir(tmp_path)
    (stopped, resumed) = (shown for lines, shown in commands("pretraining") if "pretrain.py" in lines[-1])
    data = pretraining.documents(tmp_path)
    options = pretraining.arguments(data, "runs/pretrain", "--log-every", "1", steps=400)
    process = pretraining.start(options, {})
    pretraining.wait_for(process, (tmp_path / "runs/pretrain/checkpoints/20").exists)
    process.send_signal(signal.SIGTERM)
    output = pretraining.finish(process)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert_shown(output.partition("Resume with: ")[0], stopped.partition("Resume with: ")[0])
    options = [*options, "--resume", "--export", "runs/pretrain.pth"]
    assert_shown(pretraining.finish(pretraining.start(options, {})), resumed)


def test_each_page_links_to_the_next():
    for page, following in itertools.pairwise(PATH):
        (last,) = re.findall(r"^Next: .*?\(([\w.]+)", (blocks.ROOT / "docs" / f"{page}.md").read_text(), re.M)
        assert last == f"{following}.md"


def test_a_line_that_is_not_printed_is_found():
    printed = "step     20: loss 1.50\nmore\nstep     40: loss 1.20\n"
    assert not blocks.lines_missing(printed, "step 20: loss 1.49\n...\nstep 40: ...\n")
    assert blocks.lines_missing(printed, "step 20: loss 1.1\n") == ["step 20: loss 1.1"]
    assert blocks.lines_missing(printed, "step 40: loss 1.2\nmore\n") == ["more"]
