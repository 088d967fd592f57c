"""Tables after one temperature: temperatures of two definitions are not set beside each other."""

from __future__ import annotations

import json

import numpy as np
import pytest
from made_runs import asked, record_of
from scipy import stats
from test_paper_tables import by_id, cell, table

from stfseb.experiments.paper.plan import make_plan
from stfseb.report.paper import Found
from stfseb.report.standing import standing
from stfseb.report.temperatures import ASIDE

SEEDS = (0, 1, 2)
WORDS = "T divides the outputs of every weight sample, before they are averaged (runs of an earlier version)"


def runs(ask, old=lambda record: False, nll=lambda record: None):
    """Return the runs of the table, those that `old` takes with a temperature of the older definition."""
    records = [record_of(job, ("temperature",)) for job in make_plan("tempered", ask).all_jobs]
    for record in records:
        part = record["parts"]["temperature"]
        if old(record):
            del part["of"]
        part["metrics"]["nll"] = nll(record) or part["metrics"]["nll"]
    return records


def judged(records, ask):
    plans = [make_plan("tempered", ask)]
    return {grid.name: grid for grid in standing(plans, Found(by_id(records)))["best-tempered"]}


def all_notes(grids):
    return [note for grid in grids.values() for note in grid.notes]


def test_older_ones_are_marked_and_are_neither_best_nor_second():
    ask = asked("fmnist", seeds=SEEDS)
    values = {"fseb": 0.1, "mfvi": 0.2, "stfseb": 0.3, "mcdropout": 0.4}
    records = runs(ask, lambda r: r["method"] in ("fseb", "mfvi"), lambda r: values.get(r["method"], 0.5))
    grid = table("tempered", records, ask)
    cells = {label: cell(grid, ("NLL ↓",), label) for label in grid.columns}
    assert {label for label, c in cells.items() if c.apart} == {"FS-EB", "MFVI"}
    assert {label for label, c in cells.items() if c.text.endswith(f" {ASIDE}")} == {"FS-EB", "MFVI"}
    assert cells["FS-EB"].text == "0.100 ± 0.000 §"  # shown all the same
    ranks = {label: c.rank for label, c in cells.items()}
    assert ranks == {"ST-FS-EB": 1, "FS-EB": 0, "GFSVI": 0, "MC Dropout": 2, "MFVI": 0, "MAP": 0}
    (note,) = [note for note in grid.notes if note.startswith(ASIDE)]
    assert note == (
        f"§ FMNIST, FS-EB (3 runs) and MFVI (3 runs): {WORDS}. Shown and not compared: marks are among the others of a "
        "row, as most of the task's runs are of their kind."
    )
    assert "T makes averaged probabilities p^(1/T), normalised." in grid.notes
    data = json.loads(json.dumps(grid.to_json()))["rows"][0]["cells"]
    assert [data[label].get("apart") for label in ("FS-EB", "ST-FS-EB")] == [True, None]


def test_older_ones_are_in_no_race_and_are_counted():
    ask = asked("fmnist", seeds=SEEDS)
    values = {"fseb": 0.1, "stfseb": 0.3}  # FS-EB would be ahead
    records = runs(ask, lambda r: r["method"] == "fseb", lambda r: values.get(r["method"], 0.4 + 0.01 * len(r["id"])))
    grids = judged(records, ask)
    row = cell(grids["best-tempered"], ("FMNIST", "NLL ↓"), "Next")
    assert row.text != "FS-EB"
    assert not any(c.text == "FS-EB" for grid in grids.values() for cells in grid.cells for c in cells)
    said = [note for note in all_notes(grids) if "left out" in note]
    assert said == [
        (
            "FMNIST: 3 runs left out, as their temperatures are defined otherwise than those of most of the task's "
            "runs: FS-EB (3)."
        )
    ]
    assert not any("not there to compare with" in note for note in all_notes(grids))
    whole = judged(runs(ask, nll=lambda r: values.get(r["method"], 0.5)), ask)
    assert cell(whole["best-tempered-behind"], ("FMNIST", "NLL ↓"), "The best there").text == "FS-EB"


def test_a_task_where_ours_is_older_and_others_are_not_has_no_rows():
    ask = asked("fmnist", "cifar10", seeds=SEEDS)
    older = ("stfseb", "mcdropout")
    records = runs(ask, lambda r: r["task"] == "cifar10" and r["method"] in older)
    grids = judged(records, ask)
    assert {stub[0] for grid in grids.values() for stub in grid.rows} == {"FMNIST"}
    (note,) = [note for note in all_notes(grids) if "left out" in note]
    assert note.startswith("CIFAR-10: 6 runs left out, ")
    assert note.endswith("ST-FS-EB (3) and MC Dropout (3). ST-FS-EB being among them, the task has no rows here.")


