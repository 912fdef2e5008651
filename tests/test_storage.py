"""Where files are kept, and how one is replaced."""

import errno
import os
import stat
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sdkde_core.plugin import cache_folder, write_atomically
from sdkde_core.storage import write_folder

posix = pytest.mark.skipif(os.name != "posix", reason="modes, links and pipes of POSIX")


def write(path, text):
    with write_atomically(path) as temporary:
        temporary.write_text(text)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the rule of XDG")
def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sdkde"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "sdkde"
    assert not list(tmp_path.iterdir())


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "result.npy"
    path.write_text("old")
    with write_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.suffix == ".npy"  # by which libraries choose a format
        assert temporary.parent == tmp_path
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_after_an_error_the_old_file_is_as_it_was(tmp_path, error):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(type(error)), write_atomically(path) as temporary:
        temporary.write_text("ne")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_the_caller_named(tmp_path):
    with pytest.raises(FileNotFoundError) as found:
        write(tmp_path / "no" / "x", "new")
    assert found.value.filename == str(tmp_path / "no" / "x")


@posix
@pytest.mark.parametrize("kept", [0o600, 0o640, 0o444, 0o755])
def test_the_mode_of_the_replaced_file_is_kept(tmp_path, kept):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(kept)
    with write_atomically(path) as temporary:
        assert mode(temporary) == 0o600  # what was private is so all the time
        temporary.write_text("new")
    assert (path.read_text(), mode(path)) == ("new", kept)


@posix
def test_a_new_file_has_the_mode_that_the_users_mask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "x", "new")
    finally:
        os.umask(before)
    assert mode(tmp_path / "x") == 0o640


@posix
def test_a_link_in_the_way_is_not_followed(tmp_path, monkeypatch):
    """Even if somebody did foresee the temporary name, and planted a link there."""
    victim, path = tmp_path / "victim", tmp_path / "x"
    victim.write_text("precious")
    (tmp_path / f".x.{'00' * 8}").symlink_to(victim)
    with monkeypatch.context() as patch, pytest.raises(FileExistsError):
        patch.setattr(os, "urandom", bytes)
        write(path, "new")
    assert victim.read_text() == "precious"
    assert not path.exists()


@posix
def test_a_link_stays_one_and_what_it_points_to_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), mode(target)) == ("new", 0o640)
    target.unlink()
    write(link, "again")  # a link to nothing: what it would point to is made
    assert target.read_text() == "again"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


@posix
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write(path, "new")
    reader.join(10)
    assert read == ["new"]
    assert path.is_fifo()
    write(Path(os.devnull), "new")
    assert not Path(os.devnull).is_file()


@posix
@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "link"])
@pytest.mark.parametrize("kind", ["a pipe", "a file"])
def test_what_is_open_is_written_to(tmp_path, name, kind):
    """A pipe has no name by which it could be replaced; a file that the shell has opened must stay that file."""
    (tmp_path / "out").touch()
    read, number = os.pipe() if kind == "a pipe" else (os.open(tmp_path / "out", os.O_RDONLY), None)
    number = os.open(tmp_path / "out", os.O_WRONLY) if number is None else number
    path = Path(name.format(number))
    if name == "link":
        path = tmp_path / name
        path.symlink_to(f"/dev/fd/{number}" if kind == "a pipe" else tmp_path / "out")
    try:
        if not path.exists():
            pytest.skip(f"no {name} here")
        write(path, "new")
        if name == "link" and kind == "a file":
            assert (tmp_path / "out").read_text() == "new"
        else:
            assert os.read(read, 9) == b"new"
    finally:
        os.close(number)
        os.close(read)


@posix
def test_a_link_to_itself_is_refused(tmp_path):
    path = tmp_path / "x"
    path.symlink_to(path)
    with pytest.raises(OSError, match=r"x'$") as found:
        write(path, "new")
    assert found.value.errno == errno.ELOOP and path.is_symlink()


def test_a_long_name(tmp_path):
    path = tmp_path / f"{'x' * 240}.npy"
    write(path, "new")
    assert path.read_text() == "new"


@pytest.fixture
def nobody(tmp_path):
    """A folder that anybody can enter, and as nobody it is written to: root may do everything."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        if os.geteuid() != os.getuid():
            os.seteuid(os.getuid())


def become_nobody():
    if os.geteuid() == 0:
        os.seteuid(65534)


@posix
def test_a_folder_that_takes_no_new_file_is_named_before_anything_is_computed(nobody):
    (nobody / "x").write_text("old")
    (nobody / "x").chmod(0o666)
    nobody.chmod(0o555)
    become_nobody()
    for path in (nobody / "x", nobody / "absent"):
        refused = pytest.raises(PermissionError, match=f"the folder {nobody} takes no new file")
        with refused as found, write_atomically(path):
            pytest.fail("known before anything is computed")
        assert found.value.filename == str(path)
    assert [(p.name, p.read_text()) for p in nobody.iterdir()] == [("x", "old")]


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_of_the_replaced_file_is_kept_or_it_stays(nobody):
    path = nobody / "x"
    path.write_text("old")
    path.chmod(0o640)
    os.chown(path, 65534, 65533)
    write(path, "new")
    found = path.stat()
    assert (found.st_uid, found.st_gid, mode(path), path.read_text()) == (65534, 65533, 0o640, "new")
    os.chown(path, 0, 0)  # in a folder of nobody's
    path.chmod(0o666)
    os.chown(nobody, 65534, 65534)
    become_nobody()
    with pytest.raises(PermissionError, match="its owner cannot be kept; remove it first"):
        write(path, "newer")
    assert [(p.name, p.read_text()) for p in nobody.iterdir()] == [("x", "new")]


def test_a_signal_as_the_folder_is_made_leaves_none(tmp_path, monkeypatch):
    made = Path.mkdir

    def mkdir(self, *arguments, **options):
        made(self, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(KeyboardInterrupt), write_folder(tmp_path / "x.zarr", lambda path: None):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_goes_in_which_a_thread_still_writes(tmp_path):
    begun = threading.Event()

    def write_on(folder):
        for i in range(40):
            with suppress(FileNotFoundError):
                (folder / str(i)).touch()
            begun.set()
            time.sleep(0.005)

    with pytest.raises(KeyboardInterrupt), write_folder(tmp_path / "x.zarr", lambda path: None) as folder:
        thread = threading.Thread(target=write_on, args=(folder,))
        thread.start()
        assert begun.wait(60)
        raise KeyboardInterrupt
    thread.join()
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_mounted_is_written_in_place(tmp_path, monkeypatch):
    """As into a container: its name cannot be given to another file, and what was computed is not lost."""

    def replace(self, target):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    (tmp_path / "p").write_text("before")
    monkeypatch.setattr(Path, "replace", replace)
    with write_atomically(tmp_path / "p") as new:
        new.write_text("after")
    assert (tmp_path / "p").read_text() == "after" and len(list(tmp_path.iterdir())) == 1


@posix
def test_a_file_that_may_not_be_written_is_not_replaced(nobody):
    nobody.chmod(0o777)
    (nobody / "x").write_text("old")
    (nobody / "x").chmod(0o444)
    become_nobody()
    with pytest.raises(PermissionError) as found:
        write(nobody / "x", "new")
    assert found.value.filename == str(nobody / "x") and (nobody / "x").read_text() == "old"
