"""The paper's tables from made runs: numbers against numpy and scipy, and every way in which a cell can be empty."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from made_runs import asked, made, record_of
from rich.console import Console
from scipy import stats

from stfseb.experiments.jobs import make_job
from stfseb.experiments.paper.plan import make_plan
from stfseb.report.differences import difference_grid
from stfseb.report.paper import Found, about_data, paper_grids
from stfseb.report.paper_numbers import numbers, printed
from stfseb.report.standing import held_grid, race_grids

SIX = ("stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map")


def by_id(records):
    return {r["id"]: r for r in records}


def table(what, records, ask, missing=()):
    (grid,) = paper_grids(make_plan(what, ask), Found(by_id(records), dict(missing)))
    return grid


def cell(grid, row, column):
    place = next(i for i, stub in enumerate(grid.rows) if set(row) <= set(stub))
    return grid.cells[place][grid.columns.index(column)]


@pytest.fixture(scope="module")
def runs():
    return made("table1", "table2", ask=asked("mnist", "fmnist", "cifar10"))


# The paper's own numbers -----------------------------------------------------------------------------


def test_figures_of_the_paper_read_by_eye():
    """A dozen cells, copied by hand from the paper's pages."""
    for where, mean, std in [
        (("table1", "mnist", "acc", "stfseb"), 99.33, 0.052),
        (("table1", "organamnist", "ece", "mfvi"), 0.046, 0.003),
        (("table1", "cifar10", "nll", "fseb"), 0.763, 0.009),
        (("table2", "cifar10", "auroc/cifar10-c/3", "gfsvi"), 63.72, 0.942),
        (("table2", "pathmnist", "auroc/bloodmnist", "mcdropout"), 71.24, 13.143),
        (("table2", "mnist", "auroc/mnist-c", "stfseb"), 89.38, 0.569),
        (("dof", "fmnist", "auroc/mnist", "10"), 90.47, 1.766),
        (("dof", "cifar10", "nll", "inf"), 0.402, 0.010),
        (("context-number", "organamnist", "acc", "128"), 90.65, 0.386),
        (("context-source", "pathmnist", "auroc/bloodmnist", "train"), 76.23, 22.597),
        (("efficiency", "cifar10", "peak_memory_mb", "gfsvi"), 2605.42, None),
    ]:
        found = printed(*where)
        assert (found.mean, found.std) == (mean, std), where


def test_errata_are_applied_and_noted():
    copied = printed("context-number", "fmnist", "auroc/mnist", "32")
    assert (copied.mean, copied.std) == (99.70, 0.170)
    assert "99.86" in copied.note
    fallen = printed("table1", "cifar10", "acc", "map")
    assert (fallen.mean, fallen.std) == (77.31, 23.656)  # as printed
    assert "84.79" in fallen.note
    # Nine runs at 84.79 and one at chance are what the paper printed.
    ten = np.r_[np.full(9, 84.79), 10.0]
    assert (ten.mean(), ten.std(ddof=1)) == (pytest.approx(77.31, abs=0.01), pytest.approx(23.656, abs=0.01))
    assert "severity 5" in printed("context-source", "cifar10", "auroc/cifar10-c/5", "train").note
    assert printed("context-source", "cifar10", "auroc/cifar10-c/1", "train") is None


def test_every_column_and_quantity_of_the_paper_belongs_to_a_plan():
    """A misspelt key would never be shown: each printed cell must be found by the plan of its table."""
    for what, tasks in numbers()["tables"].items():
        plan = make_plan(what, asked(*tasks, seeds=(0,)))
        for task, rows in tasks.items():
            keys = {q.key for q in plan.quantities[task]}
            for quantity, cells in rows.items():
                assert quantity in keys, (what, task, quantity)
                assert set(cells) <= {v.key for v in plan.variants}, (what, task, quantity)


# Our cells -------------------------------------------------------------------------------------------


