"""Several lists of commands at once, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from repository_scripts import ROOT, script

# In place of long_runs.py: says its arguments, and does what its list says.
STAND_IN = """
import pathlib, signal, sys, time
import os
print("arguments", *sys.argv[1:], flush=True)
print("told", os.environ.get("TOLD"), os.getpgid(0) == os.getpid(), flush=True)
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


@pytest.fixture
def stop(side_by_side):
    found = side_by_side.Stop()
    yield found
    found.close()


def test_each_list_has_a_process_and_a_log(side_by_side, stop, tmp_path, capsys):
    lists = write_lists(tmp_path / "lists", one="0", two="3", three="0")
    out, settings = tmp_path / "out", {**os.environ, "TOLD": "yes"}
    for end in (100.0, 50.0):
        assert side_by_side.run(lists, out, time.monotonic() + end, settings, stop) == 1
    said = capsys.readouterr().out
    assert "one: done" in said
    assert "two: not all done (exit 3)" in said
    assert f"2 of 3 lists done; results in {out}" in said
    for path in lists:
        first, told, again, _ = (
            (out / "logs" / f"{path.stem}.log").read_text().splitlines()
        )  # both times, one after the other
        assert told == "told yes True"  # its settings, and a session of its own
        for line, most in ((first, 100), (again, 50)):
            words = line.split()
            assert words[1:5] == [str(path), "--out", str(out), "--seconds"]
            assert most - 40 < int(words[5]) <= most


def test_one_that_ends_is_said_while_others_run(side_by_side, stop, tmp_path, capsys):
    lists = write_lists(tmp_path / "lists", slow="wait", quick="4")
    ended = []

    def end_the_slow_one():
        while "quick: not all done (exit 4)" not in (said := capsys.readouterr().out):
            ended.append(said)
            time.sleep(0.01)
        stop.running["slow"].terminate()

    helper = threading.Thread(target=end_the_slow_one)
    helper.start()
    assert side_by_side.run(lists, tmp_path / "out", time.monotonic() + 60, dict(os.environ), stop) == 2
    helper.join()


def test_who_asks_while_lists_are_started_is_heard(side_by_side, stop, tmp_path, monkeypatch, capsys):
    lists = write_lists(tmp_path / "lists", one="wait", two="wait", three="wait")
    popen = subprocess.Popen

    def asked_at_the_second(*words, **how):
        process = popen(*words, **how)
        if len(stop.running) == 1:
            log = tmp_path / "out" / "logs" / "two.log"
            while "waiting" not in log.read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(side_by_side.subprocess, "Popen", asked_at_the_second)
    assert side_by_side.run(lists, tmp_path / "out", time.monotonic() + 60, dict(os.environ), stop) == 3
    assert "0 of 3 lists done" in capsys.readouterr().out
    assert sorted(stop.running) == ["one", "two"]


def test_afterwards_nothing_runs_and_signals_are_what_they_were(side_by_side, tmp_path, monkeypatch, capsys):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    lists = write_lists(tmp_path / "lists", one="wait", two="0")
    out = tmp_path / "out"
    (out / "logs" / "two.log").mkdir(parents=True)  # where a log is to be
    processes = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        side_by_side.subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1]
    )
    monkeypatch.setattr(sys, "argv", ["side_by_side", *map(str, lists), "--out", str(out)])
    assert side_by_side.main() == 2
    assert "two.log" in capsys.readouterr().err
    assert [process.poll() is None for process in processes] == [False]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("words", "code"), [(("0", "0"), 0), (("0", "3"), 1)])
def test_with_mps_lists_are_led_to_it_and_their_codes_count(side_by_side, tmp_path, monkeypatch, words, code):
    lists = write_lists(tmp_path / "lists", **dict(zip("ab", words, strict=True)))
    monkeypatch.setattr(side_by_side, "multi_process_service", lambda: nullcontext({**os.environ, "TOLD": "mps"}))
    argv = ["side_by_side", *map(str, lists), "--out", str(tmp_path / "out"), "--mps"]
    monkeypatch.setattr(sys, "argv", argv)
    assert side_by_side.main() == code
    assert "told mps" in (tmp_path / "out" / "logs" / "a.log").read_text()


def test_a_folder_is_its_lists_and_two_of_one_name_are_refused(side_by_side, tmp_path):
    lists = write_lists(tmp_path / "lists", b="0", a="0")
    assert side_by_side.lists_of([tmp_path / "lists"]) == sorted(lists)
    other = write_lists(tmp_path / "others", a="0")
    for given, message in (
        ([*lists, *other], "3 lists, 2 names"),
        ([tmp_path / "none.txt"], "none.txt does not exist"),
        ([*lists, tmp_path / "scripts"], "scripts has no lists"),
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
    monkeypatch.setattr(side_by_side, "PATIENCE", 0.5)
    for code, says in (("exit 0", ""), ("exit 1", "without MPS"), ("exec sleep 60", "without MPS")):
        asked.unlink(missing_ok=True)
        python.write_text(f"#!/bin/sh\n{code}\n")
        python.chmod(0o755)
        with side_by_side.multi_process_service(str(python)) as settings:
            assert ("CUDA_MPS_PIPE_DIRECTORY" in settings) == (code == "exit 0")
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
