"""The operators for PyTorch: registered rightly, traced whole, and the same sums.

On the GPU where there is one, and in Triton's interpreter, on the CPU; their shapes need neither.
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from interpreter import INTERPRETED, interpreted, run
from sdkde_triton import ops
from torch._subclasses.fake_tensor import FakeTensorMode

import sdkde_core
from sdkde_core.arrays import to_host
from sdkde_core.engine.merge import each
from sdkde_core.protocol import BackendUnavailable, Partial, Reduction
from sdkde_core.testing import problems

OPS = {Reduction.LOG_SUM: ops.log_sum, Reduction.MEAN: ops.mean, Reduction.LAPLACE: ops.laplace}

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
each_reduction = pytest.mark.parametrize("reduction", list(Reduction))


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreted", marks=interpreted), pytest.param("cuda:0", id="gpu", marks=needs_gpu)]
)
def device(request):
    return request.param


def _tensors(device, n=40, m=7, d=3):
    rng = np.random.default_rng([n, m, d])
    x, y, w = (torch.tensor(rng.normal(size=size)).to(device) for size in ((n, d), (m, d), n))
    return x, y, w.log_softmax(0)


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def _same(a, b):
    return len(_tuple(a)) == len(_tuple(b)) and all(torch.equal(x, y) for x, y in zip(_tuple(a), _tuple(b)))


def _partial(reduction, result):
    fields = {"mean": ("log_sum", "shift"), "laplace": ("log_sum", "sign", "log_magnitude")}
    return each(Partial(**dict(zip(fields.get(reduction, ("log_sum",)), _tuple(result), strict=True))), to_host)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="there is a GPU, or this is what the test starts")
@pytest.mark.slow
def test_in_the_interpreter():
    run(__file__, "not gpu", "interpreted")


# --- what needs no device -----------------------------------------------------------------------------------------


def test_only_importing_them_registers_them():
    code = """
import torch, sdkde_core, sdkde_triton.backend
assert not hasattr(torch.ops.sdkde, "log_sum")
import sdkde_triton.ops
print(*sorted(str(getattr(torch.ops.sdkde, name).default) for name in ("laplace", "log_sum", "mean")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sdkde.laplace.default", "sdkde.log_sum.default", "sdkde.mean.default"]


@each_reduction
@pytest.mark.parametrize("m", [None, 0, 5])
def test_shapes_are_known_without_numbers(reduction, m):
    with FakeTensorMode():
        points, queries = torch.empty(9, 4, dtype=torch.float64), torch.empty(m or 0, 4, dtype=torch.float64)
        result = _tuple(OPS[reduction](points, None if m is None else queries))
    rows = 9 if m is None else m
    wide = [(rows,), (rows, 4)] if reduction == "mean" else [(rows,)] * (3 if reduction == "laplace" else 1)
    assert [tuple(x.shape) for x in result] == wide
    assert all(x.dtype == torch.float64 and x.is_contiguous() for x in result)


@each_reduction
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": torch.zeros(5, 2)}, r"points is a torch.float32 tensor of shape \(5, 2\).*pass float64 \(n, d\)"),
        ({"points": torch.zeros(5).double()}, "points is .* of shape"),
        ({"queries": torch.zeros(5, 2)}, "queries is a torch.float32"),
        ({"queries": torch.zeros(5, 3).double()}, "queries has 3 dimensions, but points 2"),
        ({"queries": torch.zeros(5, 2, device="meta").double()}, "all on one device"),
        ({"log_weights": torch.zeros(4).double()}, "log_weights has 4 numbers for 5"),
        ({"log_weights": torch.zeros(5, 1).double()}, r"pass float64 \(n\)"),
        ({"precision": "float64"}, r"precision is 'float64'; pass one of \('fast', 'high'\)"),
        ({"extent": -1.0}, "extent is -1.0"),
        ({"extent": float("nan")}, "extent is nan"),
        ({"points": 1e200 * torch.ones(5, 2).double()}, "extent is inf"),
        ({"points": torch.zeros(0, 2).double()}, r"points has shape \(0, 2\)"),
    ],
)
def test_what_cannot_be_right_is_refused(reduction, change, message):
    with pytest.raises(ValueError, match=message):
        OPS[reduction](**({"points": torch.ones(5, 2).double()} | change))


@pytest.mark.skipif(INTERPRETED, reason="then the CPU serves")
def test_the_cpu_needs_the_interpreter():
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1"):
        ops.log_sum(torch.zeros(5, 2).double())


# --- numbers ------------------------------------------------------------------------------------------------------


@each_reduction
@pytest.mark.parametrize("arguments", ["points", "queries", "weights", "none", "far", "strided"])
def test_they_are_registered_as_they_behave(reduction, arguments, device):
    x, y, w = _tensors(device)
    given = {
        "points": ((x,), {}),
        "queries": ((x, y), {"extent": 6.0, "precision": "fast"}),
        "weights": ((x, y, w), {"extent": 6.0}),
        "none": ((x, y[:0]), {}),
        "far": ((torch.cat([x, 1e6 + x[:3]]), y), {}),
        "strided": ((x.T.contiguous().T, y[::2], w[::1]), {"precision": "fast"}),
    }
    torch.library.opcheck(getattr(torch.ops.sdkde, reduction.value).default, *given[arguments])