def test_mean_sample_deviation_distance_and_runs(runs):
    _, records = runs
    grid = table("table1", records, asked("mnist", "fmnist", "cifar10"))
    own = [r for r in records if r["task"] == "fmnist" and r["method"] == "stfseb"]
    values = np.array([100 * r["metrics"]["acc"] for r in own])
    found = cell(grid, ("Accuracy ↑", "FMNIST"), "ST-FS-EB")
    assert found.text == f"{values.mean():.2f} ± {values.std(ddof=1):.3f}"
    assert found.paper == (92.38, 0.194)
    assert found.paper_deviations == pytest.approx((values.mean() - 92.38) / 0.194)
    assert found.runs == tuple(make_job("fmnist", "stfseb", seed).name for seed in (0, 1, 2))
    assert found.below[0] == "paper 92.38 ± 0.194"
    assert found.below[1].endswith(" sd")
    assert [stub[0] for stub in grid.rows] == ["Accuracy ↑"] * 3 + ["ECE ↓"] * 3 + ["NLL ↓"] * 3


def test_marks_are_of_printed_means_and_shared_by_ties():
    ask = asked("mnist", seeds=(0,))
    records = [record_of(job) for job in make_plan("table1", ask).all_jobs]
    for record, acc, nll in zip(records, (0.99331, 0.99334, 0.98, 0.97, 0.96, 0.95), (3, 1, 2, 2, 5, 6), strict=True):
        record["metrics"] |= {"acc": acc, "nll": nll}
    grid = table("table1", records, ask)
    assert [cell(grid, ("Accuracy ↑",), c).rank for c in grid.columns] == [1, 1, 2, 0, 0, 0]
    assert [cell(grid, ("NLL ↓",), c).rank for c in grid.columns] == [0, 1, 2, 2, 0, 0]
    assert "One seed" in grid.notes[0]


def test_corruptions_are_averaged_over_types(runs):
    _, records = runs
    grid = table("table2", records, asked("mnist", "fmnist", "cifar10"))
    own = [r for r in records if r["task"] == "cifar10" and r["method"] == "mfvi"]
    seeds = [
        np.mean([v["auroc"] for k, v in r["parts"]["corruption"]["sets"].items() if k.endswith("/5")]) for r in own
    ]
    found = cell(grid, ("CIFAR-10", "AUROC CIFAR-10-C 5 ↑"), "MFVI")
    assert found.value == pytest.approx(100 * np.mean(seeds))
    assert found.std == pytest.approx(100 * np.std(seeds, ddof=1))
    assert any("generated" in note for note in grid.notes)
    assert any("first 6,000 of 26,032" in note for note in grid.notes)


def test_empty_cells_say_why_and_keep_the_papers_figure_apart(runs):
    _, records = runs
    ask = asked("mnist", "pathmnist", "organamnist", seeds=(0, 1, 2))
    plan = make_plan("table1", ask)
    gone = {job.name: "no data" for job in plan.all_jobs if job.task == "pathmnist"}
    gone |= {job.name: "failed" for job in plan.jobs["organamnist", "map"]}
    some = [r for r in records if (r["method"], r["seed"]) != ("gfsvi", 1)]
    grid = table("table1", some, ask, gone)
    assert cell(grid, ("Accuracy ↑", "PathMNIST"), "MAP").text == "no data"
    assert cell(grid, ("Accuracy ↑", "PathMNIST"), "MAP").value is None
    assert cell(grid, ("Accuracy ↑", "PathMNIST"), "MAP").below == ("paper 89.15 ± 2.522",)
    assert cell(grid, ("Accuracy ↑", "OrganAMNIST"), "MAP").text == "failed"
    assert cell(grid, ("Accuracy ↑", "OrganAMNIST"), "MFVI").text == "not run"
    partly = cell(grid, ("Accuracy ↑", "MNIST"), "GFSVI")
    assert partly.below[0] == "2 of 3 seeds"
    assert partly.seeds == (0, 2)
    ood = table("table2", [r | {"parts": {}} for r in records], asked("mnist"))
    assert cell(ood, ("AUROC MNIST-C ↑",), "MAP").text == "not measured"
    for record in (lacking := json.loads(json.dumps(records))):
        record["metrics"].pop("auroc/notmnist", None)
    assert cell(table("table2", lacking, asked("mnist")), ("AUROC notMNIST ↑",), "MAP").text == "no data"


