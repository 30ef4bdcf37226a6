"""Every page that a person meets, in light, dark and on 400 pixels: measured, and kept as pictures.

The figures are written before the pictures, which are files of the repository.

Run: python -m tests.benchmarks.users.pages [--dry] [PAGE…]
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.report.pages_made import pages
from tests.report.readable import MODES, Reading, read_page

ROOT = Path(__file__).parents[3]
SHOTS = ROOT / "docs" / "screenshots"
_HIGHEST = 2200
"""Pixels of a page that are kept; what comes below looks alike."""
_TOP = 900
"""Pixels of the pictures that pages of the documentation show."""


Looked = dict[str, dict[str, tuple[Reading, bytes]]]
"""By page and mode: what was measured, and a picture."""


async def look(folder: Path, only: Sequence[str] = ()) -> Looked:
    """Open every page, or some, in every mode."""
    from playwright.async_api import async_playwright

    found: Looked = {}
    with pages(folder) as addresses:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            for name, address in addresses.items():
                if only and name not in only:
                    continue
                found[name] = {}
                for mode, options in MODES.items():
                    found[name][mode] = await _look(browser, address, name == "live", options)
            await browser.close()
    return found


async def _look(
    browser: Any, address: str, is_live: bool, options: dict[str, Any]
) -> tuple[Reading, bytes]:
    context = await browser.new_context(**options)
    page = await context.new_page()
    await page.goto(address)
    await page.wait_for_selector("html[data-ready=yes]")
    if is_live:
        await page.wait_for_selector("html[data-followed=yes]")
    picture = await page.screenshot(full_page=True)
    reading = await read_page(page)
    await context.close()
    return reading, picture


def _keep(picture: bytes, path: Path, height: int = _HIGHEST) -> None:
    """Write a picture with few colours, so that it stays small."""
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as whole:
        top = whole.crop((0, 0, whole.width, min(whole.height, height))).convert("RGB")
        path.parent.mkdir(parents=True, exist_ok=True)
        top.quantize(200).save(path, optimize=True)


def figures_of(found: Looked) -> dict[str, Any]:
    """Return the figures: the worst over all pages and modes, and where."""
    rows = [(f"{n} {m}", r) for n, modes in found.items() for m, (r, _) in modes.items()]
    smallest = min(rows, key=lambda row: row[1].min_font_px)
    return {
        "pages": len(found),
        "modes": len(MODES),
        "min_font_px": smallest[1].min_font_px,
        "min_font_at": f"{smallest[0]}: {smallest[1].smallest_text}",
        "overflow": sum(r.overflow_px > 0 for _, r in rows),
        "contrast_fails": sum(len(r.contrast_fails) for _, r in rows),
        "keyboard_fails": sum(len(r.unfocused) for _, r in rows),
        "texts": sum(r.texts for _, r in rows),
        "where": {
            name: {"overflow_px": r.overflow_px, "contrast": r.contrast_fails[:8],
                   "keyboard": r.unfocused[:8]}
            for name, r in rows
            if r.overflow_px or r.contrast_fails or r.unfocused
        },
    }  # fmt: skip


def main() -> None:
    """Measure all pages, or those named; record, and keep the pictures."""
    some = [name for name in sys.argv[1:] if name != "--dry"]
    with tempfile.TemporaryDirectory(prefix="tfgrpo-pages-") as place:
        looked = asyncio.run(look(Path(place), some))
    result = figures_of(looked)
    if "--dry" in sys.argv or some:
        print(json.dumps(result, indent=1))
    else:
        record("pages", result, "python -m tests.benchmarks.users.pages")
    for name, modes in looked.items():
        for mode, (_, picture) in modes.items():
            _keep(picture, SHOTS / f"{name}-{mode}.png")
            if mode == "light":
                _keep(picture, SHOTS / f"{name}-top.png", _TOP)


if __name__ == "__main__":
    main()
