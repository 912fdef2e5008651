"""The straight line: an estimate of tensors on a CUDA device, in a few launches.

What the general way (:mod:`.plan`, :mod:`.fitted`) decides on the host takes ten times as long as the kernels of a
small estimate. Here two or three kernels (a backend's feature ``"line"``) compute the whitened points and log weights.
Their extent and the weights' span are read. Everything else follows from these and from the shapes, and is kept, by the
shapes and options of a call. Guards and steps other than ½ need a backend with the feature ``"moves"``. For outliers,
weights of zero, numbers that are not finite, input that requires grad, and errors the functions here return None, and
the general way answers.

While the user captures a CUDA graph nothing can be read, and there is no other way. The passes are then those for the
largest extent of the calls before. A replay whose data reach further, or are not finite, returns NaN.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import Argument, is_attached, rounded
from ..bandwidth.matrix import Bandwidth
from ..choice import registry
from ..choice.select import named_backend
from ..engine.devices import captures, memory_errors
from ..engine.failures import raise_interrupt
from ..engine.groups import Group, guard_scale
from ..engine.launches import Lists, PerStream, Varying
from ..engine.outliers import CLEAR
from ..protocol import BackendUnavailable, Columns, LineBackend, Problem, Reduction, with_fields
from .density import density, log_constant
from .moving import limits
from .plan import choose_near, read
from .request import GUARD, Goal, Request

if TYPE_CHECKING:
    from .fitted import Fitted

_logger = logging.getLogger("sdkde")


class _Passes(NamedTuple):
    extent: float
    backend: Any
    problems: tuple[Problem, ...]


class _Line:
    """The state that calls of one shape and with the same options share."""

    def __init__(self, request: Request, shape: tuple[int, int], m: int | None, dtype: Any, place: str) -> None:
        self.request, (self.n, self.d), self.m, self.place = request, shape, m, place
        self.dtype = str(dtype).removeprefix("torch.")
        self._equal, self.records = PerStream(), registry.records()
        self._scale: tuple[Bandwidth | None, PerStream] = None, PerStream()
        self.extent = 0.0  # the largest of the calls so far
        self.brief, self.lists = _brief(self.n, m), Lists(not _brief(self.n, m, 26))
        self.state: tuple[Any, ...] = ()  # what the choice of a backend depends on besides the request
        self.known: dict[tuple[float, float | None, bool], _Passes | None] = {}
        self.how: dict[str, Any] = {"data_device": place, "calls": request.calls, "without": request.without}
        self.whitening: LineBackend | None = None
        near: Any = self.passes(8.0, None) if self.brief else None  # the usual extent
        if near is None:
            near = choose_near(request, self._problems(1.0, None), True, **self.how)
            near = near if self._able(near) else None
        self.whitening = near and near.backend

    def _able(self, choice: Any) -> bool:
        return choice is not None and choice.device == self.place and "line" in choice.info.features

    def passes(self, extent: float, span: float | None, captured: bool = False) -> _Passes | None:
        """Return the passes for points within the extent; None where some of them would be summed apart.

        As extents change with the data, the passes are those for the next power of √2, if its backend is the same.
        ``span``: of the log weights, None where they are equal.
        """
        key = extent, span, captured
        if key not in self.known:
            self.known[key] = self._passes(*key) if extent <= CLEAR else None
        return self.known[key]

    def _passes(self, extent: float, span: float | None, captured: bool) -> _Passes | None:
        wide = 2.0 ** (math.ceil(2.0 * math.log2(max(extent, 1.0))) / 2.0)
        more = self.passes(wide, span, captured) if self.brief and wide != extent else None
        if more is not None and more.backend is self.whitening:  # the same at the usual extent: so between, too
            return more
        problems = self._problems(extent, span)
        choice: Any = choose_near(self.request, problems, captured, **self.how)  # a capture has no other way
        if not self._able(choice):
            return None
        if more is not None and more.backend is choice.backend:
            return more
        return _Passes(extent, choice.backend, problems)

    def equal(self, like: Any, n: int) -> Any:
        """Log weights (n,) that are all equal, where ``like`` is."""
        dtype = sys.modules["torch"].float64
        return self._equal.get(n, lambda: like.new_full((n,), -math.log(n), dtype=dtype), like)

    def guarded(self, mover: Any, columns: Columns, request: Request) -> list[tuple[Group, Columns]]:
        """The columns and their guard, see :func:`.groups_of`: of each the group, and the columns in its unit."""
        (scale, most), points, logs, share = GUARD, columns.points, columns.log_weights, request.guard
        widest, less = 16.0 if request.coordinates is None else scale, self.n > most
        wide = Group(columns, min(widest, guard_scale(self.n, self.d, scale, most)), math.log(share))
        points = mover.in_unit(points, wide.scale, *((most, logs if columns.log_range else None) if less else ()))
        some = Columns(points, self.equal(points, most) if less else logs, log_range=columns.log_range)
        return [(Group(columns, 1.0, math.log1p(-share)), columns), (wide, some)]

    def scale(self, bandwidth: Bandwidth, x: Any) -> Any:
        kept = self._scale
        if kept[0] is not bandwidth:  # a loop with one bandwidth sends it once
            kept = self._scale = bandwidth, PerStream()
        return kept[1].get("scale", lambda: bandwidth.whitener(x), x)

    def _problems(self, extent: float, span: float | None) -> tuple[Problem, ...]:
        requires = frozenset(["weights"] * (span is not None))
        found = self.request.problems(self.m, self.n, self.d, extent, requires, self.dtype, self.place)
        return found if span is None else tuple(with_fields(p, weight_span=span) for p in found)


_lines: dict[Any, _Line] = {}


def place_of(*given: Any) -> str | None:
    """Return the current CUDA device if all these tensors are there, and are ones that the line takes; else None."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for x in given:
        if type(x) is not torch.Tensor or not x.is_cuda or x.requires_grad or x.layout is not torch.strided:
            return None
        if x.dtype is not torch.float32 and x.dtype is not torch.float64:
            return None
    device = torch.cuda.current_device()
    if any(x.get_device() != device for x in given):
        return None
    return f"cuda:{device}"


