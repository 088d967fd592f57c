"""From plan to page with runs that are pretended: every table and figure, files, and what is said."""

from __future__ import annotations

import io
import json

import pytest
from made_runs import asked, record_of
from rich.console import Console

from stfseb.data.tasks import load_task
from stfseb.experiments.paper import beyond
from stfseb.experiments.paper import carry_out as carrying
from stfseb.experiments.paper.plan import ALL, limited, make_plan
from stfseb.report.reproduce import reproduce


@pytest.fixture
def pretend(monkeypatch):
    """Runs that take no time: records and parts are written as a run would; returns what was asked to run."""
    calls = []

    def run_jobs(jobs, results, *, parts, **how):
        outcome = carrying.Outcome()
        for job in jobs:
            folder = job.folder(results)
            if job.done(results) and all((folder / f"{part}.json").exists() for part in parts):
                outcome.skipped.append(job.name)
                continue
            before = job.done(results)
            if job.method == "mfvi":
                outcome.failed[job.name] = "its card was taken away"
                continue
            record = record_of(job)
            made = record.pop("parts")
            folder.mkdir(parents=True, exist_ok=True)
            for part in parts:
                (folder / f"{part}.json").write_text(json.dumps(made.get(part, {"sets": {}})))
            (folder / "record.json").write_text(json.dumps(record))
            outcome.done.append(job.name)
            if before:
                outcome.measured.append(job.name)
        calls.append((parts, outcome))
        return outcome

    monkeypatch.setattr(carrying, "run_jobs", run_jobs)
    monkeypatch.setattr("stfseb.report.page.PLOTS", ())
    return calls


