"""A real Dask scheduler and workers on loopback; workers and the scheduler are killed, and every run is done once."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from yardstick import slowness

pytest.importorskip("distributed", reason="needs the extra 'dask'")

from stfseb.errors import StfsebError
from stfseb.experiments import claims
from stfseb.experiments.executors import run_jobs
from stfseb.experiments.executors.log import read_log
from stfseb.experiments.jobs import make_job
from stfseb.experiments.status import status

pytestmark = [
    pytest.mark.slow,
    # A cluster that is killed leaves sockets and loops to the collector; that is Dask's own.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Cluster:
    """A scheduler and workers as processes of this test."""

    def __init__(self, folder, shared=True):
        self.folder, self.workers = folder, {}
        self.scratch = {"STFSEB_SCRATCH": str(folder / "scratch")} if shared else {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"

    def start_scheduler(self):
        self.scheduler = self._start(
            "dask_scheduler", "--port", str(self.port), "--no-dashboard", "--host", "127.0.0.1"
        )
        until = time.monotonic() + 240
        while True:
            assert self.scheduler.poll() is None, (self.folder / "dask_scheduler.log").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < until
            time.sleep(0.1)

    def start_worker(self, name, *more):
        self.workers[name] = self._start(
            "dask_worker", self.address, "--no-nanny", "--no-dashboard", "--host", "127.0.0.1", "--nthreads", "1",
            "--name", name, "--local-directory", str(self.folder / name), *more,
        )  # fmt: skip

    def _start(self, module, *arguments):
        code = f"import sys; from distributed.cli.{module} import main; main()"
        environment = {
            **os.environ,
            **self.scratch,
            "OMP_NUM_THREADS": "1",
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "3",
        }
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", code, *arguments], stdout=log, stderr=log, env=environment, process_group=0
            )

    def close(self):
        for process in (self.scheduler, *self.workers.values()):
            process.kill()
            process.wait()


@contextmanager
def cluster(folder, *more):
    found = Cluster(folder)
    found.start_scheduler()
    try:
        for name in ("alice", "bob"):
            found.start_worker(name, *more)
        yield found
    finally:
        found.close()


def wait_for(condition, seconds=300, pause=0.05):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(pause)


def work_done(folder):
    """Return the lines that the workers' own processes wrote about the runs they did."""
    return [line for log in folder.rglob("log.jsonl") for line in read_log(log.parent)]


def run(jobs, results, address, **more):
    said = []
    where = {"executor": "dask", "address": address, "device": "cpu"}
    return run_jobs(jobs, results, announce=said.append, progress=False, **(where | more)), said


def test_a_worker_and_the_scheduler_are_killed_and_every_run_is_done_once(tiny, tmp_path):
    folder, results = tmp_path / "cluster", tmp_path / "results"
    folder.mkdir()
    jobs = [make_job(tiny, "map", seed, training={"epochs": 12}) for seed in range(10)]
    names = sorted(job.name for job in jobs)
    with cluster(folder) as dask:

        def disturb():
            wait_for(lambda: sum(line["event"] == "started" for line in work_done(folder)) >= 3)
            dask.workers["alice"].send_signal(signal.SIGKILL)
            wait_for(lambda: len(list(results.glob("runs/*/*/record.json"))) >= 4)
            dask.scheduler.send_signal(signal.SIGKILL)

        thread = threading.Thread(target=disturb)
        thread.start()
        with pytest.raises(StfsebError, match=r"the Dask scheduler was lost; .* of 10 runs are recorded: start the"):
            run(jobs, results, dask.address)
        thread.join()
        recorded = {path: path.stat().st_mtime_ns for path in results.glob("runs/*/*/record.json")}
        assert 4 <= len(recorded) < 10
        assert not any(claims.holder(job.folder(results)) for job in jobs)
        dask.workers["bob"].wait(180)  # a worker without a scheduler ends

        dask.start_scheduler()
        dask.start_worker("carol", "--resources", "CPU=1")
        dask.start_worker("dave")
        outcome, _ = run(jobs, results, dask.address)
    assert len(outcome.skipped) == len(recorded)
    assert sorted(outcome.done + outcome.skipped) == names
    for path, written in recorded.items():
        assert path.stat().st_mtime_ns == written
    for job in jobs:
        record = job.record(results)
        assert record["job"] == job.identity
        assert (job.folder(results) / "model" / "model.json").exists()
    assert not [path for path in results.rglob("*") if ".part" in path.name or path.name in (claims.NAME, "checkpoint")]
    # The driver's book, and the workers' own: a run that was finished was never begun again.
    for lines in (read_log(results), work_done(folder)):
        done = [line["run"] for line in sorted(lines, key=lambda line: line["time"]) if line["event"] == "done"]
        assert sorted(done) == names
    finished = set()
    for line in sorted(work_done(folder), key=lambda line: line["time"]):
        assert line["run"] not in finished
        if line["event"] == "done":
            finished.add(line["run"])