def _columns(*given: Any) -> tuple[Any, ...]:
    """Tensors (n, d) or (n,) as contiguous (n, d) of the wider dtype; those that overlap the first are copied."""
    wide = next((x.dtype for x in given if x.itemsize == 8), given[0].dtype)
    first, *others = ((x[:, None] if x.ndim == 1 else x).to(wide).contiguous() for x in given)
    start, stop = first.data_ptr(), first.data_ptr() + first.nbytes
    apart = (x.data_ptr() >= stop or x.data_ptr() + x.nbytes <= start for x in others)
    return first, *(x if alone else x.clone() for x, alone in zip(others, apart))


def _line(request: Request, x: Any, m: int | None, place: str) -> _Line:
    """The line of calls like this one; it is made anew where backends have come or failed since."""
    named = named_backend(request.backend)
    how = request.goal, request.passes, request.step, request.precision, request.device
    key = (x.shape, x.dtype, m, place, named, *how)
    state = *registry.aside, *registry.warm.items(), *request.without, request.calls
    line = _lines.get(key)
    if line is None or line.state != state or line.records is not registry.records():
        if len(_lines) >= 32:  # each keeps n numbers on the device
            _lines.pop(next(iter(_lines)), None)  # the oldest: a capture needs the line of the call before
        extent = line.extent if line else 0.0
        line = _lines[key] = _Line(request.settled, x.shape, m, x.dtype, place)
        line.state, line.extent = state, extent
    return line


def estimate(request: Request, train: Any, query: Any, log: bool = False) -> tuple[Any, Request]:
    """Return the density (m,), its log, or the score (m, d), or None; and the request with the bandwidth chosen."""
    if type(train) is np.ndarray:
        return _of_arrays(request, train, query, log)
    captured = captures(train)
    if captured and isinstance(request.bandwidth, str):
        raise RuntimeError(f"bandwidth={request.bandwidth!r} reads the data, which no CUDA graph can; pass numbers")
    found, request = _of_tensors(request, train, query, log, captured)
    if captured and found is None:
        raise RuntimeError(_NOT_CAPTURED)
    return found, request


