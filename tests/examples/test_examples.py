"""Every example runs as its reader would run it, and learns something."""

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = ("plain_loop", "lightning_loop", "accelerate_loop", "ddp_loop")


def run(name):
    found = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=600, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def run_processes(name):
    """Run an example whose processes meet over gloo, of which the meeting and the ending have been seen to hang.

    A hang that comes after the result is of no account, and one without a result is met anew; errors are not.
    """
    settings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, EXAMPLES / f"{name}.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=settings,
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-2000:]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        if "validation NLL" in said:
            return said
    raise AssertionError("the processes hung three times")


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loops_learn(name):
    said = run_processes(name) if name == "ddp_loop" else run(name)
    nll = float(re.search(r"validation NLL ([\d.]+)", said)[1])
    assert nll < 1.5 < math.log(10)


@pytest.mark.slow
def test_fine_tuning_trains_few_parameters():
    found = re.findall(r"(frozen|low-rank) backbone: ([\d,]+) parameters, accuracy ([\d.]+)", run("fine_tuning"))
    assert [kind for kind, *_ in found] == ["frozen", "low-rank"]
    assert [count for _, count, _ in found] == ["1,290", f"{1290 + 4 * (3136 + 128):,}"]
    assert all(float(accuracy) > 50 for *_, accuracy in found)


@pytest.mark.slow
def test_regression_is_better_than_the_mean_and_its_intervals_hold():
    found = re.search(r"RMSE ([\d.]+), NLL ([\d.]+), 95 % intervals hold (\d+)", run("regression"))
    assert float(found[1]) < 65  # the targets' standard deviation is 77
    assert int(found[3]) >= 85


def test_plain_loop_in_small():
    spec = importlib.util.spec_from_file_location("plain_loop", EXAMPLES / "plain_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(epochs=1, rows=256) < math.log(10)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 60
