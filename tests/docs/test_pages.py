"""Every Python block of the documentation runs: a page's blocks one after the other, in a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, *languages):
    """Return (language, first line, code) of the page's blocks, in their order."""
    text = page.read_text(encoding="utf-8")
    matches = [match for match in FENCE.finditer(text) if match.group(1) in languages]
    return [(match.group(1), text.count("\n", 0, match.start(2)) + 1, match.group(2)) for match in matches]


def execute(page, code, line, namespace):
    """Run one block; errors name the page and the line."""
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state()
    namespace = {"__name__": f"docs_{page.stem}"}
    for _, line, code in blocks(page, "python"):
        execute(page, code, line, namespace)
    torch.set_rng_state(before)


def test_pages_have_blocks_and_fences_are_closed():
    assert len(PAGES) >= 11
    for page in PAGES:
        fences = re.findall(r"^```(\w*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert all(fences[::2]), f"{page}: every block names its language, so that no Python goes untested"
        assert not any(fences[1::2]), page


@pytest.mark.slow
def test_a_newcomer_following_the_start_reaches_a_model(tmp_path, monkeypatch):
    """The page's own steps in its own order: Python, the task file, then the shell's commands."""
    page = DOCS / "start.md"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "200", "STFSEB_DATA": str(tmp_path / "none")}
    said = []
    for language, line, code in blocks(page, "python", "yaml", "bash"):
        if language == "yaml":
            (tmp_path / "photos.yaml").write_text(code)
            continue
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        if language == "python" and "Path(" in code and "from pathlib" not in code:
            command[-1] = "from pathlib import Path\n" + code  # a reader goes on in the same session
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said.append(done.stdout)
    (model,) = tmp_path.glob("runs/photos-stfseb-*/model/model.json")
    assert model.is_file()
    assert "Model:" in said[1]
    assert sum(".png" in line for line in said[2].splitlines()) >= 80  # 30 bags, 50 strange ones
    assert len(said[3].splitlines()) == 3