def test_collapsed_seeds_are_named_with_the_median(runs):
    records = json.loads(json.dumps(runs[1]))
    for record in records:
        if (record["task"], record["method"], record["seed"]) == ("cifar10", "map", 2):
            record["collapsed"] = True
            record["metrics"]["acc"] = 0.1
    grid = table("table1", records, asked("cifar10"))
    found = cell(grid, ("Accuracy ↑",), "MAP")
    own = [100 * r["metrics"]["acc"] for r in records if (r["task"], r["method"]) == ("cifar10", "map")]
    assert found.text.endswith("†")
    assert found.below[0] == f"median {np.median(own):.2f}"
    assert found.value == pytest.approx(np.mean(own))
    assert any("† CIFAR-10, MAP: 1 of 3 runs" in note and "seed 2" in note for note in grid.notes)


def test_mini_has_no_column_of_the_paper():
    ask = asked("mini", methods=("stfseb", "map"), seeds=(0, 1))
    _, records = made("table1", ask=ask)
    grid = table("table1", records, ask)
    assert all(c.paper is None and not c.below for row in grid.cells for c in row)
    assert "mini is not in the paper: there are no figures to set beside these." in grid.notes
    assert sum("paper" in note for note in grid.notes) == 1


def test_only_tasks_that_the_paper_lacks_are_said_to_have_no_figures():
    ask = asked("mnist", "mini", methods=("stfseb", "map"), seeds=(0,))
    _, records = made("table1", ask=ask)
    (note,) = [note for note in table("table1", records, ask).notes if "not in the paper" in note]
    assert note.startswith("mini is")


def test_columns_have_one_order_whatever_the_order_asked_for():
    ask = asked("mini", methods=("ensemble", "map", "stfseb"), seeds=(0,))
    assert [v.key for v in make_plan("table1", ask).variants] == ["stfseb", "map", "ensemble"]


def test_train_context_is_set_beside_the_papers_train_row():
    ask = asked("pathmnist", context="train")
    _, records = made("table1", ask=ask)
    grid = table("table1", records, ask)
    assert cell(grid, ("Accuracy ↑",), "ST-FS-EB").paper == (88.18, 1.16)
    assert cell(grid, ("Accuracy ↑",), "FS-EB").paper is None  # the paper has no such run
    assert cell(grid, ("Accuracy ↑",), "MAP").paper == (89.15, 2.522)  # has no context


def test_readings_name_the_nearest():
    ask = asked("fmnist", seeds=(0,))
    plan = make_plan("readings", ask)
    records = [record_of(job) for job in plan.all_jobs]
    near = plan.jobs["fmnist", "epoch-independent-row"][0].name
    exact = {"acc": 0.9238, "ece": 0.038, "nll": 0.226, "auroc/mnist": 0.9970, "auroc/notmnist": 0.9623}
    for record in records:
        record["metrics"] |= exact if record["id"] == near else {"acc": 0.93, "nll": 0.2}
    (grid,) = paper_grids(plan, Found(by_id(records)))
    assert grid.rows[0] == ("the paper",)
    distances = {stub[0]: row[-1].value for stub, row in zip(grid.rows, grid.cells, strict=True)}
    assert distances["per epoch, independent, a mask a row"] == pytest.approx(0.0, abs=1e-9)
    assert "Nearest to the paper: per epoch, independent, a mask a row." in grid.notes
    assert len(grid.rows) == 13


def test_samples_are_columns_of_the_same_runs():
    ask = asked("mini", seeds=(0, 1))
    _, records = made("samples", ask=ask, parts=("samples",))
    assert len(records) == 2
    grid = table("samples", records, ask)
    assert grid.columns == ("1", "10", "100")
    cells = [cell(grid, ("NLL ↓",), column) for column in grid.columns]
    own = np.mean([r["metrics"]["nll"] for r in records])
    assert [c.value for c in cells] == pytest.approx([own + 0.05, own, own - 0.01])
    assert len({c.runs for c in cells}) == 1
    bare = table("samples", [r | {"parts": {}} for r in records], ask)
    assert {c.text for row in bare.cells for c in row} == {"not measured"}


