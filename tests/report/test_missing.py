"""What the results page says is missing: parts of tables too, as many as the tables themselves leave empty."""

from __future__ import annotations

import json

import pytest
from made_runs import asked, record_of

from stfseb.experiments.paper.plan import METHODS, make_plan
from stfseb.experiments.paper.retuning import grid_plan, retuned_plan
from stfseb.report.grid import MISSING
from stfseb.report.results_page import results_page

PARTS = ("rotation", "corruption", "samples", "temperature")
SEEDS = (0, 1)


def write(results, jobs, without=lambda job, part: False):
    for job in {job.name: job for job in jobs}.values():
        record = record_of(job, PARTS)
        parts = record.pop("parts")
        parts["tails"] = {"sets": {k: {"inverse_dof": 0.25} for k in ("weights", "context", "test")}}
        folder = job.folder(results)
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            if not without(job, name):
                (folder / f"{name}.json").write_text(json.dumps(part))
        (folder / "record.json").write_text(json.dumps(record))


def main_runs(task, seeds=SEEDS):
    return make_plan("table1", asked(task, seeds=seeds)).all_jobs


def said(page, task, what):
    """Return what the section says of one table."""
    lines = [line for line in page.blocks["missing"].splitlines() if line.startswith(f"- Missing in tables, {task}: ")]
    entries = [entry for line in lines for entry in line.partition(": ")[2].split("; ")]
    return [entry.rstrip(".") for entry in entries if f"(`stfseb paper {what}`)" in entry]


@pytest.mark.parametrize(
    ("what", "task", "words"),
    [
        ("dof", "mnist", "degrees of freedom, 2 of 6 not run (20 and Gaussian)"),
        ("context-number", "mnist", "number of context points, 2 of 3 not run (64 points and 128 points)"),
        ("context-source", "mnist", "source of the context points, 2 of 3 not run (train and none)"),
        ("readings", "cifar10", "readings of the paper, 8 of 12 not run"),
        ("beyond", "mnist", "beyond the paper, 3 of 18 not run"),
    ],
)
def test_rows_and_columns_that_were_not_run_are_counted(tmp_path, what, task, words):
    plan = make_plan(what, asked(task, seeds=SEEDS))
    number = int(words.split(", ")[1].split(" of ")[0])
    kept = [v.key for v in plan.variants if (task, v.key) in plan.jobs]
    assert len(kept) == int(words.split(" of ")[-1].split(" not")[0])
    if what in ("context-number", "context-source"):  # the first column alone is no table of its own
        run = [*kept[:-number], *kept[-1:]]
        number, words = number - 1, words.replace("2 of 3", "1 of 3").replace("train and none", "train")
        words = words.replace("64 points and 128 points", "64 points")
    else:
        run = kept[:-number]
    write(tmp_path, [*main_runs(task), *(job for key in run for job in plan.jobs[task, key])])
    page = results_page(tmp_path)
    title = {"mnist": "MNIST", "cifar10": "CIFAR-10"}[task]
    assert said(page, title, what) == [f"{words} (`stfseb paper {what}`)"]
    grid = page.tables.get(what) or page.tables[f"{what}-{task}"]
    left_out = [note for note in grid.notes if note.startswith("Not run yet: ")]
    empty = [i for i in range(len(grid.columns)) if all(row[i].text in MISSING for row in grid.cells)]
    assert number == (len(left_out[0].split("; ")) if left_out else len(empty))
    write(tmp_path, plan.all_jobs)
    assert said(results_page(tmp_path), title, what) == []


def test_degrees_of_freedom_whose_tau_was_not_chosen_are_missing(tmp_path):
    ask = asked("mnist", seeds=SEEDS)
    grid = grid_plan(ask, (3.0, 5.0))
    records = {job.name: record_of(job) for job in grid.all_jobs}
    chosen = retuned_plan(ask, records, (3.0, 5.0))
    write(tmp_path, [*main_runs("mnist"), *grid.all_jobs, *chosen.all_jobs])
    (words,) = said(results_page(tmp_path), "MNIST", "dof --retuned")
    assert words.startswith(
        "degrees of freedom at a tau chosen anew for each, 4 of 6 not run (2.1, 10, 20 and Gaussian)"
    )


