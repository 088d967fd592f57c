"""Runs of the command line and jobs go on from the checkpoint in their folder, and clear it away in the end."""

import json

import numpy as np
import pytest

from stfseb import StfsebError
from stfseb.data.embedded import read
from stfseb.data.tasks import load_task
from stfseb.experiments import claims, compare, run
from stfseb.experiments.jobs import make_job, perform, perform_together
from stfseb.experiments.resume import ResumableRun
from stfseb.experiments.run import RunConfig
from stfseb.methods.mc_dropout import MCDropout
from stfseb.training import checkpoint

TASK = """
train: {array: train.npz}
test: {array: test.npz}
context: train
channels: 1
image_size: 28
classes: 10
network: {name: small, hidden: 8}
training: {epochs: 3, batch_size: 32, lr: 0.01, patience: 9, train_samples: 1, test_samples: 2}
"""


class Stop(Exception):
    """Stands for a crash."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    for name, part, count in (("train", "train", 100), ("test", "test", 30)):
        images = read(part).take(slice(0, count))
        np.savez(folder / f"{name}.npz", images=images.images.numpy(), labels=images.labels.numpy())
    (folder / "task.yaml").write_text(TASK)
    return str(folder / "task.yaml")


@pytest.fixture
def crash(monkeypatch):
    """Return a function that lets the objective fail after so many steps from now on; None mends it."""
    inner = MCDropout.terms
    left = [None]

    def terms(self, *arguments):
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                raise Stop
        return inner(self, *arguments)

    monkeypatch.setattr(MCDropout, "terms", terms)
    return lambda steps: left.__setitem__(0, steps)


def numbers(record):
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in record["history"]]
    return history, record["metrics"], record["calibration"]


def test_a_folder_is_enough_to_go_on(task, tmp_path, crash, monkeypatch):
    config = RunConfig("mcdropout", seed=3)
    expected = ResumableRun.new(tmp_path / "whole", task, config, None).go_on(progress=False)
    started = ResumableRun.new(tmp_path / "runs", task, config, None)
    crash(4)
    with pytest.raises(Stop):
        started.go_on(progress=False, checkpoint_every=0)
    assert checkpoint.read(started.folder / "checkpoint")[1]["steps"] == 1
    crash(None)

    def fail(*_, **__):
        raise Stop

    monkeypatch.setattr(run, "assess", fail)
    with pytest.raises(Stop):  # trained to the end, and struck down in its evaluation
        ResumableRun.of(started.folder).go_on(progress=False)
    monkeypatch.undo()
    monkeypatch.setattr(MCDropout, "objective", lambda *_: pytest.fail("trained again"))
    record = ResumableRun.of(started.folder).go_on(progress=False)
    assert numbers(record) == numbers(expected)
    assert sorted(p.name for p in started.folder.iterdir()) == ["images.json", "model", "record.json", "run.json"]
    written, images = (json.loads((started.folder / name).read_text()) for name in ("record.json", "images.json"))
    assert ResumableRun.of(started.folder).go_on() == {**written, "images": images}


def test_what_cannot_be_resumed_is_named(task, tmp_path):
    with pytest.raises(StfsebError, match=r"run\.json is missing"):
        ResumableRun.of(tmp_path)
    started = ResumableRun.new(tmp_path, task, RunConfig("map"), None)
    held = claims.claim(started.folder)
    with pytest.raises(StfsebError, match="another process"):
        started.go_on()
    held.release()
    for text, match in (('{"format": 9}', "upgrade"), ('{"format": 1}', "damaged"), ("{", "cannot be read")):
        (started.folder / "run.json").write_text(text)
        with pytest.raises(StfsebError, match=match):
            ResumableRun.of(started.folder)


def test_infinity_survives_the_file(task, tmp_path):
    config = RunConfig("stfseb", settings={"dof": float("inf"), "num_context": 4})
    made = ResumableRun.new(tmp_path, task, config, "train")
    again = ResumableRun.of(made.folder, device="cpu")
    assert again.context == "train"
    assert run.make_method(again.data, again.config).settings == run.make_method(made.data, config).settings


def test_jobs_go_on_alone_and_together(task, tmp_path, crash):
    jobs = [make_job(task, "mcdropout", seed) for seed in (0, 1)]
    data = load_task(task).load()
    expected = [numbers(perform(job, tmp_path / "whole", data, device="cpu")) for job in jobs]
    for kind in ("alone", "together"):
        results = tmp_path / kind

        def do(results=results, kind=kind):
            if kind == "alone":
                return [numbers(perform(job, results, data, device="cpu")) for job in jobs]
            found = {job.name: record for job, record in perform_together(jobs, results, data, device="cpu")}
            return [numbers(found[job.name]) for job in jobs]

        crash(6)  # in the third epoch of the first job
        with pytest.raises(Stop):
            do()
        assert checkpoint.read(jobs[0].folder(results) / "checkpoint")[1]["epoch"] >= 1
        crash(None)
        assert do() == expected
        assert not list(results.rglob("checkpoint"))


def test_a_comparison_of_other_options_names_those_of_its_folder(task, tmp_path, crash):
    """What a person has given is an option, and removing a checkpoint would lose work."""
    data = load_task(task).load()

    def comparison(settings=None, **training):
        base = RunConfig("", training=training)
        runs = compare.plan(["mcdropout"], [0], {"mcdropout": settings or {}}, base)
        return compare.compare(data, runs, tmp_path, announce=lambda _: None, progress=False)

    crash(4)
    with pytest.raises(Stop):
        comparison(epochs=2)
    crash(None)
    for told, options in (
        (r"was begun with --epochs 2, not 3: give --epochs 2, or leave --resume out to start", {}),
        (r"was begun with other options \(.*sigma.*\): give the same options, or", {"settings": {"sigma": 3.0}}),
    ):
        with pytest.raises(StfsebError, match=told):
            comparison(**{"epochs": 3 if not options else 2, **options})
    comparison(epochs=2)