def test_tempered_are_the_main_tables_runs_seen_after_one_temperature():
    ask = asked("fmnist", seeds=(0, 1))
    _, records = made("tempered", ask=ask, parts=("temperature",))
    assert {r["id"] for r in records} == {job.name for job in make_plan("table1", ask).all_jobs}
    grid = table("tempered", records, ask)
    raw = table("table1", records, ask)
    for label in ("ST-FS-EB", "MAP"):
        one, other = (cell(g, ("NLL ↓",), label) for g in (grid, raw))
        assert one.value == pytest.approx(other.value - 0.01)
        assert one.runs == other.runs
        assert one.paper == other.paper
        assert cell(grid, ("ECE ↓",), label).value == pytest.approx(cell(raw, ("ECE ↓",), label).value / 2)
        warm = cell(grid, ("Temperature",), label)
        assert (warm.text, warm.rank, warm.paper) == ("1.250 ± 0.071", 0, None)
    theirs = printed("table2", "fmnist", "auroc/notmnist", "map")
    assert cell(grid, ("AUROC notMNIST ↑",), "MAP").paper == (theirs.mean, theirs.std)
    assert any("without a temperature" in note for note in grid.notes)
    small = asked("mini", seeds=(0, 1))
    unprinted = table("tempered", made("tempered", ask=small, parts=("temperature",))[1], small)
    assert not any("paper" in note for note in unprinted.notes)
    assert not any("-C" in stub[1] for stub in grid.rows)  # corruptions are not measured again
    assert [note for note in grid.notes if "p^(1/T)" in note] == ["T makes averaged probabilities p^(1/T), normalised."]
    assert not any("every weight sample" in note for note in grid.notes)
    bare = table("tempered", [r | {"parts": {}} for r in records], ask)
    assert {c.text for row in bare.cells for c in row} == {"not measured"}


def test_tempered_beside_the_papers_row_of_the_same_context():
    ask = asked("pathmnist", seeds=(0, 1), context="train")
    _, records = made("tempered", ask=ask, parts=("temperature",))
    for label in ("ST-FS-EB", "FS-EB", "MAP"):
        found = [cell(table(what, records, ask), ("NLL ↓",), label).paper for what in ("tempered", "table1")]
        assert found[0] == found[1]


def test_tails_have_no_best():
    ask = asked("mini", seeds=(0, 1))
    _, records = made("tails", ask=ask, parts=())
    for record in records:
        record["parts"] = {"tails": {"sets": {"weights": {"inverse_dof": 0.1 * (1 + record["seed"])}}}}
    grid = table("tails", records, ask)
    assert grid.columns == ("ST-FS-EB", "MC Dropout", "MAP")
    found = cell(grid, ("1/dof, weights",), "MAP")
    assert found.value == pytest.approx(0.15)
    assert {c.rank for row in grid.cells for c in row} == {0}
    assert cell(grid, ("1/dof, outputs at test images",), "MAP").text == "not measured"


def test_differences_are_scipys_paired_intervals(runs):
    plans, records = runs
    grid = difference_grid(plans, Found(by_id(records)))
    found = cell(grid, ("FMNIST", "NLL ↓"), "− MFVI")
    values = {
        m: [r["metrics"]["nll"] for r in records if (r["task"], r["method"]) == ("fmnist", m)]
        for m in ("stfseb", "mfvi")
    }
    test = stats.ttest_rel(values["stfseb"], values["mfvi"])
    low, high = test.confidence_interval(0.95)
    assert found.value == pytest.approx(np.mean(values["stfseb"]) - np.mean(values["mfvi"]))
    assert found.below[0] == f"{low:+.3f} to {high:+.3f}".replace("-", "−")
    assert found.rank == (1 if test.pvalue < 0.05 else 0)  # lower is better
    assert len(found.runs) == 6
    assert difference_grid(plans, Found(by_id([r for r in records if r["seed"] == 0]))) is None


