"""Searches on the page: what both rules chose, beside the recorded trials, and folders with and without them."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import asked, made
from typer.testing import CliRunner

from stfseb.cli import app
from stfseb.errors import StfsebError
from stfseb.evaluation.ood import auroc_error
from stfseb.experiments.records import write_record
from stfseb.experiments.search.store import Store
from stfseb.report import page as page_module
from stfseb.report import write_report
from stfseb.report.reading import Searches, read_folder, read_searches
from stfseb.report.search import search_figure, search_in_words, search_table
from stfseb.report.searches import search_grid, trials_in_words

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ("fmnist-gfsvi-extended-37a8b37f", "fmnist-stfseb-extended-f0e5fb50", "mnist-map-extended-26e84ba3")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(page_module, "PLOTS", ())


@pytest.fixture
def results(tmp_path):
    """Three recorded searches, and nothing else."""
    for study in STUDIES:
        shutil.copytree(ROOT / "results" / "searches" / study, tmp_path / "searches" / study)
    return tmp_path


def recorded(study):
    return json.loads((ROOT / "results" / "searches" / study / "search.json").read_text())


class Rows(HTMLParser):
    """The body rows of the table in the searches' section, as texts (what a phone shows twice is left out)."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.small, self.cell, self.body = [], False, False, False
        self.feed(page[page.index('<h2 id="searches">') :].partition("</table>")[0])

    def handle_starttag(self, tag, attributes):
        self.body |= tag == "tbody"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True
        self.small |= tag == "small"

    def handle_endtag(self, tag):
        self.small &= tag != "small"
        self.cell &= tag not in ("td", "th")

    def handle_data(self, data):
        if self.cell and not self.small:
            self.rows[-1][-1] += data


def test_both_choices_are_the_best_of_the_recorded_trials(results):
    records, searches = read_folder(results)
    assert records == []
    page = write_report(records, results, "searches", searches=searches).read_text("utf-8")
    head, *rows = Rows(page).rows
    assert head[:3] == ["Task", "Method", "Rule"]
    assert [row[:3] for row in rows] == [
        ["MNIST", "MAP", "the paper's"],
        ["MNIST", "MAP", "ours"],
        ["FMNIST", "ST-FS-EB", "the paper's"],
        ["FMNIST", "ST-FS-EB", "ours"],
        ["FMNIST", "GFSVI", "the paper's"],
        ["FMNIST", "GFSVI", "ours"],
        ["FMNIST", "GFSVI", "level"],
    ]
    level = rows.pop()
    for study, (paper, ours) in zip(reversed(STUDIES), zip(rows[::2], rows[1::2], strict=True), strict=True):
        whole = [t for t in recorded(study)["trials"] if t["outcome"] == "complete"]
        low = min(whole, key=lambda t: t["nll"])
        first = min(whole, key=lambda t: t["metrics"]["tempered_nll"])["metrics"]
        edge = first["tempered_nll"] + first["tempered_nll_se"]
        near = [t for t in whole if t["metrics"]["tempered_nll"] <= edge]
        high = max(near, key=lambda t: t["metrics"]["tempered_auroc"])
        top = high["metrics"]["tempered_auroc"]
        good = [t for t in near if (a := t["metrics"]["tempered_auroc"]) + auroc_error(a, 6000, 1000) >= top]
        last = min(good, key=lambda t: t["metrics"]["tempered_nll"])
        for row, trial in ((paper, low), (ours, high), *([(level, last)] if rows[-1] is ours else [])):
            m = trial["metrics"]
            assert row[3] == "40"
            assert row[6:8] == [f"{trial['nll']:.4f}", f"{m['tempered_nll']:.4f}"]
            assert row[9] == f"{100 * m['tempered_auroc']:.{4 if m['tempered_auroc'] > 0.9995 else 2}f}"
            for name, value in trial["params"].items():
                assert f"{name} {value:g}" in row[5] if isinstance(value, float) else f"{name} {value}" in row[5]


