"""The summary on top: the numbers of the tables below it, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from made_runs import asked, made
from test_paper_tables import by_id, cell, table

from stfseb.experiments.paper.plan import TASKS
from stfseb.report.arrange import arranged
from stfseb.report.found_plans import found_plans
from stfseb.report.headline import headline_panels
from stfseb.report.page import write_report
from stfseb.report.paper import Found
from stfseb.report.standing import standing
from stfseb.report.summary import summary_grid

SHOWN = ("mnist", "fmnist", "cifar10")


def summary(records):
    plans, found = found_plans(records, arranged(records)), Found(by_id(records))
    grids = standing(plans, found)
    return summary_grid(plans, found, grids), {grid.name: grid for shown in grids.values() for grid in shown}


@pytest.fixture(scope="module")
def records():
    found = made("table1", "table2", ask=asked(*SHOWN, seeds=range(4)))[1]
    for record in found:  # one row that is surely won, and one that is surely lost
        if record["task"] == "fmnist":
            record["metrics"] |= {"acc": 0.91 + 1e-4 * record["seed"], "ece": 0.02 + 1e-4 * record["seed"]}
        if (record["task"], record["method"]) == ("fmnist", "stfseb"):
            record["metrics"] |= {"acc": 0.93 + 1e-4 * record["seed"] ** 2, "ece": 0.03 + 1e-4 * record["seed"] ** 2}
    return found


@pytest.fixture(scope="module")
def found(records):
    return summary(records)


def test_figures_are_those_of_the_main_table(found, records):
    grid, _ = found
    whole = table("table1", records, asked(*SHOWN, seeds=range(4)))
    assert list(grid.rows) == [(task, "4 seeds") for task in ("MNIST", "FMNIST", "CIFAR-10")]
    for task in ("MNIST", "FMNIST", "CIFAR-10"):
        for heading in ("Accuracy ↑", "NLL ↓", "ECE ↓"):
            one, other = cell(grid, (task,), heading), cell(whole, (task, heading), "ST-FS-EB")
            assert (one.text, one.value, one.runs) == (other.text, other.value, other.runs)
            row = whole.cells[whole.rows.index((heading, task))]
            sign = 1 if heading.endswith("↑") else -1
            best = max((c for c in row if c is not other), key=lambda c: sign * c.value)
            assert one.rank == (other.rank == 1)
            place, name = one.below[0].split(": ")
            assert one.below[1] == best.text
            assert name == whole.columns[row.index(best)]
            assert place == ("best" if other.rank != 1 else "level" if best.rank == 1 else "next")


def test_the_mean_auroc_is_the_headlines_and_leaves_corrupted_images_out(found, records):
    grid, _ = found
    sets = {"mnist": ("fmnist", "notmnist"), "fmnist": ("mnist", "notmnist"), "cifar10": ("svhn",)}
    panels = {p.task: p for p in headline_panels({t: [r for r in records if r["task"] == t] for t in SHOWN})}
    for stub, cells, task in zip(grid.rows, grid.cells, SHOWN, strict=True):
        means = {
            method: [
                100 * np.mean([r["metrics"][f"auroc/{s}"] for s in sets[task]])
                for r in records
                if (r["task"], r["method"]) == (task, method)
            ]
            for method in {r["method"] for r in records}
        }
        own = cells[grid.columns.index("AUROC, mean ↑")]
        assert own.value == pytest.approx(np.mean(means["stfseb"]))
        assert own.std == pytest.approx(np.std(means["stfseb"], ddof=1))
        (mark,) = [m for m in panels[task].marks if m.method == "stfseb" and not m.paper]
        assert (own.value, own.std) == pytest.approx((mark.auroc.mean, mark.auroc.std))
        best = max(np.mean(v) for m, v in means.items() if m != "stfseb")
        assert own.below[1].startswith(f"{best:.2f} ± ")
        assert own.rank == int(round(own.value, 2) >= round(best, 2)), stub


def test_counts_are_of_the_tables_of_what_is_held_and_who_is_ahead(found):
    grid, judged = found
    for (task, _), cells in zip(grid.rows, grid.cells, strict=True):
        held, best, behind = cells[-3:]
        verdicts = [row[-1].text for stub, row in zip(judged["held"].rows, judged["held"].cells, strict=True)
                    if stub[0] == task]  # fmt: skip
        assert held.text == f"{verdicts.count('held')} of {len(verdicts)}"
        for side, name, rank in ((best, "best", 1), (behind, "best-behind", 2)):
            rows = [row for stub, row in zip(judged[name].rows, judged[name].cells, strict=True) if stub[0] == task]
            sure = sum(row[2].rank == rank for row in rows)
            assert side.text.startswith(f"{len(rows)} of ")
            assert side.below == ((f"{sure or 'none'} told from chance",) if rows else ())
    best, behind = grid.cells[1][-2:]
    assert "none" not in best.below[0] + behind.below[0]
    total = judged["held"].notes[0].split()[2:5]
    assert any(f"({' '.join(total)} in all)" in note for note in grid.notes)
    assert any(f"Best or level ({len(judged['best'].rows)} of 18 in all)" in note for note in grid.notes)


def test_all_tasks_of_the_paper_have_a_row_each_and_others_have_none():
    records = made("table1", "table2", ask=asked(*TASKS, "mini", seeds=(0,)))[1]
    grid, judged = summary(records)
    assert len(grid.rows) == len(TASKS)
    assert "mini" not in str(grid.rows)
    assert "mini" in str(judged["best"].rows) + str(judged["best-behind"].rows)
    count = sum(stub[0] != "mini" for name in ("best", "best-behind") for stub in judged[name].rows)
    assert any(f" of {count} in all), and behind" in note for note in grid.notes)
    assert not any("told from chance" in str(c.below) for row in grid.cells for c in row)  # of one seed nothing is
    assert not any("Told from chance" in note or "±" in note for note in grid.notes)
    assert summary([r for r in records if r["task"] == "mini"])[0] is None
    assert summary([r for r in records if r["method"] != "stfseb"])[0] is None


def test_methods_that_were_not_run_and_other_seeds_are_said(records):
    some = [r for r in records if (r["task"], r["method"]) != ("cifar10", "gfsvi")]
    some = [r for r in some if r["method"] == "stfseb" or r["seed"] < 3]
    grid, _ = summary(some)
    assert "CIFAR-10: GFSVI not there to compare with." in grid.notes
    assert not any(note.startswith("MNIST: ") for note in grid.notes)
    assert cell(grid, ("MNIST",), "NLL ↓").below[2:] == ("over 3 seeds",)
    assert grid.rows[0] == ("MNIST", "4 seeds")
    assert not any("†" in note for note in grid.notes)
    fallen = [r | {"collapsed": r["collapsed"] or (r["method"], r["seed"]) == ("stfseb", 3)} for r in some]
    assert any(note.startswith("† runs that learnt nothing") for note in summary(fallen)[0].notes)


def test_the_report_begins_its_tables_with_it(records, tmp_path, monkeypatch):
    monkeypatch.setattr("stfseb.report.page.PLOTS", ())
    page = write_report([r for r in records if r["task"] == "mnist"], tmp_path, "t").read_text("utf-8")
    assert page.index('id="paper-summary"') < page.index('id="paper-table1"')
    assert (tmp_path / "tables" / "summary.json").exists()
    mini = made("table1", ask=asked("mini", seeds=(0,)))[1]
    assert "paper-summary" not in write_report(mini, tmp_path / "mini", "t").read_text("utf-8")