_NOT_CAPTURED = (
    "this call cannot be captured in a CUDA graph: call once with data of the same shapes, extent and options before; "
    "data must be on one device with backend 'triton' or 'hopper', bandwidth one number, weights None if not prepared; "
    "for tails and for steps other than 0.5 Triton must work there"
)


def _of_tensors(request: Request, train: Any, query: Any, log: bool, captured: bool) -> tuple[Any, Request]:
    given, weights = (train,) if query is None else (train, query), request.weights
    place = place_of(*given) if weights is None else place_of(*given, weights)
    attached = place is not None and is_attached(request.bandwidth)
    if place is None or attached or not _plain(request) or not _fits(train, query, weights):
        return None, request
    if type(request.bandwidth) in (float, int, np.float64) and 0.0 < request.bandwidth < 1e300:
        bandwidth = Bandwidth.of(float(request.bandwidth), (*train.shape, 1)[1])
    else:
        bandwidth = read(request, train, query)[1]
        request = with_fields(request, bandwidth=bandwidth)
    moving = request.moving(bandwidth)
    if bandwidth.narrow or not isinstance(bandwidth.factor, np.ndarray):
        return None, request

    what = "score" if request.goal is Goal.GRADIENT else "log" if log else "density"
    c, step, moves = moving.score_bandwidth or 1.0, moving.step or 0.5, moving.answering
    half = not moves or (c, step) == (1.0, 0.5)

    def compute() -> Any:
        nonlocal given, train, weights
        given, weights = _columns(*given), None if weights is None else weights.contiguous()
        train = given[0]
        line = _line(moving, train, None if query is None else query.shape[0], place)
        tensors, scale = given if weights is None else (*given, weights), line.scale(bandwidth, train)
        numbers = [scale] if what == "score" and not moving.guard else [scale, log_constant("gaussian", bandwidth)]
        vary = [Varying.of(x, k) if isinstance(x, float) else x for k, x in enumerate(numbers, len(tensors))]
        launched = functools.partial(launch, line, *vary)
        if captured or not line.brief:
            return launched()[0]
        how = moving.negative, moving.guard, moving.coordinates is None, moving.score_bandwidth
        key = what, getattr(scale, "ndim", 0), *how, None if weights is None else weights.dtype
        return line.lists.serve(key, (*tensors, *numbers), launched, lambda read: _served(line, read)[0])

    def launch(line: _Line, scale: Any, constant: Any = 0.0) -> tuple[Any, Any]:
        """The result, or None, and what its launches serve."""
        mover: Any = None if half and not moving.guard else registry.having("moves", place)
        unread = captured and (weights is not None or not line.extent)  # a capture cannot read these now
        if line.whitening is None or unread or (mover is None and (moving.guard or not half)):
            return None, None
        found = line.whitening.whiten(given, scale, weights=weights)
        if found is None:
            return None, None
        served, passes = _served(line, line.extent if captured else found.extent(), captured)
        if passes is None:
            return None, None
        extent, backend, problems = passes
        weighted = "weights" in problems[0].requires
        log_weights = found.log_weights if weighted else line.equal(train, line.n)
        least = -math.log(line.n) - problems[0].weight_span  # the weights sum to 1: so the largest is at least 1/n
        of = functools.partial(Columns, log_weights=log_weights, log_range=(least, 0.0) if weighted else None)
        columns, queries = of(found.points[0]), found.points[-1]
        for problem in problems[:moves]:
            scored = columns if c == 1.0 else of(mover.in_unit(columns.points, c))
            shift = backend.reduce(problem, None, backend.prepare(with_fields(problem, same=False), scored)).shift
            ends = limits(c) if step == "moments" else (step, step)
            points, weighing = columns.points, log_weights if weighted else None
            columns = of(backend.moved(points, shift) if half else mover.displaced(points, shift, weighing, c, *ends))
        groups = line.guarded(mover, columns, moving) if moving.guard else [(Group(columns), columns)]
        parts = zip(groups, problems[moves:])
        asked = [(group, p, backend.prepare(with_fields(p, same=False), scaled)) for (group, scaled), p in parts]
        result = _result(backend, place, queries, asked, constant, request.negative, what, train.dtype)
        if captured:
            result = sys.modules["torch"].where(found.extent() <= extent, result, math.nan)
        return result, served

    return _attempt(lambda: _pulled_back(compute(), bandwidth, what, train.dtype)), request


