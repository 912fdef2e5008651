"""Every default launch configuration compiles for the architectures that matter, without spilling, on any machine."""

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from sdkde_triton import bounds, space  # noqa: E402
from sdkde_triton.bounds import merges, packed_dimensions  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces what would be compiled"
)

ARCHITECTURES = (80, 86, 90, 100, 120)


def _compile(kernel, types, constants, config, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=config.options)


def _usage(compiled, path):
    """Registers, and bytes of stack and local memory, as the assembler reports them."""
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}


def _types(kernel, real=None):
    """Types of a kernel's parameters: packed operands in half precision, or coordinates of a ``real`` type."""
    pointers = {"log_weights": "*fp64", "out": f"*{real or 'fp32'}"}
    pointers |= dict.fromkeys(("rows", "columns", "phi"), f"*{real or 'fp16'}")
    pointers["sums"] = "*fp64"
    return {name: pointers.get(name, "i32") for name in kernel.arg_names}


def _check(kernel, name, columns, constants, capability, tmp_path, types):
    pieces = constants.get("PIECES", 2)
    config = space.default(name, columns, capability, constants.get("MERGE", False), pieces)
    fits = space.fits(name, config, columns, capability, pieces)
    assert fits, f"{config} does not fit sm_{capability} by its own bounds"
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    if "BLOCK_K" in kernel.arg_names:
        last = name == "triton.weighted_sum"
        constants["BLOCK_K"] = space.block_k(0 if last else columns, pieces, capability)
    if "STAGES" in kernel.arg_names:
        constants["STAGES"] = config.num_stages
    compiled = _compile(kernel, types, constants, config, capability)
    usage = _usage(compiled, tmp_path / "kernel.cubin")
    assert usage["STACK"] == 0, f"{config} spills {usage['STACK']} bytes on sm_{capability} ({usage})"
    assert usage["LOCAL"] == 0, usage
    bound = space.shared_bytes(name, config, columns, pieces, capability)
    assert compiled.metadata.shared <= bound, f"{config} takes {compiled.metadata.shared} bytes of shared memory"
    assert compiled.metadata.shared <= space.SHARED[capability]
    return compiled


@pytest.mark.parametrize(
    ("d", "form", "capability"),
    [
        *product((12, 15, 16, 32, 64, 128), (bounds.SHORT, bounds.PAIRED, bounds.LONG), ARCHITECTURES),
        *product((12, 16, 32, 64), (bounds.FULL,), ARCHITECTURES),
    ],
)
def test_mean(d, form, capability, tmp_path):
    from sdkde_triton.kernels import mean_kernel

    columns, full = packed_dimensions(d), form == bounds.FULL
    flags = {"D": columns, "PIECES": 3 if full else 2, "FORM": form, "MERGE": merges(d), "SUMMED": d < columns}
    flags["TILES"] = space.tiles_per_sum(columns, form, merges(d), capability)
    flags |= {"EXCLUDE": full, "EXACT": full}
    _check(mean_kernel, "triton.mean", columns, flags, capability, tmp_path, _types(mean_kernel))


@pytest.mark.parametrize(
    ("d", "form", "laplace", "capability"),
    [
        *product((12, 16, 32, 64, 128), (bounds.SHORT, bounds.LONG), (False, True), ARCHITECTURES),
        *product((12, 16, 32, 64), (bounds.FULL,), (False, True), ARCHITECTURES),
    ],
)
def test_log_sum(d, form, laplace, capability, tmp_path):
    from sdkde_triton.kernels import log_sum_kernel

    columns, full = packed_dimensions(d), form == bounds.FULL
    flags = {"D": columns, "PIECES": 3 if full else 2, "FORM": form, "MERGE": merges(d)}
    flags |= {"LAPLACE": laplace, "WEIGHTED": laplace, "EXCLUDE": full}
    _check(log_sum_kernel, "triton.log_sum", columns, flags, capability, tmp_path, _types(log_sum_kernel))


@pytest.mark.parametrize(
    ("d", "form", "use", "capability"),
    [
        *product((784,), (bounds.LONG, bounds.FULL), ("log_sum", "laplace", "store"), ARCHITECTURES),
        *product((128,), (bounds.FULL,), ("log_sum", "store"), ARCHITECTURES),
        *product((16,), (bounds.SHORT, bounds.FULL), ("store",), ARCHITECTURES),
    ],
)
def test_blocked(d, form, use, capability, tmp_path):
    from sdkde_triton.blocked import blocked_kernel

    columns, full = packed_dimensions(d), form == bounds.FULL
    flags = {"D": columns, "PIECES": 3 if full else 2, "FORM": form, "LAPLACE": use == "laplace"}
    flags |= {"STORE": use == "store", "EXACT": full, "WEIGHTED": use == "laplace", "EXCLUDE": full}
    types = _types(blocked_kernel)
    if use == "store":
        types["out"] = "*fp16"
    name = "triton.stored" if use == "store" else "triton.blocked"
    _check(blocked_kernel, name, columns, flags, capability, tmp_path, types)


@pytest.mark.parametrize(
    ("width", "pieces", "exact", "capability"),
    [
        *product((832,), (2, 3), (False, True), ARCHITECTURES),
        *product((16,), (2,), (False, True), ARCHITECTURES),
    ],
)
def test_weighted_sum(width, pieces, exact, capability, tmp_path):
    from sdkde_triton.blocked import weighted_sum_kernel

    flags = {"D": width, "PIECES": pieces, "EXACT": exact}
    types = _types(weighted_sum_kernel, None) | {"out": "*fp64"}
    compiled = _check(weighted_sum_kernel, "triton.weighted_sum", width, flags, capability, tmp_path, types)
    # The compiler must not take what is added to a product for the start of its sum: see sdkde_triton.kernels.alone.
    from_zero = re.findall(r"tt\.dot .*%cst.*maxNumImpreciseAcc = 1", compiled.asm["ttir"])
    assert len(from_zero) == (2 if exact else 1)


@pytest.mark.parametrize(
    ("d", "arithmetic", "reduction", "capability"),
    [
        *product((1,), ("float32", "doubled"), ("log_sum", "laplace"), ARCHITECTURES),
        *product((1, 2), ("float32", "doubled"), ("anchored",), ARCHITECTURES),
        *product((17,), ("doubled",), ("log_sum", "laplace", "mean"), ARCHITECTURES),
        *product((1, 2, 17), ("float64",), ("log_sum", "mean", "laplace"), ARCHITECTURES),
    ],
)
def test_direct(d, arithmetic, reduction, capability, tmp_path):
    from sdkde_triton.direct import direct_kernel

    flags = {
        "D": min(d, 3),
        "DOUBLED": arithmetic == "doubled",
        "LAPLACE": reduction == "laplace",
        "MEAN": reduction in ("mean", "anchored"),
        "ANCHORED": reduction == "anchored",
        "WEIGHTED": reduction != "anchored",
        "EXCLUDE": arithmetic == "float64",
    }
    name = "triton.direct_mean" if reduction == "anchored" else "triton.direct"
    types = _types(direct_kernel, "fp64" if arithmetic == "float64" else "fp32")
    _check(direct_kernel, name, d, flags, capability, tmp_path, types)
