"""What was saved, loaded: the kinds of files, and who reads them. Their format is :mod:`sdkde_core.archive`'s.

A kind is a class with ``save(path)``, which calls :func:`sdkde_core.archive.write` with the kind's name, and a class
method ``from_saved(content, arrays, name)``. One that has a :class:`Prepared` keeps what its ``to_saved`` returns.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from ..archive import read
from ..arrays import public


@public
def load(path: Path | str) -> Any:
    """Load what ``save`` has written: nothing in the file is executed, and damage is found.

    The numbers are those of what was saved, to the last bit with the same backend and threads. Where that backend or
    its device is not here, the best one that is takes its place, within the precision's bounds; with one
    :class:`SdkdeWarning` where the user had named it.

    Parameters
    ----------
    path : path

    Returns
    -------
    Prepared, KernelDensity or gaussian_kde
        What was saved.

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is another file, cut off, altered, or of another version of sdkde-core; the message names it.
    BackendUnavailable
        No backend that is here can take it.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(500, 2))
    >>> sdkde_core.prepare(x).save("x.sdkde")  # doctest: +SKIP
    >>> sdkde_core.load("x.sdkde").estimate([[0.0, 0.0]]).shape  # doctest: +SKIP
    (1,)
    """
    kind, content, arrays = read(path)
    name = os.fspath(path)
    modules = {  # a file says which of these it is for, and no more
        "KernelDensity": "sdkde_core.interop.kernel_density",
        "Prepared": "sdkde_core.estimator.prepared",
        "gaussian_kde": "sdkde_core.interop.gaussian_kde",
    }
    if kind not in modules:
        raise ValueError(f"{name!r} holds a {kind!r:.60}, which this version does not know; pip install -U sdkde-core")
    try:
        return getattr(importlib.import_module(modules[kind]), kind).from_saved(content, arrays, name)
    except KeyError as error:
        raise ValueError(f"{name!r} cannot be loaded: its {error.args[0]} is missing; save it anew") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:  # forged
        raise ValueError(f"{name!r} cannot be loaded: {error}; save it anew") from error
