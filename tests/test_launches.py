"""Lists of launches: without a card kernels are Python's, and write to the CPU's memory by address as a card's do."""

import ctypes
import itertools
import threading
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import sdkde_core
from sdkde_core.engine.launches import Launches, Lists, PerStream, Slots, Varying, note, noting
from sdkde_core.estimator import straight


class Kernel:
    """out = a · x + y; ``largest`` has the largest of out, where it is not 0."""

    launched = None  # called first, if anything

    def __init__(self, n, a):
        self.key = self.n, self.a = n, a

    def place(self, addresses):
        self.addresses = addresses
        if len(addresses) > 4:
            self.a = addresses[4]

    def launch(self, stream):
        if Kernel.launched:
            Kernel.launched()
        if 0 in self.addresses[:3]:
            return  # of a recording
        x, y, out = (np.ctypeslib.as_array((ctypes.c_double * self.n).from_address(k)) for k in self.addresses[:3])
        out[:] = self.a * x + y
        if self.addresses[3]:
            ctypes.c_double.from_address(self.addresses[3]).value = out.max()

    @staticmethod
    def on(a, x, y, out, largest=None):
        kernel = Kernel(len(x), a)
        pointers = [x, y, out, 0 if largest is None else largest]
        if noting():
            note(kernel, [*pointers, a] if isinstance(a, Varying) else pointers)
        kernel.place([p if isinstance(p, int) else p.data_ptr() for p in pointers])
        kernel.launch(0)


class Estimate:
    """2 (a x + y) + x by three launches, and how often Python worked for it."""

    def __init__(self, constant=None, early=False):
        self.slots, self.lists, self.worked, self.constant = Slots(), Lists(early), 0, constant

    def launch(self, x, y):
        self.worked += 1
        numbers, time = self.slots.ready(1, x)
        between, out = torch.empty_like(x), torch.empty_like(x)
        Kernel.on(3.0, x, y, between, numbers)
        largest = self.slots.largest(1, x.device, time)
        Kernel.on(2.0, between, x if self.constant is None else self.constant, out)
        return out if largest < 1e3 else None, np.ceil(largest / 8)

    def __call__(self, x, y, key="a"):
        return self.lists.serve(key, (x, y), lambda: self.launch(x, y), lambda largest: np.ceil(largest / 8))


