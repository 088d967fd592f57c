"""The page: one file that loads nothing, says what is missing, and escapes what it is given."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser

import pytest

from stfseb.data.tasks import load_task
from stfseb.errors import StfsebError
from stfseb.report import write_report

VOID = {"meta", "link", "img", "br", "use", "path"}


class Reader(HTMLParser):
    """Collect tags and visible text, and check that tags close in order."""

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read(path):
    reader = Reader()
    reader.feed(path.read_text("utf-8"))
    assert reader.open == []
    return reader, " ".join(" ".join(reader.text).split())


@pytest.fixture(scope="module")
def report(records, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    # Records come from JSON: nothing that JSON cannot hold may be needed.
    return write_report(json.loads(json.dumps(records)), folder, "Three methods")


def test_files_lie_beside_the_page(report):
    names = {p.relative_to(report.parent).as_posix() for p in report.parent.rglob("*") if p.is_file()}
    plots = ["headline", "confidence", "roc", "reliability", "risk-coverage", "cost", "validation", "terms"]
    expected = {f"plots/mini-{p}.{kind}" for p in plots for kind in ("png", "pdf")}
    assert names == expected | {"report.html", "tables/mini.md", "tables/mini.tex"}


def test_page_loads_nothing_and_every_picture_has_words(report):
    reader, _ = read(report)
    for tag, attributes in reader.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            assert attributes["aria-label"]
            assert attributes["role"] == "img"
    style = re.findall(r"url\(([^)]*)\)", report.read_text("utf-8"))
    assert all(target.startswith("#") for target in style)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for t, a in reader.tags if t == "a"} <= set(ids)


def test_page_tells_numbers_settings_data_code_and_machine(report, records):
    _, text = read(report)
    first = records[0]
    assert f"{100 * first['metrics']['acc']:.0f}" in text
    for about in first["data"].values():
        assert about["fingerprint"] in text
    for word in ("tau2 100", "learning_rate 0.0005", "0123abc", "Linux x86_64", "2.13.0", "15 bins", first["id"]):
        assert word in text, word
    for term in ("Accuracy", "NLL", "ECE", "Brier", "AUROC", "AUPR", "FPR95", "mutual information"):
        assert term in text


def test_hostile_records_stay_text(records, tmp_path):
    evil = "</svg><script>alert(1)</script><img src=x onerror=alert(1)>"
    record = copy.deepcopy(records[0])
    record.update(id=evil, label=evil, task=evil, task_title=evil, settings={evil: evil}, code={"version": evil})
    record["data"]["test"]["note"] = evil
    record["missing"] = {evil: evil}
    record["images"]["test"]["most"] = [
        {"src": "javascript:alert(1)", "caption": evil},
        {"src": "https://example.org/a.png", "caption": evil},
        {"src": record["images"]["test"]["most"][0]["src"], "caption": evil},
    ]
    record["metrics"][f"auroc/{evil}"] = 0.5
    path = write_report([record, records[2]], tmp_path / "new" / "folder", evil)
    reader, text = read(path)
    assert sum(tag == "script" for tag, _ in reader.tags) == 1
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    sources = [a["src"] for t, a in reader.tags if t == "img"]
    assert all(s.startswith("data:image/png;base64,") for s in sources)
    assert evil in text
    assert {p.parent.name for p in path.parent.rglob("*.png")} == {"plots"}  # no name leads out of the folder


def test_missing_sets_and_unlike_runs_are_said(records, tmp_path):
    pair = copy.deepcopy(records[:2])
    pair[0]["missing"] = {"notmnist": "not on disk"}
    pair[0]["notes"] = pair[1]["notes"] = ["glyphs: rendered from fonts"]
    pair[1]["data"]["test"]["fingerprint"] = "another"
    pair[1]["settings"]["tau2"] = 1.0
    pair[1]["machine"]["device"] = "cuda"
    _, text = read(write_report(pair, tmp_path, "t"))
    assert "notmnist (not on disk)" in text
    assert text.count("glyphs: rendered from fonts.") == 1
    assert "2 different versions of the test data" in text
    assert "do not all have the same settings" in text
    assert "different devices (cpu, cuda)" in text
    assert "do not all have the same context images" not in text


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"name": "digits", "count": 70, "fingerprint": "d"}, "set digits , images 70 , fingerprint d"),
        (None, "set the training images"),
    ],
)
def test_runs_with_other_context_images_are_told_apart(records, tmp_path, other, named):
    pair = copy.deepcopy(records[:2])
    for record in pair:
        record["settings"] = {"num_context": 32}
        record["data"]["context"] = {"name": "glyphs", "count": 50, "fingerprint": "g"}
    pair[1]["data"]["context"] = other
    _, text = read(write_report(pair, tmp_path, "t"))
    assert "do not all have the same context images" in text
    assert "set glyphs , images 50 , fingerprint g" in text
    assert named in text


def test_a_setting_at_its_default_is_said_and_only_what_is_absent_is_not_recorded(records, tmp_path):
    record = copy.deepcopy(records[0])
    record["settings"] = {"dof": 5.0, "dof_function": None, "features": None, "prior_mean": None, "vectorise": None}
    record["training"] = {"epochs": 15, "patience": None}
    record["peak_memory_mb"] = None
    del record["seconds"]
    _, text = read(write_report([record], tmp_path, "t"))
    assert "dof_function as dof" in text
    assert "features the input of the last Linear" in text
    assert "prior_mean zero" in text
    assert "vectorise by device" in text
    assert "patience none" in text
    assert "peak memory, MB not measured" in text
    assert "seconds not recorded" in text
    assert text.count("not recorded") == 2  # the seconds, and whether other runs had the device


def test_another_training_than_the_tasks_is_set_beside_it(records, tmp_path):
    task = load_task("mini")
    short = [r | {"training": task.training | {"epochs": 2}} for r in copy.deepcopy(records)]
    _, text = read(write_report(short, tmp_path, "t"))
    assert f"Trained with epochs 2 instead of the task's own {task.training['epochs']}." in text
    usual = [r | {"training": dict(task.training)} for r in short]
    _, text = read(write_report(usual, tmp_path, "t"))
    assert "the task's own" not in text


def test_bare_records_make_a_page(tmp_path):
    path = write_report([{"task": "t", "method": "map", "metrics": {"acc": 0.5}}], tmp_path, "bare")
    _, text = read(path)
    assert "50.00" in text
    assert "No unfamiliar images were given" in text
    assert not (tmp_path / "plots").exists()


def test_two_tasks_with_names_alike_get_files_of_their_own(tmp_path):
    records = [{"id": t, "task": t, "method": "map", "metrics": {"acc": 0.5}} for t in ("a b", "a-b")]
    write_report(records, tmp_path, "two")
    assert {p.name for p in (tmp_path / "tables").glob("*.md")} == {"a-b.md", "a-b-2.md"}


def test_no_records_write_nothing(tmp_path):
    with pytest.raises(StfsebError, match="no runs"):
        write_report([], tmp_path / "r", "none")
    assert not (tmp_path / "r").exists()


def test_a_page_that_cannot_be_made_leaves_the_old_one(records, tmp_path, monkeypatch):
    path = write_report([{"task": "t", "method": "map", "metrics": {"acc": 0.5}}], tmp_path, "old")
    before = path.read_bytes()

    def fail(self, other):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(StfsebError, match="disk full"):
        write_report([{"task": "t", "method": "map", "metrics": {"acc": 0.6}}], tmp_path, "new")
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"report.html", "t.md", "t.tex"}
