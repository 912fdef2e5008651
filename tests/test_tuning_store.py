"""The tuner's file: what it keeps, what wins, and what becomes of crowds, crashes and bad files."""

import contextlib
import json
from random import Random

import pytest

pytest.importorskip("sqlite_utils")

import tuning_files
from sdkde_autotune import lookup
from sdkde_autotune.records import Key
from sdkde_autotune.store import Store, StoreError
from tuning_files import add, as_nobody, edit, failed, found, guess, ok, written

from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query

python, entered = tuning_files.python, tuning_files.entered  # fixtures
KEY = Key("triton", "triton.mean", 1, "mean", "fast", "float32", "", 13, 16, 15, 12, "RTX A6000", "sm_86")
QUERY = Query("triton", "triton.mean", 1, 16, "RTX A6000", "sm_86")
OTHER = KEY._replace(n_octave=16)
VERSIONS = {"source": "abc", "torch": "2.9"}
A, B, C = {"block_m": 64, "stages": 2}, {"block_m": 128, "stages": 2}, {"block_m": 256, "stages": 3}


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "home" / "tuning.sqlite"
    monkeypatch.setenv("SDKDE_DB", str(path))
    return path


# --- what is kept -------------------------------------------------------------------------------------------------


def test_trials_come_back_as_they_went_in(path):
    outcomes = [ok(1.0), failed("compile_error", "spills 12 bytes"), failed("timeout")]
    with Store() as s:
        assert s.path == path
        for config, outcome in zip((A, B, C), outcomes):
            add(s, KEY, config, outcome, "measured", VERSIONS)
        add(s, OTHER, A, guess(3), "predicted", {})
    with Store(path) as s:
        trials = s.trials(KEY)
        assert [(t.key, t.config, found(t), t.source, t.provenance) for t in trials] == [
            (KEY, config, outcome, "measured", VERSIONS) for config, outcome in zip((A, B, C), outcomes)
        ]
        assert [t.created for t in trials] == sorted(t.created for t in trials)
        assert trials[0].created.endswith("+00:00")
        assert [t.key for t in s.trials()] == [KEY, KEY, KEY, OTHER]
        assert [t.config for t in s.trials(status="ok", n_octave=15)] == [A]
        assert [t.config for t in s.trials(status=["timeout", "compile_error"])] == [B, C]
        assert len(s.trials(source="measured")) == 3
        assert s.trials(gpu="H200 SXM") == []


def test_writing_again_replaces(path):
    with Store() as s:
        add(s, KEY, A, ok(1.0), "measured", VERSIONS)
        add(s, KEY, dict(reversed(A.items())), ok(2.0), "measured", {})
        add(s, KEY, A, guess(3), "predicted", {})
        add(s, KEY, A, ok(1.0), "imported", {})
        assert [(t.median, t.source) for t in s.trials(KEY)] == [(2.0, "measured")]  # what was measured stays
        add(s, OTHER, A, guess(3), "predicted", {})
        add(s, OTHER, A, ok(1.0), "imported", {})
        assert [b.median for b in s.best()] == [2.0, 1.0]