@pytest.mark.parametrize("moment", ["while an answer is on its way", "before the first task"])
def test_a_scheduler_lost_at_any_moment_is_said(moment, tiny, tmp_path, monkeypatch):
    import distributed

    folder, results = tmp_path / "cluster", tmp_path / "results"
    folder.mkdir()
    jobs = [make_job(tiny, "map", seed) for seed in range(3)]
    result, information = distributed.Future.result, distributed.Client.scheduler_info

    def lost_before(future, *arguments, **more):
        dask.scheduler.kill()
        return result(future, *arguments, **more)

    def lost_after(client, *arguments, **more):
        found = information(client, *arguments, **more)
        dask.scheduler.kill()
        wait_for(lambda: client.status != "running")
        return found

    with cluster(folder) as dask:
        if moment == "before the first task":
            with distributed.Client(dask.address, set_as_default=False, timeout="60s") as client:
                client.wait_for_workers(1, timeout=240)
            monkeypatch.setattr(distributed.Client, "scheduler_info", lost_after)
        else:
            monkeypatch.setattr(distributed.Future, "result", lost_before)
        with pytest.raises(StfsebError, match="the Dask scheduler was lost; 0 of 3 runs are recorded: start the"):
            run(jobs, results, dask.address)
    assert not any(claims.holder(job.folder(results)) for job in jobs)


DRIVER = """
import json, sys
from pathlib import Path
from stfseb.experiments.executors import run_jobs
from stfseb.experiments.jobs import Job

jobs = [Job(**job) for job in json.loads(sys.argv[1])]
run_jobs(jobs, Path(sys.argv[2]), executor="dask", address=sys.argv[3], device="cpu", announce=print, progress=False)
"""


def test_a_driver_started_anew_takes_up_the_runs_under_way(tiny, tmp_path):
    import distributed

    folder, results = tmp_path / "cluster", tmp_path / "results"
    folder.mkdir()
    jobs = [make_job(tiny, "map", seed, training={"epochs": 1000}) for seed in range(2)]  # beyond both starts
    with cluster(folder) as dask:
        with distributed.Client(dask.address, set_as_default=False, timeout="60s") as client:
            client.wait_for_workers(2, timeout=240)  # one for each run: both are under way at once
        asked = [json.dumps([job.__dict__ for job in jobs]), str(results), dask.address]
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, *asked])
        wait_for(lambda: len(work_done(folder)) >= 2)
        assert [line["event"] for line in work_done(folder)] == ["started", "started"]
        driver.kill()
        driver.wait()
        outcome, _ = run(jobs, results, dask.address)
    assert sorted(outcome.done) == sorted(job.name for job in jobs)
    events = sorted((line["event"], line["run"]) for line in work_done(folder))
    assert events == sorted((event, job.name) for job in jobs for event in ("started", "done"))


def test_runs_share_a_card_by_fractions_and_failures_come_back(tiny, tmp_path):
    folder, results = tmp_path / "cluster", tmp_path / "results"
    folder.mkdir()
    # Of different groups, so that each is a task of its own that takes half of the (pretended) card. Long enough to
    # overlap although the processes that do them do not start at the same moment.
    jobs = [make_job(tiny, "map", 0, training={"epochs": 300 + i}) for i in range(4)]
    wrong = make_job(tiny, "map", 1, settings={"sigma": -1.0})
    found = Cluster(folder, shared=False)
    found.start_scheduler()
    try:
        found.start_worker("alice", "--resources", "GPU=1", "--nthreads", "4")
        outcome, said = run([*jobs, wrong], results, found.address, device=None, width=2)
    finally:
        found.close()
    assert sorted(outcome.done) == sorted(job.name for job in jobs)
    assert list(outcome.failed) == [wrong.name]
    assert "Traceback" in json.loads((wrong.folder(results) / "failure.json").read_text())["traceback"]
    assert any("1 of 5 runs failed" in line for line in said)
    under_way, most = set(), 0
    for line in sorted(work_done(folder), key=lambda line: line["time"]):
        (under_way.add if line["event"] == "started" else under_way.discard)(line["run"])
        most = max(most, len(under_way))
    assert most == 2
    assert "Traceback" not in (folder / "dask_worker.log").read_text()
    assert not list(folder.rglob("*-seed*"))  # cleared once recorded


