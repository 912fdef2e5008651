"""Progress on a terminal, and a warning about a busy card. A file or a pipe gets no progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from . import provenance

__all__ = ["progress", "status_line", "warn_if_busy"]

#: Percent of its time that a card is busy before we use it, from which times are unreliable.
BUSY = 5


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int, float], None] | None]:
    """Yield a function that draws a bar with the best time so far; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=label, leave=False, file=sys.stderr, unit="") as bar:

        def advance(known: int, expected: int, best: float) -> None:
            bar.total, bar.n = expected, known
            bar.set_postfix_str(f"best {best:.4g} ms")

        yield advance


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text in place of the one before."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from tqdm import tqdm

    with tqdm(bar_format="{desc}", leave=False, file=sys.stderr) as line:
        yield line.set_description_str


def warn_if_busy(device: str | None) -> None:
    """Warn if another program computes on the card. To be called before the tuner uses it."""
    if device is None:
        return
    load = provenance.clocks(device).get("load_percent", 0)
    if load >= BUSY:
        click.echo(f"{device} is busy ({load:.0f} % of its time): times measured meanwhile are unreliable", err=True)
