"""Every page can be read: on a phone and in the dark, by everybody, with the keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.report.pages_made import pages
from tests.report.readable import read_page

pytestmark = [pytest.mark.browser, pytest.mark.long]


async def test_no_page_has_tiny_or_pale_text_or_scrolls_sideways(
    browser: Any, tmp_path: Any
) -> None:
    wrong = []
    with pages(tmp_path) as addresses:
        for name, address in addresses.items():
            context = await browser.new_context(viewport={"width": 400, "height": 860})
            page = await context.new_page()
            await page.goto(address)
            await page.wait_for_selector("html[data-ready=yes]")
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                found = await read_page(page)
                assert found.texts > 10, name
                if found.min_font_px < 11:
                    wrong.append(f"{name}: {found.min_font_px} px: {found.smallest_text}")
                if found.overflow_px:
                    wrong.append(f"{name}: {found.overflow_px} px too wide")
                wrong += [f"{name} {scheme}: pale: {text}" for text in found.contrast_fails]
                wrong += [f"{name}: no mark of focus: {what}" for what in found.unfocused]
            await context.close()
    assert wrong == []


async def test_the_measure_sees_what_is_wrong(browser: Any, tmp_path: Any) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<style>a:focus{outline:none}</style><p style='font-size:9px;color:#999'>tiny</p>"
        "<p style='width:900px'>wide</p><a href='#x'>bare</a>"
        "<svg width='50' viewBox='0 0 100 20'><text y='15' font-size='16'>drawn</text></svg>",
        encoding="utf-8",
    )
    page = await (await browser.new_context(viewport={"width": 400, "height": 600})).new_page()
    await page.goto(bad.as_uri())
    found = await read_page(page, stops=1)
    assert found.min_font_px == 8.0 and found.smallest_text == "drawn"  # half of 16
    assert found.overflow_px > 400
    assert found.contrast_fails == ["2.85 tiny"]
    assert found.unfocused == ["A bare"]
