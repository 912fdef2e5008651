"""Score-debiased kernel density estimation: estimators, the contract for backends, and the choice among them.

Public: the names below; for backends' authors :mod:`sdkde_core.protocol`, :mod:`sdkde_core.plugin`,
:mod:`sdkde_core.tuning` and :mod:`sdkde_core.testing`.
"""

import logging

from .api import (
    backends,
    debias,
    estimate,
    explain,
    grad_log_density,
    prepare,
    release_replays,
    select_bandwidth,
    warm_up,
)
from .bandwidth.matrix import Bandwidth
from .estimator.prepared import Prepared
from .interop.persistence import load
from .messages import SdkdeWarning
from .protocol import BackendUnavailable

__all__ = [
    "BackendUnavailable",
    "Bandwidth",
    "Prepared",
    "SdkdeWarning",
    "__version__",
    "backends",
    "debias",
    "estimate",
    "explain",
    "grad_log_density",
    "load",
    "prepare",
    "release_replays",
    "select_bandwidth",
    "warm_up",
]

__version__ = "0.1.0"

logging.getLogger("sdkde").addHandler(logging.NullHandler())
