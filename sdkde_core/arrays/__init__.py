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
    listed,
    numbers,
    refuse_masked,
    refuse_misread,
    refuse_not_finite,
)
from .places import (
    Array,
    Origin,
    array_namespace,
    c_order,
    convert,
    detached,
    device_name,
    is_attached,
    is_traced,
    look,
    public,
    quiet,
    rounded,
    to_host,
)
