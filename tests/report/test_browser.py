"""The page in a real browser: Debian's chromium, headless, driven by playwright."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_runs import asked, made
from PIL import Image

from stfseb.data.tasks import load_task
from stfseb.experiments.paper import beyond
from stfseb.experiments.search import read_search
from stfseb.report import write_report
from stfseb.report.reading import Searches

pytestmark = pytest.mark.slow

STUDIES = Path(__file__).resolve().parents[2] / "results" / "searches"


@pytest.fixture(scope="module")
def address(records, tmp_path_factory):
    return write_report(records, tmp_path_factory.mktemp("page"), "Three methods").as_uri()


@pytest.fixture(scope="module")
def paper_address(tmp_path_factory):
    """The page of a folder with the paper's tables, rotations, corruptions, runs at other settings and searches."""
    parts = ("rotation", "corruption", "temperature")
    plans, runs = made("table1", "table2", "dof", "beyond", ask=asked("mnist", seeds=(0, 1)), parts=parts)
    folder = tmp_path_factory.mktemp("paper")
    studies = [f"mnist-{method}-extended-26e84ba3" for method in ("fseb", "gfsvi", "mfvi", "stfseb")]
    searches = Searches([read_search(STUDIES / study / "search.json") for study in studies])
    return write_report(runs, folder, "Beside the paper", plans=plans, searches=searches).as_uri()


def opened_at(browser, address, kind):
    size = {"width": 390, "height": 844} if kind == "phone" else {"width": 1200, "height": 900}
    context = browser.new_context(viewport=size, color_scheme="dark" if kind == "dark" else "light")
    context.set_default_timeout(120_000)  # milliseconds
    opened = context.new_page()
    opened.complaints, opened.requests = [], []
    opened.on("console", lambda message: opened.complaints.append(message.text))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on("request", lambda sent: opened.requests.append(sent.url))
    opened.goto(address)
    yield opened
    context.close()


@pytest.fixture(params=["desktop", "phone", "dark"])
def page(request, browser, address):
    yield from opened_at(browser, address, request.param)


@pytest.fixture(params=["desktop", "phone"])
def paper_page(request, browser, paper_address):
    yield from opened_at(browser, paper_address, request.param)


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


def test_paper_tables_open_quietly_and_fit(paper_page, paper_address):
    paper_page.wait_for_load_state("networkidle")
    assert paper_page.complaints == []
    assert [url for url in paper_page.requests if not url.startswith("data:")] == [paper_address]
    width = paper_page.evaluate("document.documentElement.clientWidth")
    assert paper_page.evaluate("document.documentElement.scrollWidth") == width
    assert paper_page.locator("svg[role=img]:not([aria-label])").count() == 0
    assert paper_page.locator("svg[aria-label^='Turned test images']:visible").count() == 1


def test_a_shade_says_that_a_table_goes_on(paper_page):
    """The darkest point of the right edge, above the first heading: shaded only while columns are hidden there."""

    def edge(table):
        image = Image.open(io.BytesIO(table.screenshot())).convert("L")
        return min(image.getpixel((image.width - 1, y)) for y in range(4))

    tables = paper_page.locator(".scroll.main:visible")
    hidden = tables.evaluate_all("all => all.map(e => e.scrollWidth - e.clientWidth)")
    assert (max(hidden) > 0) == (paper_page.viewport_size["width"] < 400)
    for place, rest in enumerate(hidden[:3]):
        table = tables.nth(place)
        assert (edge(table) < 240) == (rest > 0)
        table.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
        assert edge(table) > 250


def test_cells_lead_to_their_runs(paper_page):
    grids = paper_page.locator("table.grid")
    for number, words in enumerate(("best: MC Dropout", "paper 99.33")):  # of the summary and of the first table
        first = grids.nth(number).locator("td.num").first
        assert "runs: stfseb-seed0-" in first.get_attribute("title")
        assert words in first.inner_text()
    paper_page.get_by_text("Runs behind the cells").first.click()
    link = paper_page.locator("dl a:visible").first
    target = paper_page.locator(link.get_attribute("href"))
    assert target.count() == 1
    assert link.inner_text() in target.inner_text()
    targets = paper_page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href').slice(1))")
    ids = paper_page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert set(targets) <= set(ids)
    assert len(ids) == len(set(ids))


def test_variants_sort_by_their_numbers(paper_page):
    table = paper_page.locator("#paper-beyond-mnist ~ .scroll table").first
    head = table.locator("thead th", has_text="NLL")
    head.locator("button").click()
    place = head.evaluate("e => e.cellIndex")
    texts = table.locator("tbody tr").evaluate_all(f"rows => rows.map(r => r.cells[{place}].dataset.value)")
    numbers = [float(t) for t in texts if t]
    assert len(numbers) == len(beyond.variants(load_task("mnist")))
    assert numbers == sorted(numbers, reverse=True)


def test_rows_are_named_in_full_beside_the_numbers(paper_page):
    """On a phone the second heading of a row stands under the first, which stays when the table is scrolled."""
    phone = paper_page.viewport_size["width"] < 400
    table = paper_page.locator("#paper-table2 ~ .scroll table").first
    first = table.locator("tbody th").first
    assert first.inner_text().split("\n") == (["MNIST", "AUROC FMNIST ↑"] if phone else ["MNIST"])
    assert table.locator("tbody td.stub:visible").count() == (0 if phone else table.locator("tbody tr").count())
    before = first.bounding_box()["x"]
    table.locator("xpath=..").evaluate("e => { e.scrollLeft = 120; }")
    if phone:
        assert first.bounding_box()["x"] == before


def test_searches_are_seen_and_sort(paper_page):
    width = paper_page.evaluate("document.documentElement.clientWidth")
    drawn = paper_page.locator(".tiles svg:visible")
    assert drawn.count() == 4
    for box in (drawn.nth(i).bounding_box() for i in range(4)):
        assert box["width"] > 250
        assert box["x"] + box["width"] <= width
    table = paper_page.locator("#searches ~ .scroll table").first
    assert table.locator("tbody tr").count() == 8
    head = table.locator("thead th", has_text="AUROC")
    head.locator("button").click()
    place = head.evaluate("e => e.cellIndex")
    texts = table.locator("tbody tr").evaluate_all(f"rows => rows.map(r => r.cells[{place}].dataset.value)")
    assert list(map(float, texts)) == sorted(map(float, texts), reverse=True)
    assert table.locator("thead th", has_text="Settings").locator("button").count() == 0  # words have no order


def test_the_list_of_tables_leads_to_them(paper_page):
    titles = paper_page.locator("ul.contents a").all_inner_texts()
    assert any("after one temperature" in title for title in titles)
    for title, link in zip(titles, paper_page.locator("ul.contents a").all(), strict=True):
        assert paper_page.locator(link.get_attribute("href")).inner_text() == title
