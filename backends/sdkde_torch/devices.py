"""What PyTorch's devices can do, and the process's settings that matter."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from sdkde_core.hardware import cpu_threads

__all__ = ["Place", "computes_float32_exactly", "intra_op_threads", "place"]


class Place(NamedTuple):
    """A device, and whether it has float64. Where it has none, points come and results go as tensors on the host."""

    device: torch.device
    double: bool


_places: dict[str, Place] = {}


def place(device: str) -> Place:
    """Return what ``device`` names; its float64 is tried once."""
    if device not in _places:
        found = torch.device(device)
        _places[device] = Place(found, found.type in ("cpu", "cuda") or _adds_float64(found))
    return _places[device]


def _adds_float64(device: torch.device) -> bool:
    if device.type == "mps":  # Apple's GPUs have none
        return False
    try:  # a tensor alone proves nothing: some devices hold what they cannot add
        return float(torch.ones(1, dtype=torch.float64, device=device).add_(1.0)) == 2.0
    except (RuntimeError, TypeError):
        return False


def computes_float32_exactly(device: torch.device) -> bool:
    """Whether a matrix product of float32 rounds its terms to float32 and no further, as PyTorch is set now.

    TF32 and bfloat16 products, which users allow for all of a process, would lose what the bounds count on. Settings
    are read, never written: other threads depend on them. What cannot be read is taken for the worst.
    """
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return False
        if device.type == "cuda":
            return not torch.backends.cuda.matmul.allow_tf32
        settings = getattr(torch.backends.mkldnn, "matmul", None)
        return getattr(settings, "fp32_precision", "none") in ("none", "ieee")
    except RuntimeError:  # PyTorch refuses to say, where settings of two generations were mixed
        return False


_lock = threading.Lock()
_users = 0
_before = 0


@contextmanager
def intra_op_threads(device: torch.device) -> Iterator[None]:
    """Keep PyTorch to ``SDKDE_NUM_THREADS``, where that is set, while any call is running on the CPU.

    The number is the process's: the first call in sets it, the last one out restores it.
    """
    global _users, _before
    if device.type != "cpu" or not os.environ.get("SDKDE_NUM_THREADS"):
        yield
        return
    with _lock:
        if _users == 0:
            _before = torch.get_num_threads()
            torch.set_num_threads(cpu_threads())
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.set_num_threads(_before)
