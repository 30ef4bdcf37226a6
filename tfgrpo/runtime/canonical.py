"""One canonical JSON text for a value, and what is derived from it: digests and seeds.

Two equal values give equal text in any process and on any day; a changed value changes it.
Does not know what the values mean. Source: own.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from decimal import Decimal
from itertools import islice
from typing import Any

log = logging.getLogger(__name__)

_LONGEST = 10**4000
"""Where integers become texts: Python writes and reads no more than 4,300 digits."""
_MOST_DIGITS = 100_000

_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
)


def jsonable(value: Any) -> Any:
    """Return `value` as plain JSON types; dataclasses and pydantic models become objects, integers
    of thousands of digits the text of their digits.

    Raises:
        TypeError: a value that JSON cannot carry without loss.
        ValueError: NaN or an infinity.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return value if -_LONGEST < value < _LONGEST else integer_text(value)
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number and has no JSON form")
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"object key {key!r} is not a string")
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(jsonable(item) for item in value)
    if hasattr(value, "model_dump"):
        return jsonable(value.model_dump(mode="json"))
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r:.200}")


def integer_text(value: int) -> str:
    """Return an integer's digits, however many."""
    return str(value) if -_LONGEST < value < _LONGEST else format(Decimal(value), "f")


def repr_of(value: Any) -> str:
    """Return a value's `repr` for a message; where an integer is too long for it, its JSON form."""
    try:
        return repr(value)
    except ValueError:
        return repr(shown_as_json(value))


def integer_of(text: str) -> int:
    """Return the integer of a JSON text, which may have 100,000 digits; for `parse_int`.

    Raises:
        ValueError: it has more.
    """
    if len(text) <= 4000:
        return int(text)
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text):,} digits; {_MOST_DIGITS:,} at most are read")
    return int(Decimal(text))


def shown_as_json(value: Any, depth: int = 0) -> Any:
    """Return any Python value as plain JSON types, for a reader: what has no JSON form is told.

    Dates become ISO texts, sets sorted lists, bytes text (or `base64:...`), arrays lists, other
    objects their fields or their text. Never raises for what a value holds; not for digests.

    >>> import datetime, decimal
    >>> shown_as_json({"at": datetime.datetime(2026, 1, 2, 3, 4), 1: {decimal.Decimal("1.50")}})
    {'at': '2026-01-02T03:04:00', '1': ['1.50']}
    """
    if depth > _MOST_DEPTH:
        return "…"
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, enum.Enum):
        return shown_as_json(value.value, depth + 1)
    if isinstance(value, int):
        return jsonable(int(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _bytes_shown(bytes(value))
    if isinstance(value, Mapping):
        return {_key_shown(k): shown_as_json(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (Set, frozenset)):
        return sorted((shown_as_json(v, depth + 1) for v in value), key=repr)
    if isinstance(value, tuple) and (named := getattr(value, "_asdict", None)) is not None:
        return shown_as_json(named(), depth + 1)
    if isinstance(value, (Sequence, deque, ValuesView)):
        return [shown_as_json(v, depth + 1) for v in islice(value, _MOST_ITEMS)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: shown_as_json(getattr(value, f.name, None), depth + 1) for f in fields}
    return _object_shown(value, depth)


_MOST_DEPTH = 50
_MOST_ITEMS = 1_000_000
"""Of a sequence that is shown, which may be a range without end."""


def _object_shown(value: Any, depth: int) -> Any:
    """Ask an object of another library for a plain form; its text where it has none."""
    # pydantic; numpy, torch and pandas; dates and times.
    for name in ("model_dump", "tolist", "to_dict", "isoformat"):
        method = getattr(value, name, None)
        if callable(method) and not isinstance(value, type):
            try:
                return shown_as_json(method(), depth + 1)
            except Exception as exc:  # foreign code: not the method that it looked like
                log.debug("%s.%s: %s", type(value).__name__, name, type(exc).__name__)
    try:
        if isinstance(value, Iterator):  # whose text is an address in memory
            return [shown_as_json(v, depth + 1) for v in islice(value, _MOST_ITEMS)]
        return str(value)
    except Exception as exc:  # foreign code, too
        return f"<{type(value).__name__} without a text: {type(exc).__name__}: {exc}>"


def _bytes_shown(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode("ascii")


def _key_shown(key: Any) -> str:
    shown = shown_as_json(key)
    return shown if isinstance(shown, str) else json.dumps(shown)


def canonical_json(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, ASCII escapes.

    >>> canonical_json({"b": (1, 2.5), "a": None})
    '{"a":null,"b":[1,2.5]}'
    """
    return _ENCODER.encode(jsonable(value))


def digest(value: Any, length: int = 64) -> str:
    """Return the first `length` hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()[:length]


def derive_seed(*parts: Any) -> int:
    """Return a seed in [0, 2**31) fixed by `parts` alone.

    >>> derive_seed(7, "task-1", 0) == derive_seed(7, "task-1", 0)
    True
    >>> derive_seed(7, "task-1", 0) == derive_seed(7, "task-1", 1)
    False
    """
    return int(digest(list(parts), 16), 16) % 2**31
