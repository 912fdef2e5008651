"""What Numba's CUDA target decides on the host, and what its compiler makes of the kernels, on any machine."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba_cuda")

import torch
from click.testing import CliRunner
from sdkde_autotune.cli import main
from sdkde_numba import gpu_bounds, gpu_info, gpu_kernels, gpu_launch, gpu_space
from sdkde_numba.gpu_info import INFO
from sdkde_numba.gpu_space import LaunchConfig

from sdkde_core import tuning
from sdkde_core.protocol import Problem, Reduction

needs_compiler = pytest.mark.skipif(
    os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" or importlib.util.find_spec("cuda") is None,
    reason="the simulator replaces the compiler, or the CUDA toolkit's packages are not installed",
)

#: Dimensions at and around those where the shape of a kernel changes.
DIMENSIONS = (1, 2, 4, 5, 7, 16, 17, 33, 64, 128, 300, 512, 513, 784, 1024)

ARITHMETICS = ("expanded", "single", "doubled", "float64")


@needs_compiler
def test_a_numpy_that_its_compiler_does_not_know_is_named():
    code = """
import numpy
from sdkde_core.protocol import Support
from sdkde_numba import gpu_backend
vars(numpy).pop("row_stack", None)
gpu_backend.grids.probe = lambda *given: Support(True, "")
support = gpu_backend.CudaBackend().probe("cuda:0")
assert not support.ok and "pip install 'numpy<2.5'" in support.reason, support
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def problem(reduction="log_sum", m=1000, n=2000, d=16, precision="high", **more):
    return Problem(Reduction(reduction), m, n, d, precision=precision, device="cuda:0", **more)


def test_no_module_has_a_name_that_numba_takes_for_its_own():
    """Its import hook looks for "numba.cuda" anywhere in a name."""
    folder = Path(gpu_info.__file__).parent
    assert not [path for path in folder.glob("*.py") if "numba.cuda" in f"sdkde_numba.{path.stem}"]


@pytest.mark.parametrize(
    ("reduction", "precision", "extent", "more", "kind"),
    [
        ("log_sum", "fast", 10.0, {}, "expanded"),
        ("log_sum", "fast", 60.0, {}, "single"),
        ("log_sum", "high", 10.0, {}, "single"),
        ("log_sum", "high", 1e9, {}, "float64"),
        ("log_sum", "float64", 1.0, {}, "float64"),
        ("laplace", "fast", 10.0, {}, "expanded"),
        ("laplace", "fast", 10.0, {"requires": frozenset({"weights"})}, "single"),
        ("mean", "high", 15.0, {"same": True}, "single"),
        ("mean", "high", 40.0, {"same": True}, "doubled"),
        ("mean", "fast", 15.0, {"same": True, "requires": frozenset({"weights"})}, "float64"),
    ],
)
def test_the_extent_picks_the_arithmetic(reduction, precision, extent, more, kind):
    assert gpu_bounds.arithmetic(problem(reduction, precision=precision, extent=extent, **more)) == kind


def test_log_weights_beyond_float32_are_summed_in_float64():
    assert gpu_bounds.arithmetic(problem(extent=5.0), 1e6) == "float64"


@pytest.mark.parametrize(("kind", "arithmetic", "d"), [*product(Reduction, ARITHMETICS, DIMENSIONS)])
def test_defaults_fit(kind, arithmetic, d):
    config = gpu_space.default(kind.value, d, arithmetic)
    assert LaunchConfig.of(config._asdict()) == config
    assert gpu_space.fits(config, kind.value, d, arithmetic)


# --- what can be tuned ----------------------------------------------------------------------------------------------


def test_nothing_is_predicted_for_a_card_that_is_not_here(tmp_path):
    database = tmp_path / "tuning.sqlite"
    how = ["--gpu", "a6000", "--backend", "numba-cuda", "--db", str(database)]
    done = CliRunner().invoke(main, how)
    assert done.exit_code and "no cost model to predict by; run this where the RTX A6000 is" in done.output
    assert not database.exists()


def test_the_space_is_consistent():
    space = tuning.space_of(INFO)
    given = problem("mean", 32768, 32768, same=True, extent=10.0)
    (kernel,) = space.kernels(given)
    assert kernel == "mean_single"
    default = space.default(kernel, given, "sm_90")
    assert space.limit(kernel, default, given, "sm_90") is None
    assert all(default[name] in values for name, values in space.parameters(kernel).items())
    assert "exceeds" in space.limit(kernel, {**default, "rows": 8}, given, "sm_90")
    assert "block_m" in space.limit(kernel, {"block_m": 64}, given, "sm_90")