def test_a_few_newer_ones_do_not_take_the_comparison_of_the_others_away():
    """One method trained anew beside four older ones: it is set apart, and the four are compared as they were."""
    ask = asked("cifar10", seeds=SEEDS)
    values = {"gfsvi": 0.1, "mcdropout": 0.2, "stfseb": 0.3}
    records = runs(ask, lambda r: r["method"] != "gfsvi", lambda r: values.get(r["method"], 0.4))
    grid = table("tempered", records, ask)
    cells = {label: cell(grid, ("NLL ↓",), label) for label in grid.columns}
    assert {label for label, c in cells.items() if c.apart} == {"GFSVI"}
    assert (cells["MC Dropout"].rank, cells["ST-FS-EB"].rank, cells["GFSVI"].rank) == (1, 2, 0)
    (note,) = [note for note in grid.notes if note.startswith(ASIDE)]
    assert note.startswith("§ CIFAR-10, GFSVI (3 runs): T makes averaged probabilities p^(1/T), normalised. Shown")
    assert f"{WORDS}." in grid.notes
    grids = judged(records, ask)
    assert cell(grids["best-tempered-behind"], ("CIFAR-10", "NLL ↓"), "The best there").text == "MC Dropout"
    equal = runs(asked("cifar10", methods=("stfseb", "fseb"), seeds=SEEDS), lambda r: r["method"] == "fseb")
    even = table("tempered", equal, asked("cifar10", methods=("stfseb", "fseb"), seeds=SEEDS))
    assert [cell(even, ("NLL ↓",), label).apart for label in even.columns] == [False, True]  # newer, of as many


def test_a_mean_is_of_one_definition_and_so_are_the_pairs():
    """Two seeds of before and three newer ones of one method: their mean would be of neither."""
    ask = asked("fmnist", methods=("stfseb", "fseb"), seeds=range(5))
    rng = np.random.default_rng(0)
    values = {(m, s): 0.2 + 0.1 * rng.random() for m in ("stfseb", "fseb") for s in range(5)}
    records = runs(ask, lambda r: r["method"] == "stfseb" and r["seed"] < 2, lambda r: values[r["method"], r["seed"]])
    grid = table("tempered", records, ask)
    found = cell(grid, ("NLL ↓",), "ST-FS-EB")
    newer = [values["stfseb", s] for s in (2, 3, 4)]
    assert found.value == pytest.approx(np.mean(newer))
    assert found.std == pytest.approx(np.std(newer, ddof=1))
    assert (found.seeds, found.apart) == ((2, 3, 4), False)
    assert "§" not in found.text
    assert found.below[0] == "3 of 5 seeds"
    assert cell(grid, ("NLL ↓",), "FS-EB").seeds == (0, 1, 2, 3, 4)
    assert "FMNIST: 2 runs of ST-FS-EB left out of the mean, with a temperature of the other kind." in grid.notes
    grids = judged(records, ask)
    shown = next(g for g in grids.values() if any(stub[1] == "NLL ↓" for stub in g.rows))
    difference = cell(shown, ("FMNIST", "NLL ↓"), "Ours minus it")
    low, high = stats.ttest_rel(newer, [values["fseb", s] for s in (2, 3, 4)]).confidence_interval(0.95)
    assert difference.below[0] == f"{low:+.3f} to {high:+.3f}".replace("-", "−")
    assert any(note.startswith("FMNIST: 2 runs left out") for note in all_notes(grids))


def test_where_all_are_older_they_are_compared_as_before():
    ask = asked("fmnist", seeds=SEEDS)
    older, newer = runs(ask, lambda r: True), runs(ask)
    for records in (older, newer):
        grid = table("tempered", records, ask)
        assert not any(ASIDE in c.text for row in grid.cells for c in row)
    ranks = [[c.rank for row in table("tempered", records, ask).cells for c in row] for records in (older, newer)]
    assert ranks[0] == ranks[1]
    assert {1, 2} <= set(ranks[0])
    assert {n: g.cells for n, g in judged(older, ask).items()} == {n: g.cells for n, g in judged(newer, ask).items()}
    assert f"{WORDS}." in table("tempered", older, ask).notes
    assert not any("p^(1/T)" in note for note in table("tempered", older, ask).notes)


def test_maps_temperature_is_of_both_definitions():
    """All its samples are equal: softmax(f / T) is p^(1/T), normalised."""
    logits = np.random.default_rng(1).normal(size=10)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    each, average = np.exp(logits / 1.7), probabilities ** (1 / 1.7)
    np.testing.assert_allclose(each / each.sum(), average / average.sum())
    ask = asked("fmnist", seeds=SEEDS)
    for old in (lambda r: r["method"] == "map", lambda r: r["method"] != "map"):
        grid = table("tempered", runs(ask, old, lambda r: 0.1 if r["method"] == "map" else 0.2), ask)
        assert cell(grid, ("NLL ↓",), "MAP").rank == 1
        assert not any(ASIDE in c.text for row in grid.cells for c in row)


def test_tasks_of_either_definition_are_named():
    ask = asked("fmnist", "mini", seeds=(0, 1))
    records = runs(ask, lambda r: r["task"] == "mini" or r["method"] == "mcdropout")
    notes = [note for note in table("tempered", records, ask).notes if "averaged" in note]
    assert notes == [
        "FMNIST: T makes averaged probabilities p^(1/T), normalised.",
        f"mini: {WORDS}.",
        (
            f"§ FMNIST, MC Dropout (2 runs): {WORDS}. Shown and not compared: marks are among the others of a row, as "
            "most of the task's runs are of their kind."
        ),
    ]
