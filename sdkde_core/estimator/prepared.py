"""Prepared training sets: validated, whitened, moved and packed once, then any number of queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..archive import write
from ..bandwidth.matrix import Bandwidth
from .batches import check_out, densities, gradients, watched
from .fitted import Fitted
from .negative import NegativeMass
from .public import public
from .request import Goal, Request
from .saved import from_saved, to_saved

__all__ = ["Prepared"]


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """A training set made ready for queries by :func:`sdkde_core.prepare`.

    It is immutable, safe to use from several threads, and pickles and copies: with its columns, so that a process or
    host that loads it has nothing left to do but to pack them, for the same backend, or for the best one that is there.
    :meth:`save` writes the same to a file that is safe to load.

    Attributes
    ----------
    method : {"sdkde", "kde", "laplace"}
    n_train, n_dimensions : int
    bandwidth : Bandwidth
    precision : {"fast", "high", "float64"}
    backend, device : str
        What was chosen.
    """

    _fitted: Fitted
    _dtype: str

    @property
    def method(self) -> str:
        return self._fitted.request.method

    @property
    def n_train(self) -> int:
        return self._fitted.problem.n

    @property
    def n_dimensions(self) -> int:
        return self._fitted.problem.d

    @property
    def bandwidth(self) -> Bandwidth:
        return self._fitted.bandwidth

    @property
    def precision(self) -> str:
        return self._fitted.problem.precision

    @property
    def backend(self) -> str:
        return self._fitted.current.choice.name

    @property
    def device(self) -> str:
        return self._fitted.current.choice.device

    @public
    def estimate(self, query: Any, *, log: bool = False, out: Any = None, progress: Any = False) -> Any:
        """Estimate the density at ``query``.

        The same numbers as ``sdkde_core.estimate(train, query, ...)``, within the bounds of the precision.

        Parameters
        ----------
        query : (m, d) or (m,) array_like
            As for :func:`sdkde_core.estimate`, but required.
        log : bool
            Return log p̂. Laplace: NaN where p̂ < 0, with one RuntimeWarning, or −inf where that is clipped.
        out, progress
            As for :func:`sdkde_core.estimate`: with one of them the rows are cut into batches.

        Returns
        -------
        (m,) array
            ``out``, or one of the kind and on the device of ``query``, with the wider dtype of it and of the training
            samples.

        Raises
        ------
        TypeError, ValueError
            A query that cannot be right.
        BackendUnavailable
            The backend that was named, or with ``"auto"`` any, cannot answer queries so far from the training samples.
        """
        given = self._fitted.asked(query)
        check_out(out, given)
        with watched(progress, given.shape[0]) as advance:
            return densities(self._fitted, given, log, out, advance)

    @public
    def negative_mass(self) -> NegativeMass:
        """Return how much of the Laplace estimate is below zero: ∫ max(−p̂, 0), before ``negative`` changes that.

        The estimate integrates to 1, so its positive part to 1 + that. In one dimension by quadrature. In more, and
        where samples lie scattered over a thousand bandwidths, by 8192 draws with a fixed seed. The first call computes
        it, and keeps it.

        Returns
        -------
        NegativeMass
            With ``mass`` and its ``standard_error``, 0 by quadrature.

        Raises
        ------
        ValueError
            The method is another than ``"laplace"``, and never negative.
        """
        if self.method != "laplace":
            raise ValueError(f"method={self.method!r} is never negative; the negative mass is that of method='laplace'")
        return self._fitted.serve(lambda fitted: fitted.negative_mass)

    @public
    def grad_log_density(self, query: Any, *, progress: Any = False) -> Any:
        """Return the score ∇log p̂ at ``query``, (m, d), per data unit; not for ``method="laplace"``.

        The first call packs the training samples for it, and keeps them. ``progress`` as for
        :func:`sdkde_core.estimate`.
        """
        Request(Goal.GRADIENT, self.method)  # raises where there is none
        given = self._fitted.asked(query)
        with watched(progress, given.shape[0]) as advance:
            return gradients(self._fitted, given, advance)

    @public
    def save(self, path: Path | str) -> None:
        """Write it to one file, which :func:`sdkde_core.load` reads here and elsewhere; overwritten if it exists.

        The file has the samples, moved and whitened, and all that was decided from them. It is no pickle; its format is
        described in :mod:`sdkde_core.archive`. After an error or an interrupt an older file is as it was.

        Parameters
        ----------
        path : path
            In a folder that exists; by custom it ends in ``.sdkde``.

        Raises
        ------
        OSError
            It cannot be written.
        TypeError
            ``backend_options`` has something else than booleans, numbers, strings, and lists and dicts of those.
        """
        write(path, "Prepared", *self.to_saved())

    def to_saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content and the arrays of a file: what other kinds of files, of this in something else, need."""
        return to_saved(self._fitted)

    @classmethod
    def from_saved(cls, content: Mapping[str, Any], arrays: Mapping[str, Any], name: str) -> Prepared:
        """Return what :meth:`to_saved` was of; ValueError where it cannot be right. ``name``: of the file."""
        fitted = from_saved(content, arrays, name)
        return cls(fitted, fitted.problem.dtype)

    def __repr__(self) -> str:
        size = f"{self.n_train} × {self.n_dimensions}"
        return f"Prepared({self.method}, {size}, {self.bandwidth}, {self.precision}, {self.backend} on {self.device})"
