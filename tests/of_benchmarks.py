"""The package ``benchmarks`` beside the sources, without its folder or the checkout on the path."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"

if "benchmarks" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("benchmarks", FOLDER / "__init__.py")
    sys.modules["benchmarks"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["benchmarks"])
