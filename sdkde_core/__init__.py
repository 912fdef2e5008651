"""Score-debiased kernel density estimation: estimators, the contract for backends, and the choice among them.

Public: the names below; for backends' authors :mod:`sdkde_core.protocol`, :mod:`sdkde_core.plugin`,
:mod:`sdkde_core.tuning` and :mod:`sdkde_core.testing`; among processes :mod:`sdkde_core.distributed`, and for files
:mod:`sdkde_core.scale`.
"""

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # before what imports it

from .api import backends, debias, estimate, explain, grad_log_density, prepare, select_bandwidth, warm_up
from .archive import load
from .bandwidth.matrix import Bandwidth
from .estimator.prepared import Prepared
from .messages import SdkdeWarning
from .protocol import BackendUnavailable

if TYPE_CHECKING:
    from . import distributed, plugin, protocol, scale, testing, tuning  # noqa: F401
    from .interop import plots
    from .interop.gaussian_kde import gaussian_kde
    from .interop.kernel_density import KernelDensity
    from .interop.mode_clustering import ModeClustering

__all__ = ["BackendUnavailable", "Bandwidth", "KernelDensity", "ModeClustering", "Prepared", "SdkdeWarning"]
__all__ += ["__version__", "backends", "debias", "estimate", "explain", "gaussian_kde", "grad_log_density"]
__all__ += ["load", "plots", "prepare", "select_bandwidth", "warm_up"]

logging.getLogger("sdkde").addHandler(logging.NullHandler())

#: Names that are imported on first use: the module that defines the name, or the module itself.
_LATER = {
    "KernelDensity": ".interop.kernel_density",
    "ModeClustering": ".interop.mode_clustering",
    "gaussian_kde": ".interop.gaussian_kde",
    "plots": ".interop.plots",
    **{name: f".{name}" for name in ("distributed", "plugin", "protocol", "scale", "testing", "tuning")},
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module = importlib.import_module(_LATER[name], __name__)
        return globals().setdefault(name, getattr(module, name, module))  # where Python finds it from now on
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names whose libraries are installed: consoles read every attribute that is listed."""
    needs = {"KernelDensity": "sklearn", "ModeClustering": "sklearn", "distributed": "torch"}
    return sorted(name for name in {*__all__, *_LATER} if name not in needs or importlib.util.find_spec(needs[name]))