@each_reduction
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("kind", ["mixture", "weights", "outlier"])
def test_they_keep_the_tolerance(reduction, kind, precision, same, device):
    case = problems.make(kind, 40, 20, 3)
    points, queries, log_weights = (torch.tensor(x).to(device) for x in (case.points, case.queries, case.log_weights))
    problem = case.problem(reduction, precision, same=same)
    want = problems.truth(case, same=same)
    arguments = points, None if same else queries, log_weights if kind == "weights" else None
    for extent in (None, problem.extent):
        got = OPS[reduction](*arguments, extent=extent, precision=precision)
        assert problems.errors(problem, _partial(reduction, got), want).max() < 1, extent


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of what its compiler imports
@each_reduction
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("weighted", [False, True])
def test_they_are_traced_whole(reduction, weighted, compiler, device):
    if compiler == "inductor" and device == "cpu":
        pytest.skip("takes a C++ compiler, and as long as all others together")
    torch.compiler.reset()

    def sums(points, queries, log_weights, extent):  # twice is exact
        return OPS[reduction](points * 2.0, queries + queries, log_weights, extent=extent)

    def given(n, m):
        x, y, w = _tensors(device, n, m)
        return (x, y, w, None) if weighted else (x, y, None, 16.0 + m / 100)

    compiled = torch.compile(sums, fullgraph=True, backend=compiler)
    for n, m in ((40, 7), (40, 7), (33, 7), (40, 12), (40, 0)):
        assert _same(compiled(*given(n, m)), sums(*given(n, m)))
    x, y, w = (to_host(a) for a in _tensors(device))
    case = problems.Case("doubled", 2.0 * x, 2.0 * y, w if weighted else np.full(len(x), -np.log(len(x))))
    got = _partial(reduction, compiled(*given(40, 7)))
    assert problems.errors(case.problem(reduction, "high"), got, problems.truth(case)).max() < 1


def test_they_are_exported_with_rows_that_are_picked(device):
    class Picked(torch.nn.Module):
        def forward(self, points, queries, keep):
            return ops.log_sum(points[keep], queries, points[keep][:, 0].log_softmax(0), extent=9.0)

    x, y, _ = _tensors(device)
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(Picked(), (x, y, x[:, 0] > 0), dynamic_shapes=({}, rows, {})).module()
    for given in ((x, y, x[:, 0] > 0.3), (x, y[:4], x[:, 1] < 0)):
        assert torch.equal(exported(*given), Picked()(*given))


@pytest.mark.parametrize("more", [-8.0, 2.0, 8.0])
def test_weights_need_not_sum_to_one(more, device):
    x, y, w = _tensors(device)
    want = torch.logsumexp(w + more - 0.5 * torch.cdist(y, x) ** 2, 1)
    torch.testing.assert_close(ops.log_sum(x, y, w + more), want, rtol=0, atol=1e-4)
    for rows in (None, y):
        torch.testing.assert_close(ops.mean(x, rows, w + more)[1], ops.mean(x, rows, w)[1], rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
def test_nan_stays_nan_and_nothing_is_differentiated(device):
    x, y, _ = _tensors(device)
    y[2, 1] = torch.nan
    assert ops.log_sum(x, y).isnan().tolist() == [False, False, True, *[False] * 4]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        ops.log_sum(x.requires_grad_()).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch imports
@pytest.mark.parametrize("prepared", [False, True])
def test_estimates_in_a_compiled_function_leave_it(prepared, device):
    x, y = (a.float() for a in _tensors(device)[:2])
    options = {"bandwidth": 0.5, "backend": "triton"}
    ready = sdkde_core.prepare(x, **options)

    def densities(x, y):
        return (ready.estimate(y * 2.0) if prepared else sdkde_core.estimate(x, y * 2.0, **options)) * 2.0

    torch.compiler.reset()
    compiled, want = torch.compile(densities, backend="aot_eager"), densities(x, y)
    for _ in range(3):
        assert torch.equal(compiled(x, y), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_documentations_example_runs(device, capsys):
    text = (Path(__file__).parent.parent / "docs" / "gradients.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "sdkde_triton" in block)
    names = {}
    with torch.compiler.set_stance("force_eager" if device == "cpu" else "default"):
        exec(compile(example.replace("cuda", device), "gradients.md", "exec"), names)
        got = names["score"](names["x"], names["y"], 0.5)
    assert capsys.readouterr().out
    want = sdkde_core.grad_log_density(names["x"], names["y"], method="kde", bandwidth=0.5, precision="float64")
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


# --- on the device only -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@each_reduction
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
def test_with_an_extent_they_only_enqueue_work(reduction, device):
    x, y, _ = _tensors(device)
    want = OPS[reduction](x, y, extent=6.0)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        assert OPS[reduction](x, y, extent=6.0) is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = OPS[reduction](x, y, extent=6.0)
    stream.synchronize()
    assert _same(there, want)
    with torch.cuda.graph(graph):
        recorded = OPS[reduction](x, y, extent=6.0)
    y.mul_(0.5)
    graph.replay()
    assert _same(recorded, OPS[reduction](x, y, extent=6.0))


@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler: what it imports, and what it does not record
@each_reduction
@pytest.mark.parametrize("extent", [None, 6.0])
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
def test_compiled_with_cuda_graphs_around_them(reduction, extent, device):
    torch.compiler.reset()
    x, y, w = _tensors(device)

    def sums(points, queries):
        return OPS[reduction](points * 0.5, queries * 0.5, w, extent=extent)

    compiled = torch.compile(sums, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert _same(compiled(x, y), sums(x, y))


@pytest.mark.parametrize("device", [pytest.param("cuda:1", marks=needs_gpu)])
def test_they_run_where_the_points_are(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, y, w = _tensors(device)
    got = ops.mean(x, y, w)
    assert all(a.device == x.device for a in got)
    assert _same(tuple(a.cpu() for a in got), tuple(a.cpu() for a in ops.mean(*_tensors("cuda:0"))))
