"""The key under which a tuned configuration is stored, as readable columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query

__all__ = ["Key", "canonical", "octave"]


class Key(NamedTuple):
    """The problem, kernel and card that a configuration was tuned for. Versions of software are in its provenance.

    Parameters
    ----------
    backend, kernel : str
    config_version : int
    reduction, precision, dtype : str
    requires : str
        The problem's features: sorted names, separated by commas.
    deterministic : int
    dimension : int
        The dimension as the kernel pads it.
    n_octave, m_octave : int
        log2 of the number of columns and of rows, rounded.
    gpu, architecture : str
    """

    backend: str
    kernel: str
    config_version: int
    reduction: str
    precision: str
    dtype: str
    requires: str
    deterministic: int
    dimension: int
    n_octave: int
    m_octave: int
    gpu: str
    architecture: str

    @classmethod
    def of(cls, query: Query, problem: Problem) -> Key:
        """Return the key of a problem."""
        return cls(
            query.backend,
            query.kernel,
            query.config_version,
            str(problem.reduction),
            problem.precision,
            problem.dtype,
            ",".join(sorted(problem.requires)),
            int(problem.deterministic),
            query.dimension,
            octave(problem.n),
            octave(problem.m),
            query.gpu,
            query.architecture,
        )

    @property
    def family(self) -> tuple[object, ...]:
        """The key without sizes, card and architecture. A configuration can serve other problems of its family only."""
        return self[:9]

    @property
    def query(self) -> Query:
        """The query that it was made of."""
        return Query(self.backend, self.kernel, self.config_version, self.dimension, self.gpu, self.architecture)

    def distance(self, other: Key) -> tuple[Any, ...]:
        """Return how far another key of the family is: another card, another architecture, octaves in n and m."""
        octaves = abs(self.n_octave - other.n_octave) + abs(self.m_octave - other.m_octave)
        return self.gpu != other.gpu, self.architecture != other.architecture, octaves


def octave(count: int) -> int:
    """Return log2 of a count, rounded to the nearest integer."""
    return round(math.log2(max(count, 1)))


def canonical(values: Mapping[str, Any]) -> str:
    """Return values by name as text that does not depend on their order: how a configuration is stored and compared."""
    return json.dumps(dict(values), sort_keys=True)
