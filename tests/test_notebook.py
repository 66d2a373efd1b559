"""The notebooks in examples/ run as they stand: a cell that raises fails, and outputs are not kept."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (ROOT / "leaderboards" / "results").is_dir(), reason="no board is here"),
]


def run(notebook, folder):
    """Run all cells in a process of its own, as Jupyter does in the notebook's folder; raises what a cell raises."""
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws_and_is_kept_without_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code), "clear its outputs"
    run(notebook, path.parent)
    shown = [kind for cell in code for output in cell.outputs for kind in output.get("data", {})]
    assert shown.count("image/png") == 3 and shown.count("text/html") == 2
    assert not [output for cell in code for output in cell.outputs if output.get("name") == "stderr"], "a warning"
