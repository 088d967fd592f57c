"""docs/results.md says what results/ holds: `make results` has been run."""

from __future__ import annotations

from repository_scripts import ROOT, script
from stfseb.report.results_page import results_page


def test_the_results_page_is_up_to_date():
    make = script("make_results")
    page = ROOT / "docs" / "results.md"
    stale = make.stale(results_page(ROOT / "results"), page)
    assert stale == [], "run `make results` and commit what it writes"
    assert "<!-- generated: headline -->" in page.read_text("utf-8")