@pytest.mark.parametrize(
    ("part", "what", "words"),
    [
        ("temperature", "tempered", "the main tables after one temperature, 2 of 6 not measured (GFSVI and MAP)"),
        ("tails", "tails", "fitted tails, 1 of 5 not measured (MAP)"),
    ],
)
def test_methods_that_were_not_measured_are_named(tmp_path, part, what, words):
    """Of tails three methods are asked for, of which MAP is one and GFSVI is not."""
    write(tmp_path, main_runs("mnist"), lambda job, name: name == part and job.method in ("gfsvi", "map"))
    assert said(results_page(tmp_path), "MNIST", what) == [f"{words} (`stfseb paper {what}`)"]


def test_a_method_that_one_task_has_is_missing_on_the_other(tmp_path):
    tasks = ("mnist", "fmnist")
    write(
        tmp_path,
        [job for task in tasks for job in main_runs(task)],
        lambda job, name: name == "tails" and job.task == "fmnist" and job.method in ("fseb", "gfsvi", "mfvi"),
    )
    page = results_page(tmp_path)
    assert said(page, "MNIST", "tails") == []
    (words,) = said(page, "FMNIST", "tails")
    assert words.startswith("fitted tails, 3 of 6 not measured (FS-EB, GFSVI and MFVI)")
    assert "not measured" in page.blocks["tails"]


def test_numbers_of_samples_that_were_not_measured(tmp_path):
    write(tmp_path, main_runs("mnist"), lambda job, name: name == "samples" and (job.method, job.seed) != ("stfseb", 0))
    assert said(results_page(tmp_path), "MNIST", "samples") == [
        "number of Monte Carlo samples, 3 of 3 at fewer seeds than were run (1, 10 and 100) (`stfseb paper samples`)"
    ]


def test_a_method_without_any_run_is_said_once(tmp_path):
    write(tmp_path, [job for job in main_runs("mnist") if job.method != "gfsvi"])
    block = results_page(tmp_path).blocks["missing"]
    assert "- MNIST: no runs of GFSVI." in block
    assert "Missing in tables" not in block
    assert block.count("GFSVI") == 1


def test_runs_at_other_settings_are_not_called_no_runs(tmp_path):
    other = make_plan("table1", asked("mnist", methods=("map",), seeds=SEEDS)).all_jobs
    shifted = [type(job)(**(vars(job) | {"settings": {"sigma": 77.0}})) for job in other]
    write(tmp_path, [*(job for job in main_runs("mnist") if job.method != "map"), *shifted])
    block = results_page(tmp_path).blocks["missing"]
    assert "- MNIST: no runs of MAP, at the task's presets." in block


def test_fewer_seeds_and_numbers_that_lack_are_said(tmp_path):
    plan = make_plan("readings", asked("cifar10", seeds=(0, 1, 2)))
    jobs = [job for job in plan.all_jobs if (job.settings.get("extractor"), job.seed) != ("he", 2)]
    bare = {job.name for job in plan.jobs["cifar10", "epoch-init-row"]}
    write(
        tmp_path,
        [*main_runs("cifar10", (0, 1, 2)), *jobs],
        lambda job, name: name == "corruption" and job.name in bare,
    )
    page = results_page(tmp_path)
    assert said(page, "CIFAR-10", "readings") == [
        "readings of the paper, 1 of 12 measured in part and 4 of 12 at fewer seeds than 3 (`stfseb paper readings`)"
    ]
    assert said(page, "CIFAR-10", "table1") == []


def test_a_table_at_other_epochs_is_named_by_its_command(tmp_path):
    plan = make_plan("dof", asked("mnist", seeds=(0,), training={"epochs": 30}))
    write(tmp_path, [*main_runs("mnist"), *(job for key in ("3", "5", "10") for job in plan.jobs["mnist", key])])
    (words,) = said(results_page(tmp_path), "MNIST", "dof --epochs 30")
    assert words.startswith("degrees of freedom, 3 of 6 not run")


def test_whole_tables_lack_nothing(tmp_path):
    write(tmp_path, main_runs("mnist"))
    assert set(METHODS) == {job.method for job in main_runs("mnist")}
    assert "Missing in tables" not in results_page(tmp_path).blocks["missing"]
