"""The results page from records: tables, what is missing, where ST-FS-EB stands, and words that are left alone."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from made_runs import asked, record_of
from scipy import stats

from repository_scripts import ROOT, script
from stfseb.data.task_files import built_in
from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.experiments.jobs import make_job
from stfseb.experiments.paper.plan import make_plan
from stfseb.report.arrange import arranged
from stfseb.report.paper import Found
from stfseb.report.paper_numbers import Printed
from stfseb.report.paper_section import all_grids
from stfseb.report.reading import read_results
from stfseb.report.records import check
from stfseb.report.results_page import BLOCKS, filled, fingerprint, results_page
from stfseb.report.results_words import how_made
from stfseb.report.standing import held_grid, race_grids, variant_differences

SEARCH = "fmnist-stfseb-extended-f0e5fb50"
ALL_PARTS = ("rotation", "corruption", "samples", "temperature")


def write_runs(results, jobs, change=lambda record: record):
    for job in jobs:
        record = change(record_of(job, ALL_PARTS))
        parts = record.pop("parts")
        if job.method == "map":
            parts["tails"] = {"sets": {k: {"inverse_dof": 0.25} for k in ("weights", "context", "test")}}
        folder = job.folder(results)
        folder.mkdir(parents=True)
        for name, part in parts.items():
            (folder / f"{name}.json").write_text(json.dumps(part))
        code = {"version": "0.1.0", "commit": "0123456789ab", "modified": False}
        (folder / "record.json").write_text(json.dumps({**record, "code": code}))


def jobs_of(what, *tasks, seeds, **more):
    return {job.name: job for job in make_plan(what, asked(*tasks, seeds=seeds, **more)).all_jobs}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two tasks with more and fewer seeds, an ablation at fewer, one method that was not run, a search."""
    folder = tmp_path_factory.mktemp("made") / "results"
    jobs = jobs_of("table1", "mnist", seeds=range(4)) | jobs_of("table1", "cifar10", seeds=range(2))
    jobs = {name: job for name, job in jobs.items() if (job.task, job.method) != ("cifar10", "gfsvi")}
    jobs |= jobs_of("dof", "mnist", seeds=(0, 1)) | jobs_of("efficiency", "mnist", seeds=(0,))
    jobs |= jobs_of("readings", "cifar10", seeds=(0,)) | jobs_of("beyond", "cifar10", seeds=(0, 1))
    write_runs(folder, jobs.values())
    (folder / "searches").mkdir()
    (folder / "searches" / SEARCH).symlink_to(ROOT / "results" / "searches" / SEARCH)
    return folder


@pytest.fixture(scope="module")
def page(results):
    return results_page(results)


def section(text, start):
    return next(part for part in re.split(r"^(?=## )", text, flags=re.MULTILINE) if part.startswith(start))


def rows(text):
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_tables_have_what_was_run_with_conditions_and_no_others(page):
    filled_blocks = {name for name, text in page.blocks.items() if text}
    assert filled_blocks == {
        "summary", "headline", "held", "best", "best-tempered", "differences", "figure1", "table1", "table2",
        "tempered", "dof", "efficiency", "readings", "beyond", "samples", "tails", "searches", "missing", "corruptions",
    }  # fmt: skip
    text = page.blocks["table1"]
    both = "`stfseb paper table1 --tasks mnist --seeds 4` and `stfseb paper table1 --tasks cifar10 --seeds 2`"
    assert f"Made by {both} · 34 runs" in text
    assert "seeds MNIST 0 to 3; CIFAR-10 0, 1" in text
    assert "cpu: made · stfseb 0.1.0 (012345678)" in text
    assert "(tables/table1.json)" in text
    assert "paper 99.33 ± 0.052" in text
    assert "over 2 to 4 seeds" in text
    (gfsvi,) = [r["GFSVI"] for r in rows(text) if r["Task"] == "CIFAR-10" and r["Metric"].startswith("NLL")]
    assert gfsvi.startswith("—<br><small>not run</small><br><small>paper 0.466")
    assert page.blocks["missing"].splitlines()[2:] == [
        "- No runs: FMNIST, PathMNIST, OrganAMNIST.",
        "- CIFAR-10: no runs of GFSVI.",
        "- Seeds in the main tables, of the paper's 10: MNIST 4, CIFAR-10 2.",
        (
            "- No runs on the paper's tasks: degrees of freedom at a tau chosen anew for each "
            "(`stfseb paper dof --retuned`), number of context points (`stfseb paper context-number`), "
            "source of the context points (`stfseb paper context-source`)."
        ),
        (
            "- No runs on CIFAR-10: degrees of freedom (`stfseb paper dof`), training time and memory "
            "(`stfseb paper efficiency`)."
        ),
        (
            "- No runs on MNIST: beyond the paper, outlier exposure and deep ensemble among it (`stfseb paper beyond`)."
        ),  # readings are of CIFAR-10 and Fashion-MNIST alone
        *(
            f"- Missing in tables, {task}: fitted tails, 2 of 3 not measured (ST-FS-EB and MC Dropout) "
            "(`stfseb paper tails`)."
            for task in ("MNIST", "CIFAR-10")
        ),
    ]


