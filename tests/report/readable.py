"""Can a page be read? Smallest text, sideways scrolling, contrast, keyboard: measured in a browser.

A text in a picture counts as large as it is drawn. Contrast is WCAG 2's, AA: 4.5, or 3 for large
text. Does not know what a page says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["MODES", "Reading", "read_page"]

MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
    "400px": {"viewport": {"width": 400, "height": 860}, "color_scheme": "light"},
}
_SCRIPT = """
() => {
  const colour = (text) => {
    const m = text.match(/rgba?\\(([^)]+)\\)/);
    if (!m) return null;
    const p = m[1].split(/[ ,\\/]+/).map(Number);
    return { rgb: p.slice(0, 3), a: p.length > 3 ? p[3] : 1 };
  };
  const over = (top, below) => top.rgb.map((c, i) => c * top.a + below[i] * (1 - top.a));
  const backdrop = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const c = colour(getComputedStyle(e).backgroundColor);
      if (c && c.a > 0) { layers.push(c); if (c.a === 1) break; }
    }
    let base = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
    for (const c of layers.reverse()) base = over(c, base);
    return base;
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = { smallest: 99, smallest_text: "", fails: [], texts: 0 };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.nodeValue.trim();
    const element = walker.currentNode.parentElement;
    if (!text || element.closest("script,style,noscript,option")) continue;
    if (!element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    const style = getComputedStyle(element);
    let size = parseFloat(style.fontSize);
    const isDrawn = element instanceof SVGElement;
    if (isDrawn) size *= Math.hypot(element.getScreenCTM().a, element.getScreenCTM().b);
    found.texts += 1;
    if (size < found.smallest) { found.smallest = size; found.smallest_text = text.slice(0, 40); }
    const ink = colour(isDrawn ? style.fill : style.color);
    if (!ink) continue;
    let opacity = 1;
    for (let e = element; e; e = e.parentElement)
      opacity *= parseFloat(getComputedStyle(e).opacity);
    const ground = backdrop(isDrawn ? element.closest("svg").parentElement : element);
    const shown = over({ rgb: ink.rgb, a: ink.a * opacity }, ground);
    const [high, low] = [luminance(shown), luminance(ground)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const isOff = element.closest("button:disabled");
    if (!isOff && ratio < (isLarge ? 3 : 4.5))
      found.fails.push(ratio.toFixed(2) + " " + text.slice(0, 40));
  }
  found.width = document.documentElement.clientWidth;
  found.scroll = document.documentElement.scrollWidth;
  return found;
}
"""
_FOCUS = """
() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const s = getComputedStyle(e);
  const inner = e.querySelector && e.querySelector("rect");
  const stroke = inner ? getComputedStyle(inner).stroke : "none";
  const ring = (s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0) || stroke !== "none";
  return { what: e.tagName + " " + (e.id || e.textContent.trim().slice(0, 20)), ring };
}
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured of one page in one mode."""

    min_font_px: float
    smallest_text: str
    overflow_px: int
    contrast_fails: list[str]
    texts: int
    unfocused: list[str] = field(default_factory=list)
    """What the keyboard reaches without a mark that shows it."""


async def read_page(page: Any, stops: int = 12) -> Reading:
    """Measure an opened page, and go along it with the keyboard."""
    found = await page.evaluate(_SCRIPT)
    bare: list[str] = []
    reached = 0
    for _ in range(stops):
        await page.keyboard.press("Tab")
        at = await page.evaluate(_FOCUS)
        if at is not None:
            reached += 1
            bare += [] if at["ring"] else [at["what"]]
    if not reached:
        bare.append("nothing can be reached by keyboard")
    return Reading(
        round(found["smallest"], 2), found["smallest_text"],
        max(0, found["scroll"] - found["width"]), sorted(set(found["fails"])), found["texts"], bare,
    )  # fmt: skip