def test_every_search_has_its_drawing_with_both_choices(results):
    path = write_report(*read_folder(results)[:1], results, "searches", searches=read_searches(results))
    page = path.read_text("utf-8")
    part = page[page.index('<h2 id="searches">') : page.index('<h2 id="meaning">')]
    labels = re.findall(r'<svg[^>]*aria-label="([^"]*)"', part)
    assert len(labels) == 3
    for label in labels:  # read aloud: what was chosen
        assert "paper: trial " in label
        assert "ours: trial " in label
    assert sorted(p.name for p in (results / "plots").glob("search-*")) == sorted(
        f"search-{study}.{kind}" for study in STUDIES for kind in ("pdf", "png")
    )
    found = recorded(STUDIES[1])
    ax = search_figure(found, small=True, title="one").axes[0]
    marked = {c.get_label(): c.get_offsets()[0] for c in ax.collections if c.get_label() in ("paper", "ours")}
    for rule, spot in marked.items():
        trial = found["trials"][found["choices"][rule]["trial"]]
        assert tuple(spot) == pytest.approx(
            (trial["metrics"]["tempered_nll"], 100 * trial["metrics"]["tempered_auroc"])
        )
    assert set(marked) == {"paper", "ours"}


def test_a_folder_without_searches_has_no_such_section(tmp_path):
    _, runs = made("table1", ask=asked("mini", seeds=(0, 1)))
    before = write_report(runs, tmp_path / "a", "same").read_bytes()
    assert write_report(runs, tmp_path / "b", "same", searches=Searches()).read_bytes() == before
    assert b'id="searches"' not in before
    assert b"#searches" not in before
    names = {p.name for folder in ("tables", "plots") for p in (tmp_path / "b" / folder).glob("search*")}
    assert names == set()


def test_the_command_shows_runs_and_searches_together(results):
    _, runs = made("table1", ask=asked("mini", methods=("stfseb", "map"), seeds=(0,)))
    for run in runs:
        write_record(results / "runs" / "mini" / run["id"], run)
    said = CliRunner().invoke(app, ["report", str(results)])
    assert said.exit_code == 0, said.output
    page = (results / "report.html").read_text("utf-8")
    assert '<a href="#searches">Searches</a>' in page
    assert "2 runs on 1 task" in page
    assert (results / "tables" / "searches.json").exists()


def test_nothing_at_all_is_refused_in_one_line(tmp_path):
    with pytest.raises(StfsebError, match=r"no record\.json below"):
        read_folder(tmp_path)
    with pytest.raises(StfsebError, match="no runs to report on"):
        write_report([], tmp_path, "none", searches=Searches())


def test_a_search_that_goes_on_says_how_far_it_is(results):
    """One that no worker has ended yet, and one that has more trials than were written."""
    from stfseb.experiments.search.plan import make_plan

    plan = make_plan("mini", "map", "paper")
    for total in (3, 5):
        with Store(f"sqlite:///{results / 'searches' / plan.name / 'study.db'}", plan, total) as store:
            claim = store.claim()
            store.finish(claim, {"outcome": "complete", "nll": 1.0 + claim.index})
            found = read_searches(results)
        if total == 3:
            assert found.ahead == {plan.name: (1, 3, 0)}
            page = write_report([], results, "one", searches=found).read_text("utf-8")
            assert f"{plan.name}: 1 of 3 trials are finished by now; nothing is chosen until a worker ends." in page
            written = recorded(STUDIES[2]) | {"study": plan.name}
            written["trials"] = written["trials"][:1]
            (results / "searches" / plan.name / "search.json").write_text(json.dumps(written))
    assert found.ahead == {plan.name: (2, 5, 1)}


