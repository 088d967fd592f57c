"""`--batch-size` is a part of how a run is trained, as `--epochs` is."""

import json

import pytest

from stfseb import MAP, StfsebError
from stfseb.data.tasks import load_task
from stfseb.experiments import compare, run
from stfseb.experiments.jobs import make_job
from stfseb.experiments.run import RunConfig
from stfseb.report.arrange import arranged

QUIET = ("--device", "cpu", "--quiet", "--epochs", "2")


@pytest.fixture
def sizes(monkeypatch):
    """Return the sizes of the minibatches that are trained on."""
    found, inner = set(), MAP.terms

    def terms(self, x, *rest):
        found.add(len(x))
        return inner(self, x, *rest)

    monkeypatch.setattr(MAP, "terms", terms)
    return found


def test_train_takes_it_and_its_folder_keeps_it(stfseb, tiny, tmp_path, sizes, monkeypatch):
    def fail(*_, **__):
        raise StfsebError("struck down")

    with monkeypatch.context() as patch:
        patch.setattr(run, "assess", fail)
        code, _, said = stfseb("train", tiny, "-m", "map", "--batch-size", "40", "--out", tmp_path, *QUIET)
    assert code == 2, said
    assert sizes == {40, 16}  # of 96 rows
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["config"]["training"] == {"epochs": 2, "batch_size": 40}
    code, _, said = stfseb("train", "--resume", folder, "--batch-size", "40")
    assert code == 2
    assert "--batch-size cannot be given with --resume: the run in that folder has its own" in said
    code, _, said = stfseb("train", "--resume", folder, "--quiet")  # the checkpoint is of 40 rows a step
    assert code == 0, said
    assert json.loads((folder / "record.json").read_text())["training"]["batch_size"] == 40


def test_without_it_the_task_decides(stfseb, tiny, tmp_path, sizes):
    code, _, said = stfseb("train", tiny, "-m", "map", "--out", tmp_path, *QUIET)
    assert code == 0, said
    assert sizes == {32}
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["config"]["training"] == {"epochs": 2}


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_what_is_no_size_is_refused(stfseb, tiny, tmp_path, command, value):
    code, _, said = stfseb(command, tiny, "--batch-size", value, "--out", tmp_path / "runs")
    assert code == 2
    assert said.strip() == f"stfseb: error: --batch-size {value}: give a whole number of at least 1"
    assert not (tmp_path / "runs").exists()


def test_compare_takes_it_and_a_folder_of_another_is_named(stfseb, tiny, tmp_path, sizes, monkeypatch):
    words = ["compare", tiny, "--methods", "map", *QUIET]
    monkeypatch.setattr("stfseb.report.page.write_report", lambda *_: "page")  # seconds of plots
    code, _, said = stfseb(*words, "--batch-size", "40", "--out", tmp_path)
    assert code == 0, said
    assert sizes == {40, 16}
    (folder,) = tmp_path.iterdir()
    code, _, said = stfseb(*words, "--batch-size", "24", "--resume", folder)
    assert code == 2
    assert "was run with batch_size=40, not 24: give the same options" in said
    code, _, said = stfseb(*words, "--batch-size", "40", "--resume", folder)
    assert code == 0, said
    # A run that was stopped in its training has a checkpoint and no record.
    data, interrupted = load_task(tiny).load(), tmp_path / "interrupted"

    def comparison(size):
        runs = compare.plan(["map"], [0], {}, RunConfig("", training={"batch_size": size}))
        return compare.compare(data, runs, interrupted, announce=lambda _: None, progress=False)

    with monkeypatch.context() as patch:
        patch.setattr(run, "assess", lambda *_, **__: (_ for _ in ()).throw(KeyError))
        with pytest.raises(KeyError):
            comparison(40)
    with pytest.raises(StfsebError, match=r"was begun with --batch-size 40, not 24: give --batch-size 40, or leave"):
        comparison(24)
    comparison(40)


def test_a_run_of_another_size_is_another_run_and_the_report_sets_it_beside_the_tasks(tiny):
    names = {make_job(tiny, "map", training=way).name for way in ({}, {"batch_size": 40}, {"epochs": 2})}
    assert len(names) == 3
    own = load_task("mini").training
    record = {"task": "mini", "method": "map", "metrics": {"acc": 0.9}, "training": {**own, "batch_size": 40}}
    assert arranged([record])["mini"].training == {"batch_size": 40}
