"""Sphinx makes the site: ``make docs``. Its pages are the Markdown files of the repository, which GitHub shows too.

The root of the repository is the source, so that links between docs/, README.md and benchmarks/ are checked as well.
"""

import re
import sys
from pathlib import Path

from myst_parser.parsers.sphinx_ import MystParser

import sdkde_core

sys.path.insert(0, str(Path(__file__).parent))
import notebooks  # the notebooks of docs/examples as Markdown

project = "sdkde"
author = copyright = "The sdkde developers"
version = release = sdkde_core.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/examples/*.ipynb",
    "docs/api/*.rst",
    "benchmarks/README.md",
    "benchmarks/notes/**.md",
    "benchmarks/recorded/**.md",
    "*.md",
]
exclude_patterns = ["build", "dist", ".*", "**/node_modules", "**/*.egg-info"]

# A page a function: docs/api, made by autosummary. A page that somebody wrote there stays. The path is absolute:
# autosummary looks for a relative one in the source folder, and Sphinx in this one.
templates_path = [str(Path(__file__).with_name("templates"))]
autosummary_generate_overwrite = False


def example(page, heading):
    """The first block of Python of a section, which tests run, and its first picture, if any: the file and its text."""
    text = Path(__file__).with_name(f"{page}.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    code, picture = re.search(r"```python\n(.*?)```", section, re.S)[1], re.search(r"!\[(.*)\]\((.*)\)", section)
    return {"page": page, "code": code, "alt": picture and picture[1], "picture": picture and picture[2]}


#: By the full name of a function or class: the example that its page shows below the docstring.
EXAMPLES = {
    "sdkde_core.estimate": ("gallery", "What debiasing does in one dimension"),
    "sdkde_core.debias": ("plots", "Contours and moves"),
    "sdkde_core.grad_log_density": ("gallery", "Modes and gradients"),
    "sdkde_core.prepare": ("gallery", "Two moons"),
    "sdkde_core.Prepared": ("gallery", "A conditional density"),
    "sdkde_core.select_bandwidth": ("gallery", "How sure the bandwidth is"),
    "sdkde_core.Bandwidth": ("gallery", "How sure the bandwidth is"),
    "sdkde_core.KernelDensity": ("start", "Ten lines"),
    "sdkde_core.explain": ("guide", "A backend"),
    "sdkde_core.backends": ("backends", "All backends"),
    "sdkde_core.load": ("large-data", "Files"),
    "sdkde_core.scale.estimate": ("large-data", "More samples than memory holds"),
    "sdkde_core.scale.debias": ("large-data", "More samples than memory holds"),
    "sdkde_core.distributed.estimate": ("scaling-out", "Several processes"),
    "sdkde_core.interop.plots.curves": ("plots", "Curves"),
    "sdkde_core.interop.plots.contours": ("gallery", "Two moons"),
    "sdkde_core.interop.plots.moves": ("plots", "Contours and moves"),
    "sdkde_core.interop.plots.scatter": ("plots", "Points coloured by their density"),
    "sdkde_core.interop.plots.pairs": ("plots", "Pairs"),
    "sdkde_core.interop.plots.selection": ("plots", "How a bandwidth was chosen"),
}
autosummary_context = {"examples": {name: example(*where) for name, where in EXAMPLES.items()}}

html_theme = "furo"
html_title = f"sdkde {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["site"]  # the page at the top of the site, which leads to root_doc
html_copy_source = False
html_scaled_image_link = False  # a card is one link, to a page

# `page.md#a-heading`, and formulas, as GitHub has them.
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
myst_enable_extensions = ["html_image"]  # the small pictures of cards: GitHub shows ![](…) at full size
suppress_warnings = ["misc.highlighting_failure"]  # of an "…" in an example

autodoc_mock_imports = ["torch"]  # gigabytes, for the docstring of one function
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say types, with shapes and units
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # else a shape such as (n, d) gets links to whatever attributes are called n and d


def as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings write |x| for a modulus, and a sentence after the last parameter: docutils reads more into both."""
    text = "\n".join(lines)
    text = re.sub(r"^Other parameters as for (:\w+:`[\w.]+`)[.;]", r"others\n    As for \1.", text, flags=re.M)
    parts = re.split("(``.*?``)", text)
    lines[:] = "".join(p if p.startswith("``") else p.replace("|", r"\|") for p in parts).split("\n")


class Notebook(MystParser):
    """A notebook, with the outputs that it keeps."""

    supported = ("ipynb",)

    def parse(self, inputstring, document):
        super().parse(notebooks.markdown(inputstring, Path(document["source"]).stem), document)


def setup(app):
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(Notebook)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon's, at 500
