"""The two tables of README.md: time and error beside other libraries, on a CPU and on a GPU.

rm benchmarks/recorded/h200/overview.jsonl      # a file is of one machine and one day
python -m benchmarks run overview --device cuda --to benchmarks/recorded/h200
python -m benchmarks tables                     # from benchmarks/recorded into README.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import compare
from ..records import read
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Table

#: By kind of device: what README.md calls a subject. Each takes part in every problem that it can solve.
NAMES: dict[str, dict[str, str]] = {
    "cpu": {
        "scikit-learn": "scikit-learn, exact (`rtol=0`)",
        "scikit-learn, rtol 0.0001": "scikit-learn, `rtol=1e-4`",
        "SciPy": "SciPy",
        "KDEpy FFTKDE": "KDEpy `FFTKDE`, its default grid",
        "KDEpy FFTKDE, fine grid": "KDEpy `FFTKDE`, 2¹⁴ or 1024² points",
        "KeOps": "KeOps, float32",
        "numpy, high": "**sdkde**, nothing else installed",
        "numba, high": "**sdkde** with Numba",
        "fourier, high": "**sdkde** with finufft",
    },
    "cuda": {
        "flash-sd-kde TF32": "flash-sd-kde, its default (TF32)",
        "flash-sd-kde fp32": "flash-sd-kde, fp32",
        "KeOps": "KeOps, float32",
        "torch.compile TF32": "PyTorch, compiled, TF32",
        "PyTorch": "PyTorch, float32",
        "hopper, fast": '**sdkde**, Hopper backend, `"fast"`',
        "triton, fast": '**sdkde**, Triton backend, `"fast"`',
        "triton, high": '**sdkde**, Triton backend, `"high"`',
        "fourier-torch, high": '**sdkde**, Fourier backend, `"high"`',
    },
}

#: By kind of device: method, n, m and d; the paper's problem is that of 32768 samples.
PROBLEMS = {
    "cpu": [
        ("kde", 10_000, 10_000, 1),
        ("kde", 10_000, 10_000, 2),
        ("kde", 1_000_000, 131_072, 2),
        ("kde", 32_768, 4096, 16),
        ("sdkde", 32_768, 4096, 16),
    ],
    "cuda": [
        ("sdkde", 32_768, 4096, 16),
        ("sdkde", 2**20, 2**17, 16),
        ("kde", 32_768, 4096, 16),
        ("sdkde", 65_536, 8192, 1),
        ("sdkde", 2**20, 2**17, 1),
    ],
}

#: Whose versions stand below a table.
LIBRARIES = {
    "cpu": ("scikit-learn", "scipy", "KDEpy", "pykeops", "numpy", "numba", "finufft"),
    "cuda": ("flash-sd-kde", "pykeops", "torch", "triton", "cuda-core"),
}

#: Who is left out of a million samples on a GPU.
SLOW = ("KeOps", "PyTorch", "torch.compile TF32", "flash-sd-kde fp32", "triton, high")


def cases(setting: Setting) -> Iterator[Case]:
    for method, n, m, d in PROBLEMS[setting.kind]:
        n, m = setting.at((n // 200, m // 200), (n // 8, m // 8), (n, m))
        names = [name for name in NAMES[setting.kind] if not (n >= 1e6 and name in SLOW)]
        yield from compare.cases(names, [method], [(n, m, d)])


def problem(row: dict[str, Any]) -> str:
    """The heading of a column."""
    method = {"kde": "KDE", "sdkde": "SD-KDE"}[row["method"]]
    return f"{method}, {row['n']:,} × {row['m']:,}, d = {row['d']}"


def cell(row: dict[str, Any]) -> str:
    """Time, by the clock, and error."""
    ms, error = row["ms"], row.get("worst")
    time = f"{ms / 1e3:.3g} s" if ms >= 999.5 else f"{ms:.3g} ms"
    if error is None:
        return time
    return f"{time}, {error:.0e}".replace("e-0", "e-") if error < 0.01 else f"{time}, {error:.1g}"


def compared(path: Path) -> str:
    """The table of README.md from a file of records, and a line that says where and when."""
    records = read(path)
    about, found = records[-1].about, {}
    for record in records:
        found.setdefault(problem(record.case), {})[record.case["subject"]] = cell(record.row) if record.ok else ""
    kind = "cuda" if about["gpu"] else "cpu"
    lines = [["", *found], ["---", *["---:"] * len(found)]]
    for subject, name in NAMES[kind].items():
        cells = [answers.get(subject, "") for answers in found.values()]
        lines += [[name, *cells]] if any(cells) else []
    where = (
        about["gpu"] or f"{about['cores']} cores ({about['cpu'].replace('(R)', '')}, {about['widest instructions']})"
    )
    versions = [f"{name} {about['versions'][name]}" for name in LIBRARIES[kind] if name in about["versions"]]
    note = f" {about['note']}." if "note" in about else ""
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\nMeasured on {where}, {about['when']}; {', '.join(versions)}.{note}"


def written(text: str, recorded: Path) -> str:
    """README.md with its tables, each between two comments of which the first names the folder of its records."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{compared(recorded / match[2] / 'overview.jsonl')}\n\n{match[3]}"

    return re.sub(r"(<!-- overview (\S+) -->).*?(<!-- end -->)", block, text, flags=re.S)


REGISTRY.add(
    Benchmark(
        "overview",
        "readers",
        "The tables of README.md: time and error beside scikit-learn, SciPy, KDEpy, KeOps, PyTorch and flash-sd-kde.",
        cases,
        compare.measure,
        (Table("Milliseconds and errors", ("method", "n", "d", "subject"), COMPARED | {"processor ms": "cpu_ms"}),),
        gpu=True,
        weight=2.0,
    )
)
