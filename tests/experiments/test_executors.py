"""Runs are done once, failures are kept and do not spread, and what a killed process leaves is taken over."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from stfseb.errors import StfsebError
from stfseb.experiments import claims
from stfseb.experiments.executors import run_jobs, work
from stfseb.experiments.executors.ledger import Ledger
from stfseb.experiments.executors.log import read_log
from stfseb.experiments.executors.plan import planned
from stfseb.experiments.executors.plan_file import read_plan
from stfseb.experiments.executors.view import View
from stfseb.experiments.executors.work import Report, Workplace
from stfseb.experiments.jobs import Job, make_job
from stfseb.training.interrupts import Interrupted


@pytest.fixture
def jobs(tiny):
    return [make_job(tiny, "map", seed) for seed in range(3)]


def run(jobs, results, **more):
    said = []
    outcome = run_jobs(jobs, results, **{"device": "cpu", "announce": said.append, "progress": False, **more})
    return outcome, said


def names(jobs):
    return [job.name for job in jobs]


def leftovers(results):
    """Return files that a complete job must not leave."""
    return [path for path in results.rglob("*") if path.name in (claims.NAME, "checkpoint") or ".part" in path.name]


def test_what_is_there_is_not_done_again(jobs, tmp_path):
    outcome, said = run([jobs[0], jobs[1], jobs[0]], tmp_path)
    assert outcome.done == names(jobs[:2])
    assert "[2/2] tiny map seed 1: done" in said[-1]
    before = {job.name: (job.folder(tmp_path) / "record.json").stat().st_mtime_ns for job in jobs[:2]}
    outcome, _ = run(jobs, tmp_path)
    assert (outcome.skipped, outcome.done) == (names(jobs[:2]), names(jobs[2:]))
    assert outcome.complete
    for job in jobs[:2]:
        assert (job.folder(tmp_path) / "record.json").stat().st_mtime_ns == before[job.name]
    assert [line["run"] for line in read_log(tmp_path) if line["event"] == "done"] == names(jobs)
    assert sorted(read_plan(tmp_path)) == sorted(names(jobs))  # of both commands
    assert not leftovers(tmp_path)


def test_a_failure_is_kept_spreads_to_no_other_and_is_retried_on_request(jobs, tmp_path, monkeypatch):
    real, broken = work.perform, jobs[1].name

    def perform(job, *args, **kwargs):
        if job.name == broken:
            raise RuntimeError("the dog ate it")
        return real(job, *args, **kwargs)

    monkeypatch.setattr(work, "perform", perform)
    outcome, said = run(jobs, tmp_path)
    assert outcome.done == [jobs[0].name, jobs[2].name]
    assert outcome.failed == {broken: "RuntimeError: the dog ate it"}
    assert not outcome.complete
    assert said[-2] == "1 of 3 runs failed (--retry-failed does them again):"
    assert "the dog ate it" in said[-1]
    failure = json.loads((jobs[1].folder(tmp_path) / "failure.json").read_text())
    assert "Traceback" in failure["traceback"]
    assert failure["traceback"].strip().endswith("RuntimeError: the dog ate it")
    assert (failure["attempt"], failure["stage"]) == (1, "training")

    monkeypatch.setattr(work, "perform", lambda *a, **k: pytest.fail("a failed run was done without being asked for"))
    outcome, said = run(jobs, tmp_path)
    assert list(outcome.failed) == outcome.before == [broken]
    assert "--retry-failed" in said[0]

    monkeypatch.setattr(work, "perform", perform)
    run(jobs, tmp_path, retry_failed=True)
    assert json.loads((jobs[1].folder(tmp_path) / "failure.json").read_text())["attempt"] == 2

    monkeypatch.setattr(work, "perform", real)
    outcome, _ = run(jobs, tmp_path, retry_failed=True)
    assert (outcome.done, outcome.failed) == ([broken], {})
    assert not (jobs[1].folder(tmp_path) / "failure.json").exists()


def test_settings_that_cannot_be_used_fail_in_one_line(jobs, tiny, tmp_path):
    wrong = make_job(tiny, "map", settings={"sigma": -1.0})
    outcome, _ = run([wrong, jobs[0]], tmp_path)
    assert outcome.done == names(jobs[:1])
    assert "sigma" in outcome.failed[wrong.name]
    assert "\n" not in outcome.failed[wrong.name]


def test_missing_images_are_looked_for_again_by_the_next_command(tiny, tmp_path, monkeypatch):
    job = make_job(tiny, "map")
    real = Job.load

    def absent(self, folder=None):
        raise StfsebError("train.npz is not there")

    monkeypatch.setattr(Job, "load", absent)
    outcome, _ = run([job], tmp_path)
    assert outcome.failed == {job.name: "train.npz is not there"}
    monkeypatch.setattr(Job, "load", real)
    outcome, _ = run([job], tmp_path)
    assert outcome.done == [job.name]


def test_images_are_read_once_for_all_runs_of_a_task(jobs, tiny, tmp_path, monkeypatch):
    real, loads = Job.load, []
    monkeypatch.setattr(Job, "load", lambda self, folder=None: loads.append(self.context) or real(self, folder))
    other = [make_job(tiny, "map", seed, context="train") for seed in range(2)]
    run([jobs[0], other[0], jobs[1], other[1]], tmp_path)
    assert loads == [None, "train"]


def test_parts_are_measured_with_the_run_or_later_from_its_model(jobs, tmp_path, monkeypatch):
    shifts = pytest.importorskip("stfseb.experiments.shifts")
    asked = []

    def measure_part(part, method, data, samples):
        asked.append((part, method.key, samples))
        if part == "broken":
            raise RuntimeError("no such part")
        return {"images": len(data.test)}

    monkeypatch.setattr(shifts, "measure_part", measure_part)
    run(jobs[:1], tmp_path, parts=("rotation",))
    record = (jobs[0].folder(tmp_path) / "record.json").stat().st_mtime_ns
    assert json.loads((jobs[0].folder(tmp_path) / "rotation.json").read_text()) == {"images": 40}
    outcome, _ = run(jobs[:2], tmp_path, parts=("rotation", "corruption"))
    assert (outcome.done, outcome.measured) == (names(jobs[:2]), [jobs[0].name])
    assert asked == [("rotation", "map", 2), ("corruption", "map", 2), ("rotation", "map", 2), ("corruption", "map", 2)]
    assert (jobs[0].folder(tmp_path) / "record.json").stat().st_mtime_ns == record
    outcome, _ = run(jobs[:1], tmp_path, parts=("rotation",))
    assert outcome.skipped == names(jobs[:1])

    outcome, _ = run(jobs[:1], tmp_path, parts=("broken",))
    assert "no such part" in outcome.failed[jobs[0].name]
    assert jobs[0].done(tmp_path)


def test_a_run_without_its_model_says_what_to_do_and_is_looked_at_again(jobs, tmp_path, monkeypatch):
    shifts = pytest.importorskip("stfseb.experiments.shifts")
    monkeypatch.setattr(shifts, "measure_part", lambda part, method, data, samples: {"images": len(data.test)})
    first, _ = run(jobs[:2], tmp_path)
    assert (sorted(first.done), first.measured) == (sorted(names(jobs[:2])), [])
    place = f"runs/tiny/{jobs[0].name}"
    record = (jobs[0].folder(tmp_path) / "record.json").read_bytes()
    model, kept = jobs[0].folder(tmp_path) / "model", tmp_path / "kept"
    shutil.copytree(model, kept)
    for spoil in (lambda: shutil.rmtree(model), lambda: next(model.glob("*.safetensors")).write_bytes(b"")):
        shutil.copytree(kept, model, dirs_exist_ok=True)
        spoil()
        for again in ({}, {"retry_failed": True}):
            outcome, _ = run(jobs[:2], tmp_path, parts=("rotation",), **again)
            error = outcome.failed[jobs[0].name]
            assert error.startswith("the run is recorded and its model cannot be read (")
            assert error.endswith(f"or remove {place}, and the same command trains it anew")
            assert not outcome.before  # it was looked at again
        assert (jobs[0].folder(tmp_path) / "record.json").read_bytes() == record
    shutil.rmtree(jobs[0].folder(tmp_path))
    outcome, _ = run(jobs[:2], tmp_path, parts=("rotation",))
    assert (outcome.done, outcome.measured, outcome.failed) == ([jobs[0].name], [], {})


def test_a_run_that_another_has_is_waited_for_and_not_repeated(jobs, tmp_path):
    held, said = claims.claim(jobs[0].folder(tmp_path)), []

    def announce(line):
        said.append(line)
        if line == "waiting for 1 runs that another process does":
            (jobs[0].folder(tmp_path) / "record.json").write_text("{}")
            held.release()

    outcome, _ = run(jobs[:2], tmp_path, announce=announce)
    assert (outcome.done, outcome.elsewhere) == ([jobs[1].name], [jobs[0].name])
    assert "waiting for 1 runs that another process does" in said
    assert (jobs[0].folder(tmp_path) / "record.json").read_text() == "{}"


def test_a_run_whose_owner_died_is_taken_over(jobs, tmp_path):
    held = claims.claim(jobs[0].folder(tmp_path))
    outcome, _ = run(jobs[:2], tmp_path, announce=lambda line: held.release() if "waiting for" in line else None)
    assert (outcome.done, outcome.elsewhere) == ([jobs[1].name, jobs[0].name], [])


def test_a_population_does_what_runs_alone_do_and_one_bad_run_does_not_take_it_along(jobs, tiny, tmp_path, monkeypatch):
    wrong = make_job(tiny, "map", 7, settings={"sigma": -1.0})
    everything = planned([*jobs, wrong], tmp_path)
    taken = claims.claim(everything[2].folder)
    place = Workplace("cpu")
    seen = [(report.name, report.state) for report in place._together(everything[:3])]
    assert seen == [
        (jobs[0].name, "started"),
        (jobs[1].name, "started"),
        (jobs[2].name, "elsewhere"),
        (jobs[0].name, "done"),
        (jobs[1].name, "done"),
    ]
    taken.release()
    monkeypatch.setattr(Workplace, "together", True)
    last = {report.name: report.state for report in place.do(everything[2:])}
    assert last == {jobs[2].name: "done", wrong.name: "failed"}
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_job_and_is_no_failure(jobs, tmp_path, monkeypatch, sent):
    real = work.perform

    def perform(job, *args, **kwargs):
        found = real(job, *args, **kwargs)
        os.kill(os.getpid(), sent)
        return found

    monkeypatch.setattr(work, "perform", perform)
    former = signal.getsignal(sent)
    with pytest.raises(Interrupted, match="after 0 of 3 runs: start the same command again"):
        run(jobs, tmp_path)
    assert signal.getsignal(sent) is former
    monkeypatch.setattr(work, "perform", real)
    outcome, _ = run(jobs, tmp_path)
    assert (outcome.skipped, outcome.failed) == ([jobs[0].name], {})
    assert not leftovers(tmp_path)


def test_wrong_words_are_refused(jobs, tmp_path, monkeypatch):
    with pytest.raises(StfsebError, match="unknown executor 'dusk': did you mean 'dask'"):
        run(jobs, tmp_path, executor="dusk")
    with pytest.raises(StfsebError, match="give --executor dask"):
        run(jobs, tmp_path, address="127.0.0.1:8786")
    with pytest.raises(StfsebError, match="--processes 0: give 1 or more"):
        run(jobs, tmp_path, processes=0)
    with pytest.raises(StfsebError, match="device 'tpu' cannot be used: give cpu, cuda or mps"):
        run(jobs, tmp_path, device="tpu")
    assert not (tmp_path / "plan.json").exists()
    assert not list(tmp_path.rglob("failure.json"))  # no run's fault: nothing to be retried
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(StfsebError, match=r"pip install 'stfseb\[dask\]'"):
        run(jobs, tmp_path, executor="dask")


def test_a_worker_that_keeps_dying_ends_in_a_failure(jobs, tmp_path):
    said = []
    ledger = Ledger(planned(jobs[:2], tmp_path), said.append, retries=1)
    chunk = ledger.chunk(5)
    ledger.note(Report(chunk[0].name, "started"))
    ledger.died(chunk, "was killed (SIGKILL)")
    assert [entry.name for entry in ledger.waiting] == names(jobs[:2])
    ledger.waiting.clear()
    ledger.note(Report(chunk[0].name, "started"))
    ledger.died(chunk[:1], "was killed (SIGKILL)")
    assert ledger.outcome.failed == {jobs[0].name: "its worker was killed (SIGKILL), 2 times"}
    assert not ledger.waiting
    # Nothing is wrong with the run itself: the next command does it again.
    assert len(Ledger(planned(jobs[:2], tmp_path), said.append).waiting) == 2


def test_the_whole_job_in_one_view(jobs, tmp_path):
    from rich.console import Console

    console = Console(force_terminal=True, record=True, width=120)
    ledger = Ledger(planned(jobs, tmp_path), lambda _: pytest.fail("lines must go above the view"))
    with View(ledger, show=True, console=console):
        for state in ("started", "done"):
            ledger.note(Report(jobs[0].name, state))
        ledger.note(Report(jobs[1].name, "failed", "why"))
        ledger.note(Report(jobs[2].name, "started"))
    text = console.export_text()
    assert "2/3" in text
    assert "1 running" in text
    assert "1 failed" in text


# With processes of their own ---------------------------------------------------------------------------

DRIVER = """
import json, sys
from pathlib import Path
from stfseb.experiments.executors import run_jobs
from stfseb.experiments.jobs import Job

