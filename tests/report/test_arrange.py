"""Runs with different settings are never averaged, and a page of hundreds of them stays small."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_runs import asked, made, record_of

from stfseb.experiments.jobs import make_job
from stfseb.experiments.records import write_record
from stfseb.report import write_report
from stfseb.report.arrange import arranged
from stfseb.report.found_plans import found_plans
from stfseb.report.paper import Found
from stfseb.report.reading import read_results
from stfseb.report.records import groups
from stfseb.report.standing import standing

MAIN = {"table1", "table2", "best", "best-behind", "differences"}  # of a task without figures of the paper


def test_presets_are_main_and_others_say_what_differs():
    jobs = [make_job("fmnist", "stfseb", s) for s in (0, 1)]
    jobs += [make_job("fmnist", "stfseb", 0, settings={"dof": 3.0})]
    jobs += [make_job("fmnist", "stfseb", 0, training={"epochs": 4}), make_job("fmnist", "map", 0)]
    jobs += [make_job("fmnist", "stfseb", s, context="train") for s in (0, 1)]
    found = arranged([record_of(job) for job in jobs])["fmnist"]
    assert {(r["method"], r["seed"]) for r in found.main} == {("stfseb", 0), ("stfseb", 1), ("map", 0)}
    assert {r["label"] for r in found.main} == {"ST-FS-EB", "MAP"}
    assert [(g.label, len(g.records)) for g in groups(found.others)] == [
        ("ST-FS-EB, dof 3.0", 1),
        ("ST-FS-EB, epochs 4", 1),
        ("ST-FS-EB, context train", 2),
    ]


def test_a_shorter_training_of_all_is_the_main_one():
    jobs = [make_job("mini", m, s, training={"epochs": 2}) for m in ("stfseb", "map") for s in (0, 1)]
    found = arranged([record_of(job) for job in jobs])["mini"]
    assert len(found.main) == 4
    assert found.training == {"epochs": 2}


def test_the_tasks_own_training_is_main_where_it_is_there():
    jobs = [make_job("mini", "map", s, training={"epochs": 2}) for s in range(4)] + [make_job("mini", "map", 0)]
    found = arranged([record_of(job) for job in jobs])["mini"]
    assert [r["id"] for r in found.main] == [jobs[-1].name]
    assert found.training == {}


def test_settings_that_are_no_preset_are_main_where_nothing_else_is_there():
    jobs = [make_job("mini", "stfseb", 0, settings={"tau2": 7.0}), make_job("mini", "map", 0)]
    found = arranged([record_of(job) for job in jobs])["mini"]
    assert {r["label"] for r in found.main} == {"ST-FS-EB, tau2 7.0", "MAP"}
    assert found.others == []


def test_records_without_a_job_stay_as_they_were():
    records = [{"id": str(i), "task": "t", "method": "map", "metrics": {}} for i in range(2)]
    assert arranged(records)["t"].main == records


def test_a_page_of_hundreds_of_runs_stays_small(tmp_path, monkeypatch):
    import stfseb.report.page as page

    monkeypatch.setattr(page, "PLOTS", ())  # drawn for main runs alone
    picture = {"src": "data:image/png;base64," + "A" * 20000, "caption": "a bag"}
    records = []
    for number in range(300):
        settings = {"tau2": 1.0 + number // 2}
        record = record_of(make_job("mini", "stfseb", number % 2, settings=settings), parts=())
        records.append(record | {"images": {"test": {"most": [picture] * 8}}})
    records += [
        record_of(make_job("mini", "stfseb", s), ()) | {"images": {"test": {"most": [picture]}}} for s in (0, 1)
    ]
    path = write_report(records, tmp_path, "many")
    text = path.read_text("utf-8")
    assert path.stat().st_size < 400_000
    assert text.count("data:image/png") == 1
    assert "89 more rows are in" in text  # of 149: tau2 100 is the preset's, and the page shows 60
    assert "tau2 150" in (tmp_path / "tables" / "mini-other-settings.md").read_text()


def test_parts_are_read_beside_the_records(tmp_path):
    folder = tmp_path / "runs" / "mini" / "a"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"id": "a", "task": "mini", "method": "map", "metrics": {}}))
    (folder / "rotation.json").write_text(json.dumps({"sets": {"0": {"acc": 1.0}}}))
    (record,) = read_results(tmp_path)
    assert record["parts"] == {"rotation": {"sets": {"0": {"acc": 1.0}}}}


def test_the_gallery_is_read_beside_the_record_or_in_it_and_may_be_left_out(tmp_path, monkeypatch):
    import stfseb.report.page as page

    monkeypatch.setattr(page, "PLOTS", ())
    found = {"test": {"most": [{"src": "data:image/png;base64,AAAA", "caption": "a bag"}]}}
    pages = {}
    for name in ("beside", "inside", "left out"):
        record = record_of(make_job("mini", "stfseb", 0), parts=()) | {"images": found}
        folder = tmp_path / name / "runs" / "mini" / record["id"]
        if name == "inside":  # as records were written before
            folder.mkdir(parents=True)
            (folder / "record.json").write_text(json.dumps(record))
        else:
            write_record(folder, record)
            assert "images" not in json.loads((folder / "record.json").read_text())
            assert json.loads((folder / "images.json").read_text()) == found
        if name == "left out":
            (folder / "images.json").unlink()
        pages[name] = write_report(read_results(tmp_path / name), tmp_path / name, "one").read_text("utf-8")
    assert pages["beside"] == pages["inside"]
    assert "a bag" in pages["beside"]
    assert "a bag" not in pages["left out"]
    assert "most certain test images" not in pages["left out"]


def test_the_tempered_table_is_found_where_it_was_measured(tmp_path, monkeypatch):
    import stfseb.report.page as page

    monkeypatch.setattr(page, "PLOTS", ())
    _, records = made("table1", ask=asked("mini", seeds=(0, 1)), parts=("temperature",))
    write_report(records, tmp_path, "tempered")
    names = {p.stem for p in (tmp_path / "tables").glob("*.json")}
    behind = {"best-tempered", "best-tempered-behind"}
    assert names & behind
    assert names - behind == {*MAIN, "tempered"}
    # They are the tables of the results page, which says the same of the same records.
    tasks = arranged(records)
    shown = standing(found_plans(records, tasks), Found({r["id"]: r for r in records}))["best-tempered"]
    for grid in shown:
        said = json.loads((tmp_path / "tables" / f"{grid.name}.json").read_text())
        assert said == json.loads(json.dumps(grid.to_json()))
        assert said["title"].endswith("(after one temperature)")
    page_ = (tmp_path / "report.html").read_text("utf-8")
    places = [page_.index(f'id="paper-{name}"') for name in ("table1", "tempered", shown[0].name)]
    assert places == sorted(places)


@pytest.mark.parametrize("whats", [("table1", "dof"), ("context-source",)])
def test_tables_are_found_again_from_records_alone(tmp_path, monkeypatch, whats):
    import stfseb.report.page as page

    monkeypatch.setattr(page, "PLOTS", ())
    _, records = made(*whats, ask=asked("fmnist"))
    write_report(records, tmp_path, "again")
    names = {p.stem for p in (tmp_path / "tables").glob("*.json")}
    assert set(whats) <= names
    found = json.loads((tmp_path / "tables" / f"{whats[-1]}.json").read_text())
    ids = {i for row in found["rows"] for c in row["cells"].values() for i in c["runs"]}
    assert ids <= {r["id"] for r in records}
    assert len(found["columns"]) == {"dof": 6, "context-source": 3}[whats[-1]]


def test_runs_of_the_presets_alone_make_the_main_tables_alone(tmp_path, monkeypatch):
    import stfseb.report.page as page

    monkeypatch.setattr(page, "PLOTS", ())
    _, records = made("table1", ask=asked("mini", training={"epochs": 2}))
    write_report(records, tmp_path, "main")
    assert {p.stem for p in (tmp_path / "tables").glob("*.json")} == MAIN


def test_runs_of_an_edited_task_file_stand_apart_from_the_newest():
    job = make_job("mini", "map", 0)
    records = [
        {**record_of(replace(job, seed=seed, definition=text)), "started": when}
        for seed, text, when in ((0, "before", 1), (1, "before", 2), (0, "after", 3))
    ]
    found = arranged(records)["mini"]
    assert [r["job"]["definition"] for r in found.main] == ["after"]
    assert {r["label"] for r in found.others} == {"MAP, task file as it was"}


def test_tasks_stand_in_the_order_of_the_paper_and_notes_as_tables_tell_them(tmp_path, monkeypatch):
    import stfseb.report.page as page

    monkeypatch.setattr(page, "PLOTS", ())
    records = [record_of(make_job(task, "stfseb", 0), parts=()) for task in ("fmnist", "mnist")]
    for record in records:
        record["notes"] = ["context kmnist: test split, as the train split is not on disk"]
    text = write_report(records, tmp_path, "two").read_text("utf-8")
    assert text.index('<h2 id="mnist">') < text.index('<h2 id="fmnist">')
    assert text.count("Context kmnist: test split, as its train split was not at hand.") == 2
    assert "not on disk" not in text
