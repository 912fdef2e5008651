"""Estimates of files: queries are read, and results written, by the batches of :mod:`sdkde_core.estimator.batches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import fitted
from ..arrays import Argument, ingest
from ..bandwidth.rules import resolve
from ..estimator.batches import batch_rows, density_of, in_batches
from ..estimator.density import has_gaps, undefined
from ..estimator.explanation import Explanation, explained
from ..estimator.request import Goal, Request
from ..scale.files import Source, check_order

__all__ = ["Stream"]

Array = NDArray[Any]


@dataclass
class Stream:
    """An estimate of which queries and results are never whole in memory; make one with :meth:`of`.

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
        From the shapes: the predicted times.
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
        """Read ``train``, and validate everything but the queries' values.

        ``options``: as for :func:`sdkde_core.estimate`.
        """
        request = Request(Goal.DENSITY, **options, calls=1)
        query = query or train
        check_order(train, query)
        data = ingest(train.read(), np.empty((0, query.columns), query.dtype), request.weights, device="cpu")
        given = request.bandwidth, data.train, data.log_weights
        bandwidth = resolve(*given, method=request.method, kernel=request.kernel)
        request = replace(request, precision=request.precision_for(data.dtype), bandwidth=bandwidth)
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
        shape = np.broadcast_to(np.zeros((), self.query.dtype), (self.query.rows, self.query.columns))
        ready = fitted(self.request, self.train, Argument.of("query", shape), advance)
        self.where = f"{ready.choice.name} on {ready.choice.where}"
        size = batch_rows(self.query.rows, ready.problem)
        for part in in_batches(ready, self._rows(size), density_of(self.log), advance):
            self.elsewhere = ready.has_second
            self.negative += undefined(part) if has_gaps(self.request, self.log) else 0
            yield part.astype(self.dtype)

    def _rows(self, size: int) -> Iterator[Argument]:
        done = 0
        for batch in self.query.batches(size):
            yield Argument.of("query", batch)._replace(first=done)
            done += len(batch)