def test_corrupted_images_are_told_apart_and_classified(tmp_path):
    """A high AUROC must not stand alone: accuracy on the same images beside it, by type too."""
    accuracy = {"fog": 0.1, "shear": 0.2, "stripe": 0.3}
    aurocs = []

    def change(record):
        sets = record["parts"]["corruption"]["sets"]
        for kind, value in accuracy.items():
            sets[f"{kind}/0"]["acc"] = value if record["method"] == "mcdropout" else 0.9
        if record["method"] == "mcdropout":
            aurocs.append(100 * np.mean([found["auroc"] for found in sets.values()]))
        return record

    write_runs(
        tmp_path / "r", jobs_of("table1", "mnist", seeds=(0, 1), methods=("stfseb", "mcdropout")).values(), change
    )
    text = results_page(tmp_path / "r").blocks["corruptions"]
    means, by_type = (rows(part) for part in re.split(r"^(?=## )", text, flags=re.MULTILINE) if part)
    (own,) = [row for row in means if row["Method"] == "MC Dropout"]
    assert own["Accuracy, % ↑"] == "<ins>20.00 ± 0.00</ins>"
    assert f"{np.mean(aurocs):.2f} ± {np.std(aurocs, ddof=1):.2f}" in own["AUROC, % ↑"]
    assert [row["MC Dropout"] for row in by_type] == [f"<ins>{v}0.00 ± 0.00</ins>" for v in (1, 2, 3)]
    assert [row["Type"] for row in by_type] == list(accuracy)
    assert "may have them all wrong" in text
    assert "generated from the test images" in text


def test_what_is_set_beside_the_paper_names_stand_ins(page):
    for name in ("held", "best"):
        assert "- MNIST, MNIST-C: generated from the test images." in page.blocks[name]
        assert "svhn: first 6,000 of 26,032 images" in page.blocks[name]
    assert "Corrupted images were not evaluated with a temperature" in page.blocks["best-tempered"]
    assert "Corrupted images were not evaluated with a temperature" in page.blocks["tempered"]
    assert "chosen with dof MNIST 3" in page.blocks["dof"]


def test_searches_say_their_epochs_and_what_lies_at_an_end_of_its_grid(page):
    paper, ours = rows(page.blocks["searches"])
    assert paper["Trials"] == ours["Trials"] == "40<br><small>extended grid</small><br><small>30 epochs</small>"
    (line,) = [line for line in page.blocks["searches"].splitlines() if line.startswith("- Chosen at an end")]
    assert "tau2 10000" in paper["Settings"]
    assert "sigma 10," in ours["Settings"]
    assert line == (
        "- Chosen at an end of the grid: FMNIST, ST-FS-EB, 40 trials, 30 epochs, the paper's: tau2 10000; "
        "FMNIST, ST-FS-EB, 40 trials, 30 epochs, ours: sigma 10."
    )


