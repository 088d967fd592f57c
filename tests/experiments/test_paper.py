"""Plans of the paper's tables: which runs, shared between tables, and what is said where data are missing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stfseb.data.task_files import built_in
from stfseb.data.tasks import load_task, with_settings
from stfseb.errors import StfsebError
from stfseb.experiments.jobs import make_job
from stfseb.experiments.paper import beyond, retuning
from stfseb.experiments.paper import carry_out as carrying
from stfseb.experiments.paper.plan import ALL, KINDS, METHODS, TASKS, Asked, limited, make_plan
from stfseb.experiments.paper.quantities import quantity


def ask(*tasks, methods=None, seeds=(0, 1), **more):
    return Asked(tuple(tasks) or None, methods, tuple(seeds), **more)


@pytest.mark.parametrize("what", KINDS)
def test_every_plan_works_on_mini_and_makes_valid_methods(what):
    plan = make_plan(what, ask("mini"))
    data = load_task("mini").load()
    from stfseb.experiments.run import make_method

    for job in {job.method + str(job.settings): job for job in plan.all_jobs}.values():
        make_method(data, job.config("cpu"))  # a wrong setting would be refused


def test_the_public_names_are_there():
    names = ["table1", "table2", "figure1", "figure2", "dof", "context-number", "context-source", "efficiency"]
    assert list(ALL) == names
    with pytest.raises(StfsebError, match="did you mean 'table1'"):
        make_plan("table11", ask("mini"))


def test_table1_is_six_methods_on_five_tasks_at_the_presets():
    plan = make_plan("table1", Asked())
    assert plan.tasks == TASKS
    assert [v.key for v in plan.variants] == list(METHODS)
    assert len(plan.all_jobs) == 6 * 5 * 10
    assert plan.jobs["fmnist", "map"][3] == make_job("fmnist", "map", 3)


def test_tables_share_their_runs():
    tables = {what: {j.name for j in make_plan(what, ask("fmnist")).all_jobs} for what in KINDS}
    preset = {make_job("fmnist", "stfseb", seed).name for seed in (0, 1)}
    for what in ("table1", "table2", "figure1", "dof", "context-number", "context-source", "readings", "beyond"):
        assert preset <= tables[what], what
    assert tables["table1"] == tables["table2"] == tables["figure2"]


def test_rows_limit_a_plan_to_their_runs_and_the_preset_stays_where_others_are_set_against_it():
    beyond_all, dofs = make_plan("beyond", ask("fmnist")), make_plan("dof", ask("fmnist"))
    found = limited([beyond_all, dofs], ["ensemble", "curvature", "20"])
    assert [[v.key for v in plan.variants] for plan in found] == [["preset", "curvature", "ensemble"], ["20"]]
    for whole, part in zip((beyond_all, dofs), found, strict=True):
        assert part.jobs == {k: cell for k, cell in whole.jobs.items() if k[1] in {v.key for v in part.variants}}
    assert len(found[0].all_jobs) == 6


ABLATED = {"stfseb": {"dof": 7.0, "tau2": 0.5, "sigma": 7.5}, "mcdropout": {"sigma": 0.25}, "map": {"sigma": 0.75}}


def test_ablations_start_from_what_the_task_says_and_the_main_tables_from_the_presets(monkeypatch):
    before = {what: {job.name for job in make_plan(what, ask("fmnist")).all_jobs} for what in KINDS}
    monkeypatch.setitem(built_in()["tasks"]["fmnist"], "ablated", ABLATED)
    plans = {what: make_plan(what, ask("fmnist")) for what in KINDS}
    for what in ("table1", "table2", "figure1", "tempered", "tails"):
        assert {job.name for job in plans[what].all_jobs} == before[what], what
        assert not [note for note in plans[what].notes if "starts from" in note]

    def settings(what, key):
        return plans[what].jobs["fmnist", key][1].settings

    start = {**make_job("fmnist", "stfseb", 1).settings, **ABLATED["stfseb"]}
    assert load_task("fmnist").start("stfseb").items() <= start.items()
    assert load_task("fmnist").start("fseb") == load_task("fmnist").presets["fseb"]
    assert load_task("fmnist").start("stfseb")["context_copies"] == 4  # of the preset
    assert settings("beyond", "preset") == settings("readings", "batch-init-shared") == start
    assert settings("context-number", "32") == settings("context-source", "auxiliary") == start
    assert settings("dof", "3") == {**start, "dof": 3.0}
    assert settings("context-number", "64") == {**start, "num_context": 64}
    assert settings("beyond", "mcdropout")["sigma"] == settings("beyond", "outlierexposure")["sigma"] == 0.25
    assert settings("beyond", "ensemble")["settings"]["sigma"] == 0.75
    assert settings("samples", "stfseb-10") == start
    assert plans["efficiency"].jobs["fmnist", "map"][0].settings["sigma"] == 0.75
    said = "FMNIST starts from ST-FS-EB at dof 7, tau2 0.5, sigma 7.5; MC Dropout at sigma 0.25; MAP at sigma 0.75: not"
    assert [note.startswith(said) for note in plans["beyond"].notes] == [True]
    assert any(note.endswith("chosen with dof FMNIST 7.") for note in plans["dof"].notes)


def test_tau2_is_chosen_anew_around_the_one_that_ablations_start_from(monkeypatch):
    monkeypatch.setitem(built_in()["tasks"]["fmnist"], "ablated", ABLATED)
    tried = retuning.grid_plan(ask("fmnist"), [5.0])
    assert [job.settings["tau2"] for job in tried.all_jobs] == [0.005, 0.05, 0.5, 5.0, 50.0]
    assert {job.settings["sigma"] for job in tried.all_jobs} == {7.5}
    history = [{"epoch": 1, "validation_nll": 1.0}]
    records = {job.name: {"history": history, "best_epoch": 1} for job in tried.all_jobs}
    records[tried.all_jobs[3].name] = {"history": [{"epoch": 1, "validation_nll": 0.5}], "best_epoch": 1}
    (cell,) = retuning.retuned_plan(ask("fmnist"), records, [5.0]).jobs.values()
    assert [[job.settings[name] for name in ("dof", "tau2", "sigma")] for job in cell] == [[5.0, 5.0, 7.5]] * 2


def test_the_other_width_of_the_context_is_that_of_the_start(monkeypatch):
    for copies, key in ((0, "copies"), (3, "plain-context")):
        monkeypatch.setitem(built_in()["tasks"]["fmnist"], "ablated", {"stfseb": {"context_copies": copies}})
        assert key in {v.key for v in beyond.variants(load_task("fmnist"))}


def test_a_setting_that_ablations_cannot_start_from_is_named_with_its_place(monkeypatch):
    monkeypatch.setitem(built_in()["tasks"]["fmnist"], "ablated", {"stfseb": {"tao2": 1.0}})
    with pytest.raises(StfsebError, match="fmnist: ablated: stfseb: unknown setting 'tao2': did you mean 'tau2'"):
        make_plan("dof", ask("fmnist"))


def test_dof_column_of_the_preset_is_the_preset():
    plan = make_plan("dof", ask("cifar10"))
    preset = make_job("cifar10", "stfseb", 0)
    assert plan.jobs["cifar10", f"{preset.settings['dof']:g}"][0] == preset
    assert plan.jobs["cifar10", "inf"][0].settings["dof"] == "inf"
    assert [v.key for v in plan.variants] == ["2.1", "3", "5", "10", "20", "inf"]


@pytest.mark.parametrize(
    ("task", "variant", "search", "rule"),
    [
        ("mnist", "paper-rule", "stfseb-extended-26e84ba3", "paper"),
        ("fmnist", "paper-rule", "stfseb-extended-c70fbbe1-final5of40", "paper"),
        ("fmnist", "level-rule", "stfseb-extended-c70fbbe1-final5of40", "level"),
        ("fmnist", "trials-300", "stfseb-extended-c70fbbe1-final5of300", "ours"),
        ("fmnist", "mcdropout-level-rule", "mcdropout-extended-37a8b37f-final5of40", "level"),
    ],
)
def test_settings_chosen_otherwise_are_those_of_the_recorded_search(task, variant, search, rule):
    folder = Path(__file__).parents[2] / "results" / "searches" / f"{task}-{search}"
    chosen = json.loads((folder / "search.json").read_text())["choices"][rule]["settings"]
    job = make_plan("beyond", ask(task)).jobs[task, variant][0]
    assert job.settings.items() >= chosen.items()
    assert job != make_job(task, job.method, 0)


@pytest.mark.parametrize(
    ("preset", "key", "copies"), [({"context_copies": 0}, "copies", 4), ({"context_copies": 4}, "plain-context", 0)]
)
def test_beyond_compares_the_preset_with_the_other_width_of_the_context(preset, key, copies):
    task = load_task("fmnist")
    presets = {name: {**task.presets.get(name, {}), **preset} for name in ("stfseb", "fseb", "outlierexposure")}
    found = {v.key: v for v in beyond.variants(with_settings(task, presets={**task.presets, **presets}))}
    for name, method in ((key, "stfseb"), (f"fseb-{key}", "fseb")):
        assert (found[name].method, found[name].settings) == (method, {"context_copies": copies})
    sigma = task.presets["mcdropout"]["sigma"]  # the control differs from MC Dropout in the context term alone
    assert found["outlierexposure"].settings == {"sigma": sigma}
    assert found[f"outlierexposure-{key}"].settings == {"sigma": sigma, "context_copies": copies}
    assert (found["distorted"].context, found["distorted"].settings) == ("distorted", {"context_copies": 0})
    assert sum("copies" in v.label for v in found.values()) == 3


def test_sources_of_the_context_stay_apart_whatever_context_is_asked_for():
    plan = make_plan("context-source", ask("fmnist", context="train"))
    assert {v: plan.jobs["fmnist", v][0].context for v in ("auxiliary", "train", "none")} == {
        "auxiliary": None,
        "train": "train",
        "none": "train",
    }
    assert plan.jobs["fmnist", "none"][0].settings["functional_scale"] == 0
    # Copies are the auxiliary set's: the paper's other source is the training images as they are.
    widened = [v for v in ("auxiliary", "train", "none") if "context_copies" in plan.jobs["fmnist", v][0].settings]
    assert widened == ["auxiliary"]


def test_no_copies_are_one_run_however_they_are_written():
    job = make_job("fmnist", "stfseb", 0, settings={"context_copies": 0})
    assert "context_copies" not in job.settings
    assert job != make_job("fmnist", "stfseb", 0)
    assert make_job("mnist", "stfseb", 0, settings={"context_copies": 0}) == make_job("mnist", "stfseb", 0)


def test_parts_go_with_the_tasks_that_have_them():
    assert make_plan("table2", ask("mnist", "fmnist")).parts == {"mnist": ("corruption",), "fmnist": ()}
    assert make_plan("figure1", ask("mnist")).parts == {"mnist": ("rotation",)}
    assert make_plan("table1", ask("mnist")).parts == {"mnist": ()}


def test_mean_over_types_at_one_severity():
    sets = {"fog/1": 0.5, "snow/1": 0.7, "fog/5": 0.9, "snow/5": 1.0}
    part = {"suite": "cifar10-c", "sets": {k: {"auroc": v} for k, v in sets.items()}}
    record = {"metrics": {}, "parts": {"corruption": part}}
    assert quantity("auroc/cifar10-c/1").read(record) == pytest.approx(60.0)
    assert quantity("auroc/cifar10-c/5").read(record) == pytest.approx(95.0)
    assert quantity("auroc/mnist-c").read(record) is None


def test_missing_data_are_named_and_the_rest_is_run(tmp_path, monkeypatch):
    """PathMNIST on disk without its context set, OrganAMNIST not at all: nothing is run for them, and it is said."""
    folder = tmp_path / "data" / "medmnist"
    folder.mkdir(parents=True)
    (folder / "pathmnist.npz").write_bytes(b"")
    monkeypatch.setenv("STFSEB_DATA", str(tmp_path / "data"))
    ran = []

    def pretend(jobs, results, **how):
        ran.extend(jobs)
        return carrying.Outcome(done=[j.name for j in jobs])

    monkeypatch.setattr(carrying, "run_jobs", pretend)
    plans = [make_plan("table1", ask("mini", "pathmnist", "organamnist", methods=("map",)))]
    said = []
    found = carrying.carry_out(plans, tmp_path / "results", announce=said.append)
    assert {j.task for j in ran} == {"mini"}
    assert set(found.missing.values()) == {"no data"}
    assert len(found.missing) == 4
    assert any("PathMNIST: context dermamnist" in line and "--context train" in line for line in found.reasons)
    assert any("OrganAMNIST: organamnist" in line for line in said)
    ran.clear()
    plans = [make_plan("table1", ask("pathmnist", methods=("map",), context="train"))]
    said.clear()
    assert not carrying.carry_out(plans, tmp_path / "results", announce=said.append).missing
    assert {j.context for j in ran} == {"train"}
    (line,) = said  # before hours are spent on runs that will lack it
    assert line.startswith("note: PathMNIST: bloodmnist is not on disk, runs will have no AUROC against it ('stfseb")


def test_parts_that_several_tables_want_are_measured_in_one_go(tmp_path, monkeypatch):
    calls = []

    def pretend(jobs, results, *, parts, **how):
        calls.append((len(jobs), parts, how["alone"]))
        return carrying.Outcome(done=[j.name for j in jobs])

    monkeypatch.setattr(carrying, "run_jobs", pretend)
    monkeypatch.setattr(carrying, "not_on_disk", lambda job, folder: None)
    asked = ask("mnist", methods=("map", "mfvi"))
    plans = [make_plan(what, asked) for what in ("table1", "table2", "figure1", "efficiency")]
    carrying.carry_out(plans, tmp_path, announce=print)
    assert sorted(calls, key=str) == sorted([(4, ("corruption", "rotation"), False), (2, (), True)], key=str)
    assert all(job.training["compiled"] for job in plans[-1].all_jobs)
    assert not any("compiled" in job.training for plan in plans[:-1] for job in plan.all_jobs)


def test_tau_is_chosen_by_validation_and_only_from_a_whole_grid():
    asked = ask("mini", seeds=(0, 1))
    grid = retuning.grid_plan(asked)
    assert len(grid.all_jobs) == 30
    assert {job.seed for job in grid.all_jobs} == {0}
    records = {}
    for job in grid.all_jobs:
        dof = math.inf if job.settings["dof"] == "inf" else job.settings["dof"]
        wanted = 1000.0 if dof < 4 else 10.0  # pretend that heavy tails want a large tau2
        score = abs(math.log10(job.settings["tau2"] / wanted)) + 0.1
        history = [{"epoch": 1, "validation_nll": score}, {"epoch": 2, "validation_nll": 0.0}]
        records[job.name] = {"history": history, "best_epoch": 1}
    plan = retuning.retuned_plan(asked, records)
    chosen = {v: [j.settings["tau2"] for j in plan.jobs["mini", v]] for v in ("2.1", "3", "5", "inf")}
    assert chosen == {"2.1": [1000.0] * 2, "3": [1000.0] * 2, "5": [10.0] * 2, "inf": [10.0] * 2}
    few = retuning.grid_plan(asked, (3.0, math.inf))
    assert len(few.all_jobs) == 10
    assert {job.name for job in few.all_jobs} <= {job.name for job in grid.all_jobs}
    assert [v.key for v in retuning.retuned_plan(asked, records, (3.0, math.inf)).variants] == ["3", "inf"]
    gone = next(j for j in grid.all_jobs if j.settings["dof"] == 5.0)
    assert ("mini", "5") not in retuning.retuned_plan(asked, {k: v for k, v in records.items() if k != gone.name}).jobs


def test_a_results_folder_without_runs_says_why(tmp_path, monkeypatch):
    from stfseb.report.reproduce import reproduce

    monkeypatch.setenv("STFSEB_DATA", str(tmp_path / "none"))
    plans = [make_plan("table1", ask("mnist", methods=("map",)))]
    with pytest.raises(StfsebError, match="MNIST: mnist train is not on disk"):
        reproduce(plans, tmp_path / "results", announce=print, report_only=True)


def test_a_whole_number_in_a_preset_is_the_same_run(monkeypatch):
    """Presets are YAML, in which somebody may write 20 for 20.0."""
    from dataclasses import replace

    from stfseb.experiments import jobs

    task = load_task("cifar10")
    written = replace(task, presets={**task.presets, "stfseb": {**task.presets["stfseb"], "dof": 20, "tau2": 1000}})
    monkeypatch.setattr(jobs, "load_task", lambda name: written)
    assert make_job("cifar10", "stfseb", 0, settings={"dof": 20.0}).name == make_job("cifar10", "stfseb", 0).name
