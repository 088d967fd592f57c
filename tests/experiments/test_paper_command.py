"""`stfseb paper` as a person uses it: in processes of its own, stopped and started again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from stfseb.methods.saving import load


def command(*words):
    return [sys.executable, "-m", "stfseb.cli", *map(str, words)]


def environment():
    return {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def stfseb(*words):
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment(), timeout=1500, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["paper", "table9"], "unknown table or figure 'table9'"),
        (["paper", "table1", "--seeds", "few"], "--seeds few: give how many (10), or which"),
        (["paper", "table1", "--seeds", "0"], "--seeds 0: give how many (10), or which"),
        (["paper", "table1", "--seeds", "0"], "(0,3,5; seed 0 alone is 0,)"),
        (["paper", "table1", "--tasks", "minni"], "unknown task 'minni'"),
        (["paper", "table1", "--tasks", "mini", "--methods", "mapp"], "unknown method 'mapp'"),
        (["paper", "table1,table9", "--tasks", "mini"], "unknown table or figure 'table9'"),
        (["paper", "table1", "--retuned"], "--retuned belongs to dof"),
        (["paper", "table1", "--runs-only", "--report-only"], "give one of the two"),
        (["paper", "table1,dof", "--tasks", "mini", "--methods", "map"], "--methods map: dof has its own rows"),
        (["paper", "dof", "--tasks", "mini", "--methods", "map"], "--methods map: dof has its own rows"),
        (
            ["paper", "beyond", "--tasks", "mini", "--rows", "ensembel"],
            "unknown row 'ensembel': did you mean 'ensemble'",
        ),
        (["paper", "beyond,dof", "--tasks", "mini", "--rows", "ensemble"], "dof has none of them; leave dof out"),
        (["paper", "table1", "--tasks", "mini", "--rows", "map"], "--rows map: table1 has no rows to choose from"),
        (["paper", "dof", "--retuned", "--tasks", "mini", "--rows", "3,4"], "unknown row '4': known are 10, 2.1, 20"),
        (["paper", "table1,dof", "--retuned", "--tasks", "mini", "--rows", "3"], "--rows 3: table1 has no rows"),
        (
            ["paper", "all", "--methods", "map", "--retuned"],
            "--retuned changes ST-FS-EB, which --methods map leaves out",
        ),
        (
            ["paper", "table1", "--tasks", "mini", "--device", "tpu"],
            "device 'tpu' cannot be used: give cpu, cuda or mps",
        ),
        (["paper", "table1", "--tasks", "mini", "--device", "cuda:77"], "device 'cuda:77' "),
    ],
)
def test_wrong_words_end_in_one_line(words, message, tmp_path):
    done = stfseb(*words, "--out", tmp_path / "results")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_runs_only_without_images_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("STFSEB_DATA", str(tmp_path))
    done = stfseb(
        "paper", "table1", "--tasks", "mnist", "--methods", "map", "--seeds", "1", "--runs-only", "--out", tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("stfseb: error: no run could be made: ")
    assert "mnist train is not on disk" in done.stderr


def test_all_without_the_method_itself_leaves_out_what_changes_it(tmp_path):
    done = stfseb("paper", "all", "--tasks", "mini", "--methods", "map", "--report-only", "--out", tmp_path / "results")
    assert "left out, as they change ST-FS-EB alone: dof, context-number, context-source" in done.stderr
    assert not {"dof", "context-number"} & {path.stem for path in (tmp_path / "results").rglob("*.json")}


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", (0, 1, 2)), ("0,3,5", (0, 3, 5)), ("7,", (7,)), ("1,1", (1,)), ("1", (0,))]
)
def test_seeds_are_a_number_or_a_list(text, seeds):
    from stfseb.commands_paper import _seeds

    assert _seeds(text) == seeds


def cells(results):
    """The numbers of the table, with the runs behind them."""
    table = json.loads((results / "tables" / "table1.json").read_text())
    return {
        (row["Metric"], row["Task"], column): (c["value"], c["std"], c["runs"])
        for row in table["rows"]
        for column, c in row["cells"].items()
    }


def check_whole(results):
    """Whatever has its final name is complete at any moment, and no run was finished twice."""
    for record in results.rglob("record.json"):
        assert json.loads(record.read_text())["metrics"]
        load(record.parent / "model")
    log = results / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
    finished = [line["run"] for line in lines if line.get("event") == "done"]
    assert len(finished) == len(set(finished))


@pytest.mark.slow
def test_killed_twenty_times_it_ends_with_the_same_numbers(nursery, tmp_path):
    """kill -9 at twenty random moments, job after job; each ends with the table of an undisturbed one."""
    words = ["paper", "table1", "--tasks", "mini", "--methods", "map", "--seeds", "2", "--epochs", "1"]
    words += ["--quiet", "--device", "cpu"]
    code, seconds = nursery.run(*words, "--out", tmp_path / "whole")
    assert code == 0, nursery.log.read_text()
    expected = cells(tmp_path / "whole")
    assert all(value is not None and len(runs) == 2 for value, _, runs in expected.values())
    moments = random.Random(20261115)
    kills = jobs = 0
    while kills < 20:
        jobs += 1
        results = tmp_path / f"job{jobs}"
        for _ in range(5):  # what is left of a job grows less: later kills fall into its last runs, tables and page
            code, _ = nursery.run(*words, "--out", results, kill_after=moments.uniform(0, 0.6 * seconds))
            assert code in (-9, 0), nursery.log.read_text()
            kills += code == -9
            check_whole(results)
        code, _ = nursery.run(*words, "--out", results)
        assert code == 0, nursery.log.read_text()
        assert cells(results) == expected
        check_whole(results)
        assert not list(results.rglob("*.part"))
    assert "The paper's tables" in (results / "report.html").read_text("utf-8")
    again = stfseb(*words, "--out", results)
    assert "0 runs made now, 2 were there already." in again.stdout
    assert "MAP" in again.stdout
    print(f"{kills} kills in {jobs} jobs; an undisturbed one takes {seconds:.1f} s")


@pytest.mark.slow
def test_what_a_killed_command_left_unfinished_is_removed_by_the_next(nursery, tmp_path):
    """Every file that a command writes may be the one at which it was killed: of runs, tables, figures, the page."""
    words = ["paper", "table1", "--tasks", "mini", "--methods", "map", "--seeds", "1", "--epochs", "1"]
    words += ["--quiet", "--device", "cpu", "--out", tmp_path / "results"]
    file, places = 1, set()
    while nursery.run(*words, kill_at_file=file)[0] == -9:
        left = list(tmp_path.rglob("*.part"))
        assert left, f"killed at file {file}, which has left nothing"
        places |= {path.parent.name for path in left}
        file += 3 if file < 8 else 17
        code, _ = nursery.run(*words, *(["--report-only"] if (tmp_path / "results" / "tables").exists() else []))
        assert code == 0, nursery.log.read_text()
        assert not list(tmp_path.rglob("*.part")), f"after a kill at file {file}"
    assert {"results", "tables", "plots"} <= places
