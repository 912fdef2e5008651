"""The key under which a tuned configuration is stored, as readable columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query

__all__ = ["FAMILY", "Key", "canonical", "octave"]

#: The columns in which a configuration's key and that of the problem it serves agree.
FAMILY = ("backend", "kernel", "config_version", "reduction", "precision", "dtype")


class Key(NamedTuple):
    """The problem, kernel and processor that a configuration was tuned for."""

    backend: str
    kernel: str
    config_version: int
    reduction: str
    precision: str
    dtype: str
    requires: str  # the problem's features: sorted names, separated by commas
    d: int  # the problem's dimension
    dimension: int  # as the kernel pads it, by which configurations are found
    n_octave: int  # log2 of the number of columns, rounded
    m_octave: int  # and of rows
    gpu: str  # the GPU's name; or the CPU's, for a backend that runs there
    architecture: str

    @classmethod
    def of(cls, query: Query, problem: Problem) -> Key:
        """Return the key of a problem."""
        kind = str(problem.reduction), problem.precision, problem.dtype, ",".join(sorted(problem.requires))
        size = problem.d, query.dimension, octave(problem.n), octave(problem.m)
        kernel = query.backend, query.kernel, query.config_version
        return cls(*kernel, *kind, *size, query.gpu, query.architecture)

    @property
    def family(self) -> tuple[object, ...]:
        """The columns of :data:`FAMILY`. A configuration can serve other problems of its family only."""
        return tuple(getattr(self, name) for name in FAMILY)

    @property
    def features(self) -> frozenset[str]:
        """The problem's features."""
        return frozenset(filter(None, self.requires.split(",")))

    def distance(self, other: Key) -> tuple[float, ...]:
        """Return how far another key of the family is: features, dimensions, and octaves in n and m."""
        octaves = abs(self.n_octave - other.n_octave), abs(self.m_octave - other.m_octave)
        dimensions = abs(math.log2(self.dimension / other.dimension))
        return len(self.features ^ other.features), dimensions, sum(octaves), max(octaves), abs(self.d - other.d)


def octave(count: int) -> int:
    """Return log2 of a count, rounded to the nearest integer."""
    return round(math.log2(max(count, 1)))


def canonical(values: Mapping[str, Any]) -> str:
    """Return values by name as text that does not depend on their order: how a configuration is stored and compared."""
    return json.dumps(dict(values), sort_keys=True)