def test_runs_of_other_tasks_are_left_out(page, results, tmp_path):
    """Who tries `stfseb paper --tasks mini` in a clone must not find the page out of date."""
    shutil.copytree(results / "runs", tmp_path / "r" / "runs")
    shutil.copytree(results / "searches", tmp_path / "r" / "searches")
    write_runs(tmp_path / "r", jobs_of("table1", "mini", seeds=(0,), methods=("map",)).values())
    own = json.loads((tmp_path / "r" / "searches" / SEARCH / "search.json").read_text())
    (tmp_path / "r" / "searches" / "own").mkdir()
    (tmp_path / "r" / "searches" / "own" / "search.json").write_text(
        json.dumps(own | {"plan": own["plan"] | {"task": "mini"}})
    )
    assert results_page(tmp_path / "r").blocks == page.blocks


def test_ablations_have_their_own_tasks_and_seeds(page):
    text = page.blocks["dof"]
    assert "`stfseb paper dof --tasks mnist --seeds 2`" in text
    assert "CIFAR-10" not in text
    assert " of 4 seeds" not in text  # the preset's column has the seeds of its neighbours, not all four
    assert "`stfseb paper efficiency --tasks mnist`" in page.blocks["efficiency"]
    assert "MNIST" not in page.blocks["readings"]
    assert "`stfseb paper readings --tasks cifar10 --seeds 1`" in page.blocks["readings"]
    six = "stfseb,fseb,gfsvi,mcdropout,mfvi,map"  # without these words `stfseb paper` would do ST-FS-EB alone
    assert f"`stfseb paper samples --tasks mnist --methods {six} --seeds 4`" in page.blocks["samples"]
    assert "--methods" not in page.blocks["tempered"]
    assert "`stfseb paper tails --tasks mnist --methods map --seeds 4`" in page.blocks["tails"]


def test_a_preset_beside_ablations_has_their_seeds_on_each_task(tmp_path):
    """MNIST's three seeds are no reason to set CIFAR-10's preset, with three, beside columns of one."""
    jobs = jobs_of("table1", "mnist", "cifar10", seeds=range(3), methods=("stfseb",))
    jobs |= jobs_of("dof", "mnist", seeds=range(3)) | jobs_of("dof", "cifar10", seeds=(0,))
    write_runs(tmp_path / "r", jobs.values())
    page = results_page(tmp_path / "r")
    grid = page.tables["dof"]
    seeds = {(stub[0], cell.seeds) for stub, row in zip(grid.rows, grid.cells, strict=True) for cell in row}
    assert seeds == {("MNIST", (0, 1, 2)), ("CIFAR-10", (0,))}
    assert (
        "paper dof --tasks mnist --seeds 3` and `stfseb paper dof --tasks cifar10 --seeds 1` · 24 runs"
        in (page.blocks["dof"])
    )
    assert page.tables["table1"].cells[1][0].seeds == (0, 1, 2)  # all that there are, where nothing else is compared


def test_what_ablations_start_from_is_no_ablation(tmp_path, monkeypatch):
    """Runs at the start, where that is not the preset, have more seeds, and costs have epochs."""
    monkeypatch.setitem(built_in()["tasks"]["fmnist"], "ablated", {"stfseb": {"dof": 7.0}, "map": {"sigma": 0.75}})
    start = load_task("fmnist").start("stfseb")
    assert start != load_task("fmnist").presets["stfseb"]
    jobs = jobs_of("table1", "fmnist", seeds=range(3), methods=("stfseb", "map"))
    jobs |= jobs_of("dof", "fmnist", seeds=range(2)) | jobs_of("efficiency", "fmnist", seeds=(0,))
    more = [make_job("fmnist", "stfseb", seed, settings=start) for seed in range(5)]
    write_runs(tmp_path / "r", (jobs | {job.name: job for job in more}).values())
    page = results_page(tmp_path / "r")
    assert [name for name in page.tables if name.startswith(("dof", "context"))] == ["dof"]
    assert {cell.seeds for row in page.tables["dof"].cells for cell in row} == {(0, 1)}
    assert not page.blocks["context-number"]


