"""The notebooks of docs/examples run, print what they keep, and are what Jupyter reads."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot

DOCS = Path(__file__).parent.parent / "docs"
NAMES = sorted(path.stem for path in (DOCS / "examples").glob("*.ipynb"))
SLOW = {"embeddings", "ends", "outliers", "quantiles", "ratio", "selection"}


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import notebooks

    return notebooks


def check(name):
    """In a process of its own, where warnings are errors."""
    command = [sys.executable, "-W", "error", DOCS / "notebooks.py", "--check", name]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NAMES])
def test_a_notebook_runs_and_prints_what_it_keeps(name):
    run = check(name)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_been_run_and_has_a_line_and_a_picture_in_the_index(name):
    notebook = json.loads((DOCS / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert kinds.count("stream") >= 2 and "display_data" in kinds
    index = (DOCS / "examples" / "index.md").read_text(encoding="utf-8")
    assert re.search(rf"^{name}$", index, re.M) and f"({name}.ipynb)" in index and f"({name}.png)" in index
    assert (DOCS / "examples" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_tool_keeps_what_a_notebook_prints_and_draws_and_the_site_shows_it(tool, tmp_path, monkeypatch, capsys):
    source = ["import matplotlib.pyplot as plt\n", "print('two', 2.0)\n", "plt.plot([1, 2])\n", "plt.title('A line')\n"]
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Title\n", "A [link](index.md)."]},
        {"cell_type": "code", "id": "b", "metadata": {}, "source": source, "outputs": [], "execution_count": None},
    ]
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    monkeypatch.setattr(tool, "EXAMPLES", tmp_path)
    monkeypatch.setattr(pyplot, "show", pyplot.show)  # which the tool replaces
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["notebooks.py", *arguments])
        return tool.main()

    assert run("--check") and "two 2.0" in capsys.readouterr().out  # nothing is kept yet
    assert not run() and not run("--check")
    page = tool.markdown(path.read_text(encoding="utf-8"), "mine")
    assert page.startswith("# Title\nA [link](index.md).\n\n{download}`Download this notebook <mine.ipynb>`")
    assert "```python\nimport" in page and "```text\ntwo 2.0\n```" in page
    assert "![A line](data:image/png;base64,iVBOR" in page
    path.write_text(path.read_text(encoding="utf-8").replace("2.0)", "2.5)"), encoding="utf-8")
    assert run("--check") and "two 2.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("loss 14.31  81%", "loss  14.62 80%", True),
        ("loss 14.31", "loss 16.31", False),
        ("a 1", "b 1", False),
        ("a 0.01", "a -0.005", True),
        ("1 2", "1 2 3", False),
    ],
)
def test_texts_agree_but_for_a_tenth_of_their_numbers(tool, one, other, same):
    assert tool.agree(one, other) is same
