"""`stfseb paper` as a person uses it: in processes of its own, stopped and started again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

import pytest

WORDS = ["paper", "table1", "--tasks", "mini", "--methods", "map,mcdropout", "--seeds", "2", "--epochs", "1"]


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
        (["paper", "table1", "--tasks", "minni"], "unknown task 'minni'"),
        (["paper", "table1", "--tasks", "mini", "--methods", "mapp"], "unknown method 'mapp'"),
        (["paper", "table1", "--retuned"], "--retuned belongs to dof"),
    ],
)
def test_wrong_words_end_in_one_line(words, message, tmp_path):
    done = stfseb(*words, "--out", tmp_path / "results")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


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


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_numbers(tmp_path):
    """kill -9 at random moments, until a start survives; then the table is that of an undisturbed command."""
    began = time.monotonic()
    whole = stfseb(*WORDS, "--out", tmp_path / "whole", "--quiet")
    assert whole.returncode == 0, whole.stderr
    seconds = time.monotonic() - began
    assert "4 runs made now" in whole.stdout
    rng = random.Random(os.environ.get("PYTEST_SEED", "0"))
    broken = tmp_path / "broken"
    for _ in range(2):
        child = subprocess.Popen(
            command(*WORDS, "--out", broken, "--quiet"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
        try:
            child.wait(rng.uniform(0.15, 0.7) * seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for record in broken.rglob("record.json"):
        json.loads(record.read_text())  # what is there is whole
    done = stfseb(*WORDS, "--out", broken, "--quiet")
    assert done.returncode == 0, done.stderr
    assert cells(broken) == cells(tmp_path / "whole")
    assert all(value is not None and len(runs) == 2 for value, _, runs in cells(broken).values())
    page = (broken / "report.html").read_text("utf-8")
    assert "The paper's tables" in page

    again = stfseb(*WORDS, "--out", broken, "--quiet")
    assert "0 runs made now, 4 were there already." in again.stdout
    assert "MC Dropout" in again.stdout