def test_without_runs_at_the_preset_those_that_ablations_start_from_come_first(tmp_path, monkeypatch):
    monkeypatch.setitem(built_in()["tasks"]["fmnist"], "ablated", {"stfseb": {"dof": 7.0}})
    jobs = [make_job("fmnist", "stfseb", seed, settings={"dof": 7.0}) for seed in range(2)]
    jobs += [make_job("fmnist", "stfseb", seed, settings={"dof": 3.0}) for seed in range(4)]
    write_runs(tmp_path / "r", jobs)
    found = arranged(check(read_results(tmp_path / "r" / "runs")))["fmnist"]
    assert [record["job"]["settings"]["dof"] for record in found.main] == [7.0, 7.0]


def test_rows_with_seeds_of_their_own_have_a_command_of_their_own(tmp_path):
    jobs = jobs_of("beyond", "fmnist", seeds=range(2))
    plan = make_plan("beyond", asked("fmnist", seeds=range(3)))
    jobs |= {job.name: job for key in ("ensemble", "curvature") for job in plan.jobs["fmnist", key]}
    write_runs(tmp_path / "r", jobs.values())
    made = results_page(tmp_path / "r").blocks["beyond"]
    first = "`stfseb paper beyond --tasks fmnist --seeds 2`"
    assert f"Made by {first} and `stfseb paper beyond --tasks fmnist --rows curvature,ensemble --seeds 3` · " in made


def test_seeds_are_named_in_cells_where_neighbours_differ(tmp_path):
    jobs = jobs_of("table1", "mnist", seeds=range(3), methods=("map",))
    jobs |= jobs_of("table1", "mnist", seeds=(1,), methods=("stfseb",))
    write_runs(tmp_path / "r", jobs.values())
    first = rows(results_page(tmp_path / "r").blocks["table1"])[0]
    assert "<small>3 seeds</small>" in first["MAP"]
    assert "<small>1 seed</small>" in first["ST-FS-EB"]
    assert "--methods stfseb,map" in results_page(tmp_path / "r").blocks["table1"]


@pytest.mark.parametrize(
    ("modified", "said"), [(False, "(0123456)"), (True, "(0123456, modified)"), (None, "(0123456, unpacked archive)")]
)
def test_code_that_may_have_been_changed_is_not_called_a_commit(modified, said):
    record = {"task": "mnist", "code": {"version": "0.1.0", "commit": "0123456", "modified": modified}}
    assert f"stfseb 0.1.0 {said}" in how_made([record], "`x`")


def test_every_number_leads_to_its_runs(page, results):
    ids = {path.parent.name for path in results.rglob("record.json")}
    for name, grid in page.tables.items():
        numbers = [c for row in grid.cells for c in row if c.value is not None and name != "searches"]
        assert numbers
        assert all(set(c.runs) <= ids for c in numbers)
        assert all(c.runs for c in numbers if c.text[0].isdigit())


def test_links_of_the_summary_lead_to_headings(page):
    """As GitHub and the site make anchors of them: small letters, hyphens for spaces, no other signs."""
    headings = [h for block in page.blocks.values() for h in re.findall(r"^## (.+)$", block, re.MULTILINE)]
    anchors = {"".join(c for c in h.lower() if c.isalnum() or c in " -").replace(" ", "-") for h in headings}
    found = re.findall(r"\]\(#([^)]*)\)", page.blocks["summary"])
    assert len(found) == len(set(found)) == 7
    assert set(found) <= anchors
    assert "(tables/summary.json)" in page.blocks["summary"]


def test_pictures_are_of_the_records(page):
    assert set(page.pictures) == {"headline", "figure1"}
    assert "![" in page.blocks["figure1"]
    assert "(images/headline.png)" in page.blocks["headline"]
    assert "`stfseb paper table2 --tasks mnist --seeds 4` and" in page.blocks["headline"]
    assert "`stfseb paper figure1 --tasks cifar10 --seeds 2` · 34 runs" in page.blocks["figure1"]


