"""Files are whole or not there, and what a killed writer left goes with the next one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from stfseb import files
from stfseb.errors import StfsebError
from stfseb.files import remove_leftovers, replacing, write_text

WRITER = """
import os, sys, pathlib
from stfseb.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as part:
    part.write_text("half")
    print("written", flush=True)
    sys.stdin.read()
"""


def writer(path):
    """A process that is in the middle of writing a file."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    return process


def parts(folder):
    return sorted(path.name for path in folder.glob(".*.part"))


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    path = tmp_path / "table.md"
    with writer(path) as process:
        process.send_signal(signal.SIGKILL)
    assert len(parts(tmp_path)) == 1
    assert not path.exists()
    write_text(tmp_path / "table.mdx", "another file's are not touched")
    assert len(parts(tmp_path)) == 1
    write_text(path, "whole")
    assert parts(tmp_path) == []
    assert path.read_text() == "whole"


def test_what_another_is_writing_stays_and_takes_its_place(tmp_path):
    path = tmp_path / "table.md"
    with writer(path) as process:
        mine = parts(tmp_path)
        write_text(path, "whole")
        assert parts(tmp_path) == mine
        process.stdin.close()
        assert process.wait(60) == 0
    assert path.read_text() == "half"
    assert parts(tmp_path) == []


def test_two_of_one_process_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "table.md"
    with replacing(path) as first:
        first.write_text("first")
        write_text(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_a_part_taken_for_a_leftover_before_its_lock_is_made_again(tmp_path, monkeypatch):
    real, taken = files.try_lock, []

    def late(handle):
        if not taken:  # another writer comes between the making of the file and its lock
            taken.extend(parts(tmp_path))
            with monkeypatch.context() as other:
                other.setattr(files, "try_lock", real)
                remove_leftovers(tmp_path / "table.md")
            assert parts(tmp_path) == []
        return real(handle)

    monkeypatch.setattr(files, "try_lock", late)
    with replacing(tmp_path / "table.md") as part:
        assert [part.name] == parts(tmp_path) != taken
        part.write_text("whole")
    assert (tmp_path / "table.md").read_text() == "whole"
    assert len(taken) == 1


def test_a_part_that_a_leftovers_remover_holds_is_left_to_it(tmp_path, monkeypatch):
    answers = iter([None])
    real = files.try_lock
    monkeypatch.setattr(files, "try_lock", lambda handle: next(answers, True) and real(handle))
    write_text(tmp_path / "table.md", "whole")
    assert (tmp_path / "table.md").read_text() == "whole"


@pytest.mark.parametrize("windows", [False, True])
def test_without_locks_a_part_may_be_anothers_until_it_is_a_day_old(tmp_path, monkeypatch, windows):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "no locks available")

    old, new = tmp_path / ".table.md.abc.part", tmp_path / ".table.md.xyz.part"
    old.write_text("half")
    new.write_text("half")
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    with monkeypatch.context() as without:
        without.setattr(files.fcntl, "flock", refuse)
        if windows:
            without.setattr(files, "fcntl", None)
        with replacing(tmp_path / "table.md") as part:
            part.write_text("whole")
            assert parts(tmp_path) == sorted([new.name, part.name])
    assert (tmp_path / "table.md").read_text() == "whole"
    left = tmp_path / part.name
    left.write_text("half")
    write_text(tmp_path / "table.md", "again")  # with locks: what was written without one may still be another's
    assert parts(tmp_path) == [left.name]
    os.utime(left, (time.time() - 25 * 3600,) * 2)
    write_text(tmp_path / "table.md", "and again")
    assert parts(tmp_path) == []


def test_where_locks_bind_other_handles_a_file_is_written_without_one(tmp_path, monkeypatch):
    """As on SMB, where a locked file takes nothing from another handle, even of the same process."""
    real, locked = Path.open, []
    monkeypatch.setattr(files, "try_lock", lambda handle: bool(locked.append(os.fstat(handle).st_ino)) or True)
    close = os.close

    def closing(handle):
        with suppress(ValueError):
            locked.remove(os.fstat(handle).st_ino)
        close(handle)

    def refuse(path, *how, **more):
        if path.exists() and path.stat().st_ino in locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *how, **more)

    monkeypatch.setattr(os, "close", closing)
    monkeypatch.setattr(Path, "open", refuse)
    with replacing(tmp_path / "table.md") as part:
        part.write_text("whole")
        monkeypatch.undo()
        remove_leftovers(tmp_path / "table.md")  # by one who can lock: it is being written all the same
        assert parts(tmp_path) == [part.name]
    assert (tmp_path / "table.md").read_text() == "whole"
    assert parts(tmp_path) == []


def test_where_files_change_their_numbers_it_is_written_without_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "leads_to", lambda path, handle: False)
    before = lowest_free_handle()
    with replacing(tmp_path / "table.md") as part:
        remove_leftovers(tmp_path / "table.md")
        assert parts(tmp_path) == [part.name]
        part.write_text("whole")
    assert (tmp_path / "table.md").read_text() == "whole"
    assert parts(tmp_path) == []
    assert lowest_free_handle() == before


def test_tidying_never_stops_a_write(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)  # a folder that may be written to and not listed
    write_text(tmp_path / "table.md", "whole")
    assert (tmp_path / "table.md").read_text() == "whole"


def test_a_full_disk_is_said_with_its_remedy_from_the_first_step_on(tmp_path, monkeypatch):
    def full(**how):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.tempfile, "mkstemp", full)
    with pytest.raises(StfsebError, match=r"table\.md: No space left on device; free some space"):
        write_text(tmp_path / "table.md", "whole")


def lowest_free_handle():
    handle = os.open(os.devnull, os.O_RDONLY)
    os.close(handle)
    return handle


def test_no_handle_is_left_open(tmp_path):
    before = lowest_free_handle()
    for _ in range(5):
        write_text(tmp_path / "table.md", "whole")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StfsebError, match="choose another name"):
        write_text(tmp_path / "folder", "a folder is there")
    assert parts(tmp_path) == []
    assert lowest_free_handle() == before
