"""An entry point that speaks protocol 99.0."""

from sdkde_core.protocol import BackendInfo

__all__ = ["INFO"]

INFO = BackendInfo(
    name="future",
    protocol=(99, 0),
    implementation="future_backend.backend:FutureBackend",  # refused before it could be missed
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights"}),
)