def test_without_held_back_images_there_is_a_row_and_no_drawing(results):
    found = recorded(STUDIES[2])
    for trial in found["trials"]:
        if trial.get("metrics"):
            trial["metrics"] |= {"auroc": None, "tempered_auroc": None}
    assert search_figure(found) is None
    grid = search_grid([found])
    assert [cell.text for cell in grid.cells[0]][-2] == "—"
    page = write_report([], results, "one", searches=Searches([found])).read_text("utf-8")
    assert 'class="tiles"' not in page


def final(task, *trials):
    """A recorded search as the final of some of its trials."""
    found = recorded("fmnist-stfseb-extended-f0e5fb50")
    taken = [next(t for t in found["trials"] if t["index"] == number) for number in trials]
    finalists = [{"trial": t["index"], "params": t["params"], **t["metrics"]} for t in taken]
    listed = {"of": found["study"], "trials": 40, "epochs": 3, "asked": len(trials), "finalists": finalists}
    found["plan"] |= {"task": task, "shortlist": listed}
    found["trials"] = [{**t, "index": place} for place, t in enumerate(taken)]
    settings = {"num_context": 32, **taken[0]["params"]}
    found["choices"] = {rule: {"trial": 0, "why": "a reason", "settings": settings} for rule in ("paper", "ours")}
    none = dict.fromkeys(("pruned", "diverged", "failed", "repeats"), 0)
    return found | {
        "study": f"{found['study']}-final{len(trials)}of40",
        "asked": len(trials),
        "counts": {"complete": len(trials), **none},
    }


def test_one_finalist_is_one_and_finals_of_one_study_are_told_apart(tmp_path):
    one, two = final("fmnist", 26), final("fmnist", 26, 27)
    assert search_in_words(one)[0].startswith("1 finalist finished (1 complete), ")
    assert search_in_words(two | {"asked": 3})[0].startswith("2 of 3 finalists finished (2 complete), ")
    assert search_table(one).title.endswith(": best of 1 finalist, on validation images")
    assert search_table(two).title.endswith(": best of 2 finalists, on validation images")
    assert trials_in_words(one) == "1 finalist of 40 trials of 3 epochs (1 complete)"
    begun = one | {"trials": [], "counts": dict.fromkeys(one["counts"], 0)}
    assert trials_in_words(begun) == "0 of 1 finalist of 40 trials of 3 epochs (none ended)"
    alone, both = (
        [note for note in search_grid(searches).notes if note.startswith("Chosen at an end")]
        for searches in ([one], [one, two])
    )
    where = "Chosen at an end of the grid: FMNIST, ST-FS-EB, 1 finalist of 40, 30 epochs, the paper's, ours: sigma 10"
    assert alone == [f"{where}."]
    assert both == [f"{where}; FMNIST, ST-FS-EB, 2 finalists of 40, 30 epochs, the paper's, ours: sigma 10."]
    page = write_report([], tmp_path / "with", "final", searches=Searches([one, two])).read_text("utf-8")
    assert page.count("Finalists: settings that did well in short") == 1
    study = recorded("fmnist-stfseb-extended-f0e5fb50")
    page = write_report([], tmp_path / "without", "none", searches=Searches([study])).read_text("utf-8")
    assert "Finalists:" not in page


def test_a_choice_of_an_unfinished_search_is_one_so_far():
    whole, begun = (search_grid([final("fmnist", 26, 27) | {"asked": asked}]).cells[0][0] for asked in (2, 3))
    assert (whole.text, whole.below[0]) == ("2", "finalists of 40 trials")
    assert (begun.text, *begun.below[:2]) == ("2 of 3", "finalists of 40 trials", "not finished: chosen so far")
    assert "not finished: chosen so far" not in whole.below


def test_whether_the_preset_is_chosen_is_said_of_tasks_that_are_known():
    """A search keeps the name of a task of one's own, not the file that may have the settings by now."""
    for task, said in (("fmnist", "no"), ("mine", "—")):
        assert {row[-1].text for row in search_grid([final(task, 26)]).cells} == {said}
