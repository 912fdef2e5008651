"""The look-up of tuned configurations: the ladder, bad files, and what it costs."""

import contextlib
import json
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sqlite_utils")

import tuning_files
from sdkde_autotune import lookup
from sdkde_autotune.records import FAMILY, Key, now
from sdkde_autotune.store import Store, StoreError
from tuning_files import HOLD, add, as_nobody, cut_to, directory, edit, fifo, foreign, guess, ok, random, rotten, text

import sdkde_core
from sdkde_core import SdkdeWarning, tuning
from sdkde_core.protocol import Problem, Reduction
from sdkde_core.tuning import Query

python, entered = tuning_files.python, tuning_files.entered  # fixtures
QUERY = Query("triton", "triton.mean", 1, 16, "RTX A6000", "sm_86")
PROBLEM = Problem(Reduction.MEAN, 2**12, 2**15, 16, "float32", "fast", "cuda:0")
KEY = Key.of(QUERY, PROBLEM)
NOW = {"source": "abc", "sdkde": "1", "triton": "3", "torch": "2", "cuda": "12", "driver": "535"}


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch, untold):
    """An absent file, the one that is looked up; known versions; no shipped tables."""
    path = tmp_path / "home" / "tuning.sqlite"
    path.parent.mkdir()
    monkeypatch.setenv("SDKDE_DB", str(path))
    monkeypatch.setattr(lookup, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(tuning, "_lookup", lambda: lookup.lookup)
    monkeypatch.setattr(tuning, "_rejected", set())
    lookup.forget()
    yield path
    lookup.forget()


def fill(path, *rows):
    """Write winners: (name of the configuration, what differs of the key, source, what differs of the versions)."""
    with Store(path) as store:
        for name, changes, source, versions in rows:
            key = KEY._replace(**changes)
            add(store, key, {"name": name}, guess(1) if source == "predicted" else ok(1.0), source, NOW | versions)


def ask(accept=None, query=QUERY, problem=PROBLEM):
    found = tuning.tuned(query, problem, accept)
    return None if found is None else (found[0]["name"], found[1])


def warnings(recwarn):
    assert all(warning.category is SdkdeWarning for warning in recwarn)
    return [str(warning.message) for warning in recwarn]


A100 = {"gpu": "A100 SXM 80GB", "architecture": "sm_80"}
A40 = {"gpu": "A40"}  # of the A6000's architecture


# --- the ladder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "row"),
    [
        ("exact", ({}, "measured", {})),
        ("exact", ({}, "imported", {})),
        ("exact", ({}, "measured", {"driver": "999"})),
        ("near", ({"n_octave": 12, "m_octave": 9}, "measured", {})),
        ("near", ({"n_octave": 18, "m_octave": 15}, "imported", {"torch": "1"})),
        ("architecture", (A40, "measured", {})),
        ("architecture", ({**A40, "n_octave": 18}, "measured", {"driver": "999"})),
        ("predicted", ({}, "predicted", {})),
        ("predicted", ({"m_octave": 10}, "predicted", {})),
        (None, (A100, "measured", {})),
        ("near", ({"dimension": 20}, "measured", {})),
        ("near", ({"dimension": 12, "n_octave": 18}, "imported", {})),
        ("near", ({"requires": "weights"}, "measured", {})),
        ("exact", ({"d": 13}, "measured", {})),  # padded alike
        ("architecture", ({**A40, "dimension": 21}, "measured", {})),
        ("predicted", ({"requires": "weights"}, "predicted", {})),
        (None, ({"dimension": 11}, "measured", {})),
        (None, ({"dimension": 22}, "measured", {})),
        (None, ({"n_octave": 19}, "measured", {})),
        (None, ({"m_octave": 8}, "measured", {})),
        (None, (A40, "predicted", {})),
        (None, ({"n_octave": 11}, "predicted", {})),
    ],
)
def test_every_rung(path, rung, row):
    fill(path, ("x", *row))
    assert ask() == (rung and ("x", rung))