# --- what wins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "winner", "default_ms"),
    [
        ([], None, None),
        ([(A, failed("crash"), "measured")], None, None),
        ([(A, ok(2.0), "measured"), (B, ok(1.0), "measured"), (C, failed("oom"), "measured")], (B, "measured"), 2.0),
        # What gains less than one percent does not beat the default, A; otherwise by name: "128" before "64".
        ([(A, ok(1.0), "measured"), (B, ok(0.995), "measured")], (A, "measured"), 1.0),
        ([(A, ok(1.0), "measured"), (B, ok(0.98), "measured")], (B, "measured"), 1.0),
        ([(C, ok(1.0), "measured"), (B, ok(1.0), "measured")], (B, "measured"), None),
        ([(A, ok(2.0), "measured"), (B, guess(1), "predicted")], (A, "measured"), 2.0),
        ([(A, ok(2.0), "measured"), (B, ok(1.0), "imported")], (B, "imported"), 2.0),
        ([(A, ok(2.0), "imported"), (B, guess(1), "predicted")], (A, "imported"), 2.0),
        ([(A, guess(2), "predicted"), (B, guess(1), "predicted")], (B, "predicted"), 2.0),
        # Of one configuration, what was measured here counts: slower, or not at all.
        ([(A, ok(3.0), "measured"), (A, ok(1.0), "imported"), (B, ok(2.0), "measured")], (B, "measured"), 3.0),
        ([(A, failed("crash"), "measured"), (A, ok(1.0), "imported"), (B, ok(2.0), "imported")], (B, "imported"), None),
        # One of the finalists wins, as their times were taken in turns.
        ([(A, ok(2.0) | {"final": True}, "measured"), (B, ok(1.0), "measured")], (A, "measured"), 2.0),
        ([(A, failed("crash"), "measured"), (A, guess(1), "predicted")], None, None),
        ([(A, failed("crash"), "measured"), (B, guess(1), "predicted")], (B, "predicted"), None),
        # A prediction is no default's time.
        ([(A, guess(1), "predicted"), (B, ok(2.0), "measured")], (B, "measured"), None),
    ],
)
def test_the_winner(path, trials, winner, default_ms):
    with Store() as s:
        for i, (config, outcome, source) in enumerate(trials):
            add(s, KEY, config, outcome, source, {"source": str(i)}, is_default=config == A)
        add(s, OTHER, C, ok(0.1), "measured", {})
        every = s.best(n_octave=15)
        assert [(b.key, b.config, b.source) for b in every] == ([(KEY, *winner)] if winner else [])
        for best in every:
            (trial,) = [t for t in s.trials(KEY) if (t.config, t.source) == winner]
            assert (found(best), best.provenance, best.created) == (found(trial), trial.provenance, trial.created)
            assert (best.default and best.default.median) == default_ms


# --- exchange -----------------------------------------------------------------------------------------------------


def filled(path):
    with Store(path) as s:
        add(s, KEY, A, ok(2.0), "measured", VERSIONS, is_default=True)
        add(s, KEY, B, ok(1.0), "measured", VERSIONS)
        add(s, KEY, C, failed("crash", "x"), "measured", VERSIONS)
        add(s, OTHER, A, guess(2), "predicted", VERSIONS, is_default=True)
        return s.dump()


@pytest.mark.parametrize("how", ["json", "database"])
def test_import(path, tmp_path, how):
    there = tmp_path / "there.sqlite"
    dump = filled(there)
    given = there if how == "database" else written(tmp_path / "there.json", dump)
    before = sorted(tmp_path.iterdir())
    with Store() as s:
        assert s.load(given) == 4
        assert s.load(given) == 0
        assert [(t.key, t.config, found(t), t.source) for t in s.trials()] == [
            (KEY, A, ok(2.0), "imported"),
            (KEY, B, ok(1.0), "imported"),
            (KEY, C, failed("crash", "x"), "imported"),
            (OTHER, A, guess(2), "predicted"),
        ]
        winners = [(b.key, b.config, b.median, b.default.median, b.source, b.provenance) for b in s.best()]
        assert winners == [(KEY, B, 1.0, 2.0, "imported", VERSIONS), (OTHER, A, 2.0, 2.0, "predicted", VERSIONS)]
        back = s.dump()
    assert sorted({*tmp_path.iterdir()} - {path.parent}) == before
    with Store(there) as s:
        assert s.load(written(tmp_path / "back.json", back)) == 0  # they began their travels here


def test_of_two_imports_the_later_measured_counts(path, tmp_path):
    def one(ms, created):
        return written(tmp_path / f"{ms}", _row(q20=ms, q50=ms, q80=ms, source="imported", created=created))

    files = [one(float(day), f"2026-01-0{day}T00:00:00.000000+00:00") for day in (1, 3, 2)]
    for order in ((0, 1, 2), (2, 1, 0)):
        with Store(path.with_name(f"{order}")) as s:
            assert [s.load(files[i]) for i in order] == [1, 1, 0]
            assert [t.median for t in s.trials(KEY)] == [3.0]


