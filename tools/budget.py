"""Count lines and module constants; fail above the budget of `[tool.sdkde.budget]` in pyproject.toml (`make lint`).

``product`` and ``tests`` are lines. ``constants`` are the names in capitals that the product's modules assign, per
1,000 lines. What `__all__` of a public module of sdkde_core has is not counted.
"""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

FOLDERS = {"product": ("sdkde_core", "backends", "autotune"), "tests": ("tests",)}


def files(folders: tuple[str, ...]) -> list[Path]:
    """Return the sources in folders that git has or would add."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard", *folders]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [Path(name) for name in listed if name.endswith((".py", ".cu", ".cuh")) and Path(name).exists()]


def constants(path: Path) -> set[str]:
    """Return the names in capitals that a module assigns and does not export to everybody."""
    assigned, exported = set(), set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.suffix == ".py" else []:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
            assigned |= {name for name in names if name.isupper() and len(name) > 1}
            if "__all__" in names and path.parent == Path("sdkde_core"):
                exported |= set(ast.literal_eval(node.value))
    return assigned - exported


def main() -> int:
    """Print the counts; where one is above its budget, the largest rooms too."""
    budget = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["sdkde"]["budget"]
    counts = {what: {path: len(path.read_bytes().splitlines()) for path in files(at)} for what, at in FOLDERS.items()}
    thousands = sum(counts["product"].values()) / 1000
    counts["constants"] = {path: len(constants(path)) / thousands for path in counts["product"]}
    failed = False
    for what, counted in counts.items():
        total = sum(counted.values())
        print(f"{what}: {round(total, 1):,} of {budget[what]:,}")
        if total > budget[what]:
            failed, rooms = True, Counter[str]()
            for path, count in counted.items():
                rooms["/".join(path.parts[:2])] += count
            largest = ", ".join(f"{room} {round(count, 1):,}" for room, count in rooms.most_common(8))
            print(f"  above the budget. Largest: {largest}")
            print("  Delete something; [tool.sdkde.budget] is raised only where that has been tried in vain.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