def test_searches_say_what_each_rule_chose_and_what_is_the_preset(page):
    found = rows(page.blocks["searches"])
    assert [(r["Rule"], r["Chosen"]) for r in found] == [("the paper's", "trial 13"), ("ours", "trial 2")]
    assert {r["Preset"] for r in found} == {"no"}
    assert "different" not in page.blocks["searches"]
    assert "stfseb search fmnist --method stfseb --trials 40 --space extended --epochs 30" in page.blocks["searches"]


def test_draws_that_came_before_are_no_settings_of_their_own(tmp_path):
    found = json.loads((ROOT / "results" / "searches" / SEARCH / "search.json").read_text())
    for trial in found["trials"][30:]:
        trial["params"] = found["trials"][0]["params"]
    (tmp_path / "searches" / SEARCH).mkdir(parents=True)
    (tmp_path / "searches" / SEARCH / "search.json").write_text(json.dumps(found))
    block = results_page(tmp_path).blocks["searches"]
    assert rows(block)[0]["Trials"].startswith("40<br><small>30 different</small>")
    assert "40 trials (39 complete, 1 pruned, 30 different settings)" in block


def learnt_dof(plan, found, grid):
    """Return a cell of the additions, and the accuracies behind it."""
    cell = grid.cells[[stub[0] for stub in grid.rows].index("learnt dof")][grid.columns.index("Accuracy ↑")]
    pair = [
        [100 * found[job.name]["metrics"]["acc"] for job in plan.jobs["cifar10", k]] for k in ("learn-dof", "preset")
    ]
    return cell, *map(np.array, pair)


def test_additions_are_set_against_the_preset_seed_by_seed():
    plan = make_plan("beyond", asked("cifar10", seeds=(0, 1, 2)))
    found = {job.name: record_of(job) for job in plan.all_jobs}
    grid = variant_differences(plan, Found(found), "cifar10")
    cell, own, base = learnt_dof(plan, found, grid)
    assert cell.value == pytest.approx((own - base).mean())
    low, high = stats.ttest_rel(own, base).confidence_interval(0.95)
    assert cell.below == (f"{low:+.2f} to {high:+.2f}".replace("-", "−"), "3 seeds")
    assert not any("Two common seeds" in note for note in grid.notes)


def test_additions_of_which_nothing_was_run_are_left_out_and_named(tmp_path):
    plan = make_plan("beyond", asked("cifar10", seeds=(0, 1, 2)))
    run = ("preset", "learn-dof", "mcdropout")
    write_runs(tmp_path / "results", [job for key in run for job in plan.jobs["cifar10", key]])
    page = results_page(tmp_path / "results")
    grid = page.tables["beyond-cifar10"]
    assert [stub[0] for stub in grid.rows] == ["ST-FS-EB", "learnt dof", "MC Dropout"]
    (note,) = [note for note in grid.notes if note.startswith("Not run yet: ")]
    assert note.removeprefix("Not run yet: ").rstrip(".").split("; ") == [
        variant.label for variant in plan.variants if variant.key not in run
    ]
    assert "Not run yet: " in page.blocks["beyond"]
    # So in the report, but where they were asked for.
    records = [record_of(job) for key in run for job in plan.jobs["cifar10", key]]
    for wanted, count in (((), 3), ((plan,), len(plan.variants))):
        (table,) = [g for g in all_grids(records, arranged(records), wanted, {}) if g.name == "beyond-cifar10"]
        assert len(table.rows) == count


def test_readings_keep_the_papers_row_which_is_no_run_of_ours(tmp_path):
    plan = make_plan("readings", asked("fmnist", seeds=(0,)))
    run = ("batch-init-shared", "epoch-he-row")
    write_runs(tmp_path / "results", [job for key in run for job in plan.jobs["fmnist", key]])
    grid = results_page(tmp_path / "results").tables["readings-fmnist"]
    assert [stub[0] for stub in grid.rows] == [
        "the paper",
        *(variant.label for variant in plan.variants if variant.key in run),
    ]
    assert "92.38" in grid.cells[0][0].text
    (note,) = [note for note in grid.notes if note.startswith("Not run yet: ")]
    assert "the paper" not in note
    assert len(note.split("; ")) == len(plan.variants) - len(run)