def drawn(n=40, scale=1.0):
    return tuple(scale * torch.rand(n, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("constant", [None, torch.arange(40.0, dtype=torch.float64)])
def test_the_second_call_is_the_list(constant):
    estimate, kept = Estimate(constant), []
    for _ in range(10):
        x, y = drawn()
        kept.append((2 * (3 * x + y) + (x if constant is None else constant), estimate(x, y)))
    assert estimate.worked == 1
    for want, got in kept:  # none has been written to again
        torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("early", [False, True])
def test_another_extent_has_another_list_and_both_stay(early):
    estimate = Estimate(early=early)
    for scale in (1.0, 10.0, 1.0, 10.0, 1.0, 10.0, 1e6):
        x, y = drawn(scale=scale)
        x[0] = y[0] = scale
        got = estimate(x, y)
        if scale < 1e6:
            torch.testing.assert_close(got, 2 * (3 * x + y) + x, rtol=1e-14, atol=0)
        else:
            assert got is None
    assert estimate.worked == 3


def test_every_key_has_its_list():
    estimate = Estimate()
    for key in [*range(100), *range(99, 36, -1)]:  # the last 64
        x, y = drawn()
        torch.testing.assert_close(estimate(x, y, key=key), 2 * (3 * x + y) + x, rtol=1e-14, atol=0)
    assert estimate.worked == 100
    estimate(*drawn(), key=3)
    assert estimate.worked == 101


@pytest.mark.parametrize("told", [True, False])
def test_calls_with_other_numbers_share_a_list(told):
    class Scaled(Estimate):
        def launch(self, x, y, a, b):
            self.worked += 1
            numbers, time = self.slots.ready(1, x)
            between, out = torch.empty_like(x), torch.empty_like(x)
            Kernel.on(Varying.of(a, 2), x, y, between, numbers)
            largest = self.slots.largest(1, x.device, time)
            Kernel.on(Varying.of(b, 3) + 0.5 if told else b + 0.5, between, x, out)
            return out, np.ceil(largest / 64)

        def __call__(self, *given):
            return self.lists.serve("a", given, lambda: self.launch(*given), lambda largest: np.ceil(largest / 64))

    scaled = Scaled()
    for _ in range(6):
        (x, y), (a, b) = drawn(), torch.rand(2).tolist()
        torch.testing.assert_close(scaled(x, y, a, b), (b + 0.5) * (a * x + y) + x, rtol=1e-14, atol=0)
    assert scaled.worked == (1 if told else 6)


@pytest.mark.parametrize("early", [False, True])
def test_numbers_that_follow_the_largest_are_told(early):
    class Weighed(Estimate):
        def launch(self, x, y):
            self.worked += 1
            numbers, time = self.slots.ready(1, x, 1)
            one, other, out = (torch.empty_like(x) for _ in range(3))
            Kernel.on(0.0, x, y, one, numbers.data_ptr() + 8)
            Kernel.on(1.0, x, y, other, numbers)
            served = self.slots.largest(1, x.device, time, 1)[1]
            Kernel.on(3.0, x, y, out)
            return out, served

        def __call__(self, x, y):
            return self.lists.serve("a", (x, y), lambda: self.launch(x, y), lambda read: read[1])

    estimate = Weighed(early=early)
    for k in (1.0, 2.0, 1.0, 2.0):
        x, y = drawn()
        y[0], y[1:] = k, 0.5 * k
        torch.testing.assert_close(estimate(x, y), 3 * x + y, rtol=1e-14, atol=0)
    assert estimate.worked == 2


@pytest.mark.parametrize("early", [False, True])
def test_a_list_may_read_nothing_and_have_several_results(early):
    lists, worked, kept = Lists(early), [], []

    def launch(x, y):
        worked.append(1)
        one, between, other = (torch.empty_like(x) for _ in range(3))
        Kernel.on(2.0, x, y, one)
        Kernel.on(3.0, one, x, between)
        Kernel.on(4.0, between, y, other)
        return (one, other), True

    for _ in range(6):
        x, y = drawn()
        got = lists.serve("a", (x, y), partial(launch, x, y), lambda _: True)
        kept.append((2 * x + y, 4 * (7 * x + 3 * y) + y, got))
    assert len(worked) == 1
    for *want, got in kept:
        assert isinstance(got, tuple)
        for a, b in zip(want, got):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


def test_what_was_made_before_is_not_made_by_the_list():
    """A prepared array stays where it is; what a call keeps for itself, the list makes again."""
    n, made, kept = 40, [], PerStream()

    def doubled(x):
        made.append(1)
        out = torch.empty_like(x)
        Kernel.on(1.0, x, x, out)
        return out

    fixed = drawn()[0]
    lists = Lists(False)

    def launch(x):
        of_call, out, more = PerStream(), torch.empty_like(x), torch.empty_like(x)
        for _ in range(2):
            Kernel.on(1.0, kept.get("a", lambda: doubled(fixed).add_(1.0), x), x, out)
        Kernel.on(1.0, of_call.get("a", lambda: doubled(x), x), out, more)
        return more, True

    for _ in range(5):
        x = drawn(n)[0]
        got = lists.serve("a", (x,), lambda: launch(x), lambda _: True)  # noqa: B023
        torch.testing.assert_close(got, 2 * x + (2 * fixed + 1.0) + x, rtol=1e-14, atol=0)
    assert len(made) == 2  # in the first call


def test_what_cannot_be_a_list_is_computed():
    class Added(Estimate):
        def launch(self, x, y):
            found, extent = super().launch(x, y)
            return found + 1.0, extent  # a kernel of PyTorch's

    estimate, (x, y) = Added(), drawn()
    for _ in range(3):
        x, y = drawn()
        torch.testing.assert_close(estimate(x, y), 2 * (3 * x + y) + x + 1.0)
    assert estimate.worked == 3


def test_arrays_that_overlap_have_no_list():
    estimate = Estimate()
    for _ in range(3):
        both = torch.cat([a[:20] for a in drawn()])
        torch.testing.assert_close(estimate(both[:20], both[10:30]), 2 * (3 * both[:20] + both[10:30]) + both[:20])
    assert estimate.worked == 3


def test_a_list_that_is_in_use_or_that_fails_is_gone_round():
    estimate, (x, y) = Estimate(), drawn()
    want = 2 * (3 * x + y) + x
    estimate(x, y)

    def meanwhile():
        Kernel.launched = None
        thread = threading.Thread(target=lambda: estimate(*drawn()))
        thread.start()
        thread.join()

    Kernel.launched = meanwhile
    torch.testing.assert_close(estimate(x, y), want)
    assert estimate.worked == 2

    def fails():
        Kernel.launched = None
        raise MemoryError

    Kernel.launched = fails
    for _ in range(3):
        torch.testing.assert_close(estimate(x, y), want)
    assert estimate.worked == 5


def test_many_threads():
    estimate, wrong = Estimate(), []
    estimate(*drawn())

    def work():
        for _ in range(200):
            x, y = drawn()
            wrong.append(not torch.equal(estimate(x, y), 2.0 * (3.0 * x + y) + x))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 800 and not any(wrong)


def estimated(listed, monkeypatch, *arguments, **options):
    with monkeypatch.context() as patched:
        if not listed:
            patched.setattr(Lists, "serve", lambda self, key, given, launch, served: launch()[0])
        return sdkde_core.estimate(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.filterwarnings("ignore:the Laplace estimate is negative")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lists_have_the_same_bits_on_a_card(method, backend, dtype, monkeypatch):
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("of Hopper cards")
    torch.manual_seed(7)
    for n, m, d in ((3000, 500, 16), (1000, None, 3), (2048, 77, 2), (700, 130, 33), (257, 3, 1)):
        if backend == "hopper" and dtype == "float64" and d > 16:
            continue  # it has "high" up to 16
        for h in (0.8, [0.5 + 0.1 * k for k in range(d)]):
            for log in (False, True):
                options = {"method": method, "backend": backend, "log": log}
                for call in range(8):
                    options["bandwidth"] = (1.0 + 0.01 * call) * np.asarray(h)
                    x = torch.randn(n, d, device="cuda", dtype=getattr(torch, dtype))
                    y = None if m is None else torch.randn(m, d, device="cuda", dtype=x.dtype)
                    y = x[:m] if m and call in (2, 4, 6) else y
                    if call % 2:  # sometimes equal, or all of the other dtype
                        w = torch.rand(n, device="cuda", dtype=torch.float32 if call == 3 else torch.float64)
                        options["weights"] = torch.ones_like(w) if call == 5 else w
                    got = estimated(True, monkeypatch, x, y, **options)
                    want = estimated(False, monkeypatch, x, y, **options)
                    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), (n, m, d, h, log, call)
                    w = options.pop("weights", None)
                    if w is not None and log and method != "laplace":
                        arrays = [None if a is None else a.cpu().numpy() for a in (x, y, w)]
                        how = options | {"weights": arrays[2], "backend": "auto", "device": "cpu"}
                        want = sdkde_core.estimate(*arrays[:2], **how)
                        assert abs(got.cpu().numpy() - want).max() < 2e-3, (n, m, d, h, call)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_chosen_by_default_is_listed_on_a_card(backend, dtype, monkeypatch):
    """The step "moments", a score of its own bandwidth, and a guard."""
    runs, run = [], Launches.run
    monkeypatch.setattr(Launches, "run", lambda *given: runs.append(1) or run(*given))
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("of Hopper cards")
    torch.manual_seed(11)
    for n, m, d, c in ((2048, 256, 2, None), (6000, None, 3, 1.4), (3000, 100, 16, 2.0), (1000, 1000, 30, 2.0)):
        h = 0.5 * np.eye(d) + 0.1 if d < 16 else np.linspace(0.7, 1.1, d)
        for log, weighted in itertools.product((False, True), (False, True)):
            options = {"step": "moments", "score_bandwidth": c, "tails": "guard", "log": log}
            for call in range(6):
                options["bandwidth"] = (1.0 + 0.01 * call) * h
                x = torch.randn(n, d, device="cuda", dtype=getattr(torch, dtype)) * (1.0 + 0.02 * call)
                options["weights"] = 0.1 + torch.rand(n, device="cuda", dtype=x.dtype) if weighted else None
                y = None if m is None else torch.randn(m, d, device="cuda", dtype=x.dtype)
                got = estimated(True, monkeypatch, x, y, backend=backend, **options)
                want = estimated(False, monkeypatch, x, y, backend=backend, **options)
                assert torch.equal(got, want), (n, m, d, log, call)
            assert len(runs) >= 4, "there is no list"
            runs.clear()
            with monkeypatch.context() as patched:
                patched.setattr(straight, "estimate", lambda request, *given: (None, request))
                other = sdkde_core.estimate(x, y, backend=backend, **options)
            *arrays, w = (None if a is None else a.cpu().numpy() for a in (x, y, options["weights"]))
            exact = sdkde_core.estimate(*arrays, precision="float64", device="cpu", **options | {"weights": w})
            prepared = sdkde_core.prepare(x, backend=backend, **{k: v for k, v in options.items() if k != "log"})
            queries = x if y is None else y
            for found in (got, other, *(prepared.estimate(queries, log=log) for _ in range(4))):
                off = abs(found.cpu().numpy() - exact) if log else abs(np.log(found.cpu().numpy() / exact))
                assert off.max() < (2e-3 if dtype == "float32" else 1e-4), (n, m, d, log, weighted, off.max())
            if backend == "hopper":
                continue  # its shifts are of the samples alone
            runs.clear()
            scores = [prepared.grad_log_density(queries) for _ in range(4)]
            if backend == "triton":  # "auto" may take one without lists, and another one once that has started
                assert len(runs) >= 2, "there is no list"
                assert all(torch.equal(scores[0], other) for other in scores)
            options = {k: v for k, v in options.items() if k != "log"} | {"weights": w, "device": "cpu"}
            want = sdkde_core.grad_log_density(*arrays, precision="float64", **options)
            assert abs(scores[0].cpu().numpy() - want).max() < 1e-3 * abs(want).max()
    x, y = (k * torch.randn(n, 3, device="cuda", dtype=getattr(torch, dtype)) for n, k in ((6000, 1.0), (7, 3.0)))
    for coordinates in (None, "identity") * 3:  # beside which a guard's kernels are narrower
        options = {"bandwidth": 0.5, "tails": 0.3, "coordinates": coordinates, "log": True}
        got = sdkde_core.estimate(x, y, backend=backend, **options).cpu().numpy()
        assert abs(got - sdkde_core.estimate(x.cpu().numpy(), y.cpu().numpy(), device="cpu", **options)).max() < 2e-3


@pytest.mark.gpu
def test_lists_in_threads_and_on_streams_on_a_card(monkeypatch):
    torch.manual_seed(8)
    xs, ys = [torch.randn(2048, 16, device="cuda") for _ in range(8)], torch.randn(256, 16, device="cuda")
    wants = [estimated(False, monkeypatch, x, ys, bandwidth=0.9) for x in xs]
    prepared = sdkde_core.prepare(xs[0], bandwidth=0.9)
    at = prepared.estimate(ys)
    torch.cuda.synchronize()
    wrong = []

    def work(k):
        with torch.cuda.stream(torch.cuda.Stream()) if k % 2 else torch.cuda.stream(torch.cuda.default_stream()):
            found = [(sdkde_core.estimate(xs[i], ys, bandwidth=0.9), wants[i]) for _ in range(30) for i in range(8)]
            found += [(prepared.estimate(ys), at) for _ in range(30)]
            torch.cuda.synchronize()
            wrong.extend(not torch.equal(got, want) for got, want in found)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 6 * 270 and not any(wrong)
    for h in (2.0, [[0.25]], 2.0, [[0.25]]):  # whose factor and inverse are the same number
        column, where = xs[0][:, :1].contiguous(), ys[:, :1].contiguous()
        got = sdkde_core.estimate(column, where, bandwidth=h).cpu().numpy()
        want = sdkde_core.estimate(column.cpu().numpy(), where.cpu().numpy(), bandwidth=h, device="cpu")
        assert np.allclose(got, want, rtol=1e-3, atol=0)
    assert prepared.grad_log_density(ys).shape == (256, 16)  # Hopper's shift is of the samples alone
    queries = [torch.randn(1000, 16, device="cuda") for _ in range(6)]
    got = [prepared.estimate(q) for q in queries]
    monkeypatch.setattr(Lists, "serve", lambda self, key, given, launch, served: launch()[0])
    assert all(torch.equal(a, prepared.estimate(q)) for a, q in zip(got, queries))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["kde", "sdkde"])
@pytest.mark.parametrize(
    "h", [0.8, [0.7, 0.8, 0.9, 1.0], [[1.0 if i == j else 0.2 for i in range(4)] for j in range(4)]]
)
def test_scores_on_a_card(method, h):
    """By the backend that a density has for queries' shifts, which need not be that of its densities."""
    torch.manual_seed(9)
    x = torch.randn(2048, 4, device="cuda")
    prepared = sdkde_core.prepare(x, bandwidth=h, method=method)
    for call in range(6):
        y = torch.randn(100, 4, device="cuda", dtype=torch.float64 if call == 4 else x.dtype)
        y = x[:100] if call == 3 else y
        want = sdkde_core.grad_log_density(x.cpu().numpy(), y.cpu().numpy(), bandwidth=h, method=method, device="cpu")
        for got in (prepared.grad_log_density(y), sdkde_core.grad_log_density(x, y, bandwidth=h, method=method)):
            assert got.dtype == y.dtype and got.is_cuda
            np.testing.assert_allclose(got.cpu().numpy(), want, atol=5e-4 * abs(want).max())
