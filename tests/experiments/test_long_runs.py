"""Lists of commands within a limit of time, and presets taken over from searches."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from repository_scripts import ROOT, script
from stfseb.data.task_files import built_in
from stfseb.errors import StfsebError
from stfseb.training.interrupts import Interrupted

TASKS = ROOT / "src" / "stfseb" / "data" / "tasks.yaml"


@pytest.fixture(scope="module")
def adopting():
    return script("adopt_presets")


@pytest.fixture
def long_runs(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    former = signal.getsignal(signal.SIGTERM)
    yield script("long_runs")
    signal.signal(signal.SIGTERM, former)


def write_search(folder, task, method, params, *, listed=None, asked=2, trials=2):
    """A search whose rule chose its trial 1."""
    name = f"{task}-{method}-extended-aaaa" + (f"-final{asked}of{listed}" if listed else "")
    plan = {"task": task, "method": method} | ({"shortlist": {"trials": listed}} if listed else {})
    rows = [{"index": k, "params": params if k == 1 else {"sigma": 9.0}} for k in range(trials)]
    found = {"format": 1, "study": name, "asked": asked, "plan": plan, "choices": {"ours": {"trial": 1}}}
    (folder / "searches" / name).mkdir(parents=True)
    (folder / "searches" / name / "search.json").write_text(json.dumps(found | {"trials": rows}))


def test_a_preset_is_put_in_its_line_and_nothing_else_changes(adopting, tmp_path):
    shutil.copy(TASKS, tmp_path / "tasks.yaml")
    write_search(tmp_path, "fmnist", "gfsvi", {"kernel": "rbf", "a_eps": 0.25, "gamma": 1e-9})
    write_search(tmp_path, "fmnist", "map", {"sigma": 0.7})
    said = adopting.adopt(tmp_path, "fmnist", file=tmp_path / "tasks.yaml")
    assert said == ["fmnist, gfsvi: {'kernel': 'rbf', 'a_eps': 0.25, 'gamma': 1e-09}", "fmnist, map: {'sigma': 0.7}"]
    before, after = TASKS.read_text().splitlines(), (tmp_path / "tasks.yaml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [old.split(":")[0].strip() for old, _ in changed] == ["gfsvi", "map"]
    expected = built_in()
    presets = {**expected["tasks"]["fmnist"]["presets"], "map": {"sigma": 0.7}}
    presets["gfsvi"] = {"kernel": "rbf", "a_eps": 0.25, "gamma": 1e-9}
    tasks = {**expected["tasks"], "fmnist": {**expected["tasks"]["fmnist"], "presets": presets}}
    assert yaml.safe_load((tmp_path / "tasks.yaml").read_text()) == {**expected, "tasks": tasks}


def test_settings_that_were_not_searched_and_comments_stay(adopting):
    text = adopting.with_preset(TASKS.read_text(), "mini", "gfsvi", {"a_eps": 0.5, "kernel_steps": 7})
    former = built_in()["tasks"]["mini"]["presets"]["gfsvi"]
    assert yaml.safe_load(text)["tasks"]["mini"]["presets"]["gfsvi"] == {**former, "a_eps": 0.5, "kernel_steps": 7}
    assert "# the full form costs seconds a step on a CPU" in text


def test_a_method_without_a_line_gets_one_in_its_own_task(adopting):
    text = TASKS.read_text()
    new = adopting.with_preset(text.replace("      map: {sigma: 1.5}\n", ""), "cifar10", "map", {"sigma": 4.0})
    assert yaml.safe_load(new)["tasks"]["cifar10"]["presets"]["map"] == {"sigma": 4.0}
    assert yaml.safe_load(new)["tasks"]["fmnist"] == built_in()["tasks"]["fmnist"]


def test_a_final_counts_before_its_search_and_the_number_of_trials_tells_two_apart(adopting, tmp_path):
    write_search(tmp_path, "fmnist", "map", {"sigma": 0.1})
    write_search(tmp_path, "fmnist", "map", {"sigma": 0.2}, listed=40)
    assert adopting.chosen(tmp_path, "fmnist", "map") == {"sigma": 0.2}
    write_search(tmp_path, "fmnist", "map", {"sigma": 0.3}, listed=300)
    with pytest.raises(StfsebError, match=r"2 searches .*final2of300.*--trials"):
        adopting.chosen(tmp_path, "fmnist", "map")
    assert adopting.chosen(tmp_path, "fmnist", "map", trials=300) == {"sigma": 0.3}
    assert adopting.chosen(tmp_path, "fmnist", "mfvi") is None


@pytest.mark.parametrize(
    ("task", "methods", "message"),
    [
        ("fmnist", ("map",), r"1 of 2 trials: finish it first"),
        ("mnist", ("map",), "no search of map on mnist"),
        ("pathmnist", ("mfvi",), "write the presets of 'pathmnist' a method a line"),
        ("nowhere", ("mfvi",), "no task 'nowhere'"),
    ],
)
def test_what_cannot_be_taken_over_is_said_and_nothing_is_written(adopting, tmp_path, task, methods, message):
    shutil.copy(TASKS, tmp_path / "tasks.yaml")
    write_search(tmp_path, "fmnist", "map", {"sigma": 0.1}, trials=1)
    for name in ("pathmnist", "nowhere"):
        write_search(tmp_path, name, "mfvi", {"sigma": 0.1})
    with pytest.raises(StfsebError, match=message):
        adopting.adopt(tmp_path, task, methods, file=tmp_path / "tasks.yaml")
    assert (tmp_path / "tasks.yaml").read_text() == TASKS.read_text()


def test_the_lists_of_the_repository_are_commands_that_exist(long_runs):
    import typer

    from stfseb.cli import app

    command = typer.main.get_command(app)
    for path in sorted((ROOT / "scripts" / "runs").glob("*.txt")):
        for line in long_runs.read_lines(path.read_text()):
            if line.words[0] == "adopt":
                assert line.words[1] in built_in()["tasks"]
            else:
                command.commands[line.words[0]].make_context("stfseb", [*line.words[1:], "--out", "x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("train mini", "line 1, 'train mini'"), ("# nothing", "no commands"), ("adopt", "line 1"), ("[5]", "line 1")],
)
def test_a_list_with_other_lines_is_refused(long_runs, text, message):
    with pytest.raises(SystemExit, match=message):
        long_runs.read_lines(text)


def log_of(folder):
    return [json.loads(line) for line in (folder / "long_runs.jsonl").read_text().splitlines()]


def test_a_line_that_fails_is_said_and_one_without_time_is_not_begun(long_runs, tmp_path, monkeypatch, capsys):
    begun = []

    def carry_out(line, out):
        begun.append(line.words[1])
        if line.words[1] == "b":
            raise StfsebError("no such thing")
        return "done"

    monkeypatch.setattr(long_runs, "carry_out", carry_out)
    lines = long_runs.read_lines("search a\nsearch b\n[1000] search c\n[5] search d")
    assert long_runs.run(lines, tmp_path / "out", 60) == 2
    assert begun == ["a", "b", "d"]
    ended = ["done", "failed: StfsebError: no such thing", "not begun", "done"]
    assert [entry["ended"] for entry in log_of(tmp_path / "out")] == ended
    assert "2 of 4 commands done; results in" in capsys.readouterr().out


def test_at_the_limit_the_command_under_way_is_stopped_and_no_other_begun(long_runs, tmp_path, monkeypatch):
    def carry_out(line, out):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.01)
        return "done"

    monkeypatch.setattr(long_runs, "carry_out", carry_out)
    began = time.monotonic()
    assert long_runs.run(long_runs.read_lines("search a\nsearch b"), tmp_path, 0.3) == 2
    assert time.monotonic() - began < 30
    first, second = log_of(tmp_path)
    assert first["ended"].startswith("stopped: stopped by SIGTERM between commands")
    assert second["ended"] == "not begun"
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)  # its handler, which the fixture takes back


@pytest.mark.slow
def test_search_adopt_and_runs_in_one_process_and_again(tmp_path):
    """On a copy of the package, whose tasks.yaml is edited."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "list.txt").write_text(
        "search mini --method map --space extended --trials 2 --epochs 1 --finalists 1\n"
        "adopt mini map\n"
        "paper table1,tempered --tasks mini --methods map --seeds 2 --epochs 1 --runs-only\n"
    )
    tasks = tmp_path / "src" / "stfseb" / "data" / "tasks.yaml"
    tasks.write_text(tasks.read_text().replace("training: {epochs: 15, train", "training: {epochs: 2, train", 1))
    words = [sys.executable, str(ROOT / "scripts" / "long_runs.py"), str(tmp_path / "list.txt")]
    words += ["--out", str(tmp_path / "out")]
    settings = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    said = []
    for _ in range(2):
        done = subprocess.run(words, capture_output=True, text=True, env=settings, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "3 of 3 commands done" in done.stdout
        said.append(done.stdout)
    (final,) = (tmp_path / "out" / "searches").glob("mini-map-*-final1of2")
    chosen = json.loads((final / "search.json").read_text())["trials"][0]["params"]
    assert yaml.safe_load(tasks.read_text())["tasks"]["mini"]["presets"]["map"] == chosen
    (record, _) = (tmp_path / "out" / "runs" / "mini").glob("map-*/record.json")
    assert json.loads(record.read_text())["job"]["settings"].items() >= chosen.items()
    assert (record.parent / "temperature.json").exists()
    assert not (tmp_path / "out" / "tables").exists()
    assert not (tmp_path / "out" / "report.html").exists()
    assert "2 runs made now, 0 were there already." in said[0]
    assert "0 runs made now, 2 were there already." in said[1]