def test_damaged_rows_are_passed_over_and_told(path, recwarn, untold):
    filled(path)
    edit(
        "UPDATE trial SET provenance = '[[' WHERE status = 'crash'",
        "UPDATE trial SET rank = 'first' WHERE source = 'predicted'",
    )(path)
    with Store() as s:
        assert [trial.config for trial in s.trials()] == [A, B]
        assert [best.config for best in s.best()] == [B]
        dump = s.dump()
    assert {str(warning.message).partition(": ")[0] for warning in recwarn} == {f"a trial in {path} is passed over"}
    with Store(path.with_name("new")) as s:
        assert s.load(written(path.with_name("dump"), dump)) == 2


def _row(**changes):
    there = {**KEY._asdict(), "config": A, "status": "ok", "error": "", "q20": 1, "q50": 1, "q80": 1}
    row = {**there, "source": "measured", "provenance": {}, "created": "2026-01-01T00:00:00.000000+00:00", **changes}
    return {"format": "sdkde-tuning", "schema": 1, "trial": [row]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{ not", "neither a database nor JSON"),
        ("[1, 2, 3]", "no export of the tuner"),
        ('{"best": []}', "no export of the tuner"),
        ({"format": "sdkde-tuning", "schema": 99}, "another version of sdkde .schema 99, this one reads 1."),
        ({"format": "sdkde-tuning", "schema": "1"}, "another version of sdkde .schema '1'"),
        ({"format": "sdkde-tuning", "trial": [{"backend": "triton"}]}, "row 1 of 'trial', .* it lacks kernel, "),
        ({"format": "sdkde-tuning", "trial": 3}, "it is 3, not values by name"),
        (_row(status="fine"), "status is 'fine', which no search stores"),
        (_row(source="rumour"), "source is 'rumour', which"),
        (_row(config=[1]), "config is .1., not values by name"),
        (_row(config={}), "config is {}, which"),
        (_row(config={"a": [1]}), "a in config is .1., neither a number of at most 64 bits nor a name"),
        (_row(config={"a": 2**63}), "a in config is 9223372036854775808, neither"),
        (_row(config={"a": float("nan")}), "a in config is nan, neither"),
        (_row(provenance={"a": {"b": 1}}), "a in provenance"),
        (_row(n_octave="15"), "n_octave is '15', which"),
        (_row(config_version=10**30), "config_version is 10{30}, which"),
        (_row(dimension=-3), "dimension is -3, which"),
        (_row(gpu="\x1b[2J"), "gpu is .*, which"),
        (_row(error=3), "error is 3, which"),
        (_row(source="predicted"), "rank is None, which"),
        *[(_row(q50=ms), "three, ascending, 1e-6 to 6e8 milliseconds") for ms in ("1", None, -1)],
        *[(_row(q20=ms, q50=ms, q80=ms), "times are") for ms in (-1, 1e-300, 10**400, float("nan"))],
        *[(_row(created=when), "created is .*, which") for when in ("yesterday", 3, "2026-01-01T00:00:00Z")],
        ('{"format": "sdkde-tuning", "trial": ' + "[" * 100_000, "neither a database nor JSON"),
        (json.dumps(_row(config={})).replace("{}", "{" + '"a": {' * 500 + "}" * 501, 1), "config"),
    ],
)
def test_what_cannot_be_imported_is_refused_whole(path, tmp_path, content, message):
    file = tmp_path / "x.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with Store() as s:
        with pytest.raises(StoreError, match=message) as caught:
            s.load(file)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
        assert not s.trials()


