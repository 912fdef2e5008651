"""Arrays of every kind: validated on the way in, and returned as they came."""

from .arguments import (
    Argument,
    Data,
    check_finite,
    check_names,
    check_query,
    check_shapes,
    check_weights,
    columns_are_points,
    ingest,
    is_dask,
    numbers,
    refuse_dask,
    refuse_masked,
)
from .looks import Decisions, Taken, decided, look, noting, recording, rounded, taken
from .places import Origin, c_order, convert, detached, device_name, grad_enabled, is_attached, to_host
from .quiet import public, quiet

__all__ = [
    "Argument",
    "Data",
    "Decisions",
    "Origin",
    "Taken",
    "c_order",
    "check_finite",
    "check_names",
    "check_query",
    "check_shapes",
    "check_weights",
    "columns_are_points",
    "convert",
    "decided",
    "detached",
    "device_name",
    "grad_enabled",
    "ingest",
    "is_attached",
    "is_dask",
    "look",
    "noting",
    "numbers",
    "public",
    "quiet",
    "recording",
    "refuse_dask",
    "refuse_masked",
    "rounded",
    "taken",
    "to_host",
]
