"""The command ``sdkde``; imported by the console script only."""

from __future__ import annotations

from pathlib import Path

import click

from . import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sdkde")
def main() -> None:
    """Score-debiased kernel density estimation."""


@main.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("sdkde-demo.png"),
    show_default=True,
    help="Where to write the plot.",
)
@click.option("--backend", default="auto", show_default=True, help="A backend's name, or auto.")
def demo(output: Path, backend: str) -> None:
    """Debiased densities of real data: scikit-learn's handwritten digits.

    Fits kde, sdkde and laplace in 16 principal dimensions over a grid of bandwidths, prints the held-out
    log-likelihood of each, the backend chosen and why, and the time of each pass; writes a plot.
    """
    from .demo import run_demo
    from .protocol import BackendUnavailable

    try:
        run_demo(output, backend, click.echo)
    except (BackendUnavailable, ValueError, ImportError, OSError) as error:
        raise _UsageError(str(error)) from error


class _UsageError(click.ClickException):
    """One line on standard error, and exit status 2."""

    exit_code = 2