@pytest.mark.filterwarnings("ignore::sdkde_core.SdkdeWarning")
@pytest.mark.parametrize("what", ["database", "export"])
def test_whatever_is_damaged_is_read_or_refused_and_left_as_it_is(path, tmp_path, what):
    """Bits that are flipped, parts that are missing, zeroed or doubled."""
    file, draw = tmp_path / "box" / "x", Random(0)
    file.parent.mkdir()
    with Store(file) as s:
        for i in range(20):
            add(s, KEY, {"n": i}, ok(1.0 + i), "measured", VERSIONS)
        whole = json.dumps(s.dump()).encode() if what == "export" else None
    whole = whole or file.read_bytes()
    for number in range(25):
        at, length = draw.randrange(len(whole)), draw.choice([1, 100, 4096])
        flipped = bytes(byte ^ 1 << draw.randrange(8) for byte in whole[at : at + length])
        file.write_bytes(whole[:at] + draw.choice([flipped, b"", bytes(length), flipped * 2]) + whole[at + length :])
        before = file.read_bytes()
        with Store(tmp_path / f"{number}") as s:
            with contextlib.suppress(StoreError):
                s.load(file)
            s.trials()
        with contextlib.suppress(StoreError), Store(file, write=False) as s:
            s.best()
        lookup.forget()
        lookup.candidates(QUERY, Problem("mean", 2**12, 2**15, 13, "float32", "fast", "cuda:0"), file)
        assert file.read_bytes() == before
        assert list(file.parent.iterdir()) == [file]


def test_files_that_cannot_be_imported(path, tmp_path):
    filled(tmp_path / "torn")
    (tmp_path / "torn").write_bytes((tmp_path / "torn").read_bytes()[50:])
    with Store() as s:
        for name, message in ("absent", "No such file"), ("", "directory"), ("torn", "neither a database nor JSON"):
            with pytest.raises(StoreError, match=message):
                s.load(tmp_path / name)


# --- files --------------------------------------------------------------------------------------------------------


def test_where_nothing_is_there_is_nothing_to_read(path):
    for make in lambda: None, lambda: path.parent.mkdir(), path.touch:
        make()
        with pytest.raises(StoreError, match=r"nothing is tuned yet: .*run sdkde-autotune, or pass --db"):
            Store(write=False)
    assert path.read_bytes() == b""


def test_read_only(path, entered):
    """A file that may not be written, a folder, and one that may not be made; what may be read is."""
    code = """
from sdkde_autotune.store import Store, StoreError
become_nobody()
for name in "file/x", "folder/x", "folder/y", "folder/z/x":
    try:
        Store(Path(sys.argv[1]) / name)
    except StoreError as error:
        print(error)
with Store(Path(sys.argv[1]) / "folder/x", write=False) as s:
    print(len(s.best()), len(s.trials()), len(s.dump()["trial"]))
"""
    filled(path)
    for folder in (entered / "file", entered / "folder"):
        folder.mkdir()
        (folder / "x").write_bytes(path.read_bytes())
        (folder / "x").chmod(0o444)
    (entered / "file").chmod(0o777)
    (entered / "folder").chmod(0o555)
    *lines, read = as_nobody(code, entered).stdout.splitlines()
    for line, file in zip(lines, ("file/x", "folder/x", "folder/y", "folder/z"), strict=True):
        assert line.startswith(str(entered / file))
        assert "cannot be written" in line
        assert "name another file with --db or SDKDE_DB" in line
    assert read == "2 4 4"
    assert list((entered / "folder").iterdir()) == [entered / "folder" / "x"]


# --- crowds and crashes -------------------------------------------------------------------------------------------

CROWD = """
import os, sys, time
from sdkde_autotune.records import Key, Trial
from sdkde_autotune.store import Store
key = Key(*eval(sys.argv[1]))
start, children = time.time() + 0.2, []
for number in range(16):
    child = os.fork()
    if child:
        children.append(child)
        continue
    try:
        time.sleep(max(0.0, start - time.time()))
        with Store() as store:
            for i in range(3):
                ms = 1.0 + ((7 * number + i) % 80)
                store.add(Trial(key._replace(kernel=str(i)), {"n": number}, ms=(ms, ms, ms)))
    except BaseException as error:
        print(number, repr(error), flush=True)
        os._exit(1)
    os._exit(0)
print(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def test_sixteen_that_start_cold_lose_nothing(path, python):
    process = python(CROWD, tuple(KEY), ready=False)
    assert process.communicate()[0] == "0\n"
    with Store() as s:
        found = s.trials()
        assert len(found) == 48
        fastest = {str(i): min(t.median for t in found if t.key.kernel == str(i)) for i in range(3)}
        assert {b.key.kernel: b.median for b in s.best()} == fastest
    assert list(path.parent.iterdir()) == [path]
