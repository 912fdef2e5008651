"""Several groups of columns in one call: the feature "groups"."""

import numpy as np
import pytest
from interpreter import INTERPRETED, interpreted, run

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sdkde_triton.backend import TritonBackend  # noqa: E402
from sdkde_triton.info import INFO  # noqa: E402

from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction  # noqa: E402
from sdkde_core.testing import reference  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.skipif(INTERPRETED, reason="it starts this")
def test_in_the_interpreter():
    run(__file__, "not gpu")


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
    for _ in range(2):  # lists are kept
        got = backend.reduce_groups(asked, torch.from_numpy(rows).to(device), state)
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
