"""The page in a real browser: Debian's chromium, headless, driven by playwright."""

from __future__ import annotations

import os
import shutil

import pytest

from stfseb.report import write_report

pytestmark = pytest.mark.slow

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@pytest.fixture(scope="module")
def browser():
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed: `apt-get install chromium`, or set CHROMIUM to its path")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed: `pip install -e '.[browser]'`")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(records, tmp_path_factory):
    return write_report(records, tmp_path_factory.mktemp("page"), "Three methods").as_uri()


@pytest.fixture(params=["desktop", "phone", "dark"])
def page(request, browser, address):
    size = {"width": 390, "height": 844} if request.param == "phone" else {"width": 1200, "height": 900}
    scheme = "dark" if request.param == "dark" else "light"
    context = browser.new_context(viewport=size, color_scheme=scheme)
    opened = context.new_page()
    opened.complaints, opened.requests = [], []
    opened.on("console", lambda message: opened.complaints.append(message.text))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on("request", lambda sent: opened.requests.append(sent.url))
    opened.goto(address)
    yield opened
    context.close()


def test_opens_without_complaints_or_requests(page, address):
    page.wait_for_load_state("networkidle")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("data:")] == [address]


def test_nothing_sticks_out_and_drawings_are_seen(page):
    width = page.evaluate("document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    shown = page.locator("figure svg:visible")
    assert shown.count() == 8  # of the two versions of a drawing, one
    for box in (shown.nth(i).bounding_box() for i in range(8)):
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] > 100


def test_pictures_load_and_have_alternative_text(page):
    assert page.locator("img").count() > 20
    assert page.locator("img:not([alt]), img[alt='']").count() == 0
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.locator("svg[role=img]:not([aria-label])").count() == 0


def test_text_stands_out_from_the_background(page):
    """WCAG contrast of body text, notes and links, computed in the page, at least 4.5."""
    for selector in ("body", ".note", "nav a", "tr.ours td"):
        ratio = page.evaluate(
            """selector => {
              const light = c => { const v = c / 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
              const lum = s => { const [r, g, b] = s.match(/[\\d.]+/g).map(Number);
                return .2126 * light(r) + .7152 * light(g) + .0722 * light(b); };
              let e = document.querySelector(selector), back = e;
              while (/, 0\\)$/.test(getComputedStyle(back).backgroundColor)) back = back.parentElement;
              const a = lum(getComputedStyle(e).color), b = lum(getComputedStyle(back).backgroundColor);
              return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
            }""",
            selector,
        )
        assert ratio >= 4.5, selector


def test_sorting_works_by_mouse_and_keyboard(page, records):
    table = page.locator("table.sortable").first

    def names():
        return [text.strip() for text in table.locator("tbody th").all_inner_texts()]

    def mean(method):
        rows = [r["metrics"]["nll"] for r in records if r["method"] == method]
        return sum(rows) / len(rows)

    labels = {"stfseb": "ST-FS-EB", "mcdropout": "MC Dropout", "map": "MAP"}
    ascending = [labels[m] for m in sorted(labels, key=mean)]
    head = table.locator("thead th", has_text="NLL")
    head.locator("button").click()
    assert names() == ascending[::-1]
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").press("Enter")
    assert names() == ascending
    assert head.get_attribute("aria-sort") == "ascending"
    table.locator("thead th").first.locator("button").click()
    assert names() == sorted(labels.values())
    assert table.locator("[aria-sort]").count() == 1


def test_runs_unfold_and_are_open_on_paper(page):
    details = page.locator("details").first
    settings = details.get_by_text("tau2")
    assert not settings.is_visible()
    details.locator("summary").click()
    assert settings.is_visible()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
