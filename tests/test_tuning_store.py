"""The tuner's file: what it keeps, what wins, and what becomes of crowds, crashes and bad files."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("sqlite_utils")
pytest.importorskip("filelock")

from sdkde_autotune import lookup, schema, store
from sdkde_autotune.key import Key
from sdkde_autotune.runner import Outcome
from sdkde_autotune.store import Store, StoreError

KEY = Key("triton", "triton.mean", 1, "mean", "fast", "float32", "", 1, 16, 15, 12, "RTX A6000", "sm_86")
OTHER = KEY._replace(n_octave=16)
VERSIONS = {"source": "abc", "torch": "2.9"}
A, B, C = {"block_m": 64, "stages": 2}, {"block_m": 128, "stages": 2}, {"block_m": 256, "stages": 3}


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "home" / "tuning.sqlite"
    monkeypatch.setenv("SDKDE_DB", str(path))
    monkeypatch.setattr(store, "BUSY_SECONDS", 0.3)
    return path


def ok(ms):
    return Outcome("ok", (0.9 * ms, ms, 1.2 * ms), phases={"compile": 1.5, "time": 0.5})


@pytest.fixture
def python():
    """Start other processes; they end with the test at the latest."""
    with contextlib.ExitStack() as stack:

        def start(code, *arguments):
            command = [sys.executable, "-c", code, *map(str, arguments)]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            return process

        yield start


# --- what is kept -------------------------------------------------------------------------------------------------


def test_trials_come_back_as_they_went_in(path):
    outcomes = [ok(1.0), Outcome("compile_error", error="spills 12 bytes"), Outcome("timeout", phases={"time": 9.0})]
    with Store() as s:
        assert s.path == path
        for config, outcome in zip((A, B, C), outcomes):
            s.add(KEY, config, outcome, "measured", VERSIONS)
        s.add(OTHER, A, ok(3.0), "predicted", {})
    with Store(path) as s:
        found = s.trials(KEY)
        assert [(t.key, t.config, t.outcome, t.source, t.provenance) for t in found] == [
            (KEY, config, outcome, "measured", VERSIONS) for config, outcome in zip((A, B, C), outcomes)
        ]
        assert [t.created for t in found] == sorted(t.created for t in found)
        assert found[0].created.endswith("+00:00")
        assert [t.key for t in s.all_trials()] == [KEY, KEY, KEY, OTHER]
        assert [t.config for t in s.all_trials(status="ok", n_octave=15)] == [A]
        assert [t.config for t in s.all_trials(status=["timeout", "compile_error"])] == [B, C]
        assert len(s.all_trials(gpu=None, source="measured")) == 3
        assert s.all_trials(gpu="H200 SXM") == []
        with pytest.raises(StoreError, match="'card' is no column of trial; there are backend,"):
            s.all_trials(card="H200 SXM")
        with pytest.raises(ValueError, match="source is 'guessed'"):
            s.add(KEY, A, ok(1.0), "guessed", {})


def test_the_columns_are_readable(path):
    with Store() as s:
        s.add(KEY, {"z": 1, "a": "x"}, ok(1.0), "measured", VERSIONS)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        (row,) = connection.execute("SELECT * FROM trial")
        assert {name: row[name] for name in Key._fields} == KEY._asdict()
        assert row["config"] == '{"a": "x", "z": 1}'
        assert connection.execute("PRAGMA application_id").fetchone()[0] == 0x53444B45
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(schema.MIGRATIONS)
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_writing_again_replaces(path):
    with Store() as s:
        s.add(KEY, A, ok(1.0), "measured", VERSIONS)
        s.add(KEY, dict(reversed(A.items())), ok(2.0), "measured", {})
        s.add(KEY, A, ok(3.0), "predicted", {})
        assert [t.outcome.median for t in s.trials(KEY)] == [2.0, 3.0]
        for _ in range(2):
            s.settle(KEY)
            assert [b.ms for b in s.best()] == [2.0]


def test_calibration(path):
    with Store() as s:
        s.calibrate("host", "triton", {"launch": 1e-5, "exps": 2e12})
        s.calibrate("host", "triton", {"launch": 2e-5})
        s.calibrate("host", "numpy", {"launch": 3e-5})
        assert s.calibration("host", "triton") == {"launch": 2e-5, "exps": 2e12}
        assert s.calibration("elsewhere", "triton") == {}


# --- what wins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "winner", "default_ms"),
    [
        ([], None, None),
        ([(A, Outcome("crash"), "measured")], None, None),
        ([(A, ok(2.0), "measured"), (B, ok(1.0), "measured"), (C, Outcome("oom"), "measured")], (B, "measured"), 2.0),
        # What gains less than one percent does not beat the default, A; otherwise by name: "128" before "64".
        ([(A, ok(1.0), "measured"), (B, ok(0.995), "measured")], (A, "measured"), 1.0),
        ([(A, ok(1.0), "measured"), (B, ok(0.98), "measured")], (B, "measured"), 1.0),
        ([(C, ok(1.0), "measured"), (B, ok(1.0), "measured")], (B, "measured"), None),
        ([(A, ok(2.0), "measured"), (B, ok(1.0), "predicted")], (A, "measured"), 2.0),
        ([(A, ok(2.0), "measured"), (B, ok(1.0), "imported")], (B, "imported"), 2.0),
        ([(A, ok(2.0), "imported"), (B, ok(1.0), "predicted")], (A, "imported"), 2.0),
        ([(A, ok(2.0), "predicted"), (B, ok(1.0), "predicted")], (B, "predicted"), 2.0),
        # Of one configuration, what was measured here counts: slower, or not at all.
        ([(A, ok(3.0), "measured"), (A, ok(1.0), "imported"), (B, ok(2.0), "measured")], (B, "measured"), 3.0),
        (
            [(A, Outcome("crash"), "measured"), (A, ok(1.0), "imported"), (B, ok(2.0), "imported")],
            (B, "imported"),
            None,
        ),
        ([(A, Outcome("crash"), "measured"), (A, ok(1.0), "predicted")], None, None),
        ([(A, Outcome("crash"), "measured"), (B, ok(1.0), "predicted")], (B, "predicted"), None),
        (
            [(A, ok(1.0), "predicted"), (B, ok(2.0), "measured")],
            (B, "measured"),
            None,
        ),  # a prediction is no default's ms
        ([(A, ok(float("nan")), "measured"), (B, ok(2.0), "measured")], (B, "measured"), None),
        ([(A, ok(float("inf")), "measured")], None, None),
    ],
)
def test_the_winner(path, trials, winner, default_ms):
    with Store() as s:
        for i, (config, outcome, source) in enumerate(trials):
            s.add(KEY, config, outcome, source, {"source": str(i)})
        s.add(OTHER, C, ok(0.1), "measured", {})
        s.settle(KEY, A)
        found = s.best(n_octave=15)
        assert [(b.key, b.config, b.source) for b in found] == ([(KEY, *winner)] if winner else [])
        for best in found:
            (trial,) = [t for t in s.trials(KEY) if (t.config, t.source) == winner]
            assert (best.ms, best.provenance, best.created) == (trial.outcome.median, trial.provenance, trial.created)
            assert best.default_ms == default_ms
            assert best.noise == pytest.approx(0.3)


def test_without_one_that_ran_the_winner_goes(path):
    with Store() as s:
        for key in KEY, OTHER:
            s.add(key, A, ok(1.0), "measured", {})
            s.settle(key)
        s.add(KEY, A, Outcome("crash", error="illegal memory access"), "measured", {})
        s.settle(KEY)
        assert [b.key for b in s.best()] == [OTHER]


def test_the_default_is_remembered(path):
    with Store() as s:
        s.add(KEY, A, ok(2.0), "measured", {})
        s.settle(KEY, A)
        s.add(KEY, B, ok(1.0), "measured", {})
        s.settle(KEY)
        (best,) = s.best()
        assert (best.config, best.ms, best.default_ms, best.default_config) == (B, 1.0, 2.0, A)


def test_the_lookup_hears_of_it(path, monkeypatch):
    heard = []
    monkeypatch.setattr(lookup, "forget", lambda: heard.append(1))
    with Store() as s:
        s.add(KEY, A, ok(1.0), "measured", {})
        s.settle(KEY)
    assert heard


# --- exchange -----------------------------------------------------------------------------------------------------


def filled(path):
    with Store(path) as s:
        s.add(KEY, A, ok(2.0), "measured", VERSIONS)
        s.add(KEY, B, ok(1.0), "measured", VERSIONS)
        s.add(KEY, C, Outcome("crash", error="x"), "measured", VERSIONS)
        s.add(OTHER, A, ok(2.0), "predicted", VERSIONS)
        s.calibrate("host", "triton", {"launch": 1e-5})
        s.settle(KEY, A)
        s.settle(OTHER, A)
        return s.dump()


def as_mapping(path, dump):
    return dump


def as_json(path, dump):
    path.with_suffix(".json").write_text(json.dumps(dump))
    return path.with_suffix(".json")


def as_database(path, dump):
    return str(path)


@pytest.mark.parametrize("how", [as_mapping, as_json, as_database])
def test_import(path, tmp_path, how):
    there = tmp_path / "there.sqlite"
    given = how(there, filled(there))
    before = sorted(tmp_path.iterdir())
    with Store() as s:
        assert s.load(given) == 5
        assert s.load(given) == 0
        assert [(t.key, t.config, t.outcome, t.source) for t in s.all_trials()] == [
            (KEY, A, ok(2.0), "imported"),
            (KEY, B, ok(1.0), "imported"),
            (KEY, C, Outcome("crash", error="x"), "imported"),
            (OTHER, A, ok(2.0), "predicted"),
        ]
        assert [(b.key, b.config, b.ms, b.default_ms, b.source, b.provenance) for b in s.best()] == [
            (KEY, B, 1.0, 2.0, "imported", VERSIONS),
            (OTHER, A, 2.0, 2.0, "predicted", VERSIONS),
        ]
        assert s.calibration("host", "triton") == {"launch": 1e-5}
        back = s.dump()
    assert sorted({*tmp_path.iterdir()} - {path.parent}) == before
    with Store(there) as s:
        assert s.load(back) == 0  # they began their travels here


def test_what_is_measured_here_stays(path, tmp_path):
    dump = filled(tmp_path / "there.sqlite")
    with Store() as s:
        s.add(KEY, B, ok(5.0), "measured", {})
        s.settle(KEY, C)
        s.load(dump)
        assert [(b.config, b.ms, b.default_config) for b in s.best(n_octave=15)] == [(A, 2.0, C)]


def test_of_two_imports_the_later_measured_counts(path):
    def one(ms, created):
        row = {**KEY._asdict(), "config": A, "status": "ok", "error": "", "q20": ms, "q50": ms, "q80": ms, "phases": {}}
        trial = {**row, "source": "imported", "provenance": {}, "created": created}
        return {"format": "sdkde-tuning", "schema": 1, "trial": [trial]}

    dumps = [one(1.0, "2026-01-01T00:00:00Z"), one(2.0, "2026-01-02T01:00:00+02:00"), one(3.0, "2026-01-01T12:00")]
    for order in ((0, 1, 2), (2, 1, 0)):
        with Store(path.with_name(f"{order}")) as s:
            assert [s.load(dumps[i]) for i in order] == [1, 1, 0]
            assert [t.outcome.median for t in s.trials(KEY)] == [2.0]


def test_filtered_dumps(path):
    filled(path)
    with Store() as s:
        dump = s.dump(status="ok", n_octave=15)
        assert [row["config"] for row in dump["trial"]] == [A, B]
        assert [row["config"] for row in dump["best"]] == [B]
        assert dump["calibration"] == []
        assert json.loads(json.dumps(dump)) == dump
        assert s.dump(n_octave=None)["calibration"]


def test_an_import_that_is_cut_short_is_mended_by_the_next(path, tmp_path, monkeypatch):
    dump = filled(tmp_path / "there.sqlite")
    with Store() as s:
        with monkeypatch.context() as patch:

            def stop(*_):
                raise KeyboardInterrupt

            patch.setattr(s, "_settle", stop)
            with pytest.raises(KeyboardInterrupt):
                s.load(dump)
        s.load(dump)
        assert len(s.best()) == 2


def _row(**changes):
    there = {**KEY._asdict(), "config": A, "status": "ok", "error": "", "q20": 1, "q50": 1, "q80": 1, "phases": {}}
    row = {**there, "source": "measured", "provenance": {}, "created": "2026-01-01T00:00:00", **changes}
    return {"format": "sdkde-tuning", "schema": 1, "trial": [row]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{ not", "neither a database nor JSON"),
        ("[1, 2, 3]", "no export of the tuner"),
        ('{"best": []}', "no export of the tuner"),
        ({"format": "sdkde-tuning", "schema": 99}, "newer sdkde .schema 99.; update sdkde"),
        ({"format": "sdkde-tuning", "trial": [{"backend": "triton"}]}, "has a row that cannot be read"),
        ({"format": "sdkde-tuning", "trial": 3}, "has a row that cannot be read"),
        (_row(status="fine"), "status 'fine'"),
        (_row(source="rumour"), "source 'rumour'"),
        (_row(config=[1]), "has a row that cannot be read"),
        (_row(config={"a": [1]}), "no numbers or names"),
        (_row(n_octave="15"), "another kind"),
        (_row(q50="1"), "times are numbers"),
        (_row(created="yesterday"), "yesterday"),
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
        assert not s.all_trials()


def test_files_that_cannot_be_imported(path, tmp_path):
    foreign, broken = tmp_path / "foreign", tmp_path / "broken"
    with contextlib.closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE bookmarks (url)")
    filled(broken)
    broken.write_bytes(broken.read_bytes()[:5000])
    with Store() as s:
        for file, message in (
            (tmp_path / "absent", "No such file"),
            (tmp_path, "directory"),
            (foreign, "another program's"),
            (broken, "malformed"),
        ):
            with pytest.raises(StoreError, match=message):
                s.load(file)


# --- migrations ---------------------------------------------------------------------------------------------------


def _more(db):
    db["trial"].add_column("host", str, not_null_default="unknown")


def test_an_older_file_is_migrated(path, monkeypatch):
    filled(path)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, _more))
    assert lookup.read(path, lambda connection: connection.execute("SELECT count(*) FROM best").fetchone()) == (2,)
    for _ in range(2):
        with Store() as s:
            assert len(s.all_trials(host="unknown")) == 4
    with Store(path.with_name("new")) as s:
        assert s.load(path) == 5
        assert len(s.all_trials(host="unknown")) == 4


def test_an_older_file_is_imported_as_it_is(path, tmp_path, monkeypatch):
    there = tmp_path / "there"
    filled(there)
    before = there.read_bytes()
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, _more))
    with Store() as s:
        assert s.load(there) == 5
    assert there.read_bytes() == before


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    filled(path)

    def fails(db):
        db.conn.execute("DROP TABLE trial")
        raise sqlite3.OperationalError("no")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, fails))
        with pytest.raises(StoreError, match="no"):
            Store()
    with Store() as s:
        assert len(s.all_trials()) == 4


# --- files --------------------------------------------------------------------------------------------------------


def random(path):
    path.write_bytes(os.urandom(5000))


def truncated(path):
    path.write_bytes(path.read_bytes()[:6000])


def header_only(path):
    path.write_bytes(path.read_bytes()[:100])


def rotten(path):
    data = bytearray(path.read_bytes())
    data[8192:12288] = b"\xa5" * 4096
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [random, truncated, header_only, rotten])
def test_a_corrupt_file_is_moved_aside(path, recwarn, spoil):
    filled(path)
    spoil(path)
    spoilt = path.read_bytes()
    with Store() as s:
        assert s.all_trials() == []
        s.add(KEY, A, ok(1.0), "measured", {})
    with Store() as s:
        assert len(s.all_trials()) == 1
    (warning,) = [str(each.message) for each in recwarn]
    (aside,) = path.parent.glob("tuning.sqlite.corrupt-*")
    assert aside.read_bytes() == spoilt
    assert str(path) in warning
    assert str(aside) in warning
    assert "\n" not in warning


def test_all_that_belongs_to_a_file_goes_with_it(path):
    path.parent.mkdir()
    for suffix in "", "-wal", "-shm":
        Path(f"{path}{suffix}").write_text(suffix)
    link = path.with_name("link")
    link.symlink_to(path)
    aside = store._move_aside(link)
    assert [Path(f"{aside}{suffix}").read_text() for suffix in ("", "-wal", "-shm")] == ["", "-wal", "-shm"]
    assert sorted(p.name for p in path.parent.iterdir() if "corrupt" not in p.name) == ["link"]


def test_an_empty_file_is_begun(path):
    path.parent.mkdir()
    path.touch()
    filled(path)


def edit(*statements):
    def change(path):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return change


def foreign(path):
    path.unlink()
    edit("CREATE TABLE trial (x)", "CREATE TABLE best (x)", "CREATE TABLE calibration (x)")(path)


def directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (foreign, "another program's SQLite file; name another with --db or SDKDE_DB"),
        (edit("PRAGMA application_id = 7"), "another program's"),
        (edit("DROP TABLE best"), "lacks best; move it away"),
        (edit("PRAGMA user_version = 99"), r"a newer sdkde wrote it \(schema 99, this one knows 1\); update sdkde"),
        (directory, "it is a directory; name another"),
    ],
)
def test_what_is_refused_is_left_alone(path, spoil, message):
    filled(path)
    Path(f"{path}.lock").unlink()
    spoil(path)
    content = path.is_file() and path.read_bytes()
    with pytest.raises(StoreError, match=message) as caught:
        Store()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(path.parent.iterdir()) == [path]
    assert content == (path.is_file() and path.read_bytes())


HOLD = """
import sqlite3, sys, filelock
if sys.argv[2] == "lock":
    lock = filelock.FileLock(sys.argv[1] + ".lock")
    lock.acquire()
