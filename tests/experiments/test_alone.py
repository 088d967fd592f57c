"""Runs whose time and memory are compared: one at a time, compiled where that can be, and the record says how."""

import time

import pytest
import torch

from stfseb.errors import StfsebError
from stfseb.experiments import jobs as jobs_module
from stfseb.experiments import run as run_module
from stfseb.experiments.executors import local, run_jobs, work
from stfseb.experiments.executors.log import read_log
from stfseb.experiments.executors.work import Report, Workplace
from stfseb.experiments.jobs import make_job, perform, perform_together
from stfseb.experiments.machine import PeakMemory
from stfseb.report.records import shared


@pytest.fixture
def jobs(tiny):
    return [make_job(tiny, "map", seed) for seed in range(3)]


def test_runs_that_could_share_a_card_are_done_one_by_one(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(Workplace, "together", True)  # as on a card
    monkeypatch.setattr(work, "perform_together", lambda *_, **__: pytest.fail("not alone"))
    monkeypatch.setattr(local, "_Pool", lambda *_: pytest.fail("not alone"))
    found = run_jobs(
        jobs, tmp_path, device="cpu", processes=2, width=3, alone=True, announce=lambda _: None, progress=False
    )
    assert sorted(found.done) == sorted(job.name for job in jobs)
    assert all(job.record(tmp_path)["peak_memory_mb"] is not None for job in jobs)


@pytest.mark.parametrize(("alone", "sizes"), [(True, [1, 1, 1]), (False, [3])])
def test_of_several_cards_one_is_used(jobs, tmp_path, monkeypatch, alone, sizes):
    """No card is needed to see what is asked of the places."""
    asked = []

    def do(self, entries):
        asked.append((self.device, self.alone, len(entries)))
        return [Report(entry.name, "done") for entry in entries]

    monkeypatch.setattr(Workplace, "do", do)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if alone else 1)
    run_jobs(jobs, tmp_path, device="cuda", alone=alone, announce=lambda _: None, progress=False)
    assert asked == [("cuda", alone, size) for size in sizes]


def test_on_dask_a_run_begins_when_the_one_before_has_ended(jobs, tmp_path):
    pytest.importorskip("distributed")
    found = run_jobs(
        jobs, tmp_path, executor="dask", device="cpu", processes=2, alone=True, announce=lambda _: None, progress=False
    )
    assert len(found.done) == 3
    assert [line["event"] for line in read_log(tmp_path)] == ["started", "done"] * 3
    assert [job.record(tmp_path)["together"] for job in jobs] == [1, 1, 1]


def test_on_dask_those_of_the_busiest_machine_are_counted(jobs, tmp_path):
    pytest.importorskip("distributed")
    quiet = {"announce": lambda _: None, "progress": False}
    run_jobs(jobs[:1], tmp_path, executor="dask", device="cpu", processes=2, **quiet)
    assert jobs[0].record(tmp_path)["together"] == 2


def test_what_is_said_of_compilation_reaches_the_engine(tiny, tmp_path, monkeypatch):
    asked = []

    class Enough(Exception):
        pass

    def note(*_, **how):
        asked.append(how.get("compiled", "unsaid"))
        raise Enough

    monkeypatch.setattr(run_module, "fit", note)
    monkeypatch.setattr(jobs_module, "fit_population", note)
    for training in ({"compiled": True}, {"compiled": False}, {}):
        job = make_job(tiny, "map", training=training)
        data = job.load()
        with pytest.raises(Enough):
            perform(job, tmp_path, data, device="cpu")
        with pytest.raises(Enough):
            next(perform_together([job], tmp_path, data, device="cpu"))
    assert asked == [True, True, False, False, "unsaid", "unsaid"]


