"""`stfseb status`: every run in the state it is in, without disturbing those under way."""

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
from search_helpers import plan, trial
from typer.testing import CliRunner

from stfseb.commands_status import summary
from stfseb.errors import StfsebError
from stfseb.experiments import claims, study_count
from stfseb.experiments.executors import run_jobs
from stfseb.experiments.executors.dask_held import BEGUN, QUEUED
from stfseb.experiments.executors.plan import planned
from stfseb.experiments.executors.plan_file import PLAN, write_plan
from stfseb.experiments.jobs import make_job
from stfseb.experiments.search.store import Store
from stfseb.experiments.status import status
from stfseb.experiments.study_count import count_trials
from stfseb.training import checkpoint


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Five planned runs: one done, one that failed, one under way, one done but for a part, one left."""
    results = tmp_path_factory.mktemp("results")
    good = [make_job(tiny, "map", seed, training={"epochs": 2}) for seed in (0, 1)]
    wrong = make_job(tiny, "map", 2, settings={"sigma": -1.0})
    run_jobs([*good, wrong], results, device="cpu", announce=lambda _: None, progress=False)
    rest = [make_job(tiny, "mcdropout", seed, training={"epochs": 9}) for seed in (0, 1)]
    write_plan(results, planned(rest, results))
    write_plan(results, planned(good[1:], results, parts=("rotation",)))
    return results, good, wrong, rest


def test_searches_are_told_with_or_without_runs(folder, tmp_path):
    from stfseb.cli import app

    study = tmp_path / "searches" / "mini-map-paper"
    study.mkdir(parents=True)
    said = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert said.output.splitlines() == ["search mini-map-paper: no worker has ended yet"]
    (study / "search.json").write_text(json.dumps({"trials": [{}, {}, {}], "asked": 4}))
    said = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert said.output.splitlines() == ["search mini-map-paper: 3 of 4 trials"]
    (found,) = status(tmp_path).as_dict()["searches"]
    assert found == {"study": "mini-map-paper", "finished": 3, "asked": 4}
    assert status(folder[0]).searches == []
    study.rename(study.with_name("mini-map-paper-final4of9"))
    said = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert said.output.splitlines() == ["search mini-map-paper-final4of9: 3 of 4 finalists"]


def test_a_running_search_is_counted_in_its_study(tmp_path):
    """Not as its last worker left it: seven trials are finished now, among them one pruned and one that repeats."""
    folder = tmp_path / "searches" / plan().name
    folder.mkdir(parents=True)
    (folder / "search.json").write_text(json.dumps({"trials": [{}, {}], "asked": 5}))
    ends = ("complete", "pruned", "diverged", "complete", "failed", "complete", "complete")
    with Store(f"sqlite:///{folder / 'study.db'}", plan(), 12) as store:
        for end in ends:
            store.finish(store.claim(), {k: v for k, v in trial(0, 0.5, outcome=end).items() if k != "index"})
        released = store.claim()
        store.release([released])  # counted by draw: it has two tries now, and no result
        assert store.claim() is not None  # under way
        before = (folder / "study.db").read_bytes()
        (found,) = status(tmp_path).searches
        assert (found.finished, found.asked) == (len(store.trials()), 12) == (7, 12)
        assert (folder / "study.db").read_bytes() == before
    (folder / "search.json").write_text(json.dumps({"trials": [{}] * 9, "asked": 12}))  # copied from elsewhere
    assert status(tmp_path).searches[0].finished == 9


def test_counting_takes_no_lock_and_waits_for_no_writer_for_long(tmp_path, monkeypatch):
    with Store(f"sqlite:///{tmp_path / 'study.db'}", plan(), 4) as store:
        store.finish(store.claim(), {k: v for k, v in trial(0, 0.5).items() if k != "index"})
        assert count_trials(tmp_path / "study.db", plan().name) == (1, 4)
        assert count_trials(tmp_path / "study.db", "another") is None
    # A reader with SQLite's own lock would be refused here, and so would a writer while it reads.
    with closing(sqlite3.connect(tmp_path / "study.db", isolation_level=None)) as writer:
        writer.execute("begin exclusive")
        assert not (tmp_path / "study.db-journal").exists()
        assert count_trials(tmp_path / "study.db", plan().name) == (1, 4)
        writer.execute("update trials set state = 'RUNNING'")  # with a journal: what is in the file may be half of it
        monkeypatch.setattr(study_count, "_PAUSE", 0.001)
        assert (tmp_path / "study.db-journal").exists()
        assert count_trials(tmp_path / "study.db", plan().name) is None
        writer.execute("rollback")
    assert count_trials(tmp_path / "study.db", plan().name) == (1, 4)
    assert count_trials(tmp_path / "none.db", plan().name) is None
    (tmp_path / "empty.db").touch()
    (tmp_path / "noise.db").write_bytes(b"no database at all" * 100)
    assert count_trials(tmp_path / "empty.db", "x") is count_trials(tmp_path / "noise.db", "x") is None


def test_a_count_that_was_overtaken_by_a_write_is_taken_again(tmp_path, monkeypatch):
    counters = iter([b"1", b"2", b"2", b"2"])
    monkeypatch.setattr(study_count, "_unchanging", lambda _: next(counters))
    with Store(f"sqlite:///{tmp_path / 'study.db'}", plan(), 3):
        assert count_trials(tmp_path / "study.db", plan().name) == (0, 3)
    assert next(counters, None) is None  # read twice


def test_status_needs_no_torch_and_no_optuna():
    code = "import sys, stfseb.experiments.status; print({'torch', 'optuna'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_resumed_run_took_its_whole_training(folder, tmp_path):
    results, good, *_ = folder
    copy = tmp_path / "r"
    shutil.copytree(results, copy)
    trained = good[0].record(results)["seconds"]
    with (copy / "log.jsonl").open("a") as log:
        log.write(json.dumps({"event": "done", "run": good[0].name, "seconds": 0.001}) + "\n")
    assert by_name(status(copy))[good[0].name].seconds == trained


def by_name(found):
    return {run.name: run for run in found.runs}


def test_states(folder):
    results, good, wrong, rest = folder
    with claims.claim(rest[0].folder(results), seed=0):
        checkpoint.write(rest[0].folder(results) / "checkpoint", {"a": torch.zeros(3)}, {"epoch": 4, "steps": 0})
        found = status(results)
        assert claims.holder(rest[0].folder(results)) is not None
    runs = by_name(found)
    assert found.counts == {"done": 1, "running": 1, "failed": 1, "left": 2}
    assert runs[good[0].name].state == "done"
    assert runs[good[0].name].seconds > good[0].record(results)["seconds"]  # with the evaluation
    assert (runs[good[1].name].state, runs[good[1].name].missing) == ("left", ["rotation"])
    running = runs[rest[0].name]
    assert (running.state, running.epoch, running.epochs) == ("running", 4, 9)
    assert running.who["process"] > 0
    assert "sigma" in runs[wrong.name].error
    assert runs[wrong.name].attempt == 1
    assert runs[rest[1].name].state == "left"


def test_what_a_dask_worker_has_not_begun_is_left_and_no_time_of_its_own(folder, tmp_path):
    results, *_, rest = folder
    checkpoint.write(tmp_path / "scratch", {"a": torch.zeros(3)}, {"epoch": 6, "steps": 0})
    queued = {"executor": "dask", "state": QUEUED}
    with (
        claims.claim(rest[0].folder(results), **queued) as begun,
        claims.claim(rest[1].folder(results), **queued),
    ):
        begun.say(state=BEGUN, host="far", process=7, checkpoint=str(tmp_path / "scratch"), since=time.time() - 5)
        found = status(results)
        text = command(results)
        begun.say(state=QUEUED)  # its worker was lost
        assert status(results).counts["running"] == 0
    runs = by_name(found)
    assert (found.counts["running"], found.counts["left"], found.queued) == (1, 2, 1)
    running = runs[rest[0].name]
    assert (running.state, running.epoch) == ("running", 6)
    assert 5 <= running.seconds < 100
    assert "far, process 7 (Dask)" in text
    assert "2 left of 5 runs; 1 of those left waits for a Dask worker; about" in text
    for run in found.runs:  # one that takes much longer than the one that is done, and no other is left
        run.seconds = 1.0 if run.state == "done" else 50.0
        run.state = "failed" if run.state == "left" else run.state
    assert "0 left of 5 runs; the one under way takes longer than such runs have taken; " in summary(found)


def test_time_left_is_that_of_runs_of_the_kind(folder):
    results, good, _, rest = folder
    found = status(results)
    for run in found.runs:  # times that can be counted in the head
        run.state = "done" if run.name == good[0].name else run.state
        run.seconds = 10.0 if run.state == "done" else None
    assert found.counts == {"done": 1, "running": 0, "failed": 1, "left": 3}
    assert found.seconds_left == 30.0
    for run in found.runs:
        if run.name in [job.name for job in rest]:
            run.state, run.seconds = "running", 4.0
    assert found.seconds_left == (10 + 6 + 6) / 2


def command(*words):
    from stfseb.cli import app

    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["status", *map(str, words)])
    if isinstance(done.exception, StfsebError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_command(folder):
    results, good, wrong, rest = folder
    with claims.claim(rest[1].folder(results)):
        text = command(results)
    assert "1 done, 1 running, 1 failed, 2 left of 5 runs" in text
    assert "tiny mcdropout seed 1" in text
    assert "sigma" in text
    traces = command(results, "--failures")
    assert wrong.name in traces
    assert "Traceback (most recent call last)" in traces
    data = json.loads(command(results, "--json"))
    assert data["counts"]["left"] == 3
    assert {run["name"] for run in data["runs"]} == {job.name for job in (*good, wrong, *rest)}


def test_runs_that_were_copied_here_count_though_no_plan_knows_them(folder, tmp_path):
    results, good, _, _ = folder
    target = tmp_path / "runs" / "tiny" / good[0].name
    target.mkdir(parents=True)
    (target / "record.json").write_bytes((good[0].folder(results) / "record.json").read_bytes())
    (run,) = status(tmp_path).runs
    assert run.seconds == good[0].record(results)["seconds"]
    assert (run.state, run.task, run.method, run.seed) == ("done", "tiny", "map", 0)


def test_errors_are_one_line(tmp_path):
    with pytest.raises(StfsebError, match="does not exist"):
        command(tmp_path / "none")
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(StfsebError, match=r"record.json is not a folder: give the one that"):
        command(tmp_path / "record.json")
    (tmp_path / "record.json").unlink()
    with pytest.raises(StfsebError, match="nothing was planned or done in"):
        command(tmp_path)
    (tmp_path / PLAN).write_text("[]")
    with pytest.raises(StfsebError, match="is not a plan"):
        command(tmp_path)
    (tmp_path / PLAN).write_text('{"format": 99, "jobs": {}}')
    with pytest.raises(StfsebError, match="upgrade stfseb"):
        command(tmp_path)


def test_torch_is_not_imported(folder):
    code = (
        "import sys, pathlib; from stfseb.experiments.status import status; import stfseb.commands_status;"
        "status(pathlib.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder[0])], check=True)
