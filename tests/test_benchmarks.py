"""python -m benchmarks: its registry, runner, records, errors and report; nothing is timed that counts."""

import json
import os
from itertools import pairwise

import numpy as np
import of_benchmarks
import pytest
import reference
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import compare, metrics, problems, records, report, runner, subjects, timing
from benchmarks.registry import REGISTRY, Benchmark, Setting, Skipped

pytestmark = pytest.mark.filterwarnings("ignore:the Laplace estimate is negative:RuntimeWarning")

SMALL = Setting(seconds=0.003)


def test_the_list_names_every_benchmark_and_tool():
    shown = CliRunner().invoke(command.main, ["list"]).output
    for benchmark in REGISTRY:
        assert f"  {benchmark.name} " in shown
        assert benchmark.about.endswith(".") and len(benchmark.about) < 120
    for tool in command.TOOLS:
        path = tool.split()[-1]
        assert tool in shown
        file = path.removeprefix("benchmarks/") if path.endswith(".py") else f"{path.split('.')[1]}/__main__.py"
        assert (of_benchmarks.FOLDER / file).exists()


# --- runs and records -----------------------------------------------------------------------------------------------


def benchmark(measure, count=4):
    cases = [{"subject": f"s{i}", "n": i} for i in range(count)]
    return Benchmark(
        "made", "ours", "Made.", lambda setting: cases, measure, (report.Table("A", ("n",), {"ms": "ms"}),)
    )


def test_what_was_interrupted_stays_and_is_not_measured_again(tmp_path):
    asked = []

    def measure(setting, case):
        asked.append(case["n"])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"ms": float(case["n"])}

    run = [benchmark(measure)], SMALL, tmp_path
    with pytest.raises(KeyboardInterrupt):
        runner.run(*run, say=lambda text: None)
    path = tmp_path / "made.jsonl"
    with path.open("a") as file:
        file.write('{"case": {"subj')  # and the machine went down
    runner.run(*run, say=lambda text: None)
    assert asked == [0, 1, 2, 2, 3]
    found = records.read(path)
    assert [record.row["ms"] for record in found] == [0.0, 1.0, 2.0, 3.0]
    about = found[0].about
    assert about["device"] == "cpu" and about["cores"] >= 1 and about["versions"]["numpy"] == np.__version__


def test_what_is_missing_is_named_and_tried_again_what_failed_is_not(tmp_path):
    asked, said = [], []

    def measure(setting, case):
        asked.append(case["n"])
        if case["n"] < 2:
            raise Skipped("thing is missing: pip install thing")
        if case["n"] == 2:
            raise RuntimeError("broken\nsecond line")
        return {"ms": 1.0}

    run = [benchmark(measure)], SMALL, tmp_path
    runner.run(*run, say=said.append)
    assert [text for text in said if "pip install thing" in text] == [
        "  s0: skipped, thing is missing: pip install thing"
    ]
    runner.run(*run, say=said.append)
    assert asked == [0, 1, 2, 3, 0, 1]
    runner.run(*run, again=True, say=said.append)
    assert asked[6:] == [0, 1, 2]
    text = report.missing(records.read(tmp_path / "made.jsonl"))[0]
    assert "- s0, s1: thing is missing: pip install thing" in text and "- s2: failed: RuntimeError: broken" in text


def test_a_lost_gpu_ends_the_run_and_its_case_is_not_tried_again(tmp_path):
    def measure(setting, case):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for n in range(2):
        with pytest.raises(runner.Lost, match=f"n {n}.*goes on from there"):
            runner.run([benchmark(measure)], SMALL, tmp_path, say=lambda text: None)


def test_a_file_is_of_one_machine(tmp_path):
    runner.run([benchmark(lambda setting, case: {"ms": 1.0})], SMALL, tmp_path, say=lambda text: None)
    with pytest.raises(ValueError, match=r"scale 'small', here 'medium'.*name another folder with --to"):
        runner.run([benchmark(None)], Setting(scale="medium"), tmp_path)


# --- errors and times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_errors_are_those_against_the_oracle(method, library, monkeypatch):
    monkeypatch.setitem(metrics.BLOCK, "cpu", 500)  # several blocks
    data = problems.data("eight", 120, 40, 3, seed=1)
    n, d, h = 120, 3, data.h
    want = reference.estimate(*(a.astype(float) for a in data[:2]), method=method, bandwidth=h)
    if library == "torch":
        torch = pytest.importorskip("torch")
        monkeypatch.setitem(metrics.BLOCK, "cuda", 500)
        data = problems.Data(*(torch.as_tensor(a) for a in data[:2]), h)
    truth = metrics.exact(data, method, 40)
    constant = metrics.log_constant(d, h)
    forms = {"density": want, "sum": n * want * np.exp(-constant)}
    if method != "laplace":
        forms["log"] = np.log(want)
    for form, answer in forms.items():
        found = metrics.against_exact(answer, form, truth, method, n, d, h)
        assert found["worst"] < 1e-11 and found["l2"] < 1e-11 and found["beyond"] == 0, form
        off = metrics.against_exact(answer * 1.01 if form != "log" else answer + 0.01, form, truth, method, n, d, h)
        assert off["worst"] == pytest.approx(0.01, rel=0.7) and off["beyond"] > 0.2
    stale = np.roll(forms["density"], 1)
    assert metrics.against_exact(stale, "density", truth, method, n, d, h)["worst"] > 0.05
    nan = np.full(40, np.nan)
    assert metrics.against_exact(nan, "density", truth, method, n, d, h) == {"worst": None, "beyond": 1.0, "l2": None}


