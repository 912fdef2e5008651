"""benchmarks/fuzz.py: its oracle against the reference, and a few random problems."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
from pairwise import cases

import sdkde_core
from sdkde_core.engine.merge import each
from sdkde_core.protocol import Reduction

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:the Laplace estimate is negative:RuntimeWarning")

PATH = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH.parent)  # as of a script, for what it imports from beside it
        patch.setitem(sys.modules, "fuzz", module)  # where dataclasses look for it
        spec.loader.exec_module(module)
        yield module


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("d", "distance", "precise"),
    cases((1, 3, 17), (0.0, 30.0, 1e5), (False, True)),
)
def test_the_oracle_is_the_reference(fuzz, monkeypatch, d, distance, precise):
    """Points in two clusters; queries in both, midway, and as far beyond; some columns without weight."""
    monkeypatch.setitem(sys.modules["fuzz_oracle"].BLOCK, "cpu", 5 * 40 * d)  # several blocks
    side = RNG.choice([-1.0, 1.0], (40, 1)) * distance
    x = RNG.normal(size=(40, d)) + side
    y = RNG.normal(size=(23, d)) + RNG.choice([-1.0, 0.0, 1.0, 2.0], (23, 1)) * distance
    y[:3] = 0.5 * (x[:3] + x[20:23])
    log_w = fuzz.log_weights(np.where(RNG.random(40) < 0.2, 0.0, RNG.random(40)), 40)
    h = np.ones(d) if precise else RNG.uniform(0.5, 2.0, d)
    want = reference.sums(y, x, h, log_weights=log_w)
    rows, points = (fuzz.given(a, "cpu", None if precise else h) for a in (y, x))
    found = fuzz.sums(rows, points, torch.tensor(log_w), precise)
    got = found.truth
    for a, b in ((got.log_sum, want.log_sum), (got.log_plus, want.log_plus)):
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-13)
    np.testing.assert_allclose(got.signed, want.signed, atol=1e-13)
    # The reference's own exponents are good to 64 bits, where the platform has them.
    slack = found.shift_slack.numpy()[:, None] * (2e-3 if precise and np.finfo(np.longdouble).nmant >= 63 else 1.0)
    assert (abs(got.shift - want.shift / h) <= 1e-13 * (1 + distance) + slack).all()


def _run(fuzz, count, precisions=("fast", "high", "float64"), target=None):
    target = target or fuzz.target_of("numpy", "cpu")
    return [fuzz.run(fuzz.draw(0, i, precisions, "cpu", 60), target) for i in range(count)]


def test_numpy_keeps_its_tolerances_on_random_problems(fuzz):
    records = _run(fuzz, 40)
    assert [r for r in records if r.outcome != "kept" and r.reason != fuzz.TOO_FAR] == []
    assert {r.task for r in records} == {*fuzz.METHODS, *(r.name for r in Reduction)}
    assert len(fuzz.table(records).splitlines()) > 10


class Wrong:
    """NumPy's answers, a little off."""

    def __init__(self, backend):
        self.prepare, self._reduce = backend.prepare, backend.reduce

    def reduce(self, *arguments):
        return each(self._reduce(*arguments), lambda x: x + 1e-2 * (1.0 + abs(x)))


def test_errors_of_a_backend_are_seen(fuzz, monkeypatch):
    numpy = fuzz.target_of("numpy", "cpu")
    right = sdkde_core.estimate

    def wrong(*arguments, log, **options):
        p = right(*arguments, log=log, **options)
        return p + np.float32(1e-2) * (1 + abs(p)) if log else p * np.float32(1.02)

    monkeypatch.setattr(sdkde_core, "estimate", wrong)
    records = _run(fuzz, 60, ("fast",), replace(numpy, backend=Wrong(numpy.backend)))
    unseen = [r for r in records if r.outcome not in ("missed", "raised") and r.reason != fuzz.TOO_FAR]
    # A density that underflows; a sign.
    assert all("p itself" in r.text or r.task == "laplace" for r in unseen)
    assert sum(r.outcome == "missed" for r in records) > 50