def test_two_seeds_have_neither_interval_nor_mark(page, results):
    grid = page.tables["beyond-cifar10-differences"]
    found = {path.parent.name: json.loads(path.read_text()) for path in results.rglob("record.json")}
    plan = make_plan("beyond", asked("cifar10", seeds=(0, 1)))
    cell, own, base = learnt_dof(plan, found, grid)
    assert (cell.value, cell.below) == (pytest.approx((own - base).mean()), ("2 seeds",))
    assert not any(cell.rank for row in grid.cells for cell in row)
    assert sum("Two common seeds give no useful interval" in note for note in grid.notes) == 1
    assert "1/dof, weights | 0.250 ± 0.000" in page.blocks["tails"]


# Where ST-FS-EB stands -------------------------------------------------------------------------------


def shaped(ask, values):
    """Return the plans of the main tables and runs whose accuracy is given: values[method] a list over seeds."""
    plans = [make_plan("table1", ask)]
    records = {}
    for job in plans[0].all_jobs:
        record = record_of(job)
        record["metrics"]["acc"] = values[job.method][job.seed]
        records[job.name] = record
    return plans, Found(records)


def test_held_is_within_one_of_the_papers_deviations_on_the_worse_side_alone():
    ask = asked("mnist", methods=("stfseb",), seeds=(0,))
    for acc, word in ((0.9933 + 0.01, "held"), (0.9933 - 0.00051, "held"), (0.9933 - 0.00053, "not held")):
        grid = held_grid(*shaped(ask, {"stfseb": [acc]}))
        assert grid.cells[0][3].text == word  # the paper has 99.33 with a deviation of 0.052
    plans, found = shaped(ask, {"stfseb": [0.99]})
    for nll, word in ((0.0, "held"), (0.0289, "held"), (0.0291, "not held")):  # 0.028 with 0.001
        next(iter(found.records.values()))["metrics"]["nll"] = nll
        grid = held_grid(plans, found)
        place = [stub[1] for stub in grid.rows].index("NLL ↓")
        assert grid.cells[place][3].text == word
    assert grid.notes[0].startswith(f"Held in {sum(row[3].text == 'held' for row in grid.cells)} of 3 cells")


def test_without_a_printed_deviation_the_printed_digits_decide():
    from stfseb.report.standing import _holds

    higher = make_plan("table1", asked("mnist")).quantities["mnist"][0]
    assert _holds(99.996, Printed(100.0, 0.0), higher)
    assert not _holds(99.99, Printed(100.0, 0.0), higher)


def test_rows_are_won_by_printed_means_and_lost_by_a_paired_difference():
    ask = asked("mnist", methods=("stfseb", "map", "mfvi"), seeds=(0, 1, 2))
    ours = np.array([0.990, 0.991, 0.9925])
    theirs = ours + np.array([0.001, 0.0012, 0.0011])
    values = {"stfseb": ours, "map": theirs, "mfvi": ours - 0.1}
    grids = race_grids(*shaped(ask, values))
    behind = grids[-1]
    place = [stub[1] for stub in behind.rows].index("Accuracy ↑")
    cells = behind.cells[place]
    assert cells[1].text == "MAP"
    low, high = stats.ttest_rel(100 * ours, 100 * theirs).confidence_interval(0.95)
    assert cells[2].below[0] == f"{low:+.2f} to {high:+.2f}".replace("-", "−")
    assert cells[2].rank == 2  # against ST-FS-EB, the interval leaves out zero
    deviation = np.sqrt((np.var(ours, ddof=1) + np.var(theirs, ddof=1)) / 2)
    assert cells[3].text == f"{(ours.mean() - theirs.mean()) / deviation:+.1f}".replace("-", "−")
    assert sum(len(grid.rows) for grid in grids) == 3
    assert behind.notes[0].startswith(f"{len(behind.rows)} of 3 rows")

    best, *_ = race_grids(*shaped(ask, values | {"map": ours + 1e-6}))
    cells = best.cells[[stub[1] for stub in best.rows].index("Accuracy ↑")]
    assert cells[1].below[0] == "level"  # the printed means are equal


