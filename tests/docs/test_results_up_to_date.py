"""docs/results.md says what results/ holds: `make results` has been run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from stfseb.report.results_page import results_page

ROOT = Path(__file__).parents[2]


def test_the_results_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "scripts" / "make_results.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    page = ROOT / "docs" / "results.md"
    stale = make.stale(results_page(ROOT / "results"), page)
    assert stale == [], "run `make results` and commit what it writes"
    assert "<!-- generated: headline -->" in page.read_text("utf-8")
