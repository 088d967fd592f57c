"""Locks: one holder at a time, whatever processes do, and none left behind by the dead."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from stfseb.errors import StfsebError
from stfseb.experiments import claims

HOLD = """
import sys, time
from pathlib import Path
from stfseb.experiments import claims
held = claims.claim(Path(sys.argv[1]), seed=3)
print("held" if held else "refused", flush=True)
time.sleep(60)
"""

# Reads a number and writes it back, one more, with a pause between: two at a time would lose counts.
COUNT = """
import sys, time
from pathlib import Path
from stfseb.experiments import claims
folder, counter = Path(sys.argv[1]), Path(sys.argv[2])
left = 40
while left:
    held = claims.claim(folder)
    if held is None:
        continue
    with held:
        number = int(counter.read_text())
        time.sleep(0.0005)
        counter.write_text(str(number + 1))
        left -= 1
"""


def start(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_one_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with claims.claim(folder, seed=3) as first:
        assert first.shared
        assert claims.claim(folder) is None
        said = claims.holder(folder)
        assert (said["process"], said["seed"]) == (os.getpid(), 3)
        assert -1 < time.time() - said["since"] < 60
    assert claims.holder(folder) is None
    assert list(folder.iterdir()) == []
    claims.claim(folder).release()


def test_a_killed_holder_holds_nothing(tmp_path):
    process = start(HOLD, tmp_path / "run")
    try:
        assert process.stdout.readline() == "held\n"
        assert claims.claim(tmp_path / "run") is None
        assert claims.holder(tmp_path / "run")["process"] == process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert (tmp_path / "run" / claims.NAME).exists()  # the file stays and means nothing
    assert claims.holder(tmp_path / "run") is None
    with claims.claim(tmp_path / "run") as held:
        assert held.shared


def test_processes_at_once_never_hold_together(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [start(COUNT, tmp_path / "run", counter) for _ in range(4)]
    for process in processes:
        assert process.wait(60) == 0
        process.stdout.close()
    assert counter.read_text() == "160"


def test_taking_a_folder_removes_what_a_killed_writer_left(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / ".record.json.abc.part").write_text("{")
    (tmp_path / "model" / ".model.json.abc.part").write_text("{")
    (tmp_path / "record.json").write_text("{}")
    with claims.claim(tmp_path):
        assert sorted(path.name for path in tmp_path.rglob("*")) == [claims.NAME, "model", "record.json"]


def test_tidy_removes_a_dead_claim_and_leaves_a_live_one(tmp_path):
    (tmp_path / claims.NAME).write_text("{}")
    (tmp_path / "checkpoint").write_text("")
    claims.tidy(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with claims.claim(tmp_path):
        claims.tidy(tmp_path)
        assert claims.holder(tmp_path) is not None


def test_without_locks_a_claim_is_granted_and_says_so(tmp_path, monkeypatch):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    (tmp_path / ".record.json.abc.part").write_text("{")
    with claims.claim(tmp_path) as held:
        assert not held.shared
        assert (tmp_path / ".record.json.abc.part").exists()  # perhaps another's
    assert claims.holder(tmp_path) is None


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StfsebError, match=r"cannot write to .*choose another folder"):
        claims.claim(tmp_path / "file" / "run")


def test_whoever_may_only_read_sees_the_holder(tmp_path, monkeypatch):
    real = os.open

    def only_reading(path, flags, *more):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *more)

    with claims.claim(tmp_path):
        monkeypatch.setattr(os, "open", only_reading)
        assert claims.holder(tmp_path)["process"] == os.getpid()


def test_somebody_who_only_looks_is_not_taken_for_a_holder(tmp_path, monkeypatch):
    pauses = []
    with (tmp_path / claims.NAME).open("w") as looking:

        def pause(seconds):
            pauses.append(seconds)
            if sum(pauses) > 0.005:  # so long may a look take
                fcntl.flock(looking, fcntl.LOCK_UN)

        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(claims.time, "sleep", pause)
        held = claims.claim(tmp_path)
    assert held is not None
    assert len(pauses) > 1
    held.release()