def main():
    asked = json.loads(sys.argv[1])
    jobs = [Job(**job) for job in asked.pop("jobs")]
    say = lambda text: print(text, file=sys.stderr, flush=True)
    outcome = run_jobs(jobs, Path(asked.pop("results")), device="cpu", announce=say, progress=False, **asked)
    print(json.dumps(outcome.__dict__))

if __name__ == "__main__":
    main()
"""


def driver(jobs, results, **more):
    asked = {"jobs": [job.__dict__ for job in jobs], "results": str(results), **more}
    one = {**os.environ, "OMP_NUM_THREADS": "1"}  # last digits depend on the number of threads
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=one,
    )


def end(process, seconds=600):
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return json.loads(out)


def check(results, jobs):
    """Every run has a whole record, was done once, and was not begun again after it was done."""
    done = set()
    for line in read_log(results):
        if line["event"] == "started":
            assert line["run"] not in done
        elif line["event"] == "done":
            assert line["run"] not in done
            done.add(line["run"])
    for job in jobs:
        assert job.record(results)["job"] == job.identity
        assert (job.folder(results) / "model" / "model.json").exists()
    assert not leftovers(results)


def wait_for(condition, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_processes_and_one_of_them_killed(tiny, tmp_path):
    jobs = [make_job(tiny, "map", seed, training={"epochs": 30}) for seed in range(6)]
    killed = []

    def kill():
        wait_for(lambda: len(read_log(tmp_path)) >= 3)
        line = read_log(tmp_path)[-1]
        killed.append(line["run"])
        os.kill(line["process"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome, said = run(jobs, tmp_path, processes=2)
    thread.join()
    assert sorted(outcome.done) == sorted(names(jobs))
    assert any("was killed (SIGKILL" in line for line in said) or killed[0] in outcome.done
    check(tmp_path, jobs)
    workers = {line["process"] for line in read_log(tmp_path)}
    assert len(workers) >= 2
    assert os.getpid() not in workers


@pytest.mark.slow
def test_two_commands_at_once_share_the_work(tiny, tmp_path):
    jobs = [make_job(tiny, "map", seed, training={"epochs": 8}) for seed in range(10)]
    first, second = driver(jobs, tmp_path), driver(jobs, tmp_path, processes=1)
    outcomes = [end(first), end(second)]
    events = [(line["event"], line["run"]) for line in read_log(tmp_path)]
    assert sorted(events) == sorted(
        [("started", name) for name in names(jobs)] + [("done", name) for name in names(jobs)]
    )
    for outcome in outcomes:
        everything = outcome["done"] + outcome["skipped"] + outcome["elsewhere"]
        assert sorted(everything) == sorted(names(jobs))
    assert sorted(outcomes[0]["done"] + outcomes[1]["done"]) == sorted(names(jobs))
    check(tmp_path, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_a_driver_killed_at_random_moments(tiny, tmp_path, processes):
    jobs = [make_job(tiny, "map", seed, training={"epochs": 8}) for seed in range(8)]
    chance, kills = random.Random(1), 0
    while kills < 3:
        begun = len(read_log(tmp_path))
        process = driver(jobs, tmp_path, processes=processes)
        wait_for(lambda: len(read_log(tmp_path)) > begun or process.poll() is not None)  # noqa: B023
        if process.poll() is None:
            time.sleep(chance.uniform(0, 1.2))
            process.kill()
        process.communicate()
        kills += 1
    outcome = end(driver(jobs, tmp_path))
    assert len(outcome["done"]) + len(outcome["skipped"]) + len(outcome["elsewhere"]) == len(jobs)
    check(tmp_path, jobs)
    assert end(driver(jobs[:1], tmp_path / "undisturbed"))["done"]
    assert jobs[0].record(tmp_path)["metrics"] == jobs[0].record(tmp_path / "undisturbed")["metrics"]


@pytest.mark.slow
def test_ctrl_c_lets_worker_processes_save_themselves(tiny, tmp_path):
    endless = {"epochs": 100_000, "patience": 100_000}  # neither is done before the other has begun
    jobs = [make_job(tiny, "map", seed, training=endless) for seed in range(2)]
    process = driver(jobs, tmp_path, processes=2)
    wait_for(lambda: all((job.folder(tmp_path) / "checkpoint").exists() for job in jobs))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=180)
    assert "stopped by Ctrl-C after 0 of 2 runs: start the same command again to go on" in err
    for job in jobs:
        assert (job.folder(tmp_path) / "checkpoint").exists()
        assert claims.holder(job.folder(tmp_path)) is None
        assert not (job.folder(tmp_path) / "failure.json").exists()
