"""Draw the pictures of docs/plots.md, support.md and gallery.md, and the README's of debiasing, into this folder.

    python docs/pictures.py [NAME ...]

They need ``pip install 'sdkde-core[plot]'`` and some seconds.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from PIL import Image

from sdkde_core import plots, prepare, select_bandwidth

DOCS = Path(__file__).parent


def bimodal(n: int) -> Any:
    """Draw from two normals of standard deviation 0.5 at ±1.5."""
    rng = np.random.default_rng(0)
    return rng.choice([-1.5, 1.5], n) + 0.5 * rng.normal(size=n)


def blobs(n: int) -> Any:
    """Draw from three normals in the plane."""
    rng = np.random.default_rng(1)
    return np.array([[-1.2, -0.8], [1.2, -0.8], [0.0, 1.4]])[rng.integers(3, size=n)] + 0.5 * rng.normal(size=(n, 2))


def ring(n: int) -> Any:
    """Draw from a noisy ring with a spot within."""
    rng = np.random.default_rng(1)
    angle, radius = rng.uniform(0, 2 * np.pi, n), 3 + 0.3 * rng.normal(size=n)
    around = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return np.where(rng.random((n, 1)) < 0.25, 0.4 * rng.normal(size=(n, 2)), around)


def debiasing() -> Any:
    """What debiasing does: one bandwidth with it and without, and how the samples move."""
    with plt.rc_context(plots.STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained", width_ratios=[1.4, 1])
    x, y = bimodal(4000), np.linspace(-4, 4, 401)
    truth = prepare([-1.5, 1.5], method="kde", bandwidth=0.5)  # two normals are a kde of two samples
    left.fill_between(y, truth.estimate(y), color="#e9ecef", label="true density", zorder=0)
    fits = {method: prepare(x, method=method, bandwidth=0.35) for method in ("kde", "sdkde")}
    plots.curves(fits, ax=left, limits=(-4, 4))
    left.set_ylim(0, 0.48)
    left.set_title("With debiasing and without, 4000 samples, h = 0.35", loc="left", fontweight="bold")
    x = blobs(400)
    density = prepare(x, bandwidth=0.4)
    plots.moves(density, x, ax=plots.contours(density, ax=right))
    right.set(aspect="equal", xlim=(-3, 3), ylim=(-2.5, 3))
    right.set_title("sdkde moves each sample", loc="left", fontweight="bold")
    return figure


def curves() -> Any:
    """All methods, a rug, and what is negative."""
    x = bimodal(300)
    return plots.curves({m: prepare(x, method=m) for m in ("kde", "sdkde", "laplace")}, x).figure


def contours() -> Any:
    """Contours with the moves of debiasing."""
    x = ring(250)
    density = prepare(x)
    ax = plots.moves(density, x, ax=plots.contours(density))
    ax.set_aspect("equal")
    return ax.figure


def scatter() -> Any:
    """Many points, coloured by their density."""
    ax = plots.scatter(ring(4000))
    ax.set_aspect("equal")
    return ax.figure


def pairs() -> Any:
    """The marginals of an estimate in three dimensions."""
    rng = np.random.default_rng(3)
    x = np.column_stack([ring(500), rng.gamma(2.0, size=500)]) @ [[1, 0, 0.3], [0, 1, 0], [0, 0, 1]]
    return plots.pairs(prepare(x), x, labels=["east", "north", "depth"])


def selection() -> Any:
    """The criteria that a bandwidth was chosen by."""
    return plots.selection(select_bandwidth(bimodal(300))).figure


def support() -> Any:
    """A density that ends at 0, and one that goes round a day, with ``support`` and without."""
    rng = np.random.default_rng(4)
    with plt.rc_context(plots.STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.8), layout="constrained")
    waits, hours = rng.exponential(size=2000), np.mod(rng.normal(23.5, 1.5, 1000), 24.0)
    shown = [
        (left, waits, (0, None), np.linspace(-1, 5, 1201), lambda y: np.where(y < 0, 0, np.exp(-y)), "Waiting times"),
        (right, hours, ("circular", 24), np.linspace(0, 24, 961), _hours, "Hours of the day"),
    ]
    for ax, x, ends, y, truth, title in shown:
        ax.fill_between(y, truth(y), color="#e9ecef", label="true density")
        ax.plot(y, prepare(x).estimate(y), "--", color="#868e96", label="without support")
        ax.plot(y, prepare(x, support=ends).estimate(y), color="#d6336c", label=f"support={ends}")
        ax.set_title(title, loc="left", fontweight="bold")
        ax.legend(frameon=False)
        ax.set_ylim(0)
    left.set_xlim(-1, 5)
    right.set(xlim=(0, 24), xticks=range(0, 25, 4))
    return figure


def _hours(y: Any) -> Any:
    """The normal density at 23.5 with a standard deviation of 1.5, round a day."""
    away = np.remainder(y - 23.5 + 12.0, 24.0) - 12.0
    return np.exp(-0.5 * (away / 1.5) ** 2) / (1.5 * np.sqrt(2.0 * np.pi))


#: By the name of the file, without ``.png``.
PICTURES = {
    "support": support,
    "debiasing": debiasing,
    "plots-curves": curves,
    "plots-contours": contours,
    "plots-scatter": scatter,
    "plots-pairs": pairs,
    "plots-selection": selection,
}


def gallery() -> Iterator[tuple[str, Any]]:
    """What each block of docs/gallery.md draws, by the name of the picture below it."""
    text, names = (DOCS / "gallery.md").read_text(encoding="utf-8"), {}
    for block in re.split(r"^## ", text, flags=re.M):
        for code in re.findall(r"```python\n(.*?)```", block, re.S):
            with contextlib.redirect_stdout(None):
                exec(compile(code, "gallery.md", "exec"), names)
        for name in re.findall(r"\((gallery-[a-z]+)\.png\)", block):
            yield name, plt.gcf()


def write(name: str, figure: Any) -> None:
    """Write a picture, in 128 colours, which makes it small."""
    memory = io.BytesIO()
    figure.savefig(memory, dpi=90)
    plt.close(figure)
    Image.open(memory).convert("RGB").quantize(128).save(DOCS / f"{name}.png", optimize=True)
    print(DOCS / f"{name}.png")


def main(names: list[str]) -> None:
    for name in PICTURES:
        if not names or name in names:
            write(name, PICTURES[name]())
    for name, figure in gallery() if not names or any(name.startswith("gallery") for name in names) else ():
        write(name, figure)


if __name__ == "__main__":
    main(sys.argv[1:])