def test_a_forced_configuration_that_cannot_run_is_refused():
    bad = {"depth": 16, "rows": 8, "threads": 128, "columns": 128, "registers": 0}
    with (
        tuning.using({"mean_single": bad}),
        pytest.raises(ValueError, match="mean_single cannot be launched"),
    ):
        gpu_launch.configuration(problem("mean", same=True), "single", torch.device("cpu"))


@needs_compiler
def test_kernels_that_differ_in_their_registers_alone_are_kept_apart():
    """Numba's cache knows a kernel by its file, its code and what it closes over, not by how it was compiled."""
    from numba.cuda.dispatcher import CUDACacheImpl

    configs = [LaunchConfig(16, 4, 128, 64, registers) for registers in (0, 128)]
    shapes = [gpu_launch.shape_of(problem(), "single", config) for config in configs]
    files = {CUDACacheImpl(gpu_kernels.reduction(shape)).filename_base for shape in shapes}
    assert len(files) == 2


def test_problems_share_code_where_their_shapes_are_equal():
    default = gpu_space.default("mean", 16, "single")

    def code(columns=64, **more):
        given = problem("mean", same=True, **more)
        return gpu_space.SPACE.code("mean_single", default._replace(columns=columns)._asdict(), given)

    assert code() == code(m=9, n=9) == code(precision="fast")
    assert code(columns=128, precision="high") == code(precision="high")  # float32 adds up 64
    assert code(columns=128, precision="fast") != code(precision="fast")
    assert len({code(), code(d=17), code(requires=frozenset({"weights"}))}) == 3


COMPILED = [
    ("laplace", "doubled", 3, ("weights",), "sm_86"),
    ("mean", "single", 4, (), "sm_90"),
    ("log_sum", "expanded", 64, ("weights",), "sm_75"),
    ("mean", "float64", 16, ("weights",), "sm_80"),
    *product(("log_sum", "laplace"), ARITHMETICS, (1, 16, 784), ((),), ("sm_86",)),
    *product(("mean",), ARITHMETICS[1:], (1, 16, 784), ((),), ("sm_86",)),
]


def ptx(shape, architecture):
    """The PTX of a kernel."""
    from numba import cuda

    capability = divmod(int(architecture.removeprefix("sm_")), 10)
    return str(cuda.compile_ptx(gpu_kernels.reduction(shape), gpu_kernels.signature(shape).args, cc=capability)[0])


def resources(text, architecture, registers):
    """What the assembler says that PTX takes."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={architecture}", "-verbose", *([f"-maxrregcount={registers}"] if registers else [])]
    code = text.encode()
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, code, len(code), "kernel")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    finally:
        nvjitlink.destroy(linker)
    report = log.decode()
    counts = (re.findall(rf"(\d+) bytes {what}", report)[:1] for what in ("spill stores", "spill loads", "smem"))
    stores, loads, shared = (sum(map(int, found)) for found in counts)
    used = re.findall(r"[Uu]sed (\d+) registers", report)
    # The linker's count has the KiB that the system keeps of a block's shared memory.
    return tuning.Compiled(int(used[-1]), max(0, shared - 1024), stores + loads)


@needs_compiler
@pytest.mark.parametrize(
    ("reduction", "arithmetic", "d", "requires", "architecture"),
    [*COMPILED[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED[2:])],
)
def test_defaults_compile_without_a_gpu(reduction, arithmetic, d, requires, architecture):
    """As they are launched: what is in registers stays there, and vectors are loaded whole."""
    precision = {"expanded": "fast", "float64": "float64"}.get(arithmetic, "high")
    given = problem(reduction, d=d, precision=precision, same=True, requires=frozenset(requires))
    config = gpu_space.default(reduction, d, arithmetic)
    shape = gpu_launch.shape_of(given, arithmetic, config)
    text = ptx(shape, architecture)
    assert ".local" not in text, "a loop was not unrolled: its arrays are in memory"
    if arithmetic == "float64" and not shape.terms:
        assert "mul.rn.f64" in text, "an exponent may be fused with the subtraction of the maximum"
    if shape.depth % 4 == 0:
        assert "ld.shared.v2.f64" in text if arithmetic == "float64" else "ld.shared.v4" in text
    compiled = resources(text, architecture, config.registers)
    assert 0 < compiled.registers <= (config.registers or 255)
    assert compiled.shared <= gpu_space.SHARED
    assert gpu_space.SPACE.too_much(compiled, architecture) is None
    assert math.isfinite(compiled.spills)
