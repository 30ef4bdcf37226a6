"""Lone surrogates: half characters that no UTF-8 text can carry, from cut or broken JSON.

Does not know where a text came from. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["without_surrogates"]

_HALF = re.compile("[\ud800-\udfff]")


def without_surrogates(value: Any) -> Any:
    """Return a JSON value whose texts can be encoded: halves of one character become it, others
    U+FFFD. Containers are copied.

    >>> without_surrogates({"a": ["hi " + chr(0xD83D) + " there"]})
    {'a': ['hi \ufffd there']}
    """
    if isinstance(value, str):
        if _HALF.search(value) is None:
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {without_surrogates(k): without_surrogates(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_surrogates(item) for item in value]
    return value
