"""Four workers on one study, one of them killed: exactly 40 trials finish, none is lost. Real servers, real kills."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest
from search_helpers import plan, tiny_task

from stfseb.experiments.search import read_search
from stfseb.experiments.search.store import Store

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def postgres():
    """Start Debian's PostgreSQL on loopback, as an unprivileged user where the tests run as root."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL server: install Debian's postgresql to run this test")
    user = next((u for u in ("postgres", "nobody") if os.geteuid() == 0), None)
    if user and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL refuses root, and there is no runuser to start it as somebody else")
    run = ["runuser", "-u", user, "--"] if user else []
    folder = Path(tempfile.mkdtemp(prefix="stfseb-pg-", dir="/tmp"))  # where another user can get, too
    if user:
        shutil.chown(folder, user)
    binaries, data = found[-1].parent, folder / "data"

    def call(*words):
        done = subprocess.run([*run, *map(str, words)], capture_output=True, text=True, cwd=folder, timeout=240)
        assert done.returncode == 0, done.stderr

    call(binaries / "initdb", "-D", data, "-A", "trust", "-U", "searcher", "--no-sync", "--no-locale", "-E", "UTF8")
    port = free_port()
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
    # Its log goes to a file: a server that keeps our pipes open would keep us waiting for it.
    call(binaries / "pg_ctl", "-D", data, "-w", "-t", "180", "-l", folder / "log", "-o", settings, "start")
    try:
        yield f"postgresql://searcher:secret@127.0.0.1:{port}/postgres"
    finally:
        call(binaries / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    pytest.importorskip("psycopg")
    return request.getfixturevalue("postgres")


def worker(url, log, trials=40, seconds=0.2, grace=20):
    """Start a worker; a live one on a busy machine or a slow disk must not be silent for as long as the grace."""
    command = [sys.executable, HERE / "search_helpers.py", url, trials, seconds, grace, log]
    return subprocess.Popen([str(word) for word in command], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


def test_four_workers_one_killed_exactly_forty(url, tmp_path):
    log = tmp_path / "log"
    workers = [worker(url, log) for _ in range(4)]
    deadline = time.monotonic() + 240
    while (not log.exists() or len(log.read_text().split()) < 10) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers[0].send_signal(signal.SIGKILL)  # in the middle of its trial
    for one in workers[1:]:
        _, errors = one.communicate(timeout=300)
        assert one.returncode == 0, errors
    assert workers[0].wait() == -signal.SIGKILL
    workers[0].stderr.close()
    with Store(url, plan(), 40) as store:
        trials = store.trials()
    assert [t["index"] for t in trials] == list(range(40))  # none lost, none twice
    assert [t["params"] for t in trials] == plan().draws(40)
    assert all(t["outcome"] == "complete" for t in trials)
    # Every draw was begun once, but for the one that died under its worker, which another began again.
    begun = Counter(map(int, log.read_text().split()))
    assert set(begun) == set(range(40))
    assert sum(begun.values()) in (40, 41)


def test_a_search_killed_again_and_again_ends_as_one_left_alone(tmp_path):
    task = tiny_task(tmp_path / "task", train=96, validation=64, context=64, epochs=4)

    def command(out):
        words = [sys.executable, "-m", "stfseb.cli", "search", task, "--method", "mcdropout", "--space", "extended"]
        words += ["--trials", 6, "--out", out, "--grace", 2, "--device", "cpu"]
        return [str(word) for word in words]

    alone = subprocess.run(command(tmp_path / "alone"), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert alone.returncode == 0, alone.stderr
    killed = 0
    for delay in (0.3, 1.0, 1.7):  # as many deaths as a trial is forgiven, should all of them hit the same one
        process = subprocess.Popen(command(tmp_path / "out"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        process.stderr.readline()  # it has said something: a trial is finished, or it goes on from some
        time.sleep(delay)
        killed += process.poll() is None
        process.kill()
        process.communicate()
    assert killed >= 2, "the kills came too late to show anything"
    last = subprocess.run(command(tmp_path / "out"), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert last.returncode == 0, last.stderr
    (first,), (second,) = ((tmp_path / where / "searches").glob("*") for where in ("alone", "out"))
    one, two = read_search(first), read_search(second)
    assert len(two["trials"]) == 6
    assert one["choices"] == two["choices"]
    for a, b in zip(one["trials"], two["trials"], strict=True):
        assert a | {"seconds": 0} == b | {"seconds": 0}  # bit for bit, but for the clock


def test_two_workers_one_killed_and_a_final(url, tmp_path):
    """One dies with a trial in its hands; the other waits for it, and only then trains the finalists."""
    task = tiny_task(tmp_path / "task", train=96, validation=64, context=64, epochs=3)
    words = [sys.executable, "-m", "stfseb.cli", "search", task, "--method", "mcdropout", "--space", "extended"]
    words += ["--trials", 12, "--epochs", 2, "--finalists", 3, "--grace", 4, "--device", "cpu"]
    words += ["--storage", url, "--out", tmp_path / "out"]
    begun = [
        subprocess.Popen(
            [str(w) for w in words], env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    begun[0].stderr.readline()  # a trial is finished, and the next one is begun
    begun[0].kill()
    begun[0].communicate()
    out, said = begun[1].communicate(timeout=300)
    assert begun[1].returncode == 0, said
    first, final = (read_search(folder) for folder in sorted((tmp_path / "out" / "searches").iterdir()))
    assert [t["index"] for t in first["trials"]] == list(range(12))
    assert [t["index"] for t in final["trials"]] == list(range(3))
    lines = said.splitlines()
    middle = lines.index("3 finalists of 12 trials, now trained to the task's 3 epochs")
    assert not any("/3 · #" in line for line in lines[:middle])
    assert sum("/3 · #" in line for line in lines[middle:]) == 3
    assert "finalist" in out
    again = subprocess.run([str(w) for w in words], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0
    assert "/3 · #" not in again.stderr
    assert "/12 · #" not in again.stderr


def test_sigterm_gives_the_trial_back_at_once(tmp_path):
    task = tiny_task(tmp_path / "task", train=96, validation=64, context=64, epochs=100_000)  # it never gets there
    task.write_text(task.read_text().replace("lr: 0.002", "lr: 0.002, patience: 100000"))
    words = [sys.executable, "-m", "stfseb.cli", "search", task, "--trials", 2, "--out", tmp_path, "--no-prune"]
    process = subprocess.Popen([str(w) for w in words], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    database = next_file(tmp_path / "searches", "*/study.db")
    wait_for_a_running_trial(database)
    time.sleep(2)  # it has its trial; now it trains
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.rstrip().splitlines()[-1].endswith("the same command goes on from there")
    assert (database.parent / "trials" / "0.safetensors").exists()  # it will go on in the middle of its training
    assert read_search(database.parent)["trials"] == []
    from stfseb.experiments.search import make_plan

    with Store(f"sqlite:///{database}", make_plan(str(task), "stfseb"), 2) as store:
        assert store.claim().index == 0  # without waiting for a grace period


def test_sigterm_in_the_final_is_one_line_too(tmp_path):
    task = tiny_task(tmp_path / "task", train=96, validation=64, context=64, epochs=100_000)
    task.write_text(task.read_text().replace("lr: 0.002", "lr: 0.002, patience: 100000"))
    words = [sys.executable, "-m", "stfseb.cli", "search", task, "--trials", 2, "--epochs", 1, "--finalists", 1]
    words += ["--out", tmp_path, "--method", "map"]
    process = subprocess.Popen([str(w) for w in words], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    database = next_file(tmp_path / "searches", "*-final1of2/study.db")
    wait_for_a_running_trial(database)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    told = said.rstrip().splitlines()
    assert told[-2] == "1 finalist of 2 trials, now trained to the task's 100000 epochs"
    assert told[-1].endswith("the same command goes on from there")
    assert (database.parent / "trials" / "0.safetensors").exists()
    assert read_search(database.parent)["trials"] == []


def wait_for_a_running_trial(database):
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        with closing(sqlite3.connect(database)) as study, suppress(sqlite3.OperationalError):  # no table yet, or busy
            if study.execute("SELECT COUNT(*) FROM trials WHERE state = 'RUNNING'").fetchone()[0]:
                return
        time.sleep(0.1)
    raise AssertionError(f"no trial was begun in {database}")


def next_file(folder, pattern):
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        for path in folder.glob(pattern):
            return path
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {folder}")
