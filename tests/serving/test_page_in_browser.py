"""The page in headless Chromium: a person drops an image and sees class, spread and verdict."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from conftest_serving import png

pytestmark = pytest.mark.slow


@pytest.fixture(params=["desktop", "phone"])
def page(request, browser, server):
    size = {"width": 390, "height": 844} if request.param == "phone" else {"width": 1100, "height": 900}
    context = browser.new_context(viewport=size)
    context.set_default_timeout(120_000)  # milliseconds
    opened = context.new_page()
    opened.complaints, opened.requests = [], []
    opened.on("console", lambda message: opened.complaints.append(message.text))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on("request", lambda sent: opened.requests.append(sent.url))
    opened.goto(server.address)
    opened.get_by_text("3 classes, 3 samples an image").wait_for()
    yield opened
    context.close()


def left():
    picture = np.full((80, 80), 25, np.uint8)
    picture[:, :30] = 200
    return png(picture)


def choose(page, content, name="photo.png"):
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": content})


def drop(page, content):
    """Drop a file on the page as a browser does: a drop event with a DataTransfer."""
    transfer = page.evaluate_handle(
        """data => { const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
             const transfer = new DataTransfer();
             transfer.items.add(new File([bytes], "photo.png", { type: "image/png" }));
             return transfer; }""",
        base64.b64encode(content).decode(),
    )
    page.dispatch_event("#drop", "dragover", {"dataTransfer": transfer})
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


def test_a_dropped_image_is_answered(page, server):
    drop(page, left())
    page.get_by_text("Looks familiar.").wait_for()
    assert page.locator("#class").inner_text().startswith("left, ")
    assert page.locator("#chart circle.sample").count() == 9  # three samples of three classes
    places = page.locator("#chart circle.sample").evaluate_all("all => all.map(c => Number(c.getAttribute('cx')))")
    assert all(130 <= place <= 460 for place in places)
    assert page.locator("#chart svg").get_attribute("aria-label").startswith("Probabilities: left ")
    assert page.locator("#preview").evaluate("image => image.naturalWidth") == 80
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.complaints == []
    assert all(url.startswith((server.address, "blob:", "data:")) for url in page.requests)


def test_noise_is_called_unfamiliar_and_says_why(page):
    noise = (np.random.default_rng(0).random((8, 8)) * 255).astype(np.uint8)
    choose(page, png(noise))
    verdict = page.locator("#verdict")
    page.get_by_text("Unfamiliar: do not rely").wait_for()
    assert "highest probability" in verdict.inner_text()
    assert page.complaints == []


def test_names_of_classes_are_text_and_never_markup(page):
    choose(page, left())
    page.get_by_text("Looks familiar.").wait_for()
    assert page.locator("#chart text", has_text="<b>centre</b>").count() == 1
    assert page.locator("#chart b").count() == 0


def test_a_damaged_image_is_said_and_the_next_works(page):
    choose(page, b"not an image")
    page.get_by_text("cannot be read as PNG or JPEG").wait_for()
    assert not page.locator("#result").is_visible()
    choose(page, left())
    page.get_by_text("Looks familiar.").wait_for()
    assert page.locator("#message").inner_text() == ""


def test_the_keyboard_reaches_the_chooser(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