def test_what_is_not_accepted_moves_down_the_ladder(path, tmp_path):
    with Store(tmp_path / "shipped.sqlite") as store:
        add(store, KEY, {"name": "shipped"}, ok(1.0), "measured", NOW)
        lookup.TABLES.mkdir()
        (lookup.TABLES / "a6000.json").write_text(json.dumps(store.dump(only_winners=True)))
    fill(
        path,
        ("predicted", {"m_octave": 13}, "predicted", {}),
        ("architecture", A40, "measured", {}),
        ("near", {"m_octave": 11}, "measured", {}),
        ("exact", {}, "measured", {}),
    )
    refused = []
    for name in ("exact", "shipped", "near", "architecture", "predicted"):
        rung = "exact" if name == "shipped" else name
        assert ask(lambda config: config["name"] not in refused) == (name, rung)
        refused.append(name)
    assert ask(lambda config: False) is None
    assert ask() == ("exact", "exact")  # nothing of that is remembered
    assert [found.best.config["name"] for found in lookup.candidates(QUERY, PROBLEM)] == refused


@pytest.mark.parametrize("column", FAMILY)
def test_another_family_never_answers(path, column):
    other = {str: "other", int: 7}[type(getattr(KEY, column))]
    fill(path, ("x", {column: other}, "measured", {}), ("x", {column: other}, "predicted", {}))
    assert ask() is None


def test_the_nearest_sizes_answer(path):
    fill(
        path,
        ("far", {"n_octave": 17, "m_octave": 13}, "measured", {}),
        ("near", {"n_octave": 16, "m_octave": 11}, "measured", {}),
        ("uneven", {"n_octave": 17}, "measured", {}),
    )
    assert [found.best.config["name"] for found in lookup.candidates(QUERY, PROBLEM)] == ["near", "uneven", "far"]


def test_features_are_matched_first_and_a_plain_configuration_serves_too(path):
    fill(
        path,
        ("plain", {}, "measured", {}),
        ("weights", {"requires": "weights", "n_octave": 17}, "measured", {}),
        ("both", {"requires": "grad,weights"}, "measured", {}),
    )
    for requires, name, rung in (
        ((), "plain", "exact"),
        (("weights",), "weights", "near"),
        (("weights", "grad"), "both", "exact"),
        (("grad",), "plain", "near"),
    ):
        assert ask(problem=replace(PROBLEM, requires=frozenset(requires))) == (name, rung)
    assert ask(lambda config: config["name"] == "plain", problem=replace(PROBLEM, requires=frozenset({"weights"}))) == (
        "plain",
        "near",
    )


def test_nearby_dimensions_serve_each_other_the_nearest_first(path):
    """What numba-cuda, which pads nothing, tuned at d = 7 serves d = 8."""
    for d in 7, 10:
        fill(path, (f"{d}", {"d": d, "dimension": d}, "measured", {}))
    for d, expected in ((7, ("7", "exact")), (8, ("7", "near")), (9, ("10", "near")), (5, None), (14, None)):
        assert ask(query=replace(QUERY, dimension=d), problem=replace(PROBLEM, d=d)) == expected


# --- shipped tables -----------------------------------------------------------------------------------------------


def ship(name, *rows):
    lookup.TABLES.mkdir(exist_ok=True)
    tried = {"status": "ok", "q20": 1, "q50": 1, "q80": 1, "rank": 1, "provenance": {}, "created": now()}
    trials = [
        {**KEY._replace(**changes)._asdict(), **tried, "config": {"name": row}, "source": source}
        for row, changes, source in rows
    ]
    (lookup.TABLES / name).write_text(json.dumps({"trial": trials}))


def test_shipped_tables_answer_as_if_measured_here():
    ship("b.json", ("kin", A40, "measured"), ("other", A100, "measured"), ("far", {"n_octave": 19}, "measured"))
    ship("a.json", ("size", {"n_octave": 12}, "measured"), ("guess", {"m_octave": 13}, "predicted"))
    ship("c.json", ("card", {}, "measured"))
    found = [(found.best.config["name"], found.rung) for found in lookup.candidates(QUERY, PROBLEM)]
    assert found == [("card", "exact"), ("size", "near"), ("kin", "architecture"), ("guess", "predicted")]


# --- odd rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["nonsense", '{"a": [1]}'])
def test_a_row_without_a_configuration_is_passed_over(path, config, recwarn):
    fill(path, ("bad", {}, "measured", {}), ("good", {"m_octave": 11}, "measured", {}))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE trial SET config = ? WHERE m_octave = 12", [config])
        connection.commit()
    for _ in range(2):
        assert ask() == ("good", "near")
        lookup.forget()
    assert len(warnings(recwarn)) == 1


