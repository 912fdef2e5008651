"""What a notebook shows of a prepared density: a table of its settings, and curves of its columns as inline SVG."""

from __future__ import annotations

from html import escape

import numpy as np

from ..estimator.prepared import Prepared
from .plots import COLOURS, DARK, grid


def page(density: Prepared) -> str:
    """The HTML; where something cannot be shown the text of ``repr`` alone."""
    try:
        fitted, how = density._fitted, density.method
        rows = {
            "method": how if density.kernel == "gaussian" else f"{how}, {density.kernel} kernel",
            "samples": f"{density.n_train:,} × {density.n_dimensions}",
            "bandwidth": "" if density.parts else str(fitted.request.told(density.bandwidth)),
            "coordinates": "" if fitted.coordinates is None else str(fitted.coordinates),
            "parts": ", ".join(dict.fromkeys(label for label, _, _ in density.parts)),
            "backend": f"{density.backend} on {density.device}, precision {density.precision}",
        }
        cells = (f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items() if text)
        return f"<div><b>Prepared</b><table>{''.join(cells)}</table>{_curves(density)}</div>"
    except Exception:  # a notebook shows the object whatever is wrong
        return f"<pre>{escape(repr(density))}</pre>"


def _curves(density: Prepared) -> str:
    """The curve of each of up to six columns; none of so many samples or parts that it would take a second."""
    d, fitted = density.n_dimensions, density._fitted
    if d > 6 or density.n_train * d > 200_000 or len(density.parts) > 20 or (d > 1 and density.kernel != "gaussian"):
        return ""
    drawn, names = [], fitted.names or [f"column {j}" for j in range(d)]
    for j, name in enumerate(names):
        one = density if d == 1 else density.marginal(j)
        x = grid([one], 0, 4, 80, 160)
        y = np.asarray(one.estimate(x), dtype=np.float64)
        low, high = min(0.0, y.min()), y.max()
        places = zip((x - x[0]) * 178.0 / (x[-1] - x[0]) + 1.0, 58.0 - 56.0 * (y - low) / (high - low))
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        drawn.append(
            f'<figure style="display:inline-block;margin:4px"><svg width="180" height="60" role="img">'
            f'<polyline points="{line}" fill="none" stroke="{COLOURS.get(density.method, DARK)}" stroke-width="1.5"/>'
            f"</svg><figcaption>{escape(name)}: {x[0]:.4g} to {x[-1]:.4g}</figcaption></figure>"
        )
    return "".join(drawn)
