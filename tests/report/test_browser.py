"""The report in a real browser: looks, reads on a phone, runs nothing of a model's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import made_run
from tfgrpo.report.page import render_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_page(made_run()), encoding="utf-8")
    return path


async def opened(
    browser: Any, file: Path, anchor: str = "", **context: Any
) -> tuple[Any, list[str]]:
    page = await (await browser.new_context(**context)).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith("file:") else said.append(r.url))
    await page.goto(file.as_uri() + anchor)
    await page.wait_for_selector("html[data-ready=yes]")
    return page, said


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_is_drawn_in_light_and_dark_without_complaint(
    browser: Any, file: Path, scheme: str, tmp_path: Path
) -> None:
    page, said = await opened(
        browser, file, color_scheme=scheme, viewport={"width": 1200, "height": 900}
    )
    shot = tmp_path / f"{scheme}.png"
    await page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 50_000
    assert said == []
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(x) for x in background.removeprefix("rgb(").rstrip(")").split(","))
    assert (brightness > 600) == (scheme == "light")
    assert await page.locator("svg.chart").count() >= 6


async def test_it_fits_a_phone_without_sideways_scrolling(browser: Any, file: Path) -> None:
    page, said = await opened(browser, file, viewport={"width": 390, "height": 844})
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
    await page.goto(file.as_uri() + "#group=0")
    await page.wait_for_selector("#group-view h1")
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
    assert said == []


async def test_model_text_runs_nothing_and_is_shown_as_text(browser: Any, file: Path) -> None:
    page, said = await opened(browser, file, "#group=0")
    await page.wait_for_selector("article.rollout")
    await asyncio.sleep(0.2)  # an image's error handler would run by now
    assert await page.evaluate("window.owned") is None
    assert await page.locator("img, iframe, #group-view script").count() == 0
    first = await page.locator("article.rollout pre").first.text_content()
    assert first.startswith("<script>window.owned = 1</script><img src=x")
    assert "\\u202e" in first
    assert said == []


async def test_a_group_page_shows_its_rollouts_side_by_side_and_its_contrast(
    browser: Any, file: Path
) -> None:
    page, _ = await opened(browser, file, viewport={"width": 1200, "height": 900})
    link = page.locator("#group-rows a").first
    await link.click()
    await page.wait_for_selector("article.rollout")
    assert await page.locator("article.rollout").count() == 6
    tops = await page.evaluate(
        "[...document.querySelectorAll('article.rollout')].slice(0, 3)"
        ".map(x => x.getBoundingClientRect().top)"
    )
    assert len(set(tops)) == 1
    await page.goto(file.as_uri() + "#group=15")
    await page.wait_for_selector("text=Contrast drawn from this group")
    await page.locator("text=← all groups").click()
    await page.wait_for_selector("#report:not([hidden])")


async def test_groups_can_be_filtered_and_paged(browser: Any, file: Path) -> None:
    page, _ = await opened(browser, file, viewport={"width": 1200, "height": 900})
    assert (await page.locator("#page-words").text_content()).endswith("of 202")
    await page.locator("#stage").select_option("test")
    assert (await page.locator("#page-words").text_content()) == "1–25 of 48"
    await page.locator("#next").click()
    assert (await page.locator("#page-words").text_content()) == "26–48 of 48"
    await page.locator("#find").fill("msg-203")
    assert await page.locator("#group-rows tr").count() == 2


async def test_provenance_links_lead_to_the_group(browser: Any, file: Path) -> None:
    page, _ = await opened(browser, file)
    await page.locator("#library + div a[data-group]").first.click()
    await page.wait_for_selector("#group-view h1")
    assert await page.locator("#group-view h1").text_content() == "msg-000"


async def test_groups_can_be_sorted_and_filtered_by_what_happened(browser: Any, file: Path) -> None:
    page, said = await opened(browser, file, viewport={"width": 1200, "height": 900})
    await page.locator("#kind").select_option("worse")
    worse = await page.locator("#group-rows tr").count()
    assert (
        worse and await page.locator("#group-rows .tag.bad", has_text="made worse").count() == worse
    )
    await page.locator("#kind").select_option("")
    await page.locator("#stage").select_option("test")
    await page.locator("button.sort", has_text="mean").focus()
    await page.keyboard.press("Enter")
    cells = page.locator("#group-rows td[data-label=mean]")
    means = [float(text) for text in await cells.all_text_contents()]
    assert means == sorted(means) and means[0] < means[-1]
    await page.keyboard.press("Enter")
    assert await page.locator("th[aria-sort=descending]").text_content() == "mean"
    falling = [float(text) for text in await cells.all_text_contents()]
    assert falling == sorted(falling, reverse=True)
    await page.locator("#kind").select_option("cut")
    assert await page.locator("#page-words").text_content() == "no groups"
    assert said == []


async def test_a_group_shows_the_messages_as_sent_and_what_was_learnt_can_be_copied(
    browser: Any, file: Path
) -> None:
    page, _ = await opened(
        browser, file, permissions=["clipboard-read", "clipboard-write"],
        viewport={"width": 1200, "height": 900},
    )  # fmt: skip
    await page.locator("#use + div button.copy").first.click()
    await page.wait_for_selector("button.copy:text('copied')")
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert "load_artefact('runs/customer-messages')" in copied
    await page.locator("#find").fill("msg-203")
    await page.locator("#group-rows a").last.click()
    turns = await page.locator("#group-view .turn b").all_text_contents()
    assert turns == ["system", "user"]
    system = await page.locator("#group-view .turn.system pre").text_content()
    assert system.startswith("You sort messages of customers.") and "answer 'refund'" in system
    other = page.locator("#group-view a", has_text="the same task with")
    assert await other.count() == 1
