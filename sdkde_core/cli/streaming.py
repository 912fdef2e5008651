"""Estimating in batches, for the command line: neither queries nor results are whole in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import estimate, explain, prepare
from ..arrays import ingest, to_host
from ..choice.hardware import cpu_threads
from ..choice.select import parse_device
from ..estimator.bandwidth import Bandwidth
from ..estimator.explanation import Explanation
from ..estimator.fitted import Prepared, TrainingSet
from ..estimator.rules import resolve
from ..estimator.spec import EstimatorSpec, Goal, asked_precision
from ..protocol import BackendUnavailable
from .files import NUMBERS, ROWS, Source

__all__ = ["Stream"]

Array = NDArray[Any]


@dataclass
class Stream:
    """An estimate of which queries and results are never whole in memory; make one with :meth:`of`.

    The training samples are moved once (sdkde) and packed once, and the density of the moved ones is then ordinary KDE,
    batch by batch. The backend is chosen once, for the whole; a batch that it cannot take goes to another only under
    ``"auto"``.

    Parameters
    ----------
    train : (n, d) float64 array
    query : Source
    bandwidth : Bandwidth
    method, weights, log, backend, device
        As for :func:`sdkde_core.estimate`.
    precision : {"fast", "high", "float64"}
    dtype : {"float32", "float64"}
        Of the result.
    plan : Explanation
        From the shapes: the backend, the device, and the predicted times.
    elsewhere : bool
        Some batch went to another backend than the plan's.
    negative : int
        Rows, so far, of which the log is NaN because the Laplace estimate is negative.
    """

    train: Array
    query: Source
    method: str
    bandwidth: Bandwidth
    weights: Array | None
    log: bool
    precision: str
    dtype: str
    backend: str
    device: str | None
    plan: Explanation
    elsewhere: bool = False
    negative: int = 0

    @classmethod
    def of(
        cls,
        train: Source,
        query: Source | None = None,
        *,
        method: str,
        bandwidth: Any,
        weights: Array | None,
        log: bool,
        precision: str,
        backend: str,
        device: str | None,
    ) -> Stream:
        """Read ``train``, validate everything but the queries' values, and choose the backend."""
        place = parse_device(device)
        query = query or train
        if train.names != query.names and sorted(train.names) == sorted(query.names):
            raise ValueError(
                f"the columns of query are {', '.join(query.names)}, those of train {', '.join(train.names)}; "
                "bring them into one order"
            )
        data = ingest(train.read(), np.empty((0, query.columns), query.dtype), weights, host=True)
        h = resolve(bandwidth, data.train, data.log_weights)
        precision = EstimatorSpec(method, precision=asked_precision(precision)).precision_for(data.dtype)
        shapes = (data.n, data.d), (max(1, query.rows), data.d)
        choice = explain(
            *shapes, method=method, bandwidth=h, weights=weights, precision=precision, backend=backend, device=place
        )
        if query is train:
            query = Source.of(train.name, data.train)
        return cls(data.train, query, method, h, weights, log, precision, data.dtype, backend, place, choice)

    @property
    def steps(self) -> int:
        """Rows to compute in all passes."""
        return self.query.rows + (len(self.train) if self.method == "sdkde" else 0)

    @property
    def predicted_seconds(self) -> float:
        """Predicted time, 0 where not known."""
        return sum(p.predicted_seconds or 0.0 for p in self.plan.passes)

    def densities(self, advance: Callable[[int], None]) -> Iterator[Array]:
        """Yield the result, in batches (k,) in order; ``advance`` is told of every k rows computed in any pass."""
        if not self.query.rows:
            return
        points, method = self.train, self.method
        if method == "sdkde":
            points, method = self._moved(advance), "kde"
        common: dict[str, Any] = {
            "method": method,
            "bandwidth": self.bandwidth,
            "weights": self.weights,
            "precision": self.precision,
            "check_finite": False,
        }
        prepared = self._somewhere(partial(prepare, points, **common))
        unprepared = partial(estimate, points, **common)
        done = 0
        for batch in self.query.batches(self._batch_rows(ROWS)):
            _check_finite(batch, done)
            yield self._density(batch, prepared, unprepared)
            done += len(batch)
            advance(len(batch))

    def _moved(self, advance: Callable[[int], None]) -> Array:
        """The samples moved by ½ H ŝ as :func:`sdkde_core.debias` does, in batches so that progress can be seen."""
        spec = EstimatorSpec("kde", Goal.GRADIENT, self.precision)
        data = ingest(self.train, None, self.weights, check_finite=False, host=True)
        samples = self._somewhere(partial(TrainingSet, spec, data, self.bandwidth))
        moved = np.empty_like(self.train)
        rows = self._batch_rows(ROWS if self.plan.device == "cpu" else len(self.train))
        for start in range(0, len(moved), rows):
            batch = self.train[start : start + rows]
            shift = samples.reduce(samples.read(batch)).shift
            moved[start : start + rows] = batch + self.bandwidth.stretch(0.5 * to_host(shift))
            advance(len(batch))
        return moved

    def _density(self, batch: Array, prepared: Prepared, unprepared: Callable[..., Any]) -> Array:
        with warnings.catch_warnings(), np.errstate(all="ignore"):  # rounding to float32 may overflow or underflow
            warnings.filterwarnings("ignore", "the Laplace estimate is negative", RuntimeWarning)
            try:
                result = prepared.estimate(batch, log=self.log)
            except BackendUnavailable:  # it reaches farther than the backend does
                if self.backend != "auto":
                    raise
                self.elsewhere = True
                result = unprepared(batch, log=self.log, device=self.device)
            result = result.astype(self.dtype)
        if self.log and self.method == "laplace":
            self.negative += int(np.isnan(result).sum())
        return result

    def _somewhere(self, call: Callable[..., Any]) -> Any:
        try:
            return call(backend=self.plan.backend, device=self.plan.device)
        except BackendUnavailable:
            if self.backend != "auto":
                raise
        self.elsewhere = True
        return call(backend="auto", device=self.device)

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