def test_no_call_gets_the_data_of_the_call_before_and_the_last_those_of_the_truth():
    pool, seen = [problems.Data(i, i, 1.0) for i in range(3)], []

    def call(x, y, h):
        seen.append(x)
        return x

    found, result = timing.measured(call, pool, "cpu", 0.0005)
    assert result == 0 and found["calls"] >= timing.LEAST
    assert found["ms_low"] <= found["ms"] <= found["ms_high"]
    assert all(a != b for a, b in pairwise(seen[-found["calls"] :]))


# --- subjects -------------------------------------------------------------------------------------------------------


def test_a_missing_peer_says_how_to_install_it():
    for module in ("no_such_module", "no_such.module"):
        gone = subjects.Subject("gone", None, modules=(module,), install="pip install gone")
        with pytest.raises(Skipped, match=f"{module} is missing: pip install gone"):
            gone.check("kde", 1, 1, "cpu")
    for peer in subjects.peers():
        assert not peer.modules or peer.install.startswith("pip install"), peer.name
        assert subjects.find(peer.name) is peer
    with pytest.raises(Skipped, match="needs a device of kind cuda"):
        subjects.Subject("gpu", None, devices=("cuda",)).check("kde", 1, 1, "cpu")
    with pytest.raises(ValueError, match="no subject 'triton'"):
        subjects.find("triton")


SLOW = "torch.compile", "KeOps", "kde and a second pass"  # they compile
PEERS = [pytest.param(p.name, marks=[pytest.mark.slow] if p.name.startswith(SLOW) else []) for p in subjects.peers()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_what_we_do(name):
    """Those that are here, in the first dimension that they take; grids and loose trees to some per cent."""
    if name.startswith(("scikit-learn, rtol", "mlpack, rel_error 0.0001")):
        pytest.skip("so loose that nothing can be said")
    peer = subjects.find(name)
    slow = name.startswith(SLOW) and "sdkde" in peer.methods
    for method in ("sdkde",) if slow else peer.methods:
        case = {"subject": name, "method": method, "kind": "eight", "n": 240, "m": 30, "d": 1}
        try:
            found = compare.measure(SMALL, case)
        except Skipped as reason:
            pytest.skip(str(reason))
        assert found["worst"] < (0.2 if "FFT" in name else 1e-4), method


def test_ours_are_those_of_the_device_and_the_dimension():
    assert {"numpy, fast", "numpy, high"} <= set(subjects.here("cpu", ("fast", "high")))
    assert not any(name.startswith(("triton", "hopper")) for name in subjects.here("cpu"))
    assert not any(name.startswith("fourier") for name in subjects.here("cpu", d=16))
    before = os.environ.get("SDKDE_TUNING")
    case = {"subject": "numpy, fast, untuned", "method": "kde", "kind": "t3", "n": 300, "m": 30, "d": 2}
    assert compare.measure(SMALL, case)["worst"] < 1e-4
    assert os.environ.get("SDKDE_TUNING") == before


# --- benchmarks -----------------------------------------------------------------------------------------------------

QUICK = {"oracle-1d", "oracle-16d", "approximate", "launch-sweep", "prediction", "prepared", "passes"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(b.name, marks=[] if b.name in QUICK else [pytest.mark.slow])
        for b in REGISTRY
        if b.name != "keops"  # all of it compiles
    ],
)
def test_a_benchmark_runs_at_a_small_size_and_is_reported(name, tmp_path):
    """On this CPU, without what compiles for long; in the quick tests with few subjects."""
    asked = ["run", name, "--device", "cpu", "--scale", "small", "--each", "0.003", "--to", str(tmp_path)]
    asked += ["--without", "KeOps,keops,torch.compile,kde and a second pass"]
    if name in QUICK:
        asked += ["--subjects", "numpy,scikit,auto,triton"]
    told = CliRunner().invoke(command.main, asked, catch_exceptions=False)
    assert told.exit_code == 0, told.output
    found = records.read(tmp_path / f"{name}.jsonl")
    assert any(record.ok for record in found)
    assert not [record for record in found if "failed" in record.result]
    asked = ["report", str(tmp_path), "--no-plots" if name in QUICK else "--plots"]
    told = CliRunner().invoke(command.main, asked, catch_exceptions=False)
    assert f"{len(found)} records" in told.output
    text = (tmp_path / "report.md").read_text()
    assert f"## {name}\n" in text and "| ---" in text
    for image in text.split("](")[1:]:
        assert (tmp_path / image.split(")")[0]).stat().st_size > 5000


def test_a_report_has_the_published_values_and_the_machine(tmp_path):
    setting = Setting(device="cuda:0", scale="full")
    about = {"gpu": "Made GPU", "driver": "1", "cpu": "x", "widest instructions": "y", "cores": 2, "python": "3",
             "versions": {"numpy": "2"}, "when": "2026-01-01", "scale": "full", "device": "cuda:0"}  # fmt: skip
    lines = [{"about": about}]
    for name in ("hopper, fast", "KeOps"):
        for n in (2048, 32768):
            result = {"ms": 1.5, "ms_low": 1.4, "ms_high": 1.6, "worst": 1e-5, "share_tf32": 0.25, "mhz": 1980}
            case = {"subject": name, "method": "sdkde", "kind": "two", "n": n, "m": n // 8, "d": 16}
            lines.append({"case": case, "result": result})
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "runtime-16d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "1 benchmarks, 4 records" in report.write(tmp_path, tmp_path / "pages", plots=True)
    text = (tmp_path / "pages" / "report.md").read_text()
    assert "Made GPU, driver 1" in text
    assert "| sdkde | KeOps | 1.5 | 1.4–1.6 | 1.0e-05 | 1980 | 25 | 16.9 |" in text
    assert (tmp_path / "pages" / "h200-runtime-16d-times.png").stat().st_size > 10_000
    assert setting.at(1, 2, 3) == 3
