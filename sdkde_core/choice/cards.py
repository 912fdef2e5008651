"""Peak rates of GPUs by their data sheets, with the sources; the GPUs need not be here.

Rates are kept per multiprocessor and clock, so that every figure of a card refers to one clock: data sheets mix them
(the H100's 989 TFLOP/s in fp16 are quoted at 1.83 GHz, its 66.9 in fp32 at 1.98).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GPU", "GPUS", "Processor", "card_name", "gpu"]


@dataclass(frozen=True)
class Processor:
    """Rates of a processor, from which the cost model predicts times.

    Parameters
    ----------
    name : str
    matrix_flops : mapping of str to float
        Floating-point operations per second in matrix products, by dtype.
    scalar_flops, exps, bandwidth : float
        Per second: other single-precision operations, single-precision exponentials, bytes to and from main memory.
    launch_seconds : float
        Seconds that starting a kernel takes.
    transfer : float
        Bytes per second between host and device; inf on the host.
    threads : int
        Of a CPU; the rates are those of all threads together.
    overlaps : bool
        Whether the units work side by side, so that the slowest decides. On a CPU that runs array operations one after
        another the times add up.
    source : str
        Where the figures come from.
    """

    name: str
    matrix_flops: Mapping[str, float]
    scalar_flops: float
    exps: float
    bandwidth: float
    launch_seconds: float
    transfer: float = float("inf")
    threads: int = 1
    overlaps: bool = True
    source: str = ""


@dataclass(frozen=True)
class GPU:
    """A GPU by its data sheet; dense rates, without sparsity, sums in fp32.

    Parameters
    ----------
    name : str
        As the driver writes it, without the vendor.
    aliases : tuple of str
        Short names for the command line.
    architecture : str
        ``"sm_86"``.
    sms : int
        Streaming multiprocessors.
    clock_ghz : float
        Boost clock.
    matrix : mapping of str to int
        Floating-point operations per clock and multiprocessor in Tensor Cores, by dtype.
    scalar, exps : int
        fp32 operations (a fused multiply-add is two) and exponentials per clock and multiprocessor.
    bandwidth, transfer : float
        Bytes per second of its memory, and to the host.
    source : str
    """

    name: str
    aliases: tuple[str, ...]
    architecture: str
    sms: int
    clock_ghz: float
    matrix: Mapping[str, int]
    bandwidth: float
    transfer: float
    source: str
    scalar: int = 256
    exps: int = 16

    def at(self, clock_ghz: float | None = None) -> Processor:
        """Return its rates at a clock, by default the boost clock."""
        clocks = self.sms * 1e9 * (clock_ghz or self.clock_ghz)
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


_EXPS = "exps: CUDA C++ Programming Guide, arithmetic instructions"

GPUS = (
    GPU(
        "RTX A6000",
        ("a6000",),
        "sm_86",
        84,
        1.80,
        {"float16": 1024, "bfloat16": 1024, "tf32": 512, "float64": 4},
        768e9,
        25e9,
        f"NVIDIA RTX A6000 data sheet; NVIDIA Ampere GA102 whitepaper, table 2; {_EXPS}",
    ),
    GPU(
        "A100 80GB SXM",
        ("a100",),
        "sm_80",
        108,
        1.41,
        {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "float64": 128},
        2039e9,
        25e9,
        f"NVIDIA A100 data sheet; NVIDIA A100 whitepaper, table 1; {_EXPS}",
        scalar=128,
    ),
    GPU(
        "H100 SXM",
        ("h100",),
        "sm_90",
        132,
        1.98,
        {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float64": 256},
        3350e9,
        50e9,
        f"NVIDIA H100 data sheet (fp16 quoted at 1.83 GHz); NVIDIA H100 whitepaper; {_EXPS}",
    ),
    GPU(
        "H200 SXM",
        ("h200",),
        "sm_90",
        132,
        1.98,
        {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float64": 256},
        4800e9,
        50e9,
        f"NVIDIA H200 data sheet (fp16 quoted at 1.83 GHz); {_EXPS}",
    ),
    GPU(
        "L40S",
        ("l40s",),
        "sm_89",
        142,
        2.52,
        {"float16": 1024, "bfloat16": 1024, "tf32": 512, "float64": 4},
        864e9,
        25e9,
        f"NVIDIA L40S data sheet; NVIDIA Ada GPU architecture whitepaper; {_EXPS}",
    ),
    GPU(
        "GeForce RTX 4090",
        ("rtx4090", "4090"),
        "sm_89",
        128,
        2.52,
        {"float16": 512, "bfloat16": 512, "tf32": 256, "float64": 4},
        1008e9,
        25e9,
        f"NVIDIA Ada GPU architecture whitepaper, appendix A (sums in fp32 at half the L40S's rate); {_EXPS}",
    ),
    GPU(
        "B200",
        ("b200",),
        "sm_100",
        148,
        1.85,
        {"float16": 8192, "bfloat16": 8192, "tf32": 4096, "float64": 128},
        8000e9,
        50e9,
        f"NVIDIA HGX B200 data sheet (2.25 PFLOP/s fp16 dense, at which the clock is taken); {_EXPS}",
    ),
)

#: Words that tell a variant from the card of the same name: it has fewer multiprocessors, or other clocks.
_VARIANTS = {"pcie", "nvl", "laptop", "max", "d", "ada", "mig"}


def gpu(name: str) -> GPU | None:
    """Return the GPU with that alias, or that the driver names so; None if it is not in :data:`GPUS`.

    ``"a6000"`` is the RTX A6000, never the RTX 6000 Ada Generation. Variants of a card under its name (PCIe, laptop)
    have other rates and are not known.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & _VARIANTS:
        return None
    joined = re.sub(r"[^a-z0-9]+", "", name.lower())
    return next((card for card in GPUS if words & set(card.aliases) or joined in card.aliases), None)


def card_name(name: str) -> str:
    """Return a card's name as in :data:`GPUS`; if it is not there, the driver's name without the vendor."""
    card = gpu(name)
    return card.name if card else name.removeprefix("NVIDIA ").strip()
