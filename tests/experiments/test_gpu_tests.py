"""The script that runs the tests of the card in several processes, tried where there may be none."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from repository_scripts import ROOT, script


@pytest.fixture(scope="module")
def gpu_tests():
    return script("gpu_tests")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("..\n2 passed in 1.20s\n", {"passed": 2}),
        (
            ".F.\nFAILED a in 3 of b\n1 failed, 2 passed, 3 skipped in 61.20s (0:01:01)\n",
            {"failed": 1, "passed": 2, "skipped": 3},
        ),
        ("1 passed, 2 warnings, 1 error in 0.1s", {"passed": 1, "error": 1}),
        ("Segmentation fault", {}),
    ],
)
def test_counts_are_those_of_the_last_line(gpu_tests, log, expected):
    assert gpu_tests.counts(log) == expected


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the whole of it, with a card")
def test_what_was_skipped_is_not_passed(gpu_tests, tmp_path, monkeypatch, capsys):
    words = ["2", "--out", str(tmp_path / "found.json"), "--tests", "tests/data/test_augmentation.py"]
    monkeypatch.setattr(sys, "argv", ["gpu_tests", *words])
    assert gpu_tests.main() == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tests"] == found["skipped"] == 1
    assert found["machine"]["device"].startswith("cpu")
    assert "1 tests: {'skipped': 1}" in capsys.readouterr().out


@pytest.mark.slow
def test_all_tests_can_be_collected_where_pytest_is_alone(gpu_tests):
    assert len(gpu_tests.collected(["tests"])) >= 60


def test_a_place_without_such_tests_is_said(gpu_tests):
    assert (ROOT / "tests" / "test_files.py").exists()
    with pytest.raises(SystemExit, match="no test could be collected"):
        gpu_tests.collected(["tests/test_files.py"])
