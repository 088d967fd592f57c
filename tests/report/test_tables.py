"""Tables: deviations against numpy, marks by direction, four formats that survive hostile names."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from stfseb.errors import StfsebError
from stfseb.report import tables
from stfseb.report.cards import cards_of
from stfseb.report.records import check, groups, missing_sets, ood_families, ood_sets, spread


def run(method="map", seed=0, label=None, task="t", **metrics):
    metrics = {key.replace("__", "/"): value for key, value in metrics.items()}
    found = {"id": f"{task}-{method}-{seed}-{label}", "task": task, "method": method, "seed": seed}
    return found | {"label": label or method, "metrics": metrics}


def cell(table, row, column):
    titles = [c.title for c in table.columns]
    labels = [g.label for g in table.groups]
    return table.cells[labels.index(row)][titles.index(column)]


def test_mean_and_sample_deviation_over_seeds():
    values = [0.81, 0.84, 0.9]
    table = tables.main_table([run("map", seed, acc=v) for seed, v in enumerate(values)])
    expected = f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f}"
    assert cell(table, "map", "Accuracy").text == expected
    assert table.notes[0] == "Mean ± sample standard deviation over 3 seeds."


def test_one_seed_has_no_deviation_and_says_so():
    table = tables.main_table([run("map", acc=0.5)])
    assert cell(table, "map", "Accuracy").text == "50.00"
    assert "One seed" in table.notes[0]
    assert spread([None, None]) is None


def test_marks_follow_the_direction_and_the_printed_digits():
    records = [
        run("stfseb", acc=0.90001, nll=0.30, ece=0.01, auroc__far=0.9),
        run("map", acc=0.90002, nll=0.50, ece=0.01, auroc__far=0.7),
        run("mfvi", acc=0.85, nll=0.40, ece=0.01, auroc__far=0.8),
    ]
    table = tables.main_table(records)
    ranks = {c.title: [row[i].rank for row in table.cells] for i, c in enumerate(table.columns)}
    assert [g.method for g in table.groups] == ["stfseb", "mfvi", "map"]
    assert ranks == {
        "Accuracy": [1, 2, 1],  # 90.00 is printed for both
        "NLL": [1, 2, 0],  # lower is better
        "ECE": [0, 0, 0],  # nothing is best where nothing differs
        "AUROC far": [1, 2, 0],
    }


def test_a_reference_row_that_leads_is_named_as_such_with_the_best_of_the_methods():
    records = [
        run("stfseb", label="ST-FS-EB", acc=0.68, auroc__mnist=0.8794),
        run("mcdropout", label="MC Dropout", acc=0.67, auroc__mnist=0.8359),
        run("fseb", label="FS-EB", acc=0.70, auroc__mnist=0.5862),
        run("gfsvi", label="GFSVI", acc=0.70, auroc__mnist=0.5571),
        run("mfvi", label="MFVI", acc=0.70, auroc__mnist=0.5571),
        run("outlierexposure", label="MC Dropout + OE", acc=0.69, auroc__mnist=0.9081),
    ]
    table = tables.main_table(records)
    assert "MC Dropout + OE: a reference row, beside the methods that are compared." in table.notes
    cards = {card["title"]: card for card in cards_of(table)}
    assert cards["Highest AUROC mnist, %"] == {
        "title": "Highest AUROC mnist, %",
        "value": "90.81",
        "lines": ["MC Dropout + OE (reference row)", "of the methods: ST-FS-EB 87.94"],
        "ours": False,
    }
    assert cards["Highest accuracy, %"]["lines"] == ["FS-EB, GFSVI and MFVI", "ST-FS-EB 68.00"]
    assert not any("reference" in note for note in tables.main_table(records[:-1]).notes)


def test_labels_split_rows_and_tasks_do_not_mix():
    rows = groups([run("stfseb", 0, "A", acc=0.1), run("stfseb", 1, "A", acc=0.3), run("stfseb", 0, "B", acc=0.2)])
    assert [(g.label, len(g.records)) for g in rows] == [("A", 2), ("B", 1)]


def test_collapsed_runs_are_named():
    records = [run("map", 0, acc=0.8), run("map", 4, acc=0.1) | {"collapsed": True}]
    table = tables.main_table(records)
    assert table.labels() == ["map †"]
    assert any("1 of 2 runs" in note and "seed 4" in note for note in table.notes)


def test_families_of_sets_are_averaged_not_pooled():
    sets = {"auroc__c/fog": 0.6, "auroc__c/snow": 0.8, "auroc__c/fog/entropy": 0.1, "auroc__svhn": 0.9}
    records = [run("map", **sets)]
    assert ood_sets(records) == ["c/fog", "c/snow", "svhn"]
    assert ood_families(records) == {"c, mean of 2": ["c/fog", "c/snow"], "svhn": ["svhn"]}
    assert cell(tables.main_table(records), "map", "AUROC c, mean of 2").text == "70.00"
    partly = [*records, run("mfvi", **{"auroc__c/fog": 0.6})]
    assert cell(tables.main_table(partly), "mfvi", "AUROC c, mean of 2").text == ""


def test_missing_sets_are_named_with_the_reason():
    records = [
        run("map", auroc__a=0.5) | {"data": {"ood/b": {"note": "notMNIST is not on disk"}, "ood/a": {}}},
        run("mfvi") | {"missing": {"c": "no licence"}},
    ]
    found = missing_sets(records)
    assert found["b"] == "notMNIST is not on disk"
    assert found["c"] == "no licence"
    assert found["a"] == "not evaluated for mfvi, seed 0"
    assert missing_sets([run("map", auroc__a=0.5)]) == {}


def test_hostile_labels_are_escaped_everywhere():
    name = "<script>alert('x')</script> | 50% _of_ {it} & [b]\\[/b]"
    table = tables.main_table([run("map", label=name, acc=0.5), run("mfvi", acc=0.4)])
    page = table.to_html()
    assert "<script" not in page
    root = ET.fromstring(page)
    assert name in [th.text for th in root.iter("th")]
    markdown = table.to_markdown().splitlines()
    rows = [line for line in markdown if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {3}
    assert "\\<script\\>" in "\n".join(markdown)
    latex = table.to_latex()
    assert "50\\% \\_of\\_ \\{it\\} \\& [b]\\textbackslash{}[/b]" in latex
    assert name in text(table, 200)


def test_latex_and_markdown_marks(records):
    table = tables.main_table(records)
    assert table.to_latex().count("\\textbf{") == sum(c.rank == 1 for row in table.cells for c in row)
    assert table.to_markdown().count("<ins>") == sum(c.rank == 2 for row in table.cells for c in row)
    assert "\\toprule" in table.to_latex()
    assert "$\\pm$" in table.to_latex()


def text(table, width):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(table.to_rich(width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_terminal_table_fits_and_loses_nothing(records, width):
    for table in tables.tables(records):
        shown = text(table, width)
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
        for row in table.cells:
            for c in row:
                assert c.text in shown


def test_main_table_of_two_sets_is_one_block_in_100_columns(records):
    shown = text(tables.main_table(records), 100)
    assert shown.count("MC Dropout") == 1


def test_cells_of_html_carry_sortable_values(records):
    root = ET.fromstring(tables.main_table(records).to_html())
    for td in root.iter("td"):
        assert float(td.attrib["data-value"]) == pytest.approx(float("".join(td.itertext()).split()[0]), abs=0.006)


def test_records_that_cannot_be_used_are_refused():
    with pytest.raises(StfsebError, match="no runs to report on"):
        check([])
    with pytest.raises(StfsebError, match="run x has format 2, newer than 1"):
        check([run() | {"id": "x", "format": 2}])
    with pytest.raises(StfsebError, match="run x has no 'metrics'"):
        check([{"id": "x", "task": "t", "method": "map"}])
    assert check([run(acc=0.1), run(acc=0.2)])[0]["metrics"] == {"acc": 0.2}  # the same id: the last counts


def test_times_of_runs_that_shared_a_card_are_not_ranked():
    records = [
        {"task": "t", "method": m, "label": m, "seed": 0, "metrics": {}, "seconds": s, "peak_memory_mb": None}
        | {"machine": {"device": "cuda: a card"}, "seconds_per_epoch": s / 10, "best_epoch": 3}
        for m, s in (("stfseb", 20.0), ("map", 10.0))
    ]
    shared = tables.cost_table(records)
    assert not any(cell.rank for row in shared.cells for cell in row)
    assert "trained several at a time on one card" in shared.notes[-1]
    alone = tables.cost_table([r | {"peak_memory_mb": 100.0} for r in records])
    assert [row[0].rank for row in alone.cells] == [2, 1]
    assert "several at a time" not in " ".join(alone.notes)
    said = tables.cost_table([r | {"peak_memory_mb": 100.0, "together": 3} for r in records])
    assert [row[0].rank for row in said.cells] == [0, 0]
    assert "several at a time" in said.notes[-1]
    on_cpu = tables.cost_table([r | {"machine": {"device": "cpu"}} for r in records])
    assert [row[0].rank for row in on_cpu.cells] == [2, 1]


def test_only_long_names_of_rows_take_several_lines():
    long = "GFSVI (last layer, 60 kernel steps on <256> points)"
    assert tables.row_head(long) == (
        '<th scope="row" class="long">GFSVI (last layer, 60 kernel steps on &lt;256&gt; points)</th>'
    )
    assert tables.row_head("MC Dropout") == '<th scope="row">MC Dropout</th>'
