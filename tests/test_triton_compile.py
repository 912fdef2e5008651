"""Every default launch configuration compiles for the architectures that matter, without spilling, on any machine."""

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from sdkde_triton import space  # noqa: E402
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
    pointers |= dict.fromkeys(("rows", "columns"), f"*{real or 'fp16'}")
    return {name: pointers.get(name, "i32") for name in kernel.arg_names}


def _check(kernel, name, columns, constants, capability, tmp_path, types):
    config = space.default(name, columns, capability, constants.get("MERGE", False))
    assert space.fits(name, config, columns, capability), f"{config} does not fit sm_{capability} by its own bounds"
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    if "STAGES" in kernel.arg_names:
        constants["STAGES"] = config.num_stages
    compiled = _compile(kernel, types, constants, config, capability)
    usage = _usage(compiled, tmp_path / "kernel.cubin")
    assert usage["STACK"] == 0, f"{config} spills {usage['STACK']} bytes on sm_{capability} ({usage})"
    assert usage["LOCAL"] == 0, usage
    bound = space.shared_bytes(name, config, columns)
    assert compiled.metadata.shared <= bound, f"{config} takes {compiled.metadata.shared} bytes of shared memory"
    assert compiled.metadata.shared <= space.SHARED[capability]
    return usage


@pytest.mark.parametrize(
    ("d", "form", "capability"), list(product((12, 15, 16, 32, 64, 128), (0, 1, 2), ARCHITECTURES))
)
def test_mean(d, form, capability, tmp_path):
    from sdkde_triton.kernels import mean_kernel

    columns = packed_dimensions(d)
    flags = {"D": columns, "FORM": form, "MERGE": merges(d), "SUMMED": d < columns}
    flags["TILES"] = space.tiles_per_sum(columns, form, merges(d), capability)
    _check(mean_kernel, "triton.mean", columns, flags, capability, tmp_path, _types(mean_kernel))


@pytest.mark.parametrize(
    ("d", "form", "laplace", "capability"),
    list(product((12, 16, 32, 64, 128), (0, 2), (False, True), ARCHITECTURES)),
)
def test_log_sum(d, form, laplace, capability, tmp_path):
    from sdkde_triton.kernels import log_sum_kernel

    columns = packed_dimensions(d)
    flags = {"D": columns, "FORM": form, "MERGE": merges(d), "LAPLACE": laplace, "WEIGHTED": laplace}
    _check(log_sum_kernel, "triton.log_sum", columns, flags, capability, tmp_path, _types(log_sum_kernel))


@pytest.mark.parametrize(
    ("d", "dtype", "reduction", "capability"),
    [
        *product((1,), ("fp32",), ("log_sum", "laplace"), ARCHITECTURES),
        *product((1, 2), ("fp32",), ("anchored",), ARCHITECTURES),
        *product((1, 2, 17), ("fp64",), ("log_sum", "mean", "laplace"), ARCHITECTURES),
    ],
)
def test_direct(d, dtype, reduction, capability, tmp_path):
    from sdkde_triton.direct import direct_kernel

    flags = {
        "D": d,
        "LAPLACE": reduction == "laplace",
        "MEAN": reduction in ("mean", "anchored"),
        "ANCHORED": reduction == "anchored",
        "WEIGHTED": reduction != "anchored",
    }
    name = "triton.direct_mean" if reduction == "anchored" else "triton.direct"
    types = _types(direct_kernel, dtype)
    _check(direct_kernel, name, d, flags, capability, tmp_path, types)
