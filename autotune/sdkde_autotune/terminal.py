"""What a person at a terminal sees while the tuner works; a file or a pipe gets nothing of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from . import provenance

__all__ = ["progress", "telling", "warn_if_busy"]

#: Percent of its time that a card is busy beforehand, from which on times are not to be trusted.
BUSY = 5


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int, float], None] | None]:
    """Yield what draws a bar with the best so far."""
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
def telling() -> Iterator[Callable[[str], None]]:
    """Yield what says what is being done."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from tqdm import tqdm

    with tqdm(bar_format="{desc}", leave=False, file=sys.stderr) as line:
        yield line.set_description_str


def warn_if_busy(device: str | None) -> None:
    """Say so, to anyone, where something else computes on the card: before anything of ours does."""
    if device is None:
        return
    load = provenance.clocks(device).get("load_percent", 0)
    if load >= BUSY:
        click.echo(f"{device} is busy ({load:.0f} % of its time): what is measured meanwhile is not reliable", err=True)