def test_a_race_says_among_which_methods_and_explains_its_columns_at_once():
    three = ("stfseb", "map", "mfvi")
    plans, found = shaped(asked("mnist", methods=three, seeds=(0, 1, 2)), {m: [0.99, 0.98, 0.97] for m in three})
    first, *_ = race_grids(plans, found)
    assert first.title == "Rows where ST-FS-EB is best of the three methods, or level with the best"
    assert "Compared: ST-FS-EB, MFVI and MAP." in first.notes
    assert any(note.startswith("Ours minus it: ") and "In sd: " in note for note in first.notes)
    beyond = make_plan("beyond", asked("mnist", seeds=(0,)))
    rows_beside = [record_of(job) for job in beyond.all_jobs if job.method in ("outlierexposure", "ensemble")]
    beside = Found({**found.records, **{r["id"]: r for r in rows_beside}})
    (note,) = [n for n in race_grids(plans, beside)[0].notes if n.startswith("Compared: ")]
    assert note.startswith("Compared: ST-FS-EB, MFVI and MAP; reference rows (")
    assert "MC Dropout + OE" in note
    assert note.endswith(" are not counted.")


def test_level_rows_are_not_counted_as_won():
    """The printed means are equal, and seed by seed the other method is ahead all the same."""
    ask = asked("mnist", methods=("stfseb", "map"), seeds=(0, 1, 2))
    ours = np.array([0.99000, 0.99101, 0.99252])
    best, *_ = race_grids(*shaped(ask, {"stfseb": ours, "map": ours + np.array([1e-6, 1.1e-6, 1e-6])}))
    place = [stub[1] for stub in best.rows].index("Accuracy ↑")
    assert best.cells[place][2].rank == 2
    others = [row[2].rank == 1 for i, row in enumerate(best.cells) if i != place]
    assert f"in {sum(others) or 'none'} of them the 95 % interval leaves out zero, in its favour" in best.notes[0]


def test_both_sides_of_a_race_say_their_seeds_where_these_differ(tmp_path):
    jobs = jobs_of("table1", "mnist", seeds=range(4), methods=("map",))
    jobs |= jobs_of("table1", "mnist", seeds=(0, 1, 2), methods=("stfseb",))
    write_runs(tmp_path / "r", jobs.values())
    tables = re.split(r"^(?=## )", results_page(tmp_path / "r").blocks["best"], flags=re.MULTILINE)
    found = [row for table in tables if table for row in rows(table)]
    assert len(found) == 6
    for row in found:
        assert "<small>3 seeds</small>" in row["ST-FS-EB"]
        assert "<small>4 seeds</small>" in next(row[column] for column in ("Next", "The best there") if column in row)


def test_one_seed_has_a_difference_and_no_interval():
    ask = asked("mnist", methods=("stfseb", "map"), seeds=(0,))
    best, *_ = race_grids(*shaped(ask, {"stfseb": [0.99], "map": [0.98]}))
    cells = best.cells[0]
    assert (cells[2].text, cells[2].below) == ("+1.00", ("one seed",))
    assert best.columns == ("ST-FS-EB", "Next", "Ours minus it")  # no column of dashes, and nothing on t tests
    assert not any("t test" in note or "In sd" in note for note in best.notes)
    assert re.fullmatch(r"\d of 3 rows\.", best.notes[0])  # of intervals that are not there nothing is said


# The page and the script -----------------------------------------------------------------------------