def test_an_accept_that_raises_refuses(path, recwarn):
    fill(path, ("bad", {}, "measured", {}), ("good", {"m_octave": 11}, "measured", {}))

    def accept(config):
        if config["name"] == "bad":
            raise ValueError("a configuration has block_m, not name")
        return True

    for _ in range(3):
        assert ask(accept) == ("good", "near")
    assert len(warnings(recwarn)) == 1


# --- files --------------------------------------------------------------------------------------------------------


BAD = {
    "random": (random, "is no database of the tuner, and is left alone; name another"),
    "text": (text, "is no database of the tuner"),
    "truncated": (cut_to(6000), "is not used: it is corrupt .*name another file with --db or SDKDE_DB"),
    "no pages": (cut_to(100), "is not used: it is corrupt .*name another"),
    "rotten": (rotten, "it is corrupt"),
    "foreign": (foreign, "another program's SQLite file; name another"),
    "foreign id": (edit("PRAGMA application_id = 1"), "another program's"),
    "newer": (edit("PRAGMA user_version = 2"), "another version of sdkde wrote it .schema 2, this one reads 1.; name"),
    "no table": (edit("DROP TABLE trial"), "cannot be used .no such table: trial.; name another"),
    "no column": (edit("ALTER TABLE trial DROP COLUMN rank"), "cannot be used .no such column: rank.; name another"),
    "directory": (directory, "it is no regular file; name another"),
    "fifo": (fifo, "it is no regular file"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_counts_as_empty_is_reported_once_and_left_alone(path, tmp_path, recwarn, spoil, message):
    fill(path, ("x", {}, "measured", {}))
    ship("a.json", ("shipped", {}, "measured"))
    spoil(path)
    lookup.forget()
    content = path.is_file() and path.read_bytes()
    for _ in range(3):
        assert ask() == ("shipped", "exact")
        assert ask() == ("shipped", "exact")
        lookup.forget()
    (warning,) = warnings(recwarn)
    with Store(tmp_path / "other") as other:
        ways = [Store, lambda: Store(write=False).trials(), lambda: other.load(path)]
        for use in ways if "corrupt" in message else ways[:1]:
            with pytest.raises(StoreError, match=message) as caught:
                use()
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert str(path) in warning and "sdkde-autotune" in warning and "\n" not in warning
    assert list(path.parent.iterdir()) == [path]
    assert content == (path.is_file() and path.read_bytes())


@pytest.mark.parametrize("absent", ["nothing", "no folder", "empty file", "a file for a folder"])
def test_a_missing_file_is_no_news(path, recwarn, monkeypatch, absent):
    if absent == "no folder":
        path.parent.rmdir()
    elif absent == "empty file":
        path.touch()
    elif absent == "a file for a folder":
        path.write_text("x")
        monkeypatch.setenv("SDKDE_DB", str(path / "tuning.sqlite"))
    before = sorted(path.parent.parent.rglob("*"))
    assert ask() is None
    assert sorted(path.parent.parent.rglob("*")) == before
    assert len(warnings(recwarn)) == (absent == "a file for a folder")


@pytest.mark.parametrize(
    ("statements", "readable"),
    [
        (["BEGIN IMMEDIATE", "DELETE FROM trial"], True),
        pytest.param(["BEGIN EXCLUSIVE", "DELETE FROM trial"], False, marks=pytest.mark.slow),
        (["PRAGMA locking_mode = EXCLUSIVE", "DELETE FROM trial WHERE 0", "BEGIN IMMEDIATE"], False),
    ],
)
def test_a_locked_file(path, recwarn, statements, readable, python):
    fill(path, ("x", {}, "measured", {}))
    process = python(HOLD, path, *statements)
    before, start = sorted(path.parent.iterdir()), time.monotonic()
    for _ in range(2):
        assert ask() == (("x", "exact") if readable else None)
        lookup.forget()
    assert time.monotonic() - start < 10  # an estimate waits half a second, also on a busy machine
    assert len(warnings(recwarn)) == (not readable)
    assert sorted(path.parent.iterdir()) == before
    with pytest.raises(StoreError, match=f"{path} is locked by another process; wait for it or end it"):
        Store(wait=0.3)
    process.communicate()
    with Store() as store:
        assert len(store.trials()) == 1


KILLED = """
import os, signal, sys
from sdkde_autotune.records import Key, Trial
from sdkde_autotune.store import Store
store = Store()
key = Key(*eval(sys.argv[1]))
store.add(Trial(key, {"name": "x"}, ms=(1., 1., 1.), provenance=eval(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
connection = store._db.conn
connection.execute("PRAGMA cache_size = 1")  # so that pages are written before the end of the transaction
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE trial SET config = replace(hex(zeroblob(99000)), '0', 'x')")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_running_tuner_has_written_is_found_and_what_a_killed_one_left(path, recwarn, python):
    """Killed in the middle of a transaction, whose pages are half written."""
    fill(path, ("old", {"m_octave": 11}, "measured", {}))
    process = python(KILLED, tuple(KEY), NOW)
    assert ask() == ("x", "exact")
    before = path.read_bytes()
    process.communicate("go\n")
    assert Path(f"{path}-journal").stat().st_size
    assert path.read_bytes() != before
    lookup.forget()
    assert ask() == ("x", "exact")
    assert path.read_bytes() == before
    assert not warnings(recwarn)
    with Store(path) as store:
        assert len(store.best()) == 2
    assert list(path.parent.iterdir()) == [path]


def test_read_while_tuners_come_and_go(path, recwarn, python):
    fill(path, ("x", {}, "measured", {}))
    code = """
import sys, time
from sdkde_autotune.records import Key, Trial
from sdkde_autotune.store import Store
key = Key(*eval(sys.argv[1]))
print("ready", flush=True)
while True:
    with Store() as store:
        for i in range(50):
            store.add(Trial(key, {"name": str(i)}, ms=(2.0, 2.0, 2.0)))
            time.sleep(0.02)  # less than a candidate takes
"""
    process = python(code, tuple(KEY))
    for _ in range(150):
        assert ask() == ("x", "exact"), warnings(recwarn)
        lookup.forget()
    process.kill()
    process.communicate()
    assert not warnings(recwarn)


def test_another_users_files(path, entered):
    """In a folder that one may not write to the file is read; one that may not be read is reported."""
    fill(path, ("x", {}, "measured", {}))
    code = """
from sdkde_autotune.lookup import lookup
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query
become_nobody()
for name in "open", "closed":
    os.environ["SDKDE_DB"] = f"{sys.argv[1]}/{name}"
    problem = Problem("mean", 2**12, 2**15, 16, "float32", "fast", "cuda:0")
    print(lookup(Query("triton", "triton.mean", 1, 16, "RTX A6000", "sm_86"), problem))
"""
    for kind, mode in ("open", 0o444), ("closed", 0o000):
        (entered / kind).write_bytes(path.read_bytes())
        (entered / kind).chmod(mode)
    entered.chmod(0o555)
    found = as_nobody(code, entered)
    assert sorted(p.name for p in entered.iterdir()) == ["closed", "open"]
    assert found.stdout.splitlines() == ["({'name': 'x'}, 'exact')", "None"]
    assert "SdkdeWarning" in found.stderr
    assert "closed is not used" in found.stderr


# --- where, when, and at what cost --------------------------------------------------------------------------------


def test_no_home_is_no_reason_to_fail(monkeypatch, recwarn, tmp_path):
    def nobody(uid):
        raise KeyError(uid)

    for name in "SDKDE_DB", "HOME", "XDG_CACHE_HOME":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileNotFoundError, match="the user has no home"):
        lookup.database()
    assert ask() is None
    assert sdkde_core.estimate([0.0, 1.0, 3.0], [1.0]).shape == (1,)
    assert not warnings(recwarn)  # nothing that was kept is passed over
    assert sorted(tmp_path.rglob("*")) == before


def test_a_home_that_is_not_there_is_told(monkeypatch, recwarn):
    monkeypatch.setenv("SDKDE_DB", "~nobody-of-that-name/x.sqlite")
    assert ask() is None
    (warning,) = warnings(recwarn)
    assert "SDKDE_DB is '~nobody-of-that-name/x.sqlite'" in warning
    assert sdkde_core.estimate([0.0, 1.0, 3.0], [1.0]).shape == (1,)


def test_read_once_until_told_to_forget(path, tmp_path, monkeypatch):
    fill(path, ("x", {}, "measured", {}))
    assert ask() == ("x", "exact")
    path.unlink()
    assert ask() == ("x", "exact")
    assert ask(problem=replace(PROBLEM, m=2**11)) is None  # another question
    fill(tmp_path / "other.sqlite", ("y", {}, "measured", {}))  # the tuner forgets by itself
    assert ask() is None
    monkeypatch.setenv("SDKDE_DB", str(tmp_path / "other.sqlite"))
    assert ask() == ("y", "exact")
