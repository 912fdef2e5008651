"""What backends share: public, so that a third party's backend has all that the shipped ones have.

The page "Writing a backend" has a table of them. ``exponents``, ``grids``, ``launches``, ``prices`` and ``products``
are modules with descriptions of their own.
"""

from __future__ import annotations

from .arrays import array_namespace
from .choice import cost as prices
from .choice import grids
from .choice.hardware import cpu_threads
from .engine import exponents, launches, products
from .engine.columns import reduce_pass
from .engine.devices import current_stream, in_slabs, on_device, without_grad
from .engine.exact import reduce_exact
from .engine.forks import in_child, new_lock
from .engine.launches import PerStream, Slots
from .engine.merge import concatenate, each, empty, merge, put
from .engine.threads import check_threads, checkpoint, map_threads
from .fresh import run_python
from .messages import parse_size, warn_once
from .storage import cache_folder, write_atomically

__all__ = ["PerStream", "Slots", "array_namespace", "cache_folder", "check_threads", "checkpoint", "concatenate"]
__all__ += ["cpu_threads", "current_stream", "each", "empty", "exponents", "grids", "in_child", "in_slabs", "launches"]
__all__ += ["map_threads", "merge", "new_lock", "on_device", "parse_size", "prices", "products", "put", "reduce_exact"]
__all__ += ["reduce_pass", "run_python", "warn_once", "without_grad", "write_atomically"]
