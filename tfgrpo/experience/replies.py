"""What a reply says after its thinking, and whether it may be used. Does not know JSON."""

from __future__ import annotations

from dataclasses import dataclass

from tfgrpo.protocols import Completion
from tfgrpo.runtime.thinking import has_open_thinking, without_thinking


@dataclass(frozen=True, slots=True)
class Visible:
    """What a reply says after its thinking."""

    text: str
    cut: str = ""
    """Why it must not be used: `length`, `thinking`, `filter`, or empty for a whole reply."""


def visible(completion: Completion) -> Visible:
    """Return the reply without thinking, and whether it is unusable as it stands.

    A reply cut at its limit, one inside an unclosed thinking block, and one that is only thinking
    are never knowledge.
    """
    text = without_thinking(completion.text).strip()
    if completion.finish == "content_filter":
        return Visible(text, "filter")
    if completion.finish == "length":
        return Visible(text, "length")
    if has_open_thinking(completion.text):
        return Visible("", "thinking")
    if not text.strip() and (completion.reasoning.strip() or completion.text.strip()):
        return Visible("", "thinking")
    return Visible(text)