def _of_arrays(request: Request, train: Any, query: Any, log: bool) -> tuple[Any, Request]:
    """The same for NumPy's arrays, on a GPU that PyTorch uses already, if it is the fastest at the usual extent, 8."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized() or not _plain(request) or is_attached(request.bandwidth):
        return None, request
    arrays = [x for x in (train, query, request.weights) if x is not None]
    floats = train.dtype in (np.float32, np.float64) and all(type(x) is np.ndarray for x in arrays)
    if not floats or any(x.dtype != train.dtype for x in arrays) or not _fits(train, query, request.weights):
        return None, request
    (n, d), m, weighted = (*train.shape, 1)[:2], None if query is None else query.shape[0], request.weights is not None
    if (n + (m or 0)) * max(d, 16) > 1 << 23:  # copying takes longer than launching
        return None, request
    problems = request.problems(m, n, d, 8.0, frozenset(["weights"] * weighted), str(train.dtype), "cpu")
    choice = choose_near(request, problems, True, data_device="cpu", calls=request.calls, without=request.without)
    if choice is None or choice.device != f"cuda:{torch.cuda.current_device()}" or "line" not in choice.info.features:
        return None, request
    chosen = request

    def compute() -> Any:
        nonlocal chosen
        x, y, weights = (
            None if x is None else torch.from_numpy(np.array(x, order="C")).to(choice.device)
            for x in (train, query, request.weights)
        )
        found, inner = estimate(with_fields(request, weights=weights), x, y, log)
        chosen = with_fields(request, bandwidth=inner.bandwidth)
        return None if found is None else found.cpu().numpy()

    return _attempt(compute), chosen


def answer(fitted: Fitted, query: Argument, what: str) -> Any:
    """Return the ``"density"``, its ``"log"`` (m,) or the ``"score"`` (m, d) of prepared columns, or None."""
    other = fitted.second if what == "score" and fitted.groups else None  # a list of densities asks for each
    found = _answer(other.current, query, what) if other else None
    found = _answer(fitted, query, what) if found is None else found
    if found is None and captures(query.array):
        raise RuntimeError(_NOT_CAPTURED)
    return found


def _answer(fitted: Fitted, query: Argument, what: str) -> Any:
    x, request, choice = query.array, fitted.request, fitted.choice
    place = place_of(x)
    laplace_score = what in ("score", "slope") and request.method == "laplace"
    if not fitted.groups or place is None or x.ndim > 2 or not x.shape[0] or choice.device != place or choice.devices:
        return None
    if laplace_score or request.ranks or not _plain(request) or "line" not in choice.info.features:
        return None
    if len(fitted.groups) > 1 and not registry.having("moves", place):
        return None
    dtype = getattr(sys.modules["torch"], max(query.dtype, fitted.problem.dtype))  # "float64" > "float32"

    def compute() -> Any:
        nonlocal x
        (x,), packed = _columns(x), fitted.whole(fitted.reduction_for(what))
        if any(one is None for one in packed) or fitted.bandwidth.narrow:
            return None
        backend, problem = packed[0][:2]

        def near(extent: float) -> bool | None:
            return True if extent <= CLEAR and rounded(extent) <= problem.extent else None

        def launch() -> tuple[Any, bool]:
            found, captured = backend.whiten((x,), fitted.scale, fitted.centre), captures(x)
            if found is None:
                return None, True
            each, how = zip(fitted.groups, packed), (request.negative, what, dtype)
            asked = [(group, with_fields(one.problem, m=x.shape[0], same=False), one.state) for group, one in each]
            result = _result(backend, place, found.points[0], asked, fitted.log_constant, *how)
            extent = found.extent()
            if captured:
                return sys.modules["torch"].where(extent <= min(CLEAR, problem.extent), result, math.nan), True
            return result if near(extent) else None, True

        if captures(x) or not _brief(packed[0].problem.n, x.shape[0]):
            return launch()[0]
        key = what, x.shape, x.dtype, *(one.state for one in packed)  # which a list has the addresses of
        return fitted.lists.serve(key, (x,), launch, near)

    return _attempt(lambda: _pulled_back(compute(), fitted.bandwidth, what, dtype))


def _brief(n: int, m: int | None, bits: int = 32) -> bool:
    """Whether a card takes milliseconds at most for n samples and m queries; with 26 bits no longer than the host."""
    return n * max(n, m or 0) <= 1 << bits


def _result(
    backend: Any, place: str, queries: Any, asked: Any, constant: float, negative: str, what: str, dtype: Any
) -> Any:
    """Sum one or two groups, each ``asked`` as (group, problem, state); return the density, its log, or the shift."""
    (_, first, state), *others = asked
    mover: Any = registry.having("moves", place) if others else None
    rows = [None if p.same else queries if g.scale == 1.0 else mover.in_unit(queries, g.scale) for g, p, _ in asked]
    if what != "score" and not others and (first.reduction is Reduction.LOG_SUM or negative == "keep"):
        found = backend.density(first, rows[0], state, constant, what == "log", dtype)
        if found is not None:
            return found
    parts = [backend.reduce(problem, here, state) for (_, problem, state), here in zip(asked, rows)]
    if others:
        constants = tuple(constant + group.raise_by(first.d) for group, *_ in asked)
        logs, shifts = (tuple(x) for x in zip(*((sums.log_sum, sums.shift) for sums in parts)))
        if what != "score":
            return mover.joined(logs, constants, what == "log", dtype)
        return mover.joined_shifts(logs, constants, shifts, tuple(group.scale for group, *_ in asked))
    if what == "score":
        return parts[0].shift
    return density(parts[0], constant, what == "log", negative != "keep").to(dtype)


def _pulled_back(found: Any, bandwidth: Bandwidth, what: str, dtype: Any) -> Any:
    """Turn a shift into the score, by two kernels of PyTorch's, which no list of launches has; pass others on."""
    return bandwidth.pull_back(found).to(dtype) if what == "score" and found is not None else found


