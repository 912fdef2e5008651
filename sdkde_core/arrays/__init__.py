"""Arrays of every kind: validated on the way in, and returned as they came."""

from .arguments import (
    Argument,
    Data,
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
    refuse_not_finite,
)
from .looks import look, rounded
from .places import Array, Origin, c_order, convert, detached, device_name, grad_enabled, is_attached, to_host
from .quiet import public, quiet

__all__ = [
    "Argument",
    "Array",
    "Data",
    "Origin",
    "c_order",
    "check_names",
    "check_query",
    "check_shapes",
    "check_weights",
    "columns_are_points",
    "convert",
    "detached",
    "device_name",
    "grad_enabled",
    "ingest",
    "is_attached",
    "is_dask",
    "look",
    "numbers",
    "public",
    "quiet",
    "refuse_dask",
    "refuse_masked",
    "refuse_not_finite",
    "rounded",
    "to_host",
]
