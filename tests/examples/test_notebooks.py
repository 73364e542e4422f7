"""The notebooks run from their first cell to the last, and are stored without outputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LIMIT = 300  # seconds, for what takes 20
# In place of a kernel, which shows figures, and updates one that is shown.
KERNEL = """
import matplotlib, runpy, sys, types
import flax.nnx  # before there is an IPython, of which it would import more
matplotlib.use("agg")
shown = []
class Handle:
    def update(self, figure):
        shown.append(figure)
def display(figure, display_id):
    shown.append(figure)
    return Handle()
sys.modules["IPython"] = types.ModuleType("IPython")
vars(sys.modules["IPython"]).update(get_ipython=lambda: None, version_info=(9, 0))  # for matplotlib
sys.modules["IPython.display"] = types.ModuleType("IPython.display")
sys.modules["IPython.display"].display = display
names = runpy.run_path(sys.argv[1])
print(len(shown), names["result"].summary.steps, float(names["evaluation"].metrics["accuracy"].mean))
"""


def code_of(notebook: Path) -> str:
    """Return the code of all cells as one program."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs(notebook):
    content = json.loads(notebook.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    for cell in content["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None), cell["id"]
    compile(code_of(notebook), notebook.name, "exec")  # Python alone, without commands of a kernel


@pytest.mark.slow
def test_the_first_notebook_learns(tmp_path):
    script, kernel = tmp_path / "cells.py", tmp_path / "kernel.py"
    script.write_text(code_of(ROOT / "examples" / "notebooks" / "first_pipeline.ipynb"))
    kernel.write_text(KERNEL)
    result = subprocess.run([sys.executable, kernel, script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    *_, last = result.stdout.splitlines()
    shown, steps, accuracy = last.split()
    assert (int(shown), int(steps)) == (14, 300)  # once at first, at 12 steps, and at the end
    assert float(accuracy) > 0.95
    assert {path.name for path in tmp_path.iterdir()} == {"cells.py", "kernel.py"}
