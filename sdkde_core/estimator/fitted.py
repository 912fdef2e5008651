"""Prepared training sets: whitened, moved and packed once, then any number of queries."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of

from ..arrays import Data, Origin, Query, convert, ingest_query
from ..engine.outliers import radii
from ..engine.packed import PreparedColumns
from ..protocol import Partial, Reduction
from .bandwidth import Bandwidth
from .density import density
from .plan import columns_of_last_pass, plan, read_extent, report
from .spec import EstimatorSpec, Goal
from .untraced import untraced

__all__ = ["Prepared", "TrainingSet"]

_logger = logging.getLogger("sdkde")


class TrainingSet:
    """The columns of a spec's last pass, where its backend has them, for rows in data units.

    Parameters
    ----------
    spec : EstimatorSpec
    data : Data
        Without a query.
    bandwidth : Bandwidth
    check_finite : bool
        Refuse NaN and inf in queries.
    **where
        ``backend``, ``device`` and ``options``, as for :func:`sdkde_core.execute.plan`; raises as that does.
    """

    def __init__(
        self, spec: EstimatorSpec, data: Data, bandwidth: Bandwidth, *, check_finite: bool = True, **where: Any
    ) -> None:
        ready = plan(spec, data, bandwidth, **where)
        self.bandwidth, self.choice, self.problem = bandwidth, ready.choice, ready.problems[-1]
        self._checked = check_finite
        centre = convert(ready.centre, ready.choice.info.arrays, ready.choice.device)
        self._whiten = bandwidth.whitening(centre)
        self.home = Origin()
        if not isinstance(centre, np.ndarray):
            self.home = Origin(array_namespace(centre), device_of(centre), on_host=False)
        self._columns = columns_of_last_pass(ready)
        self._prepared: dict[Reduction, PreparedColumns] = {}
        self._lock = threading.Lock()
        self._prepared_for(self.problem.reduction)

    def read(self, query: Any) -> Query:
        """Validate the user's query and bring it to where the columns are."""
        return ingest_query(query, self.problem.d, self.home)

    def reduce(self, query: Query, reduction: Reduction | None = None) -> Partial:
        """Reduce for every row of the query, m ≥ 1; ``reduction``: another than the last pass's."""
        start, reduction = time.perf_counter(), reduction or self.problem.reduction
        with np.errstate(all="ignore"):
            points = self._whiten(query.points)
            distances = radii(points)
            largest = array_namespace(distances).max(distances)
        check = query.check_finite if self._checked else _accept
        extent = read_extent(largest, distances, check, self.bandwidth)  # the one number that is waited for
        result, far_points = self._prepared_for(reduction).reduce(points, distances, extent)
        if _logger.isEnabledFor(logging.DEBUG):
            report(replace(self.problem, reduction=reduction, m=points.shape[0]), result, start, far_points)
        return result

    def _prepared_for(self, reduction: Reduction) -> PreparedColumns:
        with self._lock:
            if reduction not in self._prepared:
                problem, choice = replace(self.problem, reduction=reduction), self.choice
                self._prepared[reduction] = PreparedColumns(choice.backend, choice.info, problem, self._columns)
            return self._prepared[reduction]


def _accept() -> None:
    """Take NaN and inf as they are."""


class Prepared:
    """A training set made ready for queries by :func:`sdkde_core.prepare`; safe to use from several threads.

    Attributes
    ----------
    method : {"sdkde", "kde", "laplace"}
    n_train, n_dimensions : int
    bandwidth : Bandwidth
    precision : {"fast", "high", "float64"}
    backend, device : str
        What was chosen.
    """

    def __init__(self, spec: EstimatorSpec, data: Data, bandwidth: Bandwidth, **options: Any) -> None:
        self._set = TrainingSet(spec, data, bandwidth, **options)
        self._dtype = data.dtype
        self.method, self.bandwidth = spec.method, bandwidth
        self.n_train, self.n_dimensions = data.n, data.d
        self.precision = self._set.problem.precision
        self.backend, self.device = self._set.choice.name, self._set.choice.device

    @untraced
    def estimate(self, query: Any, *, log: bool = False) -> Any:
        """Estimate the density at ``query``.

        The same numbers as ``sdkde_core.estimate(train, query, ...)``, within the bounds of the precision.

        Parameters
        ----------
        query : (m, d) or (m,) array_like
            As for :func:`sdkde_core.estimate`, but required.
        log : bool
            Return log p̂. Laplace: NaN where p̂ < 0, with one RuntimeWarning.

        Returns
        -------
        (m,) array
            Of the kind and on the device of ``query``, with the wider dtype of it and of the training samples.

        Raises
        ------
        TypeError, ValueError
            A query that cannot be right.
        BackendUnavailable
            The backend cannot answer queries so far from the training samples.
        """
        read = self._set.read(query)
        if not read.points.shape[0]:
            return self._restored(np.empty(0), read)
        sums = self._set.reduce(read)
        return self._restored(density(sums, self.bandwidth.log_constant, log), read)

    @untraced
    def grad_log_density(self, query: Any) -> Any:
        """Return the score ∇log p̂ at ``query``, (m, d), per data unit; not for ``method="laplace"``.

        The first call packs the training samples for it, and keeps them.
        """
        EstimatorSpec(self.method, Goal.GRADIENT)  # says what cannot be
        read = self._set.read(query)
        if not read.points.shape[0]:
            return self._restored(np.empty((0, self.n_dimensions)), read)
        shift = self._set.reduce(read, Reduction.MEAN).shift
        return self._restored(self.bandwidth.pull_back(shift), read)

    def _restored(self, x: Any, query: Query) -> Any:
        return query.origin.restore(x, max(query.dtype, self._dtype))  # "float64" > "float32"

    def __repr__(self) -> str:
        size = f"{self.n_train} × {self.n_dimensions}"
        return f"Prepared({self.method}, {size}, {self.bandwidth}, {self.precision}, {self.backend} on {self.device})"
