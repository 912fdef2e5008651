"""Where files are kept, and how one is replaced."""

import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from sdkde_core.plugin import cache_folder, write_atomically

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


def test_the_temporary_name_is_another_each_time(tmp_path):
    names = set()
    for _ in range(20):
        with write_atomically(tmp_path / "x") as temporary:
            names.add(temporary.name)
    assert len(names) == 20
    assert not any(str(os.getpid()) == name.split(".")[2] for name in names)


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
