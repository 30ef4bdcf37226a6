"""The tree's page in a real browser: slider, cost by part, and nothing of a model's that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.search.test_views import EVIL, evil_tree
from tfgrpo.search.views import to_html

pytestmark = pytest.mark.browser


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tree.html"
    text = to_html(evil_tree().tree, best=1, title="Errands <b>", facts={"calls": 3})
    path.write_text(text, encoding="utf-8")
    return path


async def opened(browser: Any, file: Path, **context: Any) -> tuple[Any, list[str]]:
    """Return the page and whatever it complained about or asked the network for."""
    page = await (await browser.new_context(**context)).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
    page.on("request", lambda r: None if r.url.startswith("file:") else said.append(r.url))
    await page.goto(file.as_uri())
    await page.wait_for_selector("#drawn g.node")
    return page, said


async def test_the_page_opens_without_complaint_and_shows_the_whole_tree(
    browser: Any, file: Path
) -> None:
    page, said = await opened(browser, file)
    assert await page.title() == "Errands <b>"
    labels = await page.locator("#drawn g.node text.name").all_text_contents()
    assert labels[:2] == ["start", "open(door='red')"] and len(labels) == 4
    assert await page.locator("#facts").text_content() == "calls: 3"
    assert await page.locator("#now").text_content() == "1 of 1 visits, 4 steps known"
    assert await page.locator("g.goal.best").count() == 1
    assert said == []


async def test_the_slider_goes_back_in_time(browser: Any, file: Path) -> None:
    page, said = await opened(browser, file)
    await page.locator("#time").fill("0")
    assert await page.locator("#drawn g.node:visible").count() == 1
    assert await page.locator("#now").text_content() == "0 of 1 visits, 1 steps known"
    await page.locator("#time").press("End")
    assert await page.locator("#drawn g.node:visible").count() == 4
    assert said == []


async def test_a_click_shows_a_node_s_cost_by_part(browser: Any, file: Path) -> None:
    page, said = await opened(browser, file)
    await page.locator("#drawn g.node", has_text="open(door").click()
    rows = await page.locator("#detail tr").all_text_contents()
    assert (
        "like plans that worked0.25" in rows
        and "how far along in plans that worked0.50" in rows
        and "cost of this step0.50" in rows
    )
    widths = await page.locator("#detail .part").evaluate_all("x => x.map(e => e.offsetWidth)")
    assert widths == [15, 30]  # 60 pixels for 1
    assert await page.locator('g.node[aria-pressed="true"]').count() == 1
    assert said == []


async def test_model_text_is_shown_and_runs_nothing(browser: Any, file: Path) -> None:
    page, said = await opened(browser, file)
    await page.locator("#drawn g.node").nth(2).press("Enter")
    shown = await page.locator("#detail h2").text_content()
    assert shown.startswith("x</script><script>alert(1)</script>") and "\x1b" not in shown
    assert EVIL.startswith("x</script>")
    assert await page.locator("script").count() == 2
    assert said == []


async def test_it_fits_a_phone_without_sideways_scrolling(browser: Any, file: Path) -> None:
    page, said = await opened(browser, file, viewport={"width": 390, "height": 844})
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
    assert said == []
