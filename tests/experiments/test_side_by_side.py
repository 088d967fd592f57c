"""Several lists of commands at once, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from repository_scripts import ROOT, script

# In place of long_runs.py: says its arguments, and does what its list says.
STAND_IN = """
import pathlib, signal, sys, time
print("arguments", *sys.argv[1:], flush=True)
word = pathlib.Path(sys.argv[1]).read_text().strip()
if word == "wait":
    def stop(number, frame):
        print("stopped by", signal.Signals(number).name, flush=True)
        sys.exit(1)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print("waiting", flush=True)
    while True:
        time.sleep(0.01)
sys.exit(int(word))
"""


@pytest.fixture
def side_by_side(tmp_path, monkeypatch):
    module = script("side_by_side")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "long_runs.py").write_text(STAND_IN)
    monkeypatch.setattr(module, "HERE", tmp_path / "scripts")
    return module


def write_lists(folder, **lists):
    folder.mkdir(exist_ok=True)
    for name, word in lists.items():
        (folder / f"{name}.txt").write_text(word)
    return [folder / f"{name}.txt" for name in lists]


def test_each_list_has_a_process_and_a_log(side_by_side, tmp_path, capsys):
    lists = write_lists(tmp_path / "lists", one="0", two="3", three="0")
    out = tmp_path / "out"
    assert side_by_side.run(lists, out, 100.0, dict(os.environ)) == 1
    said = capsys.readouterr().out
    assert "one: done" in said
    assert "two: not all done (exit 3)" in said
    assert f"2 of 3 lists done; results in {out}" in said
    for path in lists:
        words = (out / "logs" / f"{path.stem}.log").read_text().split()
        assert words[1:4] == [str(path), "--out", str(out)]
        assert 0 < int(words[5]) <= 100


def test_a_folder_is_its_lists_and_two_of_one_name_are_refused(side_by_side, tmp_path):
    lists = write_lists(tmp_path / "lists", b="0", a="0")
    assert side_by_side.lists_of([tmp_path / "lists"]) == sorted(lists)
    other = write_lists(tmp_path / "others", a="0")
    for given, message in (
        ([*lists, *other], "3 lists, 2 names"),
        ([tmp_path / "none.txt"], "none.txt does not exist"),
        ([tmp_path / "scripts"], "0 lists"),
    ):
        with pytest.raises(SystemExit, match=message):
            side_by_side.lists_of(given)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once(tmp_path, number):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "long_runs.py").write_text(STAND_IN)
    copy = tmp_path / "scripts" / "side_by_side.py"
    copy.write_text((ROOT / "scripts" / "side_by_side.py").read_text())
    lists, out = write_lists(tmp_path / "lists", one="wait", two="wait"), tmp_path / "out"
    words = [sys.executable, str(copy), *map(str, lists), "--out", str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        logs = [out / "logs" / f"{path.stem}.log" for path in lists]
        while not all(log.exists() and "waiting" in log.read_text() for log in logs):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "0 of 2 lists done" in said
    for log in logs:
        assert log.read_text().count("stopped by") == 1


def test_mps_is_started_checked_and_ended(side_by_side, tmp_path, monkeypatch, capsys):
    """A stand-in for NVIDIA's control program writes down what it was asked."""
    asked = tmp_path / "asked"
    control = tmp_path / "bin" / side_by_side.CONTROL
    control.parent.mkdir()
    control.write_text(f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {asked}\n[ "$1" = -d ] || cat >> {asked}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    python = tmp_path / "bin" / "python"
    for code, says in ((0, ""), (1, "without MPS, as a process under it cannot use the card")):
        asked.unlink(missing_ok=True)
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        with side_by_side.multi_process_service(str(python)) as settings:
            assert ("CUDA_MPS_PIPE_DIRECTORY" in settings) == (code == 0)
            place = settings.get("CUDA_MPS_PIPE_DIRECTORY")
        begun, ended, last = asked.read_text().splitlines()
        assert begun.startswith("-d ")
        assert place is None or (begun.endswith(place) and ended.endswith(place))
        assert last == "quit"
        assert says in capsys.readouterr().out


def test_without_mps_it_is_said_and_goes_on(side_by_side, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(side_by_side, "CONTROL", str(tmp_path / "nothing"))
    with side_by_side.multi_process_service() as settings:
        assert settings == dict(os.environ)
    assert "note: without MPS, as " in capsys.readouterr().out
