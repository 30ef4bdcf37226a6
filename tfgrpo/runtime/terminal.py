"""Text from models, tools and files, made safe for a terminal.

Control characters can retitle a window, write to the clipboard, overwrite what was printed before
or reverse the reading order; square brackets can be markup. Here each such character is shown as
an escape instead of being sent. Stored text is never changed: this is for display alone.

Does not know colours, tables or HTML (the report escapes at its own sink). Source: the C0 and C1
sets of ECMA-48, the bidirectional controls of Unicode Annex 9.
"""

from __future__ import annotations

import re

__all__ = ["clip", "markup", "one_line", "printable"]

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f"  # C0 but tab and newline; delete
    "\x80-\x9f"  # C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\u2028\u2029"  # line and paragraph separators
    "\ufff9-\ufffb"  # interlinear annotation
    "\U000e0000-\U000e007f"  # invisible tags
    "\ud800-\udfff"  # lone surrogates cannot be encoded
    "]"
)

_MARKUP = re.compile(r"(?<!\\)(\\*+)(\[[a-z#/@][^\[\]]*\])|(?<!\\)(\\++)(?=\[)")
"""What `rich` does not show as it stands: a tag, whose backslashes it halves, and a backslash
before a bracket that opens no tag, of which it takes one away."""


def printable(text: str) -> str:
    r"""Return `text` with every control and bidirectional character shown as an escape.

    Tab and newline stay, all other visible text of any script stays.

    >>> printable("a\x1b]0;owned\x07b\u202ec\nd")
    'a\\x1b]0;owned\\x07b\\u202ec\nd'
    """
    return _UNSAFE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(text: str, most: int = 200) -> str:
    """Return `text` printable, on one line, and at most `most` characters long.

    >>> one_line("a\\n  b\\tc")
    'a b c'
    >>> one_line("abcdef", 4)
    'abc…'
    """
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= most else flat[: max(0, most - 1)] + "…"


def markup(text: str) -> str:
    r"""Return `text` printable and literal for places where `rich` reads markup.

    >>> print(markup("[bold]x[/] [link=http://a]y"))
    \[bold]x\[/] \[link=http://a]y
    """
    return _MARKUP.sub(_literal, printable(text))


def _literal(match: re.Match[str]) -> str:
    slashes, tag, before_bracket = match.groups()
    if before_bracket:
        return f"{before_bracket}\\"
    return f"{slashes}{slashes}\\{tag}"


def clip(text: str, most: int) -> str:
    """Return a text of at most `most` characters: head and tail, with a mark between.

    >>> clip("abcdefghij" * 10, 60)
    'abcdefghijabcdefghija\\n…[69 characters left out]…\\nabcdefghij'
    """
    if len(text) <= most:
        return text
    mark = f"\n…[{len(text)} characters left out]…\n"
    room = max(0, most - len(mark))
    head = room - room // 3
    tail = room - head
    mark = f"\n…[{len(text) - head - tail} characters left out]…\n"
    return (text[:head] + mark + text[len(text) - tail :])[:most]
