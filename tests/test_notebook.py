"""The notebook in examples/: its code runs, and the outputs in it are what comes out."""

import json
import re
from pathlib import Path

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
BYTES = 300_000
"""Largest size of a notebook with its outputs."""
pytestmark = pytest.mark.skipif(not (ROOT / "leaderboards" / "results").is_dir(), reason="no board is here")
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """Return the kinds of what a cell shows: ["image/png", "text/plain"] for each output."""
    return [sorted(output.get("data", {})) for output in cell.outputs]


def tables(cell):
    """Return the words of a cell's tables, without figures, whose last digits depend on the processor."""
    return [
        re.sub(r"-?\d+\.\d+", "#", output["data"].get("text/plain", "")) for output in cell.outputs if "data" in output
    ]


@every
def test_a_notebook_keeps_outputs_of_every_cell_that_shows_something_and_stays_small(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    shown = [kind for cell in code_of(notebook) for some in kinds(cell) for kind in some]
    assert shown.count("image/png") >= 5 and shown.count("text/html") >= 2 and path.stat().st_size < BYTES
    assert not [o for cell in code_of(notebook) for o in cell.outputs if o.get("name") == "stderr"], "a warning"
    pictured = [cell for cell in code_of(notebook) if "image/png" in json.dumps(cell.outputs)]
    assert all(cell.metadata.get("alt") for cell in pictured), "who cannot see a picture is left without one"


@every
def test_the_cells_of_a_notebook_run_one_after_another(path, monkeypatch):
    """In this process, which has imported already what a kernel would wait for."""
    monkeypatch.chdir(path.parent)
    matplotlib.use("agg")
    space = {}
    for cell in code_of(nbformat.read(path, 4)):
        exec(compile(cell.source, f"{path.name}: {cell.id}", "exec"), space)
    assert min(space["result"].psnr(space["x"])) > 40, "the photograph is rebuilt"
    assert min(space["update"].psnr(space["x"])) > 40, "and from an update of three epochs"
    assert len(space["worst"]) > 100 and set(space["usable"]["parameters"])


@every
@pytest.mark.nightly
def test_what_a_notebook_shows_is_what_comes_out_in_jupyter(path):
    kept, notebook = nbformat.read(path, 4), nbformat.read(path, 4)
    about = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, startup_timeout=300, kernel_name="python3", resources=about).execute()
    for old, new in zip(code_of(kept), code_of(notebook), strict=True):
        assert kinds(old) == kinds(new) and tables(old) == tables(new), new.source