else:
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    for statement in sys.argv[2:]:
        connection.execute(statement).fetchall()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "statements",
    [
        ["lock"],
        ["BEGIN IMMEDIATE"],
        ["PRAGMA locking_mode = EXCLUSIVE", "DELETE FROM best"],
        ["PRAGMA journal_mode = DELETE", "BEGIN EXCLUSIVE", "DELETE FROM best"],
    ],
)
def test_a_locked_file_is_said_to_be(path, statements, python):
    filled(path)
    process = python(HOLD, path, *statements)
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(StoreError, match="is locked by another process; wait for it or end it") as caught:
        Store()
    assert str(path) in str(caught.value)
    process.communicate()
    with Store() as s:
        assert len(s.all_trials()) == 4


def test_a_writer_waits_for_another(path, monkeypatch, python):
    monkeypatch.setattr(store, "BUSY_SECONDS", 10.0)
    filled(path)
    with Store() as s:
        process = python(
            HOLD.replace("sys.stdin.read()", "import time; time.sleep(0.5); print(time.monotonic())"),
            path,
            "BEGIN IMMEDIATE",
        )
        assert process.stdout.readline() == "ready\n"
        s.add(KEY, A, ok(7.0), "measured", {})
        done = time.monotonic()
        assert done > float(process.communicate()[0])  # when the other was about to end