def _fits(train: Any, query: Any, weights: Any) -> bool:
    if train.ndim not in (1, 2) or not 0 < math.prod(train.shape) <= 1 << 24:
        return False
    if weights is not None and weights.shape != train.shape[:1]:
        return False
    (_, d), (m, of) = ((*x.shape, 1)[:2] for x in (train, train if query is None else query))  # (n,) is one column
    return m > 0 and of == d and (query is None or query.ndim in (1, 2))


def _plain(request: Request) -> bool:
    if request.kernel != "gaussian" or request.negative == "renormalise" or request.backend_options or request.ranks:
        return False
    laplace = request.goal is Goal.GRADIENT and request.passes[-1].reduction is Reduction.LAPLACE
    return not laplace and not request.adaptive and _device_asked(request)


def _device_asked(request: Request) -> bool:
    return not isinstance(request.device, tuple) and request.device != "cpu"


def _served(line: _Line, read: Any, captured: bool = False) -> tuple[Any, _Passes | None]:
    """Return the passes for what a whitening has read, after the extent and weight span that they serve; or Nones."""
    largest, span = read if isinstance(read, tuple) else (read, 0.0)
    if span == math.inf:  # a weight is not positive
        return None, None
    extent, weights = largest if captured else rounded(largest), float(math.ceil(span)) or None
    if (passes := line.passes(extent, weights, captured)) is None:
        return None, None
    line.extent = max(line.extent, extent)
    return (passes.extent, weights), passes


def _attempt(compute: Callable[[], Any]) -> Any:
    """Return a result; None where the general way is to find out what is wrong, and to say it."""
    try:
        with memory_errors():
            return compute()
    except (BackendUnavailable, MemoryError):  # it may have another backend, or fewer rows at a time
        return None
    except Warning:  # the user has made warnings errors
        raise
    except (Exception, SystemExit) as error:  # a backend may raise anything
        raise_interrupt(error)
        _logger.debug("the straight line ended with %s: %s", type(error).__name__, error)
        return None