@pytest.mark.parametrize("count", [2, 3])
def test_differences_of_two_seeds_have_no_interval_and_no_mark(count):
    ask = asked("fmnist", methods=("stfseb", "map"), seeds=range(count))
    plans, records = made("table1", ask=ask)
    for record in records:  # so nearly constant that even two seeds would be significant
        record["metrics"]["acc"] = (0.95 if record["method"] == "stfseb" else 0.90) + 1e-4 * record["seed"] ** 2
        record["metrics"]["acc"] += 1e-6 * record["seed"] * (record["method"] == "map")
    ours, theirs = ([r["metrics"]["acc"] for r in records if r["method"] == m] for m in ("stfseb", "map"))
    assert stats.ttest_rel(ours, theirs).pvalue < 0.001
    found = Found(by_id(records))
    grids = [difference_grid(plans, found), race_grids(plans, found)[0]]
    cells = [
        cell(grids[0], ("FMNIST", "Accuracy ↑"), "− MAP"),
        cell(grids[1], ("FMNIST", "Accuracy ↑"), "Ours minus it"),
    ]
    for grid, entry in zip(grids, cells, strict=True):
        assert entry.text == "+5.00"
        assert (entry.rank, len(entry.below)) == ((0, 1) if count == 2 else (1, 2))
        assert entry.below[-1] == f"{count} seeds"
        notes = race_grids(plans, found)[0].notes if grid is grids[1] else grid.notes
        assert any("Two common seeds give no useful interval" in note for note in notes) == (count == 2)
    assert ("the 95 % interval leaves out zero" in grids[1].notes[0]) == (count == 3)


def test_a_tail_at_the_end_of_the_fits_range_is_a_bound():
    from stfseb.evaluation import tails

    end = 1 / (tails._LOWEST * np.exp(1e-4))  # the fit stops within its tolerance
    ask = asked("mini", seeds=(0, 1))
    _, records = made("tails", ask=ask, parts=())
    some = {"stfseb": (0.5, 0.5), "mcdropout": (0.5, end), "map": (end, end)}
    for record in records:
        value = some[record["method"]][record["seed"]]
        record["parts"] = {"tails": {"sets": {"weights": {"inverse_dof": value}}}}
    grid = table("tails", records, ask)
    texts = [cell(grid, ("1/dof, weights",), name) for name in grid.columns]
    assert [c.text for c in texts] == ["0.500 ± 0.000", f"≥ {(0.5 + end) / 2:.3f}", "≥ 20"]
    assert texts[1].below == ("1 of 2 at the end of the fit's range",)
    assert [c.std for c in texts] == [0, None, None]


def test_notes_of_records_are_told_without_their_disk():
    ask = asked("mnist", methods=("stfseb",), seeds=(0,))
    plans, records = made("table1", ask=ask)
    records[0]["notes"] = ["context kmnist: test split, as the train split is not on disk; 10 images"]
    (line,) = about_data(plans[0], Found(by_id(records)), ["mnist"])
    assert line == "MNIST: context kmnist: test split, as its train split was not at hand; 10 images."


def test_standing_counts_what_is_reached():
    ask = asked("fmnist", seeds=(0, 1))
    plan = make_plan("table1", ask)
    records = [record_of(job) for job in plan.all_jobs]
    for record in records:
        own = record["method"] == "stfseb"
        # Accuracy reaches the paper's within a deviation and is best; NLL is beaten, ECE is too high.
        record["metrics"] |= {
            "acc": 0.922 if own else 0.91,
            "nll": 0.226 if own else 0.220,
            "ece": 0.05 if own else 0.06,
        }
    found = Found(by_id(records))
    held = held_grid([plan], found)
    verdicts = {stub[1]: row[3].text for stub, row in zip(held.rows, held.cells, strict=True)}
    assert verdicts == {"Accuracy ↑": "held", "ECE ↓": "not held", "NLL ↓": "held"}
    assert held.notes[0].startswith("Held in 2 of 3 cells")
    best, behind = race_grids([plan], found)
    assert [stub[1] for stub in best.rows] == ["Accuracy ↑", "ECE ↓"]
    assert best.notes[0].startswith("2 of 3 rows")
    assert [stub[1] for stub in behind.rows] == ["NLL ↓"]
    assert cell(behind, ("NLL ↓",), "Ours minus it").text == "+0.006"