def test_read_only(path, tmp_path):
    """A file that may not be written, a folder, and one that may not be made; as another user, for root may all."""
    import tempfile  # pytest's folders cannot be entered by others

    code = """
import os, sys
from pathlib import Path
from sdkde_autotune.store import Store, StoreError
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in "file/x", "folder/x", "folder/y", "folder/z/x":
    try:
        Store(Path(sys.argv[1]) / name)
    except StoreError as error:
        print(error)
"""
    filled(path)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for folder in "file", "folder":
            (top / folder).mkdir()
            (top / folder / "x").write_bytes(path.read_bytes())
            (top / folder / "x").chmod(0o444)
            (top / folder / "x.lock").touch()
            (top / folder / "x.lock").chmod(0o666)
        (top / "file").chmod(0o777)
        (top / "folder").chmod(0o555)
        top.chmod(0o755)
        found = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True).stdout
        (top / "folder").chmod(0o755)
        lines = found.splitlines()
        assert len(lines) == 4
        for line, file in zip(lines, ("file/x", "folder/x", "folder/y", "folder/z")):
            assert line.startswith(str(top / file))
            assert "cannot be written" in line
            assert "name another file with --db or SDKDE_DB" in line


def test_a_parent_that_is_a_file(path):
    path.parent.write_text("x")
    with pytest.raises(StoreError, match="cannot be written"):
        Store()