def test_a_cluster_of_its_own_a_killed_run_and_the_drivers_share_of_the_time(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("STFSEB_SCRATCH", str(tmp_path / "scratch"))
    jobs = [make_job(tiny, "map", seed, training={"epochs": epochs}) for seed, epochs in enumerate((30, 1500))]
    share = []

    def watch():
        wait_for(lambda: work_done(tmp_path / "scratch"))
        os.kill(work_done(tmp_path / "scratch")[0]["process"], signal.SIGKILL)
        wait_for(lambda: len(work_done(tmp_path / "scratch")) == 2)  # the long one has begun
        began, cpu = time.perf_counter(), time.process_time()
        wait_for(lambda: len(work_done(tmp_path / "scratch")) > 2, pause=1)
        share.append((time.process_time() - cpu) / (time.perf_counter() - began))

    thread = threading.Thread(target=watch)
    thread.start()
    outcome, said = run(jobs, tmp_path / "results", None, processes=1)
    thread.join()
    assert "CommClosedError" not in capfd.readouterr().err  # of a scheduler that tells a driver which has left
    assert sorted(outcome.done) == sorted(job.name for job in jobs)
    assert any("its worker was killed (SIGKILL, out of memory?): given to another" in line for line in said)
    slower = slowness()  # a slow machine needs more CPU time, a busy one makes the job longer
    assert outcome.driver_cpu_seconds < 0.02 * max(60, outcome.seconds) * slower  # the start included
    assert share[0] < 0.02 * slower  # this thread's own looking included


def test_nobody_at_the_address_is_said_and_nothing_is_planned(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("stfseb.experiments.executors.dask_client.PATIENCE", 2.0)
    with pytest.raises(StfsebError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9 .*is it running"):
        run([make_job(tiny, "map")], tmp_path, "tcp://127.0.0.1:9")
    with socket.socket() as mute:  # takes connections and never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        there = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(StfsebError, match=rf"answers at {there} \(no answer within 2 s\): is it running"):
            run([make_job(tiny, "map")], tmp_path, there)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:8787", "tcp://127.0.0.1:99999", ":8786"])
def test_an_address_that_cannot_be_is_one_line_at_once(address, tmp_path):
    """In a process of its own, to whose end it belongs that nothing is left to be waited for."""
    words = ["table1", "--tasks", "mini", "--epochs", "1", "--executor", "dask", "--address", address]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "stfseb", "paper", *words, "--out", str(tmp_path / "results")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"stfseb: error: --address {address} cannot be used (")
    assert line.endswith("give that of a scheduler, --address tcp://HOST:8786")
    assert time.perf_counter() - began < 20 * slowness()  # not the 30 s of a client that nobody closed
    assert not (tmp_path / "results").exists()


def test_a_client_that_fails_leaves_nothing_to_its_end(monkeypatch):
    """It passes what is looked at before a client is made, and its scheduler is gone."""
    code = """
import sys
from stfseb.experiments.executors import dask_client
dask_client.PATIENCE, dask_client._listen = 1.0, lambda address: None
try:
    dask_client.connect(sys.argv[1])
except dask_client.StfsebError as error:
    print(error)
"""
    for address in ("tls://127.0.0.1:9", "tcp://127.0.0.1:9"):
        done = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, check=False, timeout=25 * slowness()
        )
        assert done.stdout.startswith(f"no Dask scheduler answers at {address} (")
        assert not done.stderr


def test_status_tells_the_queue_from_what_is_trained_and_a_lost_worker_is_said(tiny, tmp_path):
    folder, results = tmp_path / "cluster", tmp_path / "results"
    folder.mkdir()
    jobs = [make_job(tiny, "map", seed, training={"epochs": 700}) for seed in range(6)]
    seen = []
    with cluster(folder) as dask:

        def disturb():
            wait_for(lambda: (results / "plan.json").exists() and len(status(results).of("running")) == 2)
            wait_for(lambda: all(run.epoch for run in status(results).of("running")))
            seen.append(status(results))
            dask.workers["alice"].send_signal(signal.SIGKILL)
            dask.start_worker("carol")

        thread = threading.Thread(target=disturb)
        thread.start()
        outcome, said = run(jobs, results, dask.address)
        thread.join()
    assert len(outcome.done) == 6
    assert "CRITICAL" not in (folder / "dask_scheduler.log").read_text()
    (found,) = seen
    assert (found.counts["running"], found.counts["left"], found.queued) == (2, 4, 4)
    assert len({one.who["worker"] for one in found.of("running")}) == 2
    assert all(one.who["process"] != os.getpid() for one in found.of("running"))
    (line,) = [line for line in said if "was lost" in line]
    assert re.search(r"tiny map seed \d.*: its Dask worker, tcp://127.0.0.1:\d+, was lost: another takes", line)
