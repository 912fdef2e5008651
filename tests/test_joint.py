"""Several groups of columns in one call: the feature "groups"."""

import functools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from interpreter import INTERPRETED, interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import reference  # noqa: E402
from sdkde_triton.backend import TritonBackend  # noqa: E402
from sdkde_triton.info import INFO  # noqa: E402

import sdkde_core  # noqa: E402
from sdkde_core.arrays import Argument  # noqa: E402
from sdkde_core.estimator.joint import Together  # noqa: E402
from sdkde_core.estimator.mapped import of_part  # noqa: E402
from sdkde_core.estimator.stacked import Part  # noqa: E402
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


CASES = [
    (Reduction.LOG_SUM, "fast", 3, 70),
    (Reduction.LOG_SUM, "high", 16, 5),
    (Reduction.MEAN, "fast", 5, 64),
    (Reduction.MEAN, "high", 2, 33),
]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("reduction", "precision", "d", "m"), CASES)
def test_every_group_is_summed_over_its_own_columns(device, reduction, precision, d, m):
    rng = np.random.default_rng(d)
    sizes, counts = (1, 40, 300) if device == "cpu" else (1, 40, 3000, 128), 0
    groups, want = [], []
    rows = rng.normal(size=(len(sizes), m, d)) * 2.0
    for k, n in enumerate(sizes):
        points, w = rng.normal(size=(n, d)) * (1.0 + 0.3 * k), np.log(rng.gamma(1.0, size=n))
        groups.append(Columns(*(torch.from_numpy(a).to(device) for a in (points, w - np.logaddexp.reduce(w)))))
        want.append(reference.sums(rows[k], points, log_weights=w - np.logaddexp.reduce(w)))
        counts += n
    extent = max(float(abs(rows).max()) * d**0.5, *(float(abs(g.points).max()) * d**0.5 for g in groups))
    asked = Problem(
        reduction, m, counts, d, precision=precision, device=str(groups[0].points.device), extent=extent,
        requires=frozenset(["weights", "groups"]),
    )  # fmt: skip
    assert INFO.supports(asked).ok
    backend = TritonBackend()
    state = backend.prepare_groups(asked, groups)
    unused = torch.zeros(len(sizes), m), torch.full((m,), -torch.inf)  # all is summed, whatever they are
    for _ in range(2):  # lists are kept
        got = backend.reduce_groups(asked, torch.from_numpy(rows).to(device), state, *unused)
        absolute = TOLERANCES[precision][reduction]
        for k, sums in enumerate(want):
            if reduction is Reduction.LOG_SUM:
                off = abs(got.log_sum[k].cpu().numpy() - sums.log_sum)
                assert (off <= absolute.absolute + absolute.relative * abs(sums.log_sum)).all()
            else:
                off = np.linalg.norm(got.shift[k].cpu().numpy() - sums.shift, axis=1)
                assert (off <= absolute.absolute + absolute.relative * abs(sums.log_sum)).all()


def test_groups_are_declined_where_no_kernel_sums_them():
    asked = {"precision": "fast", "device": "cuda:0", "requires": frozenset(["weights", "groups"])}
    for d, extent in ((17, 5.0), (1, 5.0), (4, 1e3)):
        assert not INFO.supports(Problem(Reduction.LOG_SUM, 10, 100, d, extent=extent, **asked)).ok


@functools.cache
def _drawn():
    """Samples on a spiral, to which mixtures are fitted that keep them, torch; queries beside, and one far from all.

    Of some draws the first with a smoothed mixture, and with no part that is nearly left out.
    """
    d = 5
    for seed in range(30):
        rng = np.random.default_rng(seed)
        at = rng.uniform(1.0, 9.0, size=(150, 1))
        x = np.hstack([at * np.cos(at), at * np.sin(at), at, 0 * at, 0 * at]) + 0.2 * rng.normal(size=(150, d))
        x = x @ rng.normal(size=(d, d))
        shares = Counter()
        for label, share, _ in sdkde_core.prepare(x, method="stacked", coordinates="identity", device="cpu").parts:
            shares[label] += share
        if any("smoothed" in label for label in shares) and min(shares.values()) > 0.06:
            return torch.from_numpy(x), torch.from_numpy(np.concatenate([x[:40] + 0.3, [np.full(d, 3000.0)]]))
    raise AssertionError("no draw has a smoothed mixture")


@interpreted
@pytest.mark.parametrize("scored", [False, True])
def test_parts_of_a_list_are_summed_together(scored):
    x, y = _drawn()
    wide, how = x.std(dim=0).numpy(), {"method": "kde", "backend": "torch", "precision": "high"}
    some = ((0.2, 0.6), (0.5, 0.8), (0.3, 1.0))  # shares and bandwidths
    densities = [sdkde_core.prepare(x[k::3], bandwidth=h * wide, **how) for k, (_, h) in enumerate(some)]
    parts = [Part("", math.log(share), density._fitted.current) for (share, _), density in zip(some, densities)]
    which = [0, 1, 2]
    together = Together(parts, which)
    together.choice = SimpleNamespace(info=INFO, backend=TritonBackend())
    asked, known = Argument.of("query", y), torch.full((len(y),), -torch.inf, dtype=torch.float64)
    logs = np.stack([parts[k].log_share + of_part(parts[k].fitted, asked, "log").numpy() for k in which])
    assert together.summed(y, scored, known) is None  # the last row is farther away than there are sums
    known[-1] = 0.0  # beside which it does not matter
    found = together.summed(y, scored, known)
    np.testing.assert_allclose(found.log_sum[:-1], np.logaddexp.reduce(logs, axis=0)[:-1], atol=1e-4)
    assert found.log_sum[-1] < -1e290
    if scored:
        shares = np.exp(logs - np.logaddexp.reduce(logs, axis=0))[:, :-1]
        slopes = np.stack([of_part(parts[k].fitted, asked, "score").numpy() for k in which])[:, :-1]
        want = np.einsum("km,kmd->md", shares, slopes)
        np.testing.assert_allclose(found.shift[:-1], want, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fast", "high"])
def test_a_stack_on_a_gpu_is_the_sum_of_its_parts(precision):
    x, y = _drawn()
    density = sdkde_core.prepare(x.cuda(), method="stacked", precision=precision, coordinates="identity")
    logs = np.stack(
        [np.log(share) + part.estimate(y.cuda(), log=True).cpu().numpy() for _, share, part in density.parts]
    )
    want = np.logaddexp.reduce(logs, axis=0)
    np.testing.assert_allclose(density.estimate(y.cuda(), log=True).cpu(), want, rtol=1e-5, atol=2e-3)
    slopes = np.stack([part.grad_log_density(y[:-1].cuda()).cpu().numpy() for _, _, part in density.parts])
    score = np.einsum("pm,pmd->md", np.exp(logs - want)[:, :-1], slopes)
    np.testing.assert_allclose(density.grad_log_density(y[:-1].cuda()).cpu(), score, rtol=1e-3, atol=2e-2)


@pytest.mark.gpu
def test_a_gpu_fits_the_stack_that_the_host_does():
    x, y = _drawn()
    there, here = (sdkde_core.prepare(x, method="stacked", coordinates="identity") for x in (x.cuda(), x.numpy()))
    assert [label for label, *_ in there.parts] == [label for label, *_ in here.parts]
    for (_, share, _), (_, known, _) in zip(there.parts, here.parts):  # samples' sums are rounded differently
        assert abs(share - known) < 0.05
    off = there.estimate(y[:-1].cuda(), log=True).cpu().numpy() - here.estimate(y[:-1].numpy(), log=True)
    assert abs(off).max() < 0.1
