"""HTML elements as values: every text is escaped where it enters, so no caller can forget.

`h("p", "<b>")` gives `<p>&lt;b&gt;</p>`. Only `Html` values, made here or marked by `trusted`, go
in unescaped. Texts of models also lose control and bidirectional characters (shown as escapes).

Does not know pages. Idea: escape at the sink (own).
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from tfgrpo.runtime.redaction import redact
from tfgrpo.runtime.terminal import printable

__all__ = ["Child", "Html", "h", "safe_text", "trusted"]


class Html(str):
    """Markup that is already escaped."""

    __slots__ = ()


Child = str | int | bool | float | None | Html | Iterable["Child"]

_VOID = frozenset({"meta", "br", "hr", "input"})


def h(tag: str, /, *children: Child, **attributes: str | bool | None) -> Html:
    """Return an element; attribute names use `_` for `-` and a trailing `_` for reserved words.

    >>> h("a", "x < y", href="#top", class_="big")
    '<a href="#top" class="big">x &lt; y</a>'
    >>> h("p", ["one", h("b", "&")], None)
    '<p>one<b>&amp;</b></p>'
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{escape(safe_text(value))}"')
    parts.append(">")
    if tag in _VOID:
        return Html("".join(parts))
    return Html("".join([*parts, *_texts(children), f"</{tag}>"]))


def trusted(markup: str) -> Html:
    """Mark text of our own making as markup: a style sheet, a script, a chart."""
    return Html(markup)


def safe_text(text: object) -> str:
    """Return text without secrets and with control characters shown as escapes."""
    return printable(redact(str(text)))


def _texts(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None or isinstance(child, bool):
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, (str, int, float)):
            yield escape(safe_text(child), quote=False)
        else:
            yield from _texts(child)
