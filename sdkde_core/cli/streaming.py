"""Estimates in batches, for the command line: neither queries nor results are whole in memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import debias, estimate, explained, prepared
from ..arrays import ingest
from ..bandwidth.rules import resolve
from ..choice.hardware import cpu_threads
from ..estimator.explanation import Explanation
from ..estimator.fitted import Progress
from ..estimator.prepared import Prepared
from ..estimator.request import Goal, Request
from ..protocol import BackendUnavailable
from .files import NUMBERS, ROWS, Source, check_order

__all__ = ["Stream"]

Array = NDArray[Any]


@dataclass
class Stream:
    """An estimate of which queries and results are never whole in memory; make one with :meth:`of`.

    The training samples are moved once (sdkde) and packed once, and the density of the moved ones is then ordinary KDE,
    batch by batch. The backend is chosen once, for the whole, by the samples; a batch that it cannot take goes to
    another only under ``"auto"``.

    Parameters
    ----------
    train : (n, d) float64 array
    query : Source
    request : Request
        As the user made it, with the bandwidth and the precision that it means for the data.
    log : bool
    dtype : {"float32", "float64"}
        Of the result.
    plan : Explanation
        From the shapes: the backend, the device, and the predicted times.
    where : str
        The backend and the device that the samples call for, once they are prepared.
    elsewhere : bool
        Some batch went to another backend.
    negative : int
        Rows, so far, of which the log is NaN because the Laplace estimate is negative.
    """

    train: Array
    query: Source
    request: Request
    log: bool
    dtype: str
    plan: Explanation
    where: str = ""
    elsewhere: bool = False
    negative: int = 0

    @classmethod
    def of(
        cls,
        train: Source,
        query: Source | None = None,
        *,
        log: bool,
        **options: Any,
    ) -> Stream:
        """Read ``train``, validate everything but the queries' values, and choose the backend.

        ``options``: as for :func:`sdkde_core.estimate`.
        """
        request = Request(Goal.DENSITY, **options, calls=1)
        query = query or train
        check_order(train, query)
        data = ingest(train.read(), np.empty((0, query.columns), query.dtype), request.weights, host=True)
        given = request.bandwidth, data.train, data.log_weights
        bandwidth = resolve(*given, method=request.method, kernel=request.kernel)
        precision = request.precision_for(data.dtype)
        request = replace(request, precision=precision, bandwidth=bandwidth, check_finite=False)
        plan = explained(request, (data.n, data.d), (max(1, query.rows), data.d), measure=False)
        if query is train:
            query = Source.of(train.name, data.train)
        return cls(data.train, query, request, log, data.dtype, plan)

    @property
    def steps(self) -> int:
        """Rows to compute in all passes."""
        return self.query.rows + (len(self.train) if self.request.method == "sdkde" else 0)

    @property
    def predicted_seconds(self) -> float:
        """Predicted time, 0 where not known."""
        return sum(p.predicted_seconds or 0.0 for p in self.plan.passes)

    def densities(self, advance: Callable[[int], None]) -> Iterator[Array]:
        """Yield the result, in batches (k,) in order; ``advance`` is told of every k rows computed in any pass."""
        if not self.query.rows:
            return
        ready = self._prepared(advance)
        self.where = f"{ready.backend} on {ready.device}"
        done = 0
        for batch in self.query.batches(self._batch_rows(ROWS)):
            _check_finite(batch, done)
            yield self._density(batch, ready)
            done += len(batch)
            advance(len(batch))

    def _prepared(self, advance: Callable[[int], None]) -> Prepared:
        """The samples moved and packed, on the plan's device if something can."""
        progress = Progress(advance, self._batch_rows(ROWS if self.plan.device == "cpu" else len(self.train)))
        how: dict[str, Any] = {"expected": self.query.rows, "progress": progress}
        try:
            return prepared(replace(self.request, device=self.plan.device), self.train, **how)
        except BackendUnavailable:
            if self.request.backend != "auto":
                raise
        return prepared(self.request, self.train, **how)

    def _density(self, batch: Array, ready: Prepared) -> Array:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the Laplace estimate is negative", RuntimeWarning)
            try:
                result = ready.estimate(batch, log=self.log)
            except BackendUnavailable:  # it reaches farther than the backend does
                if self.request.backend != "auto":
                    raise
                self.elsewhere = True
                points, method = self._moved
                result = estimate(points, batch, method=method, log=self.log, **self.request.options("method"))
            result = result.astype(self.dtype)
        if self.log and self.request.method == "laplace":
            self.negative += int(np.isnan(result).sum())
        return result

    @functools.cached_property
    def _moved(self) -> tuple[Array, str]:
        """The samples, moved if the method moves them, and the method that is left: for batches out of reach."""
        if self.request.method != "sdkde":
            return self.train, self.request.method
        return debias(self.train, **self.request.options("method")), "kde"

    def _batch_rows(self, most: int) -> int:
        """Rows of a batch: some 32 MiB, on the CPU about a second's work; from the shapes alone, as bits depend on it.

        At least 256: fewer would occupy no backend.
        """
        n, d = self.train.shape
        rows = min(most, NUMBERS // d)
        if self.plan.device == "cpu":
            rows = min(rows, cpu_threads() * (1 << 32) // (n * (d + 16)))
        return max(rows, 256)


def _check_finite(batch: Array, start: int) -> None:
    finite = np.isfinite(batch)
    if not finite.all():
        i, j = (int(k) for k in np.argwhere(~finite)[0])
        raise ValueError(
            f"query has values that are not finite, the first {batch[i, j]} at row {start + i}, column {j}; "
            "drop or fill them"
        )