def test_damage_while_it_is_open_is_said(path):
    filled(path)
    with Store() as s:
        s._db.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * 30000)
        s._db.conn.execute("PRAGMA shrink_memory")
        with pytest.raises(StoreError, match=r"is corrupt .*run the tuner again, which moves it aside"):
            s.all_trials()


# --- crowds and crashes -------------------------------------------------------------------------------------------

CROWD = """
import os, sys, time
from sdkde_autotune.store import Store, Outcome, Key
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
            for i in range(5):
                ms = 1.0 + ((7 * number + i) % 80)
                store.add(key._replace(kernel=str(i)), {"n": number}, Outcome("ok", (ms, ms, ms)), "measured", {})
                store.settle(key._replace(kernel=str(i)))
            store.calibrate("host", "triton", {str(number): 1.0})
    except BaseException as error:
        print(number, repr(error), flush=True)
        os._exit(1)
    os._exit(0)
print(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


@pytest.mark.parametrize("beginning", ["absent", "corrupt"])
def test_sixteen_that_start_cold_lose_nothing(path, beginning, python):
    if beginning == "corrupt":
        path.parent.mkdir()
        path.write_bytes(os.urandom(9000))
    process = python(CROWD, tuple(KEY))
    assert process.communicate()[0] == "0\n"
    with Store() as s:
        found = s.all_trials()
        assert len(found) == 80
        assert len(s.calibration("host", "triton")) == 16
        fastest = {str(i): min(t.outcome.median for t in found if t.key.kernel == str(i)) for i in range(5)}
        assert {b.key.kernel: b.ms for b in s.best()} == fastest
    assert len(list(path.parent.glob("*corrupt*"))) == (beginning == "corrupt")


KILLED = """
import sys
from sdkde_autotune.store import Store, Outcome, Key
key = Key(*eval(sys.argv[1]))
with Store() as store:
    i = 0
    while True:
        store.add(key, {"n": i}, Outcome("ok", (1.0 + i, 1.0 + i, 1.0 + i)), "measured", {})
        print(i, flush=True)
        store.settle(key)
        i += 1
