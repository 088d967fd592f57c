"""Where numbers come from: the code's commit, from a checkout and from an archive of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stfseb import __version__
from stfseb.experiments.machine import script_command


def test_the_command_of_a_benchmark_has_what_was_given():
    settings = {"out": Path("x.json"), "images": None, "rounds": 9, "some_thing": "a b"}
    assert script_command("validation", settings) == "python benchmarks/validation.py --rounds=9 '--some-thing=a b'"


def test_an_archive_knows_its_commit(tmp_path):
    top = Path(__file__).resolve().parents[2]
    if not (top / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout, or no git")
    wanted = subprocess.run(["git", "-C", top, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if wanted.returncode:  # such as a checkout of another user's
        pytest.skip(wanted.stderr.strip())
    packed = subprocess.run(["git", "-C", top, "archive", "HEAD", "src"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", tmp_path], input=packed, check=True)
    subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)  # another repository around it does not mislead
    asked = "from stfseb.experiments.machine import code_version; print(code_version())"
    found = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str({"version": __version__, "commit": wanted.stdout.strip(), "modified": None})


def test_a_change_anywhere_in_the_package_is_said(tmp_path):
    """A run with edited mathematics must not pass for a run of the commit."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    top = Path(__file__).resolve().parents[2]
    shutil.copytree(
        top / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "_commit.txt")
    )
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    asked = "from stfseb.experiments.machine import code_version; print(code_version()['modified'])"

    def modified():
        given = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, "-c", asked], env=given, capture_output=True, text=True, check=True)

    assert modified().stdout.strip() == "False"
    with (tmp_path / "src" / "stfseb" / "methods" / "st_fs_eb.py").open("a") as file:
        file.write("# edited\n")
    assert modified().stdout.strip() == "True"
    subprocess.run([*git, "commit", "-qam", "b"], check=True)
    assert modified().stdout.strip() == "False"
    (tmp_path / "src" / "stfseb" / "kernels_of_mine.py").write_text("")
    assert modified().stdout.strip() == "True"
