"""The protocol's two phases: columns packed in tiles on JAX's device, rows block by block."""

import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sdkde_core.plugin import checkpoint, concatenate, cpu_threads, empty, exponents, map_threads
from sdkde_core.protocol import DeviceOutOfMemory, Partial, Reduction, Support

from .info import formula
from .tiles import add_tile

# XLA compiles for every shape, a tenth of a second each. So there are few: rows and columns are filled up to these.
ROWS = (16, 64, 256, 1024)
COLUMNS = {"cpu": (256, 1024)}  # elsewhere a tile must be larger to take longer than its launch
LARGE_COLUMNS = (1024, 16384)

_process = []  # the first to call JAX, whose threads are there alone


@dataclass(frozen=True)
class _State:
    points: np.ndarray  # (n, d), as they came
    tiles: list[Any]  # pairs of a tile's columns, (d, c), and their log weights, (c,), on the device
    formula: str
    dtype: str
    log_weight: float  # what all columns have; 0 where they differ


class JaxBackend:
    """Tiles of exponentials that XLA compiles and shares out among its threads.

    Parameters
    ----------
    platform : str
        Which of JAX's devices computes: ``"cpu"``, or another that your JAX has, such as ``"gpu"`` or ``"tpu"``.
    """

    def __init__(self, platform="cpu"):
        if not isinstance(platform, str):
            raise TypeError(f"platform is {platform!r}; pass the name of one of JAX's platforms, such as 'cpu'")
        self.platform = platform

    def probe(self, device):
        """Say whether JAX has the platform."""
        try:
            _check_process()
            return Support(True, f"JAX {jax.__version__} on {self._device()}")
        except RuntimeError as error:
            return Support(False, f"JAX {jax.__version__} has no platform {self.platform!r}: {error}")

    def prepare(self, problem, columns):
        """Pack the columns in tiles, the last one filled up with columns of no weight."""
        how, dtype = formula(problem)
        points, log_weight = columns.points, 0.0
        if "weights" in problem.requires:
            log_weights = columns.log_weights
        else:
            log_weight, log_weights = float(columns.log_weights[0]), np.zeros(len(points))
        width = _at_least(len(points), COLUMNS.get(self.platform, LARGE_COLUMNS))

        def pack(start):
            here = slice(start, start + width)
            some = np.full(width, -np.inf, dtype)
            some[: len(points[here])] = log_weights[here]
            return jax.device_put((_filled_up(points[here], width, dtype), some), self._device())

        tiles = _apart(pack, range(0, len(points), width))
        return _State(points, tiles, how, dtype, log_weight)

    def reduce(self, problem, queries, state, own_offset=0):
        """Reduce a block of rows at a time, over one tile of columns after another."""
        rows = state.points if queries is None else queries
        m, height = len(rows), _at_least(len(rows), ROWS)

        def block(start):
            some = rows[start : start + height]
            u = _filled_up(some, height, state.dtype)
            sums, u = jax.device_put((_no_sums(problem, height, state.dtype), u), self._device())
            for x, log_weights in state.tiles:
                checkpoint()
                sums = add_tile(sums, u, x, log_weights, reduction=problem.reduction, formula=state.formula)
                jax.block_until_ready(sums)  # what is queued no interrupt reaches
            return _partial(problem, [None if x is None else np.asarray(x)[..., : len(some)] for x in sums], state)

        return concatenate(_apart(block, range(0, m, height))) if m else empty(problem, state.points)

    def _device(self):
        return jax.devices(self.platform)[0]


def _apart(task, arguments):
    """Return ``task`` of each argument, computed in threads of their own.

    There 64-bit numbers are on, which is a setting of the thread: the user's stays as it is, also after an interrupt,
    and the main thread, which Ctrl-C interrupts between two of Python's instructions, is never inside of XLA.
    """

    def call(argument):
        try:
            _check_process()
            with jax.enable_x64(True):
                return task(argument)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise DeviceOutOfMemory(str(error)) from error
            raise

    return map_threads(call, arguments, cpu_threads(), apart=True)


def _check_process():
    """Raise RuntimeError in a process that was forked after JAX had begun: without its threads a call never ends."""
    if not _process:
        _process.append(os.getpid())
    if _process[0] != os.getpid():
        raise RuntimeError('JAX cannot be used in this forked process; start processes by "spawn" or "forkserver"')


def _at_least(size, sizes):
    """Return the least of the sizes that has room, or the largest."""
    return next((s for s in sizes if s >= size), sizes[-1])


def _filled_up(points, size, dtype):
    """Return points as columns, (d, size), with zeros behind them."""
    result = np.zeros((points.shape[1], size), dtype)
    result[:, : len(points)] = points.T
    return result


def _no_sums(problem, b, dtype):
    """Return sums over no columns; the largest term begins finite, as −inf − −inf would be NaN."""
    more = {Reduction.MEAN: np.zeros((problem.d, b)), Reduction.LAPLACE: np.zeros(b)}
    return np.full(b, np.finfo(dtype).min, dtype), np.zeros(b), more.get(problem.reduction)


def _partial(problem, sums, state):
    """Return the results of a block, float64, in arrays that are the caller's."""
    top, total, more = sums
    scale = top.astype(np.float64) + state.log_weight
    with np.errstate(divide="ignore"):  # log 0, of a row that no column is left for
        if problem.reduction is Reduction.LAPLACE:
            return exponents.laplace(problem.d, total, more, scale)
        log_sum, shift = np.log(total) + scale, None
    if problem.reduction is Reduction.MEAN:
        shift = np.ascontiguousarray((more / np.where(total > 0, total, 1.0)).T)
    return Partial(log_sum, shift=shift)
