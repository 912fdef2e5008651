"""The processors that the cost model knows: rates with their sources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Processor", "cpu_threads", "processor"]


@dataclass(frozen=True)
class Processor:
    """Peak rates of a processor, the roofs of the cost model.

    Parameters
    ----------
    name : str
    matrix_flops : mapping of str to float
        Floating-point operations per second in matrix products, by dtype.
    scalar_flops, exps, bandwidth : float
        Other floating-point operations, exponentials, and bytes of main memory per second.
    launch_seconds : float
        What starting a kernel costs.
    source : str
        Where the figures come from.
    """

    name: str
    matrix_flops: Mapping[str, float]
    scalar_flops: float
    exps: float
    bandwidth: float
    launch_seconds: float
    source: str


def cpu_threads() -> int:
    """Threads that a CPU backend may use: ``SDKDE_NUM_THREADS``, else the cores that this process may run on.

    Raises
    ------
    ValueError
        ``SDKDE_NUM_THREADS`` is not a positive integer.
    """
    text = os.environ.get("SDKDE_NUM_THREADS", "")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"SDKDE_NUM_THREADS is {text!r}; set a positive integer")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor(device: str) -> Processor | None:
    """Return the rates for ``device``; None where they are not known."""
    if device != "cpu":
        return None
    threads = cpu_threads()
    return Processor(
        name=f"CPU, {threads} threads",
        matrix_flops={"float64": 20e9 * threads, "float32": 40e9 * threads},
        scalar_flops=8e9 * threads,
        exps=1.2e9 * threads,
        bandwidth=20e9,
        launch_seconds=2e-5,
        source="nominal rates per core of a server CPU with AVX2, not a measurement of this one",
    )
