"""The notebook in `examples/notebook`: it runs from the first cell to the last, and is committed with the outputs of a
run."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "quickstart.ipynb"


def cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell) -> str:
    """All text outputs of a cell."""
    return "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def test_the_notebook_is_committed_with_outputs_and_without_paths_of_a_machine():
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in cells(notebook)] == list(range(1, len(cells(notebook)) + 1))
    assert not [output for cell in cells(notebook) for output in cell.outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for cell in cells(notebook) for output in cell.outputs)
    assert not re.search(r"/(home|root|tmp|work|Users)/", NOTEBOOK.read_text())
    for cell in cells(notebook):
        ast.parse(cell.source)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs_in_a_kernel(tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, 4)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": tmp_path}}).execute()
    assert "before:" in texts(cells(notebook)[-1]) and (tmp_path / "runs" / "notebook" / "metrics.jsonl").exists()
