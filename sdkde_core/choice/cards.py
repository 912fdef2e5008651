"""GPUs and their peak rates: by compute capability for any card, by data sheets for those in the table.

Rates are kept per multiprocessor and clock, so that every figure of a card refers to one clock: data sheets mix them
(the H100's 989 TFLOP/s in fp16 are quoted at 1.83 GHz, its 66.9 in fp32 at 1.98).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..engine.forks import cached_property


@dataclass(frozen=True)
class Processor:
    """Rates of a processor, per second, from which the cost model predicts times."""

    name: str
    matrix_flops: Mapping[str, float]  # floating-point operations in matrix products, by dtype
    scalar_flops: float  # other single-precision operations
    exps: float  # single-precision exponentials
    bandwidth: float  # bytes to and from main memory
    launch_seconds: float  # that starting a kernel takes
    transfer: float = float("inf")  # bytes between host and device; inf on the host
    threads: int = 1  # of a CPU; the rates are those of all threads together
    # Whether the units work side by side, so that the slowest decides. On a CPU that runs array operations one after
    # another the times add up.
    overlaps: bool = True
    source: str = ""  # where the figures come from


@dataclass(frozen=True)
class GPU:
    """A GPU; dense rates, without sparsity, sums in fp32."""

    name: str  # as the driver writes it, without the vendor; with the variant where that is left out ("H100 SXM")
    aliases: tuple[str, ...]  # short names for the command line, and what else the driver writes
    architecture: str  # "sm_86"
    sms: int  # streaming multiprocessors
    clock_ghz: float  # boost clock
    matrix: Mapping[str, int]  # operations per clock and multiprocessor in Tensor Cores, by dtype; what they have
    bandwidth: float  # bytes per second of its memory
    transfer: float  # and to the host
    source: str
    scalar: int = 256  # fp32 operations per clock and multiprocessor; a fused multiply-add is two
    exps: int = 16  # exponentials likewise

    @cached_property
    def processor(self) -> Processor:
        """Its rates at the boost clock."""
        clocks = self.sms * 1e9 * self.clock_ghz
        return Processor(
            name=self.name,
            matrix_flops={dtype: rate * clocks for dtype, rate in {"float32": self.scalar, **self.matrix}.items()},
            scalar_flops=self.scalar * clocks,
            exps=self.exps * clocks,
            bandwidth=self.bandwidth,
            launch_seconds=4e-6,
            transfer=self.transfer,
            source=self.source,
        )


# --- by compute capability -------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """A multiprocessor's operations per clock, a fused multiply-add being two, and the rate of the bus."""

    float16: int  # in matrix products with sums in fp32
    tf32: int  # likewise; 0: it has no such product
    float64: int
    scalar: int  # fp32 operations
    exps: int
    # Bytes per second to the host, of memory that is not pinned, as NumPy's: over PCIe 3.0, 4.0 or 5.0 with 16 lanes.
    # Beside an H200 9.7e9 were measured, where pinned memory has 55e9.
    transfer: float


#: By ten times the compute capability. fp32, fp64 and exponentials: CUDA C++ Programming Guide, throughput of native
#: arithmetic instructions. Tensor Cores: the whitepapers of V100, Turing, A100, GA102, Ada, H100 and RTX Blackwell, the
#: Jetson AGX Xavier and Orin technical briefs (7.2, 8.7), the HGX B200 data sheet, and for 10.3, with its few fp64
#: units and twice the exponentials, NVIDIA's "Inside NVIDIA Blackwell Ultra".
ARCHITECTURES: Mapping[int, Rates] = {
    70: Rates(1024, 0, 64, 128, 16, 6e9),
    72: Rates(1024, 0, 64, 128, 16, 6e9),
    75: Rates(1024, 0, 4, 128, 16, 6e9),
    80: Rates(2048, 1024, 128, 128, 16, 9e9),
    86: Rates(1024, 512, 4, 256, 16, 9e9),
    87: Rates(2048, 1024, 4, 256, 16, 9e9),
    89: Rates(1024, 512, 4, 256, 16, 9e9),
    90: Rates(4096, 2048, 256, 256, 16, 10e9),
    100: Rates(8192, 4096, 128, 256, 16, 10e9),
    103: Rates(8192, 4096, 4, 256, 32, 10e9),
    120: Rates(1024, 512, 4, 256, 16, 10e9),
}


