"""Forged and damaged files through the readers: no crash, no traceback, and no damage accepted where a checksum exists.

    python benchmarks/fuzz_files.py [--files 2500] [--seed 0] [--replay INDEX]

File i is made from (seed, i) alone: a .npy, .npz, .csv, .parquet or .zarr, or a checkpoint, is written, and then bits
are flipped, bytes replaced, cut out or put in, the end is cut off, or a number in a header is another. It is read by
`sdkde estimate` and by `scale.estimate`. Each must succeed, or end with an error of the promised kind, in one line that
names the file, and leave no output. Where a checksum covers what was changed (.npz, chunks of zarr with crc32c, pages
of parquet files by sdkde, whole checkpoints) a success must have the bits of the whole file. Exit status 1: something
else happened.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from sdkde_core import scale
from sdkde_core.cli.main import main as command
from sdkde_core.files import writing

KINDS = ("npy", "npz", "csv", "parquet", "zarr", "checkpoint")
HOW = {"bandwidth": 0.5, "backend": "numpy"}
OPTIONS = ("--bandwidth", "0.5", "--backend", "numpy", "-q")
PROMISED = (ValueError, TypeError, OSError, MemoryError)
X = np.round(np.random.default_rng(0).normal(size=(2348, 3)), 3)

#: Seconds for a file, and bytes of address space.
LIMIT, SPACE = 60, 1 << 34

#: What stands in for a number in a header.
NUMBERS = ("-1", "0", "1", "7", "2350", "1e9", "NaN", "4611686018427387904", "9" * 40, '"a"', "null", "[]", "true")


def make(kind: str, rng: np.random.Generator) -> str:
    """Write a whole file, and return its name."""
    x, name = X[:300], f"x.{kind}"
    if kind == "npy":
        np.save(name, np.asfortranarray(x) if rng.random() < 0.3 else x[:, 0] if rng.random() < 0.3 else x)
    elif kind == "npz":
        save = np.savez if rng.random() < 0.5 else np.savez_compressed
        save(name, x=np.asfortranarray(x) if rng.random() < 0.3 else x)
    elif kind == "csv":
        np.savetxt(name, x, "%.3f", ",", header='a,"b",c' if rng.random() < 0.5 else "", comments="")
    elif kind == "parquet":
        with writing(name, x.shape, "float64", "x") as write:
            write(x)
    elif kind == "zarr":
        import zarr

        codec = {"compressors": zarr.codecs.Crc32cCodec()} if rng.random() < 0.5 else {}
        zarr.create_array(name, shape=x.shape, chunks=(100, 3), dtype="f8", **codec)[:] = x
    else:
        name = "kept"
        shutil.copytree("whole", name)
    return name


def damage(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """Return other bytes, and what was done."""
    a, b = sorted(int(rng.integers(len(data) + 1)) for _ in range(2))
    if rng.random() < 0.5:  # in the header, or in the footer
        a = min(a, int(rng.integers(200))) if rng.random() < 0.6 else max(0, len(data) - int(rng.integers(1, 400)))
        b = min(len(data), a + int(rng.integers(1, 60)))
    what = ("flip", "flip", "flip", "cut off", "cut out", "put in", "zeros", "noise", "number", "number")[
        rng.integers(10)
    ]
    if what == "flip" and data:
        a = min(a, len(data) - 1)
        return data[:a] + bytes([data[a] ^ (1 << rng.integers(8))]) + data[a + 1 :], f"flip at {a}"
    if what == "cut off":
        return data[:a], f"cut off at {a}"
    if what == "cut out":
        return data[:a] + data[b:], f"cut out {a} to {b}"
    if what == "put in":
        return data[:a] + rng.bytes(b - a) + data[a:], f"put in at {a}, {b - a}"
    if what == "zeros":
        return data[:a] + bytes(b - a) + data[b:], f"zeros {a} to {b}"
    found = [(m.start(), m.end()) for m in re.finditer(rb"\d+", data[:2000])] if what == "number" else []
    if found:
        start, end = found[rng.integers(len(found))]
        number = NUMBERS[rng.integers(len(NUMBERS))].encode()
        number = number.ljust(end - start) if rng.random() < 0.5 else number
        return data[:start] + number + data[end:], f"{data[start:end]!r} at {start} is {number!r}"
    return data[:a] + rng.bytes(b - a) + data[b:], f"noise {a} to {b}"


def forge(name: str, rng: np.random.Generator) -> tuple[str, bool]:
    """Damage a file, or one in the folder; return what was done, and whether a checksum covers it."""
    path = Path(name)
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        path = inside[rng.integers(len(inside))]
        if rng.random() < 0.05 and path.name != "lock":
            path.unlink()
            return f"{path} removed", name == "kept"
    data = path.read_bytes()
    new, what = damage(data, rng)
    covered = name in ("x.npz", "kept")
    if name == "x.zarr":
        covered = path.name != "zarr.json" and b"crc32c" in Path(name, "zarr.json").read_bytes()
    if name == "x.parquet":  # pages, but not the footer, whose length its last eight bytes begin with
        footer = int.from_bytes(data[-8:-4], "little") + 8
        covered = len(new) == len(data) and new[-footer:] == data[-footer:]
    path.write_bytes(new)
    return f"{path}: {what}", covered and new != data


def by_command(arguments: list[str]) -> tuple[list[str], list[Any]]:
    """Run the command; return what went against the promise, and its result, if there is one."""
    wrong, found = [], []
    result = CliRunner().invoke(command, ["estimate", *arguments, "-o", "out.npy", *OPTIONS])
    if not isinstance(result.exception, SystemExit | None):
        wrong.append(f"the command raised {result.exception!r}")
    elif result.exit_code == 2:
        if result.stderr.count("Error: ") != 1 or result.stderr.rstrip().count("\nError") > 1:
            wrong.append(f"the command wrote {result.stderr!r}")
        elif not re.search(r"x\.\w+|kept", result.stderr):
            wrong.append(f"no file is named: {result.stderr!r}")
        if Path("out.npy").exists():
            wrong.append("an output after an error")
    elif result.exit_code:
        wrong.append(f"exit status {result.exit_code}: {result.output!r}")
    else:
        found.append(np.load("out.npy"))
        Path("out.npy").unlink()
    return wrong, found


def by_python(call: Any) -> tuple[list[str], list[Any]]:
    """The same of Python's function."""
    wrong, found = [], []
    try:
        found.append(call())
    except PROMISED as error:
        if not re.search(r"x\.\w+|kept", str(error)) and type(error) is not ValueError:
            wrong.append(f"no file is named: {error!r}")
    except Exception as error:
        wrong.append(f"scale.estimate raised {error!r}")
    return wrong + [f"{path} is left" for path in Path().glob(".*")], found


