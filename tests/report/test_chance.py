"""Runs that learnt nothing: marked and named however short, never best, and in no card."""

from __future__ import annotations

import json
import math

import pytest
from made_runs import asked, made

from stfseb.experiments.paper.plan import make_plan
from stfseb.report import tables
from stfseb.report.cards import cards_of
from stfseb.report.chance import learnt_nothing, notes_of
from stfseb.report.paper import Found, paper_grids
from stfseb.report.shifts import corruption_grids
from stfseb.report.standing import held_grid, race_grids


def run(method, acc, nll, auroc, seed=0, validation=None, classes=4, **more):
    history = [{"epoch": 1, "validation_nll": nll + 0.1}, {"epoch": 2, "validation_nll": validation or nll}]
    found = {"id": f"{method}-{seed}", "task": "own", "method": method, "label": method, "seed": seed}
    found |= {"history": history, "collapsed": False, "classes": classes}
    return found | {"metrics": {"acc": acc, "nll": nll, "auroc/strange": auroc}} | more


TWO_EPOCHS = [  # four classes, two epochs: three of the five guess
    run("stfseb", 0.25, 1.380, 0.3271),
    run("fseb", 0.525, 1.006, 0.3835),
    run("mcdropout", 0.25, 1.485, 0.5596),
    run("mfvi", 0.525, 0.981, 0.4005),
    run("map", 0.25, 1.596, 0.6804),
]


def test_chance_is_the_log_of_the_number_of_classes_however_few_the_epochs():
    line = math.log(4) - 0.01
    assert learnt_nothing(run("map", 0.25, line + 1e-6, 0.5))
    assert not learnt_nothing(run("map", 0.3, line - 1e-6, 0.5))
    # The epoch that was kept decides, not a test set that is harder than the validation images.
    assert not learnt_nothing(run("map", 0.6, 1.5, 0.5, validation=1.2))
    assert learnt_nothing({"task": "t", "method": "map", "metrics": {"nll": 1.5}, "classes": 4})
    # Of a known task the number of classes is known; of others, records of an earlier version do not say.
    assert learnt_nothing({"task": "mini", "method": "map", "metrics": {"nll": 2.3}})
    assert not learnt_nothing({"task": "own", "method": "map", "metrics": {"nll": 2.3}})
    assert learnt_nothing({"task": "own", "method": "map", "metrics": {"nll": 0.1}, "collapsed": True})


def test_what_learnt_nothing_is_marked_named_and_neither_best_nor_second():
    table = tables.main_table(TWO_EPOCHS)
    assert table.labels() == ["stfseb †", "fseb", "mcdropout †", "mfvi", "map †"]
    ranks = {c.title: [row[i].rank for row in table.cells] for i, c in enumerate(table.columns)}
    assert ranks == {"Accuracy": [0, 0, 0, 0, 0], "NLL": [0, 2, 0, 1, 0], "AUROC strange": [0, 2, 0, 1, 0]}
    (note,) = [note for note in table.notes if note.startswith("† map")]
    assert note == (
        "† map: the only run is at chance (seed 0: validation NLL 1.596, guessing gives 1.386); not ranked. Train "
        "longer, or see what its settings do."
    )
    titles = {card["title"]: card for card in cards_of(table)}
    assert titles["Highest AUROC strange, %"]["value"] == "40.05"
    assert "map" not in str(titles)


def test_a_row_stays_ranked_where_most_of_its_seeds_learnt():
    good = [run("map", 0.9, 0.3, 0.9, seed) for seed in (0, 1)]
    records = [*good, run("map", 0.25, 1.4, 0.9, 2), *(run("mfvi", 0.5, 0.9, 0.5, seed) for seed in (0, 1, 2))]
    table = tables.main_table(records)
    assert [row[0].rank for row in table.cells] == [2, 1]
    (note,) = notes_of("map", records[:3], "included in the mean")
    assert note.startswith("† map: 1 of 3 runs at chance (seed 2: validation NLL 1.400, guessing gives 1.386)")
    assert "included in the mean." in note
    half = tables.main_table([*good[:1], records[2]] + [run("mfvi", 0.5, 0.9, 0.5, seed) for seed in (0, 1)])
    assert all(cell.rank == 0 for row in half.cells for cell in row)  # of one, nothing is best


@pytest.fixture
def main_tables():
    ask = asked("mnist", methods=("stfseb", "map", "mfvi"), seeds=(0,))
    plans, records = made("table1", ask=ask)
    return plans, json.loads(json.dumps(records))


def test_tables_of_the_paper_rank_none_that_learnt_nothing(main_tables):
    plans, records = main_tables
    for record in records:
        if record["method"] == "map":
            record["metrics"] |= {"acc": 0.999, "nll": 2.4, "ece": 0.0}
            record["history"] = [{"epoch": 1, "validation_nll": 2.4}]
    found = Found({r["id"]: r for r in records})
    (grid,) = paper_grids(plans[0], found)
    place = grid.columns.index("MAP")
    assert all(row[place].rank == 0 and row[place].text.endswith("†") for row in grid.cells)
    assert sorted(row[i].rank for row in grid.cells for i in range(3) if i != place) == [1, 1, 1, 2, 2, 2]
    assert any(note.startswith("† MNIST, MAP: the only run is at chance (seed 0") for note in grid.notes)
    races = race_grids(plans, found)
    assert not any("MAP" in cell.text for grid in races for row in grid.cells for cell in row)
    assert any("MNIST: MAP at chance (†) and not compared" in note for note in races[-1].notes)


def test_st_fs_eb_at_chance_holds_nothing_and_is_best_in_no_row(main_tables):
    plans, records = main_tables
    for record in records:
        if record["method"] == "stfseb":
            record["metrics"] |= {"acc": 0.999, "nll": 2.4, "ece": 0.0}
            record["history"] = [{"epoch": 1, "validation_nll": 2.4}]
    found = Found({r["id"]: r for r in records})
    assert {row[3].text for row in held_grid(plans, found).cells} == {"not held"}
    assert race_grids(plans, found) == []


def test_times_of_networks_at_chance_are_times():
    plan = make_plan("efficiency", asked("mnist", methods=("stfseb", "map"), seeds=(0,)))
    _, records = made("efficiency", ask=asked("mnist", methods=("stfseb", "map"), seeds=(0,)))
    for record in records:
        record["history"] = [{"epoch": 1, "validation_nll": 2.4}]
        record["together"] = 1
    (grid,) = paper_grids(plan, Found({r["id"]: r for r in records}))
    assert not any("†" in cell.text for row in grid.cells for cell in row)
    assert any(cell.rank == 1 for row in grid.cells for cell in row)


def test_corrupted_images_rank_none_that_learnt_nothing():
    _, records = made("table2", ask=asked("mnist", methods=("stfseb", "map", "mfvi"), seeds=(0,)))
    for record in records:
        if record["method"] == "map":
            record["history"] = [{"epoch": 1, "validation_nll": 2.4}]
            for found in record["parts"]["corruption"]["sets"].values():
                found["auroc"] = 0.99
    by_severity, *by_type = corruption_grids(records)
    (place,) = [i for i, stub in enumerate(by_severity.rows) if stub == ("MAP †",)]
    assert not any(cell.rank for cell in by_severity.cells[place])
    for grid in by_type:
        assert not any(row[grid.columns.index("MAP †")].rank for row in grid.cells)
    for grid in (by_severity, *by_type):
        assert any(note.startswith("† MAP: the only run is at chance") for note in grid.notes)
