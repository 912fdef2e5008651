"""Fitted columns as what a file can hold, and back: numbers, strings and float64 arrays, each checked.

docs/architecture.md has the content of a file of the kind ``"Prepared"``; see :mod:`sdkde_core.archive`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..archive import plain
from ..arrays import Array, Origin
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.selection import Selection
from ..coordinates import Coordinates
from ..engine.groups import Group
from ..engine.outliers import radii
from ..messages import brief, warn_once
from ..protocol import BackendUnavailable, Columns
from .fitted import loaded
from .mapped import Mapped
from .request import Goal, Options, Request
from .stacked import Part, Stacked


def to_saved(fitted: Any, origin: Origin) -> tuple[dict[str, Any], dict[str, Array]]:
    """The content and the arrays of a file; TypeError for backend_options that JSON does not have."""
    fitted = fitted.current
    if fitted.coordinates is not None:
        inner, known = to_saved(fitted.first, origin)
        maps, own = fitted.coordinates.to_saved()
        about = {"samples": fitted.problem.n, "origin": list(origin.address)}
        return {"coordinates": maps, "inner": inner, **about}, known | own
    if fitted.parts:
        content: dict[str, Any] = {"stacked": [], "samples": fitted.problem.n}
        arrays: dict[str, Any] = {}
        for k, (label, log_share, one, left_out) in enumerate(fitted.parts):
            part, own = to_saved(one, origin)
            content["stacked"].append([label, log_share, part, left_out])
            arrays |= {f"part {k}.{name}": x for name, x in own.items()}
        return content | {"origin": list(origin.address)}, arrays
    request, bandwidth, problem, backend, centre, groups, names = fitted.state(fitted.choice.name)
    options = request.options("bandwidth", "weights") | {"precision": problem.precision}
    options["check_finite"] = bool(options["check_finite"])
    if request.backend_options is not None:
        options["backend_options"] = plain("backend_options", request.backend_options)
    content = {
        "request": options,
        "names": list(names),
        "rule": bandwidth.rule,
        "selection": None,
        "dtype": problem.dtype,
        "weighted": "weights" in problem.requires,
        "rows": problem.m,
        "samples": problem.n,
        "extent": problem.extent,
        "groups": [[group.n, group.scale, group.log_share] for group in groups],
        "backend": backend,
        "origin": list(origin.address),
    }
    points, log_weights = ([getattr(group.columns, name) for group in groups] for name in ("points", "log_weights"))
    arrays = {"points": np.concatenate(points), "log_weights": np.concatenate(log_weights), "centre": centre}
    arrays |= bandwidth.arrays()
    if bandwidth.selection is not None:
        chosen = {name: x.item() if isinstance(x, np.generic) else x for name, x in vars(bandwidth.selection).items()}
        arrays |= {f"selection.{name}": x for name, x in chosen.items() if isinstance(x, np.ndarray)}
        content["selection"] = {name: x for name, x in chosen.items() if not isinstance(x, np.ndarray)}
    return content, arrays


def from_saved(content: Mapping[str, Any], arrays: Mapping[str, Array], name: str) -> Any:
    """Return the columns, with the backend that made them, or another one; nothing in the file ``name`` is trusted."""
    if "coordinates" in content:
        inner = from_saved(_checked(content, "inner", dict), arrays, name)
        maps = Coordinates.from_saved(content["coordinates"], arrays, inner.problem.d, inner.names)
        if not 0 < (n := _checked(content, "samples", int)) <= inner.problem.n:
            raise ValueError("its samples cannot be right")
        return Mapped(inner, maps, n)
    if "stacked" in content:
        return _stacked(content, arrays, name)
    options = dict(_checked(content, "request", dict))
    # What cannot be had where the file is loaded is done without.
    where = {key: options.pop(key, None) for key in ("backend", "device", "backend_options")}
    named = {key: value for key, value in where.items() if value not in (None, "auto")}
    if unknown := options.keys() - Options.__annotations__:
        name = min(unknown)
        raise ValueError(f"it has the option {name!r}, which this version does not know; pip install -U sdkde-core")
    if type(options.get("check_finite", True)) is not bool:
        raise ValueError(f"its option check_finite is {brief(options['check_finite'])}")
    request = Request(Goal.DENSITY, **options).settled
    for key, ndim in (("points", 2), ("log_weights", 1), ("centre", 1)):
        x = arrays.get(key)
        if x is None or x.ndim != ndim or x.dtype != np.float64:
            raise ValueError(f"its array {key!r} is missing, or is another")
    points, log_weights, centre = arrays["points"], arrays["log_weights"], arrays["centre"]
    d, groups = points.shape[1], _groups(content.get("groups"), points, log_weights)
    n = _checked(content, "samples", int)
    selection = _selection(content.get("selection"), arrays, d)
    bandwidth = Bandwidth.from_arrays(arrays, _checked(content, "rule", str), selection)
    if selection is not None:
        bandwidth = request.annotated(bandwidth)
    if bandwidth.d != d or len(centre) != d:
        raise ValueError("its arrays do not fit one another")
    weighted, rows = _checked(content, "weighted", bool), _checked(content, "rows", int)
    for logs in (group.columns.log_weights for group in groups):
        if not abs(np.exp(logs).sum() - 1.0) < 1e-6 or not (weighted or (logs == logs[0]).all()):
            raise ValueError("its weights cannot be right")
    dtype, extent = _checked(content, "dtype", str), _checked(content, "extent", float)
    distances = radii(points)
    if request.check_finite and (np.isnan(distances).any() or not np.isfinite(centre).all()):
        raise ValueError("its samples are not finite")
    extent = max(extent, float(distances[~np.isnan(distances)].max(initial=0.0)))  # no backend is to look beyond it
    if dtype not in ("float32", "float64") or not 0 < rows < 1 << 63 or not 0 < n < 1 << 63 or not extent < 1e150:
        raise ValueError("its fields cannot be right")
    asked = None if rows == n else rows, n, d, extent, frozenset(["weights"] * weighted), dtype, "cpu"
    problem = replace(request.problems(*asked)[request.answering], extent=extent)
    names = _checked(content, "names", list)
    if len(names) not in (0, d) or not all(isinstance(name, str) for name in names):
        raise ValueError("its columns' names cannot be right")
    state = bandwidth, problem, _checked(content, "backend", str), centre, groups, tuple(names)
    try:
        return loaded(replace(request, **named), *state)
    except (BackendUnavailable, TypeError, ValueError) as error:
        if not named:
            raise
        fitted = loaded(request, *state)
        wanted = ", ".join(f"{key}={brief(value)}" for key, value in named.items())
        warn_once(f"{name} was made with {wanted}, not to be had here ({error}); {fitted.choice.name} takes its place")
        return fitted


def _stacked(content: Mapping[str, Any], arrays: Mapping[str, Array], name: str) -> Any:
    parts = list[Part]()
    for k, one in enumerate(_checked(content, "stacked", list)):
        match one:
            case [str(label), float(log_share), dict(part), float(left_out) | (None as left_out)]:
                start = f"part {k}."
                own = {key.removeprefix(start): x for key, x in arrays.items() if key.startswith(start)}
                parts.append(Part(label, log_share, from_saved(part, own, name), left_out))
    n = _checked(content, "samples", int)
    if len(parts) != len(content["stacked"]) or not parts or not 0 < n < 1 << 63:
        raise ValueError("its parts cannot be right")
    alike = len({(part.fitted.problem.d, part.fitted.problem.dtype) for part in parts}) == 1
    for fitted in (part.fitted for part in parts):
        inside = ("kde", "sdkde") if fitted.coordinates is None else ("kde", "sdkde", "stacked")
        alike &= not fitted.parts and fitted.request.method in inside and fitted.request.kernel == "gaussian"
    if not alike or not abs(sum(math.exp(min(part.log_share, 1.0)) for part in parts) - 1.0) < 1e-6:
        raise ValueError("its parts do not fit one another")
    first = parts[0].fitted.request
    return Stacked(replace(first, method="stacked", step=None, score_bandwidth=None, tails=None), parts, n)


def origin_of(content: Mapping[str, Any]) -> Origin:
    """Where the samples came from, if that is here, and of a library that is known: no other is imported."""
    known = "array_api_compat.torch", "array_api_compat.cupy", "jax.numpy"
    match content.get("origin"):
        case [str(library), str(device), bool(on_host)] if library in known:
            return Origin.at(library, device, on_host)
    return Origin()


def _groups(content: Any, points: Array, log_weights: Array) -> tuple[Group, ...]:
    found, start = list[Group](), 0
    for one in content if isinstance(content, list) else ():
        match one:
            case [int(n), float(scale), float(share)] if n > 0 and 0.1 < scale <= 16.0 and share < math.inf:
                here, start = slice(start, start + n), start + n
                found.append(Group(Columns(points[here], log_weights[here]), scale, share))
    if not found or len(found) != len(content) or not start == len(points) == len(log_weights):
        raise ValueError("its groups do not fit its arrays")
    if not abs(sum(math.exp(min(group.log_share, 1.0)) for group in found) - 1.0) < 1e-6:
        raise ValueError("its groups' shares cannot be right")
    return tuple(found)


def _selection(content: Any, arrays: Mapping[str, Array], d: int) -> Selection | None:
    if content is None:
        return None
    known = {"multiples", "least_squares", "likelihood", "units"}
    curves = {name.removeprefix("selection."): x for name, x in arrays.items() if name.startswith("selection.")}
    found: dict[str, Any] = {**content, **curves} if isinstance(content, dict) else {}
    k, shape = len(curves.get("multiples", ())), curves.get("shape")
    fits = found.pop("shape", None) is shape
    types = {"method": str, "rule": str, "multiple": float, "reason": str, "used": int}
    fits &= {name: type(x) for name, x in found.items() if name not in known} == types
    sizes = {"shape": (d, d), "units": (d,)}
    fits &= all(x.shape == sizes.get(name, (k,)) and x.dtype == float for name, x in curves.items())
    if not fits or not known <= set(curves) or not (np.diff(curves["multiples"], prepend=0.0) > 0.0).all():
        raise ValueError("its selection of the bandwidth cannot be right")
    return Selection(**found, shape=shape)


def _checked(content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"its {name} is {brief(value)}")
    return value