"""


def test_kill_9_loses_the_row_in_flight_at_most(path, python):
    for rows in (1, 40, 90):
        path.unlink(missing_ok=True)
        process = python(KILLED, tuple(KEY))
        last = [process.stdout.readline() for _ in range(rows)][-1]
        process.send_signal(signal.SIGKILL)
        said = int((process.stdout.read().splitlines() or [last])[-1]) + 1
        process.communicate()
        with Store() as s:
            assert [t.config["n"] for t in s.trials(KEY)][:said] == list(range(said))
            assert len(s.trials(KEY)) <= said + 1
            s.settle(KEY)
            assert [b.config for b in s.best()] == [{"n": 0}]


def test_killed_while_it_begins(path, python):
    """At every statement of creation: the next process finds nothing, or everything."""
    code = """
import os, sys
from sdkde_autotune import store
left = 0
def trace(statement):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
connect = store.sqlite3.connect
def traced(*args, **options):
    connection = connect(*args, **options)
    connection.set_trace_callback(trace)
    return connection
end = 9
while end:
    child = os.fork()
    if not child:
        os.environ["SDKDE_DB"] += str(left)
        store.sqlite3.connect = traced
        store.Store()
        os._exit(0)
    end = os.waitpid(child, 0)[1]
    assert end in (0, 9)
    left += 1
print(left)
"""
    count = int(python(code).communicate()[0])
    assert 20 < count < 200
    for number in range(count):
        filled(path.with_name(f"{path.name}{number}"))


def test_an_interrupt_leaves_all_or_nothing(path, monkeypatch):
    with Store() as s:
        s.add(KEY, A, ok(1.0), "measured", {})
        insert = s._insert

        def interrupted(table, found):
            insert(table, found)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(s, "_insert", interrupted)
            with pytest.raises(KeyboardInterrupt):
                s.add(KEY, B, ok(1.0), "measured", {})
        s.add(KEY, C, ok(1.0), "measured", {})
        assert [t.config for t in s.trials(KEY)] in ([A, C], [A, B, C])  # the latter with sqlite-utils 3


def test_two_in_one_process(path):
    with Store() as first, Store() as second:
        for i in range(20):
            (first, second)[i % 2].add(KEY, {"n": i}, ok(1.0), "measured", {})
        assert len(first.trials(KEY)) == len(second.trials(KEY)) == 20
