"""The notebooks run from top to bottom, at a small size, with the results that they describe."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]
FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
matplotlib.use("Agg")


def code(name):
    """The code cells of a notebook, and whether each sets the sizes."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    found = [cell for cell in cells if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), "parameters" in cell["metadata"].get("tags", ())) for cell in found]


def run(name, **sizes):
    names = {"__name__": name}
    for i, (cell, sets_sizes) in enumerate(code(name)):
        exec(compile(cell, f"{name}.ipynb, cell {i + 1}", "exec"), names)
        if sets_sizes:
            assert sizes.keys() <= names.keys()
            names |= sizes
    matplotlib.pyplot.close("all")
    return names


def test_state_tracking(capsys):
    names = run("state_tracking", length=8, steps=250, hidden_size=16, scales=(2.0, 0.0))
    curves = {name: result[3] for name, result in names["results"].items()}
    assert curves["rate scale 2"][:8].min() > 0.9, "one layer learns parity"
    assert curves["rate 0 (RWKV-6's class)"][-8:].max() < 0.7, "and one that cannot flip does not"
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_fine_tuning(tmp_path, capsys):
    names = run(
        "fine_tuning", base_steps=30, steps=20, length=32, batch=4, hidden_size=64, folder=str(tmp_path)
    )
    assert names["with_lora"] < names["before"] and names["with_states"] < names["before"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.pth", "states.pth", "tuned.pth"]
    assert "state tuning" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["state_tracking", "fine_tuning"])
def test_saved_outputs_are_of_these_cells(name):
    """Every cell was run, in order and without an error, and its output names no machine."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(np.arange(len(cells)) + 1)
    text = json.dumps([cell["outputs"] for cell in cells])
    assert '"error"' not in text and "image/png" in text and "/home/" not in text and "/work/" not in text