# Formats ---------------------------------------------------------------------------------------------


def test_formats_hold_every_cell_and_its_runs(runs):
    _, records = runs
    grid = table("table2", records, asked("mnist", "fmnist", "cifar10"))
    data = json.loads(json.dumps(grid.to_json()))
    for row in data["rows"]:
        for found in row["cells"].values():
            assert found["runs"]
    page, markdown, latex = grid.to_html(), grid.to_markdown(), grid.to_latex()
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(grid.to_rich(90))
    shown = console.export_text()
    for row in grid.cells:
        for c in row:
            assert c.text in page
            assert c.text in markdown
            assert c.text.replace("±", "$\\pm$") in latex
            assert c.text in shown
            assert c.runs[0] in page
    assert max(map(len, shown.splitlines())) <= 90
    bold = sum(c.rank == 1 for row in grid.cells for c in row)
    assert latex.count("\\textbf{") == page.count("<strong>") == bold
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {9}


def test_a_cost_of_runs_that_were_not_alone_is_refused():
    ask = asked("mnist", methods=("stfseb", "map"), seeds=(0,))
    (plan,), records = made("efficiency", ask=ask)
    runs = {r["id"]: r | {"together": 3 if r["method"] == "map" else 1} for r in records}
    (grid,) = paper_grids(plan, Found(runs))
    ours, other = zip(*grid.cells, strict=True)
    assert all(cell.value is not None for cell in ours)
    assert [cell.text for cell in other] == ["not alone", "not alone"]
    assert not any(cell.rank for cell in ours)  # of one nothing is best
    assert any(note.startswith("Not alone: other runs had the device") for note in grid.notes)
    (alone,) = paper_grids(plan, Found({name: r | {"together": 1} for name, r in runs.items()}))
    assert not any("ot alone" in text for text in (*alone.notes, *(c.text for row in alone.cells for c in row)))


def test_an_interval_beside_zero_shows_on_which_side_it_lies():
    plans, records = made("table1", ask=asked("fmnist", methods=("stfseb", "map"), seeds=range(5)))
    for record in records:
        more = 5e-4 + 2e-4 * (record["seed"] - 2)
        record["metrics"]["ece"] = 0.01 + more * (record["method"] == "stfseb")
    ours, theirs = ([r["metrics"]["ece"] for r in records if r["method"] == m] for m in ("stfseb", "map"))
    interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert 0 < interval.low < 0.0005  # which three digits would print as zero
    found = cell(difference_grid(plans, Found(by_id(records))), ("FMNIST", "ECE ↓"), "− MAP")
    assert found.rank == 2
    low, _, high = found.below[0].partition(" to ")
    assert low.startswith("+")
    assert (float(low), float(high)) == pytest.approx((interval.low, interval.high), abs=5e-5)


def test_seeds_are_said_once_where_all_differences_have_as_many():
    plans, records = made("table1", ask=asked("fmnist", seeds=range(3)))
    grid = difference_grid(plans, Found(by_id(records)))
    assert all(c.below[-1] == "3 seeds" for row in grid.cells for c in row)
    once = grid.seeds_once()
    assert not any("seeds" in line for row in once.cells for c in row for line in c.below)
    assert once.notes[-1] == "Differences are over 3 seeds."
    fewer = [r for r in records if (r["method"], r["seed"]) != ("map", 2)]
    uneven = difference_grid(plans, Found(by_id(fewer)))
    assert uneven.seeds_once() is uneven


def test_only_what_is_missing_is_printed_pale():
    plans, records = made("table1", "table2", ask=asked("fmnist", seeds=(0, 1)))
    words = held_grid(plans, Found(by_id(records)))
    assert {"held", "not held"} & {c.text for row in words.cells for c in row}
    assert "num none" not in words.to_html()
    gap = table("table1", [r for r in records if r["method"] != "map"], asked("fmnist", seeds=(0, 1)))
    assert gap.to_html().count("num none") == 3
