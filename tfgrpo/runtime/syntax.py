"""Syntax trees of Python texts."""

from __future__ import annotations

import ast
import gc

_TRIES = 5


def syntax_tree(text: str) -> ast.Module:
    """Parses a text as Python.

    CPython up to 3.11.7 counts the depth of a tree in a place that all parses of a process share.
    Where the garbage collector runs during a parse and a finaliser parses too (a formatted
    traceback does), the outer parse ends in a SystemError though its text is right
    (python/cpython, issue 106905). It is parsed again then, once that garbage is gone.

    >>> type(syntax_tree("x = 1").body[0]).__name__
    'Assign'

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
        SystemError: every try was disturbed.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(text)  # noqa: TID251
        except SystemError:
            gc.collect()
    return ast.parse(text)  # noqa: TID251
