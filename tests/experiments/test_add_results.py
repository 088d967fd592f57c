"""Adding runs of another folder: what is copied, what is left, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from repository_scripts import script
from stfseb.errors import StfsebError
from stfseb.experiments.jobs import make_job
from stfseb.experiments.search.outcome import write_search


@pytest.fixture(scope="module")
def adding():
    return script("add_results")


def write_run(results, seed, value=0.5, images=True, parts=("rotation",), **settings):
    job = make_job("mini", "stfseb", seed, settings=settings)
    folder = job.folder(results)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.safetensors").write_bytes(b"large")
    for part in parts:
        (folder / f"{part}.json").write_text(json.dumps({"sets": {"0": value}}))
    if images:
        (folder / "images.json").write_text("{}")
    record = {"format": 1, "id": job.name, "task": "mini", "method": "stfseb", "seed": seed, "job": job.identity}
    (folder / "record.json").write_text(json.dumps({**record, "metrics": {"acc": value}}))
    return folder


def files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_records_and_parts_come_models_stay_and_one_gallery_a_cell(adding, tmp_path):
    away, here = tmp_path / "away", tmp_path / "here"
    runs = [write_run(away, seed) for seed in (1, 2)] + [write_run(away, 2, tau2=7.0)]
    assert adding.add(away, here).startswith("3 of 3 runs and searches are new")
    base = here / "runs" / "mini"
    assert files(base / runs[0].name) == ["images.json", "record.json", "rotation.json"]
    assert files(base / runs[1].name) == ["record.json", "rotation.json"]
    assert files(base / runs[2].name) == ["images.json", "record.json", "rotation.json"]  # another cell
    before = {p: (here / p).read_bytes() for p in files(here)}
    assert adding.add(away, here).startswith("0 of 3")
    assert {p: (here / p).read_bytes() for p in files(here)} == before
    write_run(tmp_path / "later", 0)  # a lower seed comes: the gallery is its
    adding.add(tmp_path / "later", here)
    assert not (base / runs[0].name / "images.json").exists()
    assert (base / make_job("mini", "stfseb", 0).name / "images.json").exists()
    assert not list(here.rglob(".*"))


@pytest.mark.parametrize(("was", "refused"), [(0, False), (None, False), (4, True)])
def test_a_run_with_other_settings_than_planned_is_refused(adding, tmp_path, was, refused):
    file = write_run(tmp_path / "a", 0) / "record.json"
    record = json.loads(file.read_text())
    had = {**record["job"]["settings"], **({} if was is None else {"context_copies": was}), "samples": 3}
    file.write_text(json.dumps({**record, "settings": had}))
    if not refused:
        assert adding.add(tmp_path / "a", tmp_path / "here").startswith("1 of 1")
        return
    with pytest.raises(StfsebError, match="planned with context_copies=0 and run with context_copies=4"):
        adding.add(tmp_path / "a", tmp_path / "here")
    assert not (tmp_path / "here" / "runs").exists()


def test_a_run_with_another_dof_than_planned_is_refused(adding, tmp_path):
    file = write_run(tmp_path / "a", 0) / "record.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "settings": {**record["job"]["settings"], "dof": "inf"}}))
    with pytest.raises(StfsebError, match=r"planned with dof=5\.0 and run with dof=inf"):
        adding.add(tmp_path / "a", tmp_path / "here")


def test_a_run_that_was_trained_otherwise_than_planned_is_refused(adding, tmp_path):
    file = write_run(tmp_path / "a", 0) / "record.json"
    record = json.loads(file.read_text())
    planned = record["job"]["training"]
    file.write_text(json.dumps({**record, "training": {**planned, "lr": 0.1}}))
    with pytest.raises(StfsebError, match=rf"planned with lr={planned['lr']} and run with lr=0\.1"):
        adding.add(tmp_path / "a", tmp_path / "here")


def test_parts_measured_later_are_added(adding, tmp_path):
    write_run(tmp_path / "a", 0, parts=())
    adding.add(tmp_path / "a", tmp_path / "here")
    run = write_run(tmp_path / "b", 0, parts=("rotation", "temperature"))
    adding.add(tmp_path / "b", tmp_path / "here")
    found = files(tmp_path / "here" / "runs" / "mini" / run.name)
    assert found == ["images.json", "record.json", "rotation.json", "temperature.json"]


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"seconds": 9.0, "code": {"commit": "b"}, "started": 2}, True),
        ({"history": [{"epoch": 1, "data": 0.25, "seconds": 7.0}]}, True),
        ({"history": [{"epoch": 1, "data": 0.26, "seconds": 1.0}]}, False),
        ({"metrics": {"acc": 0.5000001}}, False),
        ({"best_epoch": 2}, False),
        ({"data": {"train": "other"}}, False),
    ],
)
def test_the_same_run_made_again_lends_its_parts_where_it_came_out_the_same(adding, tmp_path, changes, added):
    runs = {}
    for name, more, parts in (("a", {}, ()), ("b", changes, ("temperature",))):
        file = write_run(tmp_path / name, 0, parts=parts) / "record.json"
        first = {"seconds": 3.0, "code": {"commit": "a"}, "history": [{"epoch": 1, "data": 0.25, "seconds": 1.0}]}
        file.write_text(json.dumps({**json.loads(file.read_text()), **first, **more}))
        runs[name] = file.parent
    adding.add(tmp_path / "a", tmp_path / "here")
    if not added:
        with pytest.raises(StfsebError, match="other contents"):
            adding.add(tmp_path / "b", tmp_path / "here")
        return
    adding.add(tmp_path / "b", tmp_path / "here")
    there = tmp_path / "here" / "runs" / "mini" / runs["a"].name
    assert "temperature.json" in files(there)
    assert (there / "record.json").read_bytes() == (runs["a"] / "record.json").read_bytes()


def test_another_record_of_the_same_name_is_refused_before_anything_is_copied(adding, tmp_path):
    here = tmp_path / "here"
    write_run(tmp_path / "a", 1)
    adding.add(tmp_path / "a", here)
    new, other = write_run(tmp_path / "b", 0), write_run(tmp_path / "b", 1, value=0.6)
    with pytest.raises(StfsebError, match=r"1 runs or searches .* other contents .*nothing was copied"):
        adding.add(tmp_path / "b", here)
    assert not (here / "runs" / "mini" / new.name).exists()
    assert adding.add(tmp_path / "b", here, keep=True).startswith("1 of 1")
    kept = json.loads((here / "runs" / "mini" / other.name / "record.json").read_text())
    assert kept["metrics"] == {"acc": 0.5}


def test_one_run_twice_below_the_source_with_two_contents_is_refused(adding, tmp_path):
    write_run(tmp_path / "from" / "piece1", 0)
    write_run(tmp_path / "from" / "piece2", 0, value=0.7)
    with pytest.raises(StfsebError, match="nothing was copied"):
        adding.add(tmp_path / "from", tmp_path / "here")


def test_renamed_or_untraceable_runs_are_refused(adding, tmp_path):
    run = write_run(tmp_path / "a", 0)
    run.rename(run.with_name("stfseb-seed0-best"))
    with pytest.raises(StfsebError, match="do not rename runs"):
        adding.add(tmp_path / "a", tmp_path / "here")
    run = write_run(tmp_path / "b", 0)
    record = json.loads((run / "record.json").read_text())
    record["job"]["settings"]["tau2"] = 1e6  # the numbers would be shown as another setting's
    (run / "record.json").write_text(json.dumps(record))
    with pytest.raises(StfsebError, match="by its contents it is"):
        adding.add(tmp_path / "b", tmp_path / "here")
    with pytest.raises(StfsebError, match="holds no"):
        adding.add(tmp_path / "empty", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_search_may_grow_and_may_not_lose_trials(adding, tmp_path):
    def search(folder, count):
        trials = [{"index": i, "nll": 0.1 * i} for i in range(count)]
        plan = {"method": "map", "task": "mini"}
        found = {"study": "s", "asked": count, "plan": plan, "choices": {}, "trials": trials}
        write_search(folder / "searches" / "s", found)

    for name, count in (("four", 4), ("six", 6)):
        search(tmp_path / name, count)
    here = tmp_path / "here"
    adding.add(tmp_path / "four", here)
    adding.add(tmp_path / "six", here)
    assert len(json.loads((here / "searches" / "s" / "search.json").read_text())["trials"]) == 6
    with pytest.raises(StfsebError, match="other contents"):
        adding.add(tmp_path / "four", here)


def test_two_searches_of_one_name_below_the_source(adding, tmp_path):
    def search(folder, nlls):
        trials = [{"index": i, "nll": nll} for i, nll in enumerate(nlls)]
        plan = {"method": "map", "task": "mini"}
        found = {"study": "s", "asked": len(trials), "plan": plan, "choices": {}, "trials": trials}
        write_search(tmp_path / folder / "searches" / "s", found)

    search("from/piece1", [0.1, 0.2])
    search("from/piece2", [0.1, 0.2, 0.3])
    adding.add(tmp_path / "from", tmp_path / "here")
    assert len(json.loads((tmp_path / "here" / "searches" / "s" / "search.json").read_text())["trials"]) == 3
    search("from/piece3", [0.1, 0.7])
    with pytest.raises(StfsebError, match="nothing was copied"):
        adding.add(tmp_path / "from", tmp_path / "other")


def test_half_written_runs_are_left_alone_and_damaged_ones_refused(adding, tmp_path):
    away, here = tmp_path / "away", tmp_path / "here"
    under_way = write_run(away, 0)
    (under_way / "record.json").unlink()  # galleries and parts come before the record
    unfinished = write_run(here, 0)
    (unfinished / "record.json").unlink()
    write_run(away, 1)
    assert adding.add(away, here).startswith("1 of 1")
    assert (unfinished / "images.json").exists()
    broken = write_run(away, 2)
    (broken / "rotation.json").write_text('{"sets": ')
    with pytest.raises(StfsebError, match="cannot be read"):
        adding.add(away, here)
    assert not (here / "runs" / "mini" / broken.name).exists()


@pytest.mark.parametrize("content", ["[]", "{}", '{"job": null}', '{"job": {"task": "mini"}, "id": "x"}'])
def test_what_is_no_record_of_a_job_is_refused_in_one_line(adding, tmp_path, content):
    folder = tmp_path / "away" / "some"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(content)
    with pytest.raises(StfsebError, match="it cannot be traced"):
        adding.add(tmp_path / "away", tmp_path / "here")


def test_a_copy_that_is_killed_leaves_nothing_that_is_read_as_a_run(adding, tmp_path, monkeypatch):
    write_run(tmp_path / "away", 0)
    seen = []
    rename = Path.rename

    def look(path, target):
        seen.extend(files(tmp_path / "here" / "runs"))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look)
    adding.add(tmp_path / "away", tmp_path / "here")
    assert seen == []
    assert len(list((tmp_path / "here" / "runs").rglob("record.json"))) == 1


def test_as_a_command(adding, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "a", 0)
    monkeypatch.setattr(sys, "argv", ["add_results", str(tmp_path / "a"), "--into", str(tmp_path / "here")])
    assert adding.main() == 0
    assert "make results" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["add_results", str(tmp_path / "nothing")])
    assert adding.main() == 1
    assert capsys.readouterr().err.startswith("error: ")