def run(seed: int, index: int) -> tuple[str, str, list[str]]:
    """Make, damage and read a file; return its kind, what came of it, and what went against the promise."""
    rng = np.random.default_rng((seed, index))
    kind = KINDS[index % len(KINDS)]
    name = make(kind, rng)
    arguments, given = [name], (name,)
    if kind == "checkpoint":
        arguments, given = ["train.npy", "--checkpoint", name, "--resume"], ("train.npy",)
    elif rng.random() < 0.3:
        arguments, given = ["few.npy", name], ("few.npy", name)
    elif rng.random() < 0.3:
        arguments += ["--memory", "20GB"]
    kept: dict[str, Any] = {"checkpoint": name, "resume": True} if kind == "checkpoint" else {}

    def call() -> Any:
        return scale.estimate(*given, **kept, **HOW)

    whole = by_command(arguments)[1] + by_python(call)[1]
    if len(whole) < 2 and given[0] != "few.npy":  # which has three columns, and a file may have one
        raise RuntimeError(f"{arguments}: a whole file is not read")
    what, covered = forge(name, rng)
    Path("now").write_text(f"{index}: {' '.join(arguments)}: {what}")
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    if kind == "checkpoint":  # the first to read it mends it
        shutil.copytree(name, "copy")
    wrong, found = by_command(arguments)
    if kind == "checkpoint":
        shutil.rmtree(name)
        shutil.move("copy", name)
    more, also = by_python(call)
    wrong, found = wrong + more, found + also
    faulthandler.cancel_dump_traceback_later()
    same = all(any(np.array_equal(one, x) for x in whole) for one in found)
    if covered and not same:
        wrong.append("damage that a checksum covers gave other numbers")
    outcome = "refused" if not found else "the same" if same else "other numbers"
    shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)
    return kind, outcome, [f"{index}: {' '.join(arguments)}: {what}: {cause}" for cause in wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, metavar="INDEX", help="that file alone")
    options = parser.parse_args()
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    faulthandler.enable()
    warnings.simplefilter("ignore")
    outcomes, failures = Counter[tuple[str, str]](), 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        np.save("train.npy", X)
        np.save("few.npy", X[:50])
        scale.estimate("train.npy", checkpoint="whole", **HOW)
        for index in range(options.files) if options.replay is None else [options.replay]:
            kind, outcome, wrong = run(options.seed, index)
            outcomes[kind, outcome] += 1
            failures += bool(wrong)
            for line in wrong:
                print(line, flush=True)
        os.chdir("/")
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{kind:12}{outcome:15}{count:6}")
    print(f"{sum(outcomes.values())} files, seed {options.seed}: {failures} against the promise")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