def test_only_what_stands_between_markers_is_written():
    text = "# A\n\nwords\n<!-- generated: held -->\nold\n<!-- end -->\nmore\n"
    assert filled(text, {"held": "new\n"}, "p") == text.replace("old", "\nnew\n")
    assert filled(text, {"held": ""}, "p") == text.replace("old\n", "")
    assert filled(filled(text, {"held": "new"}, "p"), {"held": "new"}, "p") == filled(text, {"held": "new"}, "p")
    for broken, said in [
        (text.replace("<!-- end -->", ""), "needs its"),
        (text.replace("held", "hold"), "'hold' is not known"),
        (text + text, "twice"),
    ]:
        with pytest.raises(StfsebError, match=said):
            filled(broken, {"held": "new"}, "p")
    with pytest.raises(StfsebError, match="no place for 'best'"):
        filled(text, {"held": "", "best": "new"}, "p")


def test_the_script_writes_everything_once_and_sees_what_is_stale(results, page, tmp_path):
    make = script("make_results")
    path = tmp_path / "docs" / "results.md"
    path.parent.mkdir()
    path.write_text("# Mine\n\n" + "\n".join(f"<!-- generated: {name} -->\n<!-- end -->\n" for name in BLOCKS))
    assert len(make.write(page, path)) == 1 + len(page.tables) + 2
    assert path.read_text().startswith("# Mine\n")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert make.write(results_page(results), path) == []
    assert make.stale(page, path) == []
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before

    (path.parent / "images" / "headline.png").write_bytes((path.parent / "images" / "figure1.png").read_bytes())
    (path.parent / "tables" / "of-old.json").write_text("{}")
    path.write_text(path.read_text().replace("99.3", "99.4"))
    assert {p.name for p in make.stale(page, path)} == {"headline.png", "of-old.json", "results.md"}
    make.write(page, path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_last_digits_do_not_count():
    assert fingerprint([{"a": (0.1 + 0.2, 1)}]) == fingerprint([{"a": [0.3, 1]}])
    assert fingerprint([0.3]) != fingerprint([0.30001])


def test_a_folder_without_runs_has_empty_blocks(tmp_path):
    assert set(results_page(tmp_path).blocks.values()) == {""}


def test_ablations_with_fewer_epochs_than_the_main_runs_are_shown_and_say_so(tmp_path):
    jobs = jobs_of("table1", "mnist", seeds=(0,)) | jobs_of("dof", "mnist", seeds=(0,), training={"epochs": 30})
    jobs |= jobs_of("efficiency", "mnist", seeds=(0,))
    write_runs(tmp_path / "r", jobs.values())
    found = results_page(tmp_path / "r").blocks
    assert "--seeds 1 --epochs 30`" in found["dof"]
    assert "Trained with epochs 30" in found["dof"]
    assert "—" not in rows(found["dof"])[0].values()
    assert found["efficiency"].count("## ") == 1
    assert not found["context-number"]  # the preset at 30 epochs is no such table
    assert found["table1"].count("## ") == 1


def test_times_are_found_where_the_main_runs_were_shortened(tmp_path):
    jobs = jobs_of("table1", "mnist", seeds=(0,), training={"epochs": 30}) | jobs_of("efficiency", "mnist", seeds=(0,))
    write_runs(tmp_path / "r", jobs.values())
    found = results_page(tmp_path / "r").blocks
    assert "`stfseb paper efficiency --tasks mnist`" in found["efficiency"]
    assert "--epochs 30`" in found["table1"]
    assert "--epochs 30`" in found["headline"]


def test_a_folder_that_is_not_there_does_not_empty_the_page(tmp_path, monkeypatch, capsys):
    page = tmp_path / "results.md"
    page.write_text("<!-- generated: held -->\nkept\n<!-- end -->\n")
    words = ["make_results", "--results", str(tmp_path / "nothere"), "--page", str(page)]
    monkeypatch.setattr("sys.argv", words)
    assert script("make_results").main() == 2
    assert "holds neither runs nor searches: give a folder of results" in capsys.readouterr().err
    assert "kept" in page.read_text()
