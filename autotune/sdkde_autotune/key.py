"""What a tuned configuration is for, as readable columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query

__all__ = ["Key", "canonical", "octave"]


class Key(NamedTuple):
    """The columns that say what a configuration is for. Versions of the software are no part of it: see provenance.

    Parameters
    ----------
    backend, kernel : str
    config_version : int
    reduction, precision, dtype : str
    requires : str
        Sorted names, with commas.
    deterministic : int
    dimension : int
        As the kernel pads it.
    n_octave, m_octave : int
        log2 of the columns and of the rows, rounded.
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
        """The key of a problem."""
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
        """All but sizes, card and architecture: only within a family is one configuration good for another problem."""
        return self[:9]


def octave(count: int) -> int:
    """log2 of a count, rounded to the nearest integer."""
    return round(math.log2(max(count, 1)))


def canonical(values: Mapping[str, Any]) -> str:
    """Return values by name as text that does not depend on their order: how a configuration is stored and compared."""
    return json.dumps(dict(values), sort_keys=True)
