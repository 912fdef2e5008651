"""What backends share: public, so that a third party's backend has all that the shipped ones have.

=================  ===================================================================================================
threads            :func:`cpu_threads` (honours ``SDKDE_NUM_THREADS``), :func:`check_threads`, :func:`map_threads`,
                   :func:`checkpoint`, where a task ends whose call was interrupted
forked children    :func:`new_lock`, :class:`Unforkable` libraries, :func:`in_child`
the host's memory  :func:`claim_memory` before a library that ends the process without
partial results    :func:`merge` over columns, :func:`concatenate` over rows,
                   :func:`each` array, :func:`empty` for no rows
whole reductions   :func:`reduce_exact` by direct differences, for rows that a fast formula must not answer;
                   :func:`reduce_pass` as the core does it: weights of zero dropped, outliers summed apart
exponents          :mod:`exponents <sdkde_core.engine.exponents>` of tiles: expanded squares, split squares, differences
matrix products    the module :mod:`products <sdkde_core.engine.products>`: by BLAS, on the calling thread alone
files              :func:`cache_folder`, :func:`write_atomically`
options            :func:`parse_size`, bytes such as ``"256 MiB"``
fresh processes    :func:`run_python`: with nothing imported from the working directory
messages           :func:`warn_once`, with ``SdkdeWarning``, about the user's line
PyTorch's devices  :func:`in_slabs`, :func:`on_device`,
                   :class:`PerStream`, :class:`Slots`, :func:`current_stream`, :func:`without_grad`;
                   the module :mod:`launches <sdkde_core.engine.launches>`: what a small estimate launches, as a list
kernels' grids     the module :mod:`grids <sdkde_core.choice.grids>`: CUDA cards, into how many parts columns go
prices             the module :mod:`prices <sdkde_core.choice.cost>`: rates, what threads gain, the time that Work takes
=================  ===================================================================================================
"""

from __future__ import annotations

from .choice import cost as prices
from .choice import grids
from .choice.hardware import cpu_threads
from .engine import exponents, launches, products
from .engine.columns import reduce_pass
from .engine.devices import PerStream, current_stream, in_slabs, on_device, without_grad
from .engine.exact import reduce_exact
from .engine.forks import Unforkable, in_child, new_lock
from .engine.launches import Slots
from .engine.memory import claim_memory
from .engine.merge import concatenate, each, empty, merge
from .engine.threads import check_threads, checkpoint, map_threads
from .fresh import run_python
from .messages import parse_size, warn_once
from .storage import cache_folder, write_atomically

__all__ = [
    "PerStream",
    "Slots",
    "Unforkable",
    "cache_folder",
    "check_threads",
    "checkpoint",
    "claim_memory",
    "concatenate",
    "cpu_threads",
    "current_stream",
    "each",
    "empty",
    "exponents",
    "grids",
    "in_child",
    "in_slabs",
    "launches",
    "map_threads",
    "merge",
    "new_lock",
    "on_device",
    "parse_size",
    "prices",
    "products",
    "reduce_exact",
    "reduce_pass",
    "run_python",
    "warn_once",
    "without_grad",
    "write_atomically",
]