def test_everything_from_one_command_and_nothing_twice(pretend, tmp_path):
    ask = asked("mini", methods=("stfseb", "map"), seeds=(0, 1))
    plans = [make_plan(what, ask) for what in ALL]
    said = []
    made = reproduce(plans, tmp_path, announce=said.append, retuned=ask)
    names = [grid.name for grid in made.grids]
    assert names == ["table1", "table2", "dof", "context-number", "context-source", "efficiency", "dof-retuned"]
    for name in names:
        for kind in ("json", "md", "tex"):
            assert (tmp_path / "tables" / f"{name}.{kind}").stat().st_size > 100
    for name in ("figure1", "figure2"):
        assert (tmp_path / "plots" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    retuned = made.grids[-1]
    assert all(cell.value is not None for row in retuned.cells for cell in row)
    (note,) = [note for note in retuned.notes if note.startswith("Chosen tau2: ")]
    assert note.count("mini") + note.count("Fashion") == 1  # the task is named once for all its dofs
    assert f"Report: {tmp_path / 'report.html'}" in made.lines
    assert not made.failed
    page = (tmp_path / "report.html").read_text("utf-8")
    for grid in made.grids:
        assert f'id="paper-{grid.name}"' in page

    count = sum(len(o.done) for _, o in pretend)
    pretend.clear()
    again = reproduce(plans, tmp_path, announce=said.append, retuned=ask)
    assert sum(len(o.done) for _, o in pretend) == 0
    assert any(line.startswith("0 runs made now, ") for line in again.lines)
    assert count > 30
    assert [g.to_json() for g in again.grids] == [g.to_json() for g in made.grids]
    looked = reproduce(plans, tmp_path, announce=said.append, report_only=True)
    assert [g.to_json() for g in looked.grids] == [g.to_json() for g in made.grids[:-1]]


def test_rows_of_dof_are_those_that_are_retuned(pretend, tmp_path):
    ask = asked("mini", seeds=(0, 1))
    made = reproduce(limited([make_plan("dof", ask)], ["3", "inf"]), tmp_path, announce=print, retuned=ask)
    assert [list(grid.columns) for grid in made.grids] == [["3", "Gaussian"]] * 2
    # Two dofs of two seeds, and five tau2 of each with the first; the presets' tau2 is among the five.
    assert made.lines[0].startswith(f"{len(list(tmp_path.rglob('record.json')))} runs made now, 0 were there already")
    assert {json.loads(p.read_text())["settings"]["dof"] for p in tmp_path.rglob("record.json")} <= {3.0, "inf"}


def test_runs_are_counted_by_what_was_done_for_them(pretend, tmp_path, monkeypatch):
    ask = asked("mini", methods=("stfseb", "map"), seeds=(0, 1))
    reproduce([make_plan("table2", ask)], tmp_path, announce=print)
    figure = [make_plan("figure1", ask)]
    said = reproduce(figure, tmp_path, announce=print).lines[0]
    assert said == "0 runs made now, 4 were there already (4 of them were measured now for this, not trained)."
    assert reproduce(figure, tmp_path, announce=print).lines[0] == "0 runs made now, 4 were there already."

    whole = carrying.run_jobs

    def shared(jobs, results, **how):
        outcome = whole(jobs, results, **how)
        outcome.elsewhere.append(outcome.done.pop())
        return outcome

    monkeypatch.setattr(carrying, "run_jobs", shared)
    said = reproduce([make_plan("table1", ask)], tmp_path / "other", announce=print).lines[0]
    assert said == "3 runs made now, 0 were there already, 1 was done by another command."


def test_what_failed_before_is_told_from_what_failed_now_with_the_way_on(pretend, tmp_path, monkeypatch):
    plans = [make_plan("table1", asked("mini", methods=("map", "mfvi"), seeds=(0,)))]
    lines = reproduce(plans, tmp_path, announce=print).lines
    assert lines[1] == "1 run is missing: 1 failed; --retry-failed does what failed again."
    assert " failed: its card was taken away" in lines[2]
    whole = carrying.run_jobs

    def again(jobs, results, **how):
        outcome = whole(jobs, results, **how)
        outcome.before += outcome.failed
        return outcome

    monkeypatch.setattr(carrying, "run_jobs", again)
    line = reproduce(plans, tmp_path, announce=print).lines[2]
    assert " failed before, and was not tried now: its card was taken away" in line


def test_failed_runs_and_missing_data_are_said(pretend, tmp_path, monkeypatch):
    monkeypatch.setenv("STFSEB_DATA", str(tmp_path / "none"))
    ask = asked("mini", "mnist", methods=("map", "mfvi"), seeds=(0, 1))
    made = reproduce([make_plan("table1", ask)], tmp_path / "r", announce=print)
    (grid,) = made.grids
    words = {(stub[1], column): cell.text for stub, row in zip(grid.rows, grid.cells, strict=True)
             for column, cell in zip(grid.columns, row, strict=True)}  # fmt: skip
    assert words["mini", "MFVI"] == "failed"
    assert words["MNIST", "MAP"] == words["MNIST", "MFVI"] == "no data"
    assert made.failed
    assert "6 runs are missing: 4 no data, 2 failed; --retry-failed does what failed again." in made.lines
    assert any("its card was taken away" in line for line in made.lines)
    page = (tmp_path / "r" / "report.html").read_text("utf-8")
    assert "no data" in page
    assert ">failed<" in page


def test_tables_of_several_commands_stand_on_one_page(pretend, tmp_path):
    """A second command for one task must not take the first one's tasks off the page."""
    reproduce([make_plan("table1", asked("mini", methods=("map",), seeds=(0, 1)))], tmp_path, announce=print)
    plan = make_plan("table1", asked("mini", methods=("map", "stfseb"), seeds=(0,), training={"epochs": 3}))
    reproduce([plan], tmp_path, announce=print)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Other settings" in page
    assert "MAP, epochs 3" in page
    assert "Trained with epochs 3 in place of the task" in page  # the table that was asked for, and the other
    assert {p.name for p in (tmp_path / "tables").glob("table1*.json")} == {"table1.json", "table1-2.json"}
    out = io.StringIO()
    Console(file=out, width=80).print(reproduce([plan], tmp_path, announce=print).grids[0].to_rich(80))
    assert "ST-FS-EB" in out.getvalue()


def test_seeds_of_runs_at_other_epochs_are_not_missing(pretend, tmp_path):
    methods = ("stfseb", "fseb", "map")
    one = make_plan("table1", asked("mini", methods=methods, seeds=(0,), training={"epochs": 1}))
    two = make_plan("table1", asked("mini", methods=("map",), seeds=(0, 1), training={"epochs": 2}))
    reproduce([two], tmp_path, announce=print)
    assert reproduce([one], tmp_path, announce=print).lines[0] == "3 runs made now, 0 were there already."
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "of 2 seeds" not in page
    again = make_plan("table1", asked("mini", methods=("map",), seeds=(0,), training={"epochs": 1}))
    assert reproduce([again], tmp_path, announce=print).lines[0] == "0 runs made now, 1 was there already."


@pytest.mark.parametrize("what", ["readings", "beyond"])
def test_tables_with_variants_down_the_side(pretend, tmp_path, what, monkeypatch):
    monkeypatch.setattr(carrying, "not_on_disk", lambda job, folder: None)
    made = reproduce([make_plan(what, asked("fmnist", seeds=(0, 1)))], tmp_path, announce=print)
    (grid,) = made.grids
    assert grid.name == f"{what}-fmnist"
    assert len(grid.rows) == {"readings": 13, "beyond": len(beyond.variants(load_task("fmnist")))}[what]
    assert (tmp_path / "tables" / f"{what}-fmnist.tex").exists()
