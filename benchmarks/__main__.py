"""The command line: list, run, report, tables."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import click

from . import runner
from .registry import GROUPS, REGISTRY, SCALES, Benchmark, Setting

TOOLS = {
    "python benchmarks/fuzz.py": "random problems against float64, for any backend",
    "python benchmarks/bandwidths.py": "the study of bandwidths",
    "python benchmarks/real_data.py": "held-out log densities on real sets, beside other libraries'",
    "python benchmarks/scores.py": "errors of scores, and debiasing by the true score",
    "python benchmarks/tuning.py": "what tuning gives, what pruning costs, how well the cost model ranks",
    "python benchmarks/selection_on_card.py": "what the default bandwidth adds to a call on a GPU",
    "python -m benchmarks.choice": 'the grid that judges backend="auto"; also .again and .overheads',
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Benchmarks of sdkde; benchmarks/README.md says who is who."""


@main.command("list")
def list_all() -> None:
    """Name every benchmark, and the tools."""
    for group, title in GROUPS.items():
        click.echo(f"\n{title} (--group {group})")
        for benchmark in (b for b in REGISTRY if b.group == group):
            click.echo(f"  {benchmark.name:18}{'GPU ' if benchmark.gpu else '    '}{benchmark.about}")
    click.echo("\nTools, with options of their own")
    for command, what in TOOLS.items():
        click.echo(f"  {command:34}{what}")


@main.command()
@click.argument("names", nargs=-1)
@click.option("--group", type=click.Choice(list(GROUPS)), multiple=True, help="All benchmarks of a group.")
@click.option("--gpu", is_flag=True, help="All that are worth a run on a GPU.")
@click.option("--to", "folder", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--device", default=None, help="cpu, cuda or cuda:1; default: a GPU where there is one.")
@click.option("--scale", type=click.Choice(SCALES), default=None, help="Default: full on a GPU, medium on a CPU.")
@click.option("--seconds", type=float, default=float("inf"), help="Begin no case after that; shared among benchmarks.")
@click.option("--each", type=float, default=0.6, show_default=True, help="Seconds that a subject is called for.")
@click.option("--subjects", default="", help="Only subjects whose names begin with one of these, comma-separated.")
@click.option("--without", default="", help="Not those whose names begin with one of these.")
@click.option("--again", is_flag=True, help="Try again what failed.")
@click.option("--set", "options", multiple=True, metavar="NAME=VALUE", help="Options of single benchmarks.")
def run(names: tuple[str, ...], folder: Path, device: str | None, scale: str | None, **more: Any) -> None:
    """Run benchmarks by name; records go to FOLDER/NAME.jsonl. What is there already is not measured again."""
    try:
        chosen = _chosen(names, more["group"], more["gpu"])
        setting = Setting(
            device=_device(device),
            scale=scale or ("medium" if _device(device) == "cpu" else "full"),
            seconds=more["each"],
            subjects=tuple(filter(None, more["subjects"].split(","))),
            without=tuple(filter(None, more["without"].split(","))),
            options=dict(option.split("=", 1) for option in more["options"]),
        )
        runner.run(chosen, setting, folder, more["seconds"], more["again"], click.echo)
    except (ValueError, runner.Lost) as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), default=None, help="Default: FOLDER.")
@click.option("--plots/--no-plots", default=True)
def report(folder: Path, to: Path | None, plots: bool) -> None:
    """Turn the records of a folder into report.md, with a plot for each figure."""
    from .report import write

    if plots and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("plots need matplotlib: pip install 'sdkde-core[plot]'; or pass --no-plots")
    try:
        click.echo(write(folder, to or folder, plots))
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.option("--check", is_flag=True, help="Write nothing; fail if README.md is not as it would be written.")
def tables(check: bool) -> None:
    """Write the tables of README.md from the records of "overview" in benchmarks/recorded."""
    from .entries.overview import written

    root = Path(__file__).parent.parent
    before = (root / "README.md").read_text(encoding="utf-8")
    after = written(before, root / "benchmarks" / "recorded")
    if check and after != before:
        raise click.ClickException("README.md has other figures than benchmarks/recorded: python -m benchmarks tables")
    (root / "README.md").write_text(after, encoding="utf-8")


def _chosen(names: tuple[str, ...], groups: tuple[str, ...], gpu: bool) -> list[Benchmark]:
    found = [REGISTRY[name] for name in names]
    found += [b for b in REGISTRY if (b.group in groups or (gpu and b.gpu)) and b not in found]
    if not found:
        raise ValueError("nothing to run: name benchmarks (python -m benchmarks list), a --group, or --gpu")
    return found


def _device(name: str | None) -> str:
    if name is None:
        try:
            import torch

            name = "cuda" if torch.cuda.is_available() else "cpu"
        except ImportError:
            name = "cpu"
    return "cuda:0" if name == "cuda" else name


if __name__ == "__main__":
    main()