def _rates(capability: int) -> Rates:
    """The rates of the newest architecture that is not newer, else of the oldest."""
    return ARCHITECTURES[max((known for known in ARCHITECTURES if known <= capability), default=min(ARCHITECTURES))]


def _made(
    name: str, aliases: tuple[str, ...], capability: int, sms: int, clock_ghz: float, bandwidth: float,
    source: str = "", *, halved: bool = False, transfer: float = 0.0,
) -> GPU:  # fmt: skip
    """A GPU with the rates of its compute capability; ``halved``: its Tensor Cores sum in fp32 at half their rate."""
    rates, part = _rates(capability), 2 if halved else 1
    matrix = {"float16": rates.float16 // part, "float64": rates.float64}
    if rates.tf32:  # and bfloat16, which came with it
        matrix |= {"bfloat16": rates.float16 // part, "tf32": rates.tf32 // part}
    rest = bandwidth, transfer or rates.transfer, source or f"NVIDIA {name} data sheet", rates.scalar, rates.exps
    return GPU(name, aliases, f"sm_{capability}", sms, clock_ghz, matrix, *rest)


def cores(capability: int) -> int:
    """Return how many fp32 units a multiprocessor has; each does a fused multiply-add, two operations, in a clock."""
    return _rates(capability).scalar // 2


@functools.cache
def derived(name: str, capability: int, sms: int, clock_ghz: float, bandwidth: float = 0.0) -> GPU | None:
    """Return a GPU with the rates that follow from what the driver says of it; None where they do not.

    A GeForce card's Tensor Cores sum in fp32 at half their rate. Below compute capability 7.0 there is none; what is
    newer than all in :data:`ARCHITECTURES` counts as the newest there. The driver's largest clock may be above a data
    sheet's boost clock (an RTX 4090: 3.105 GHz, where it has 2.52). A bandwidth of 0 is not known.
    """
    if capability < min(ARCHITECTURES) or sms < 1 or not clock_ghz > 0:
        return None
    bandwidth = bandwidth or 8e9 * sms  # of memory that is the host's: GB10 has 5.7e9 a multiprocessor, Orin 12.8e9
    told = f"{sms} multiprocessors at {clock_ghz:.4g} GHz, {bandwidth / 1e9:.4g} GB/s"
    source = f"NVML: {told}; rates by compute capability"
    return _made(card_name(name), (), capability, sms, clock_ghz, bandwidth, source, halved="geforce" in name.lower())


#: A GPU of no particular kind, to rank backends on devices whose rates nobody knows.
PLAIN = _made("a plain GPU", (), 86, 40, 1.5, 400e9, "made up").processor


# --- by data sheet ---------------------------------------------------------------------------------------------------


def _of_data_sheets() -> tuple[GPU, ...]:
    v100, turing = "NVIDIA V100 data sheet", "NVIDIA Turing GPU architecture whitepaper, appendix A"
    a100, ga102 = "NVIDIA A100 data sheet", "NVIDIA Ampere GA102 whitepaper, table 2"
    ada, h100 = "NVIDIA Ada GPU architecture whitepaper, appendix A", "NVIDIA H100 data sheet (fp16 quoted at 1.83 GHz)"
    b200 = "NVIDIA HGX B200 data sheet (2.25 PFLOP/s fp16 dense, at which the clock is taken)"
    slow, rtx_50 = "data sheet (fp16 quoted at 1.545 GHz)", "NVIDIA RTX Blackwell whitepaper, appendix A"
    return (
        _made("V100 SXM2", ("v100", "V100-SXM2-16GB", "V100-SXM2-32GB"), 70, 80, 1.53, 900e9, v100),
        _made("V100 PCIe", ("v100-pcie", "V100-PCIE-16GB", "V100-PCIE-32GB"), 70, 80, 1.38, 900e9, v100),
        _made("T4", ("t4",), 75, 40, 1.59, 320e9),
        _made("GeForce RTX 2080 Ti", ("rtx2080ti", "2080ti"), 75, 68, 1.545, 616e9, turing, halved=True),
        _made("A100 80GB SXM", ("a100", "a100-80gb", "A100-SXM4-80GB"), 80, 108, 1.41, 2039e9, a100),
        _made("A100 80GB PCIe", ("a100-80gb-pcie", "A100-PCIE-80GB"), 80, 108, 1.41, 1935e9, a100),
        _made("A100 40GB SXM", ("a100-40gb", "A100-SXM4-40GB"), 80, 108, 1.41, 1555e9, a100),
        _made("A100 40GB PCIe", ("a100-40gb-pcie", "A100-PCIE-40GB"), 80, 108, 1.41, 1555e9, a100),
        _made("A30", ("a30",), 80, 56, 1.44, 933e9),
        _made("A10", ("a10",), 86, 72, 1.695, 600e9),
        _made("A10G", ("a10g",), 86, 80, 1.71, 600e9, "NVIDIA A10G data sheet (70 TFLOP/s in fp16)", halved=True),
        _made("A40", ("a40",), 86, 84, 1.74, 696e9),
        _made("RTX A6000", ("a6000",), 86, 84, 1.80, 768e9, f"NVIDIA RTX A6000 data sheet; {ga102}"),
        _made("RTX A5000", ("a5000",), 86, 64, 1.695, 768e9),
        _made("RTX A4000", ("a4000",), 86, 48, 1.56, 448e9),
        _made("GeForce RTX 3090", ("rtx3090", "3090"), 86, 82, 1.695, 936e9, ga102, halved=True),
        _made("GeForce RTX 3080", ("rtx3080", "3080"), 86, 68, 1.71, 760e9, f"{ga102}; with 10 GB", halved=True),
        _made("L4", ("l4",), 89, 58, 2.04, 300e9),
        _made("L40", ("l40",), 89, 142, 2.49, 864e9, "NVIDIA L40 data sheet (181 TFLOP/s in fp16)", halved=True),
        _made("L40S", ("l40s",), 89, 142, 2.52, 864e9),
        _made("RTX 6000 Ada Generation", ("rtx6000ada", "6000ada"), 89, 142, 2.505, 960e9),
        _made("GeForce RTX 4090", ("rtx4090", "4090"), 89, 128, 2.52, 1008e9, ada, halved=True),
        _made("GeForce RTX 4080", ("rtx4080", "4080"), 89, 76, 2.505, 717e9, ada, halved=True),
        _made("H100 SXM", ("h100", "H100 80GB HBM3"), 90, 132, 1.98, 3350e9, f"{h100}; NVIDIA H100 whitepaper"),
        _made("H100 PCIe", ("h100-pcie",), 90, 114, 1.755, 2039e9, "NVIDIA H100 data sheet (fp16 quoted at 1.62 GHz)"),
        _made("H100 NVL", ("h100-nvl",), 90, 132, 1.785, 3938e9, f"NVIDIA H100 NVL {slow}"),
        _made("GH200", ("gh200", "GH200 480GB"), 90, 132, 1.98, 4000e9, "NVIDIA GH200 data sheet", transfer=360e9),
        _made("H200 SXM", ("h200", "H200"), 90, 132, 1.98, 4800e9, "NVIDIA H200 data sheet (fp16 quoted at 1.83 GHz)"),
        _made("H200 NVL", ("h200-nvl",), 90, 132, 1.785, 4800e9, f"NVIDIA H200 NVL {slow}"),
        _made("B200", ("b200",), 100, 148, 1.85, 8000e9, b200),
        _made("GeForce RTX 5090", ("rtx5090", "5090"), 120, 170, 2.407, 1792e9, rtx_50, halved=True),
        _made("GeForce RTX 5080", ("rtx5080", "5080"), 120, 84, 2.617, 960e9, rtx_50, halved=True),
    )


#: The cards that are known without being here: multiprocessors, boost clock, bandwidth. Of a name that several variants
#: share, such as a100, the first alias is the variant in most servers.
GPUS = _of_data_sheets()


def plain(name: str) -> str:
    """Return what counts of a name in :func:`gpu`."""
    needless = {"nvidia", "geforce", "tesla", "generation", "gpu"}  # words that a name may have or lack
    return "".join(word for word in re.findall("[a-z0-9]+", name.lower()) if word not in needless)


@functools.cache
def gpu(name: str) -> GPU | None:
    """Return the GPU of :data:`GPUS` with that name, which may be an alias or the driver's; None if there is none.

    Neither case, spaces and dashes nor the vendor count, all else does: a variant under a card's name (PCIe, laptop, a
    MIG slice) has other rates. ``"a6000"`` is the RTX A6000, never the RTX 6000 Ada Generation.
    """
    known = plain(name)
    return next((card for card in GPUS if known in map(plain, (card.name, *card.aliases))), None)


def card_name(name: str) -> str:
    """Return a card's name as in :data:`GPUS`; if it is not there, the driver's name without the vendor."""
    card = gpu(name)
    return card.name if card else name.removeprefix("NVIDIA ").strip()
