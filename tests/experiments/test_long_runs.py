"""Lists of commands within a limit of time, and presets taken over from searches."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import typer
import yaml

from repository_scripts import ROOT, script
from stfseb.cli import app
from stfseb.data.task_files import built_in
from stfseb.errors import StfsebError
from stfseb.experiments.paper.plan import Asked, make_plan
from stfseb.experiments.search.plan import make_plan as search_plan
from stfseb.files import alone_in

TASKS = ROOT / "src" / "stfseb" / "data" / "tasks.yaml"
PRESETS = {name: task.get("presets", {}) for name, task in built_in()["tasks"].items()}


@pytest.fixture(scope="module")
def adopting():
    return script("adopt_presets")


@pytest.fixture
def long_runs(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("long_runs")


def write_search(folder, task, method, params, *, asked=2, trials=2, chosen=1):
    """A search whose rule chose its trial 1; return its folder."""
    rows = [{"index": k, "params": params if k == 1 else {"sigma": 9.0}} for k in range(trials)]
    choices = {"ours": {"trial": chosen, "why": "no trial was trained to its end"}}
    base = {k: v for k, v in PRESETS.get(task, {}).get(method, {}).items() if k == "context_copies"}
    plan, name = {"task": task, "method": method, "base": base}, f"{task}-{method}-extended"
    found = {"format": 1, "study": name, "asked": asked, "plan": plan, "choices": choices, "trials": rows}
    (folder / name).mkdir(parents=True)
    (folder / name / "search.json").write_text(json.dumps(found))
    return folder / name


def test_a_preset_is_put_in_its_line_and_nothing_else_changes(adopting, tmp_path):
    shutil.copy(TASKS, tmp_path / "tasks.yaml")
    studies = [
        write_search(tmp_path, "fmnist", "gfsvi", {"kernel": "rbf", "a_eps": 0.25, "gamma": 1e-9}),
        write_search(tmp_path, "fmnist", "map", {"sigma": 0.7}),
    ]
    had = {name: PRESETS["fmnist"]["gfsvi"][name] for name in ("kernel", "a_eps", "gamma")}
    now = "{'kernel': 'rbf', 'a_eps': 0.25, 'gamma': 1e-09}"
    assert adopting.adopt(studies, file=tmp_path / "tasks.yaml") == [
        f"fmnist, gfsvi: {now}, before {had} (fmnist-gfsvi-extended, by ours)",
        f"fmnist, map: {{'sigma': 0.7}}, before {PRESETS['fmnist']['map']} (fmnist-map-extended, by ours)",
        f"written: {tmp_path / 'tasks.yaml'}; runs at these settings and 'make results' come next",
    ]
    before, after = TASKS.read_text().splitlines(), (tmp_path / "tasks.yaml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [old.split(":")[0].strip() for old, _ in changed] == ["gfsvi", "map"]
    expected = built_in()
    presets = {**expected["tasks"]["fmnist"]["presets"], "map": {"sigma": 0.7}}
    presets["gfsvi"] = {"kernel": "rbf", "a_eps": 0.25, "gamma": 1e-9, "context_copies": 4}  # not searched: as it was
    tasks = {**expected["tasks"], "fmnist": {**expected["tasks"]["fmnist"], "presets": presets}}
    assert yaml.safe_load((tmp_path / "tasks.yaml").read_text()) == {**expected, "tasks": tasks}


def test_a_rule_can_be_named(adopting, tmp_path):
    shutil.copy(TASKS, tmp_path / "tasks.yaml")
    study = write_search(tmp_path, "fmnist", "map", {"sigma": 0.7})
    found = json.loads((study / "search.json").read_text())
    found["choices"]["level"] = {"trial": 0, "why": "lowest NLL"}
    (study / "search.json").write_text(json.dumps(found))
    for was in (f"before {PRESETS['fmnist']['map']}", "as it was"):
        first, _ = adopting.adopt([study], tmp_path / "tasks.yaml", "level")
        assert first == f"fmnist, map: {{'sigma': 9.0}}, {was} (fmnist-map-extended, by level)"
    assert yaml.safe_load((tmp_path / "tasks.yaml").read_text())["tasks"]["fmnist"]["presets"]["map"] == {"sigma": 9.0}
    with pytest.raises(StfsebError, match="has no choice by 'paper': it was made under an older temperature"):
        adopting.adopt([study], tmp_path / "tasks.yaml", "paper")
    found["plan"]["temperature"] = "average"
    (study / "search.json").write_text(json.dumps(found))
    with pytest.raises(StfsebError, match="has no choice by 'paper': give its command again"):
        adopting.adopt([study], tmp_path / "tasks.yaml", "paper")


def test_who_adopts_at_the_same_time_waits(adopting, tmp_path):
    shutil.copy(TASKS, tmp_path / "tasks.yaml")
    study = write_search(tmp_path, "fmnist", "map", {"sigma": 0.7})
    helper = threading.Thread(target=adopting.adopt, args=([study], tmp_path / "tasks.yaml"))
    with alone_in(tmp_path):
        helper.start()
        helper.join(0.3)
        assert helper.is_alive()
        assert (tmp_path / "tasks.yaml").read_text() == TASKS.read_text()
    helper.join()
    assert "map: {sigma: 0.7" in (tmp_path / "tasks.yaml").read_text()


def test_two_searches_of_one_method_are_refused(adopting, tmp_path):
    shutil.copy(TASKS, tmp_path / "tasks.yaml")
    one = write_search(tmp_path / "a", "fmnist", "map", {"sigma": 0.7})
    other = write_search(tmp_path / "b", "fmnist", "map", {"sigma": 0.7})
    found = json.loads((other / "search.json").read_text())
    (other / "search.json").write_text(json.dumps({**found, "study": "the-other"}))
    with pytest.raises(StfsebError, match="the-other and fmnist-map-extended are of one method on one task"):
        adopting.adopt([one, other], file=tmp_path / "tasks.yaml")
    assert (tmp_path / "tasks.yaml").read_text() == TASKS.read_text()


def test_settings_that_were_not_searched_and_comments_stay(adopting):
    text = adopting.with_preset(TASKS.read_text(), "mini", "gfsvi", {"a_eps": math.inf, "kernel_steps": 7})
    former = built_in()["tasks"]["mini"]["presets"]["gfsvi"]
    assert yaml.safe_load(text)["tasks"]["mini"]["presets"]["gfsvi"] == {
        **former,
        "a_eps": math.inf,
        "kernel_steps": 7,
    }
    assert "# the full form costs seconds a step on a CPU" in text


def test_a_method_without_a_line_gets_one_in_its_own_task(adopting):
    text = TASKS.read_text()
    new = adopting.with_preset(text.replace("      map: {sigma: 1.5}\n", ""), "cifar10", "map", {"sigma": 4.0})
    assert yaml.safe_load(new)["tasks"]["cifar10"]["presets"]["map"] == {"sigma": 4.0}
    assert yaml.safe_load(new)["tasks"]["fmnist"] == built_in()["tasks"]["fmnist"]


@pytest.mark.parametrize(
    ("task", "how", "message"),
    [
        ("fmnist", {"trials": 1}, "1 of 2 trials: finish it first"),
        ("fmnist", {"chosen": None}, "has chosen nothing: no trial was trained to its end"),
        ("organamnist", {}, "write the presets of 'organamnist' a method a line"),
        ("nowhere", {}, "no task 'nowhere'"),
    ],
)
def test_what_cannot_be_taken_over_is_said_and_nothing_is_written(adopting, tmp_path, task, how, message):
    shutil.copy(TASKS, tmp_path / "tasks.yaml")
    studies = [write_search(tmp_path, "mnist", "map", {"sigma": 0.7}), write_search(tmp_path, task, "mfvi", {}, **how)]
    with pytest.raises(StfsebError, match=message):
        adopting.adopt(studies, file=tmp_path / "tasks.yaml")
    assert (tmp_path / "tasks.yaml").read_text() == TASKS.read_text()


@pytest.mark.parametrize(("study", "had", "has"), [("37a8b37f", 0, 4), ("c70fbbe1", 4, 0)])
def test_a_search_with_other_copies_of_the_context_than_the_preset_is_not_taken_over(
    adopting, tmp_path, study, had, has
):
    text = TASKS.read_text() if has else TASKS.read_text().replace(", context_copies: 4", "")
    (tmp_path / "tasks.yaml").write_text(text)
    name = f"fmnist-stfseb-extended-{study}"
    message = f"{name} had context_copies: {had}, the preset of 'stfseb' in 'fmnist' has {has}: make them equal"
    with pytest.raises(StfsebError, match=message):
        adopting.adopt([ROOT / "results" / "searches" / name], file=tmp_path / "tasks.yaml")
    assert (tmp_path / "tasks.yaml").read_text() == text


def test_searches_of_a_list_are_known_by_the_settings_that_they_are_given(long_runs):
    words = ("search", "fmnist", "--space", "extended", "--epochs", "10")
    for more, name in (((), "c70fbbe1"), (("--set", "context_copies=0"), "37a8b37f")):
        assert long_runs.studies_of([(*words, *more)], "fmnist") == [f"fmnist-stfseb-extended-{name}"]


def test_the_lists_of_the_repository_are_commands_that_exist(long_runs):
    command = typer.main.get_command(app)
    paths = sorted((ROOT / "scripts" / "runs").rglob("*.txt"))
    assert len(paths) > 10
    for path in paths:
        lines = long_runs.read_lines(path.read_text())
        for number, line in enumerate(lines):
            if line.words[0] == "adopt":
                names = long_runs.studies_of([one.words for one in lines[:number]], line.words[1])
                assert len(names) == {"mnist": 6, "fmnist": 6, "cifar10": 6, "level": 3}.get(path.stem, 1)
                assert all(name.endswith("-final5of40") for name in names)
                continue
            given = command.commands[line.words[0]].make_context("stfseb", [*line.words[1:], "--out", "x"]).params
            if line.words[0] == "paper":
                for what in given["what"].split(","):
                    asked = Asked(tuple(given["tasks"].split(",")), seeds=(0,), context=given["context"])
                    assert make_plan(what, asked).all_jobs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train mini", "line 1, 'train mini': begin with search, paper or adopt"),
        ("# nothing", "no commands"),
        ("[5]", "line 1"),
        ("search mini\nsearch 'mini", "line 2, .*No closing quotation"),
        ("search mini\nadopt fmnist", "line 2, .*a task that is searched above it"),
        ("search mini\nadopt mini lowest", r"line 2, .*at most a rule \(paper, ours, level\)"),
        ("search mini\nadopt mini ours level", "line 2, .*at most a rule"),
        ("adopt mini\nsearch mini", "line 1, .*a task that is searched above it"),
    ],
)
def test_a_list_with_other_lines_is_refused(long_runs, text, message, tmp_path, monkeypatch, capsys):
    with pytest.raises(StfsebError, match=message):
        long_runs.read_lines(text)
    (tmp_path / "list.txt").write_text(text)
    monkeypatch.setattr(sys, "argv", ["long_runs", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")])
    assert long_runs.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'list.txt'}: ")


def test_what_is_adopted_is_the_final_of_the_search_in_the_list(long_runs):
    lines = ["search mini --method map --space extended", "search mini -m map --trials 4 --epochs 1 --finalists 2"]
    lines += ["search mnist -m mfvi --trials 3"]
    words = [tuple(line.split()) for line in lines]
    short = search_plan("mini", "map", "paper", training={"epochs": 1}).name
    assert long_runs.studies_of(words, "mini") == [f"{short}-final2of4"]
    assert long_runs.studies_of(words, "mnist") == [search_plan("mnist", "mfvi", "paper").name]
    assert long_runs.studies_of(words[:1], "mini") == [search_plan("mini", "map", "extended").name]


def log_of(folder):
    return [json.loads(line) for line in (folder / "long_runs.jsonl").read_text().splitlines()]


LINES = "search mini -m map\nsearch mini -m mfvi\n[1000] search mini -m fseb\n[5] search mini -m gfsvi"


def carried_out(long_runs, monkeypatch, **ends):
    """Replace commands by what their methods do here; return those that were begun."""
    begun = []

    def carry_out(words, before, out):
        begun.append(words[-1])
        return ends.get(words[-1], lambda: "done")()

    monkeypatch.setattr(long_runs, "carry_out", carry_out)
    return begun


def fail():
    raise StfsebError("no such thing")


def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(30)


def test_a_line_that_fails_is_said_and_one_without_time_is_not_begun(long_runs, tmp_path, monkeypatch, capsys):
    begun = carried_out(long_runs, monkeypatch, mfvi=fail)
    assert long_runs.run(long_runs.read_lines(LINES), tmp_path / "out", 600) == 2
    assert begun == ["map", "mfvi", "gfsvi"]
    ended = ["done", "error: no such thing", "not begun", "done"]
    assert [entry["ended"] for entry in log_of(tmp_path / "out")] == ended
    assert "2 of 4 commands done; results in" in capsys.readouterr().out


@pytest.mark.parametrize("end", [ask, lambda: ask(signal.SIGINT), lambda: "exit 130", lambda: "exit 143"])
def test_who_asks_to_stop_stops_the_list_although_time_is_left(long_runs, tmp_path, monkeypatch, end):
    begun = carried_out(long_runs, monkeypatch, mfvi=end)
    assert long_runs.run(long_runs.read_lines(LINES), tmp_path, 10_000) == 3
    assert begun == ["map", "mfvi"]
    first, second, *others = [entry["ended"] for entry in log_of(tmp_path)]
    assert first == "done"
    assert second in ("stopped", "exit 130", "exit 143")
    assert others == ["not begun", "not begun"]


def test_a_signal_between_commands_is_noted_and_nothing_is_lost(long_runs, tmp_path, monkeypatch):
    begun, real = carried_out(long_runs, monkeypatch), long_runs._log

    def log(out, entry):
        os.kill(os.getpid(), signal.SIGTERM)
        real(out, entry)

    monkeypatch.setattr(long_runs, "_log", log)
    assert long_runs.run(long_runs.read_lines(LINES), tmp_path, 10_000) == 3
    assert begun == ["map"]
    assert [entry["ended"] for entry in log_of(tmp_path)] == ["done", *["not begun"] * 3]


def test_at_the_limit_a_command_that_does_not_hear_is_asked_again(long_runs, tmp_path, monkeypatch):
    def deaf():
        asked = 0
        while asked < 3:
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                asked += 1
        return "done"

    begun = carried_out(long_runs, monkeypatch, map=deaf)
    monkeypatch.setattr(long_runs, "AGAIN", 0.05)
    began = time.monotonic()
    assert long_runs.run(long_runs.read_lines(LINES), tmp_path, began - long_runs.BEGAN + 0.3) == 3
    assert time.monotonic() - began < 25
    assert begun == ["map"]
    assert [entry["ended"] for entry in log_of(tmp_path)] == ["done", *["not begun"] * 3]


def test_afterwards_signals_are_what_they_were_and_nobody_asks(long_runs, tmp_path, monkeypatch):
    carried_out(long_runs, monkeypatch)
    before, threads = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)], threading.active_count()
    assert long_runs.run(long_runs.read_lines("search mini"), tmp_path, 10_000) == 0
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert threading.active_count() == threads


def test_after_a_failed_adopt_nothing_is_begun(long_runs, tmp_path, monkeypatch):
    begun = []
    real = long_runs.carry_out

    def carry_out(words, before, out):
        begun.append(words[0])
        return "done" if words[0] != "adopt" else real(words, before, out)

    monkeypatch.setattr(long_runs, "carry_out", carry_out)
    lines = long_runs.read_lines("search mini -m map\nadopt mini\npaper table1 --tasks mini")
    assert long_runs.run(lines, tmp_path, 10_000) == 2
    assert begun == ["search", "adopt"]
    _, second, third = [entry["ended"] for entry in log_of(tmp_path)]
    assert second.startswith("error: ")
    assert third == "not begun: adopt failed"


def test_after_an_adopt_for_which_there_was_no_time_nothing_is_begun(long_runs, tmp_path, monkeypatch):
    begun = carried_out(long_runs, monkeypatch)
    lines = long_runs.read_lines("search mini -m map\n[9999] adopt mini\npaper table1 --tasks mini")
    assert long_runs.run(lines, tmp_path, 1000) == 2
    assert len(begun) == 1
    said = [entry["ended"] for entry in log_of(tmp_path)]
    assert said == ["done", "not begun", "not begun: nothing was adopted"]


def test_a_command_that_ends_with_a_code_is_not_done(long_runs, tmp_path, capsys):
    assert long_runs.run(long_runs.read_lines("search mini --trials 0\nsearch minni"), tmp_path, 10_000) == 2
    first, second = [entry["ended"] for entry in log_of(tmp_path)]
    assert first == "error: --trials 0: give at least 1"
    assert second.startswith("error: unknown task 'minni'")


def test_a_log_that_cannot_be_written_ends_nothing(long_runs, tmp_path, monkeypatch, capsys):
    begun = carried_out(long_runs, monkeypatch)
    (tmp_path / "long_runs.jsonl").mkdir()
    assert long_runs.run(long_runs.read_lines("search mini\nsearch mini -m map"), tmp_path, 10_000) == 0
    assert begun == ["mini", "map"]
    assert capsys.readouterr().out.count("long_runs.jsonl cannot be written (Is a directory)") == 2


@pytest.mark.slow
def test_search_adopt_and_runs_in_one_process_and_again(tmp_path):
    """On a copy of the package, whose tasks.yaml is edited."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "list.txt").write_text(
        "search mini --method map --space extended --trials 2 --epochs 1 --finalists 1\n"
        "adopt mini level\n"
        "paper table1,tempered --tasks mini --methods map --seeds 2 --epochs 1 --runs-only\n"
        "search mini --method map --space extended --trials 3 --epochs 1 --finalists 1\n"
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
        assert "4 of 4 commands done" in done.stdout
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
