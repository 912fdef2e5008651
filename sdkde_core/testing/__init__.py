"""The conformance suite: what a backend must do, as tests that a plugin runs with one import. Needs pytest.

:mod:`~sdkde_core.testing.problems` has the cases and the errors, :mod:`~sdkde_core.testing.checks` the checks; neither
needs pytest.
"""

from typing import Any

__all__ = ["BackendConformance"]


def __getattr__(name: str) -> Any:
    if name != "BackendConformance":
        raise AttributeError(name)
    from .conformance import BackendConformance  # only now: benchmarks use the problems without pytest installed

    return BackendConformance
