"""Prompts as package data: one Markdown file a prompt, with `$name` placeholders.

`render` replaces the declared placeholders once and changes nothing else: braces, percent signs,
backslashes and dollar signs in a value, or elsewhere in the prompt, arrive as they are. A
placeholder is `$` and lower-case letters or underscores; `$$` is a literal dollar sign.

Does not know what a prompt is for. Idea: prompts without code (own).
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["fields_of", "fill", "load", "names", "render"]

_PLACEHOLDER = re.compile(r"\$(?:\$|([a-z_]+))")


def _folder() -> Traversable:
    from importlib.resources import files  # 10 ms, which not every import of a record should cost

    return files(__name__)


@cache
def load(name: str) -> str:
    """Return the text of a prompt without its final newline.

    Raises:
        KeyError: there is no prompt of that name.
    """
    if name not in names():  # a name from a file of somebody else's is no path
        raise KeyError(f"no prompt {name[:80]!r}; there are {', '.join(names())}")
    return _folder().joinpath(f"{name}.md").read_text(encoding="utf-8").removesuffix("\n")


@cache
def names() -> tuple[str, ...]:
    """Return the names of all prompts, sorted."""
    found = (p.name for p in _folder().iterdir())
    return tuple(sorted(n.removesuffix(".md") for n in found if n.endswith(".md")))


def fields_of(name: str) -> frozenset[str]:
    """Return the placeholders that a prompt needs."""
    return frozenset(m for m in _PLACEHOLDER.findall(load(name)) if m)


def render(name: str, **values: str) -> str:
    """Return a prompt with its placeholders filled; values are never scanned again.

    Raises:
        KeyError: no such prompt, a placeholder without a value, or a value without a placeholder.
    """
    return fill(load(name), name, **values)


def fill(template: str, name: str = "template", **values: str) -> str:
    """Fill the placeholders of a template text.

    >>> fill('{"a": $x} costs $$5', x="{y}")
    '{"a": {y}} costs $5'
    """
    needed = {m for m in _PLACEHOLDER.findall(template) if m}
    if needed != values.keys():
        raise KeyError(
            f"prompt {name!r} needs {sorted(needed)}: missing {sorted(needed - values.keys())}, "
            f"unknown {sorted(values.keys() - needed)}"
        )
    return _PLACEHOLDER.sub(lambda m: values[m[1]] if m[1] else "$", template)