def test_the_record_says_how_the_steps_were_run(tiny, tmp_path):
    job = make_job(tiny, "map", training={"compiled": True})  # there is nothing to compile on a CPU
    assert perform(job, tmp_path, job.load(), device="cpu")["engine"] in ("eager, float32", "eager, bf16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_four_epochs_on_a_card_are_compiled_and_their_memory_is_measured(tmp_path):
    jobs = [make_job("mini", "map", seed, training={"epochs": 4, "compiled": True}) for seed in range(2)]
    found = run_jobs(jobs, tmp_path, device="cuda", alone=True, announce=lambda _: None, progress=False)
    assert not found.failed
    for job in jobs:
        record = job.record(tmp_path)
        assert record["engine"] == "captured, bf16, compiled"
        assert record["peak_memory_mb"] > 0


@pytest.mark.parametrize(("device", "width", "beside", "together"), [
    ("cuda", 2, 1, 2),  # two at a time of three
    ("cuda", 8, 1, 3),  # there are no more
    ("cuda", 2, 2, 4),  # two processes on one card
    ("cpu", 8, 1, 1),  # where a population is one after the other
])  # fmt: skip
def test_the_record_says_how_many_had_the_device(jobs, tmp_path, monkeypatch, device, width, beside, together):
    """What would be on a card is trained on the CPU here."""
    real = jobs_module.fit_population
    monkeypatch.setattr(jobs_module, "fit_population", lambda *a, **how: real(*a, **(how | {"device": "cpu"})))
    names = [job.name for job in jobs]
    found = perform_together(jobs, tmp_path, jobs[0].load(), device=device, width=width, beside=beside)
    assert {job.name: record["together"] for job, record in found} == dict.fromkeys(names, together)
    records = [job.record(tmp_path) for job in jobs]  # where they were: the number is no part of a run's identity
    assert [r["together"] for r in records] == [together] * 3
    assert all("together" not in r["job"] for r in records)
    assert [shared(r) for r in records] == [together > 1] * 3


def test_a_run_alone_and_those_of_several_processes_say_so(jobs, tmp_path):
    assert perform(jobs[0], tmp_path / "one", jobs[0].load(), device="cpu")["together"] == 1
    quiet = {"announce": lambda _: None, "progress": False}
    run_jobs(jobs, tmp_path / "two", device="cpu", processes=2, **quiet)
    run_jobs(jobs, tmp_path / "alone", device="cpu", processes=2, alone=True, **quiet)
    assert [job.record(tmp_path / "two")["together"] for job in jobs] == [2, 2, 2]
    assert [job.record(tmp_path / "alone")["together"] for job in jobs] == [1, 1, 1]


def test_older_records_are_judged_by_their_memory():
    card, cpu = {"machine": {"device": "cuda: a card"}}, {"machine": {"device": "cpu: x"}}
    assert shared(card | {"peak_memory_mb": None})
    assert not shared(card | {"peak_memory_mb": 100.0})
    assert not shared(cpu | {"peak_memory_mb": None})
    assert not shared(card | {"peak_memory_mb": None, "together": 1})  # the last of a population of one
    assert shared(cpu | {"peak_memory_mb": 100.0, "together": 2})


def test_memory_that_earlier_work_has_left_does_not_hide_growth():
    def grown():
        with PeakMemory(torch.device("cpu")) as memory:
            kept = [torch.ones(100, 100) for _ in range(2000)]  # 80 MB in small pieces, which the allocator keeps
            until = time.monotonic() + 20
            while memory._peak < memory._before + 40e6 and time.monotonic() < until:
                time.sleep(0.05)  # it is looked at twenty times a second, or when a busy machine comes to it
            del kept
        return memory.megabytes

    assert [grown() > 40 for _ in range(3)] == [True] * 3


def test_a_card_that_is_not_there_is_refused_before_anything_is_written(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(StfsebError, match="device 'cuda:2' is not there: the last one is cuda:1"):
        run_jobs(jobs, tmp_path / "r", device="cuda:2", announce=print, progress=False)
    assert not (tmp_path / "r").exists()
    assert run_module.usable_device("cuda:1") == "cuda:1"
    with pytest.raises(StfsebError, match="device 'cuda:x' cannot be used here"):
        run_module.usable_device("cuda:x")


def test_the_record_says_how_many_classes_there_are(tiny, tmp_path):
    job = make_job(tiny, "map")
    assert perform(job, tmp_path, job.load(), device="cpu")["classes"] == job.load().task.classes
