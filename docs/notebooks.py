"""Run the notebooks of docs/examples, and keep in them what they print and draw; read them for the site.

    python docs/notebooks.py [NAME ...]          # run, write the outputs into the notebook, and its picture beside it
    python docs/notebooks.py --check [NAME ...]  # run, and compare what is printed with what is kept

Jupyter is not needed: `pip install 'sdkde-core[demo]'` is. A notebook edited in Jupyter is fine; run this afterwards.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent / "examples"


def markdown(text: str, name: str) -> str:
    """Return a notebook as a page of MyST Markdown, for Sphinx: code, what it printed, and its pictures."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                said, picture = output["data"]["text/plain"], "".join(output["data"]["image/png"].split())
                parts.append(f"![{''.join(said)}](data:image/png;base64,{picture})")
    parts.insert(1, f"{{download}}`Download this notebook <{name}.ipynb>`")
    return "\n\n".join(parts) + "\n"


def picture(figure: Any) -> bytes:
    """Return a figure as a PNG in 64 colours, which makes it small."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=80, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


def executed(notebook: dict[str, Any], name: str) -> bytes:
    """Run the cells of code one after the other in one namespace, and set their outputs; return the last picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.show = lambda *_, **__: None  # figures are taken after each cell
    names: dict[str, Any] = {"__name__": "__main__"}
    last = b""
    for number, cell in enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), 1):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), f"{name}.ipynb, cell {number}", "exec"), names)
        text = said.getvalue()
        outputs: list[dict[str, Any]] = []
        if text:
            outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
        for figure in map(plt.figure, plt.get_fignums()):
            last = picture(figure)
            drawn = {"image/png": base64.b64encode(last).decode(), "text/plain": [described(figure)]}
            outputs.append({"data": drawn, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        cell.update(execution_count=number, outputs=outputs, metadata={})
    return last


def described(figure: Any) -> str:
    """Return what a picture shows, for those who do not see it: the titles of its axes."""
    return "; ".join(filter(None, (ax.get_title() or ax.get_title(loc="left") for ax in figure.axes))) or "a figure"


def printed(notebook: dict[str, Any]) -> str:
    """Return all that the cells have printed."""
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", ()) if o["output_type"] == "stream"]
    return "".join(line for output in outputs for line in output["text"])


def agree(one: str, other: str) -> bool:
    """Whether two texts are the same but for a tenth, or .02, in their numbers: machines and versions differ."""
    number = r"-?\d+\.?\d*(?:e-?\d+)?"
    ones, others = ([float(x) for x in re.findall(number, text)] for text in (one, other))
    near = functools.partial(math.isclose, rel_tol=0.1, abs_tol=0.02)
    same = re.sub(rf"{number}| +", " ", one).split() == re.sub(rf"{number}| +", " ", other).split()
    return same and len(ones) == len(others) and all(map(near, ones, others))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as outliers; all without")
    parser.add_argument("--check", action="store_true", help="compare with what is kept, and write nothing")
    given = parser.parse_args()
    known = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
    if unknown := set(given.names) - set(known):
        parser.error(f"no notebook {', '.join(sorted(unknown))} in {EXAMPLES}; there are {', '.join(known)}")
    failed = False
    os.chdir(EXAMPLES)
    for name in given.names or known:
        path = EXAMPLES / f"{name}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        before = printed(notebook)
        drawn = executed(notebook, name)
        if not given.check:
            path.with_suffix(".png").write_bytes(drawn)
            path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
            print(path)
        elif not agree(before, printed(notebook)):
            failed = True
            print(f"{path.name} keeps\n{before}\nand now prints\n{printed(notebook)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
