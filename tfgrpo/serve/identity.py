"""Who a request is: its response id, and the task, session and group that its client names.

A response id holds its time, 80 random bits and a short keyed digest, so that an id that was never
given out is told from one whose rows were purged. Clients name identities in the body
(`"tfgrpo": {…}`), in `x-tfgrpo-…` headers or in the path; the most explicit one wins.

Does not know routes' settings or arms. Source: own; the 26 characters are a ULID.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tfgrpo.errors import StoreError
from tfgrpo.serve.wire.errors import ApiError

__all__ = ["Extensions", "IdMaker", "Place", "read_extensions", "read_place", "read_secret"]

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ID = re.compile(r"(?!\.+\Z)[A-Za-z0-9._~-]{1,128}\Z")
_RESPONSE = re.compile(r"(?:chatcmpl-|resp_|emb-)?(tf_[0-9A-Z]{26}[0-9a-f]{8})\Z")
_SELECTIONS = ("vote", "verifier", "judge")


def read_secret(folder: Path) -> bytes:
    """Return the folder's secret of 32 bytes; made on first use, readable by its owner only.

    Raises:
        StoreError: it cannot be read or written.
    """
    path = folder / "secret"
    try:
        if not path.exists():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(os.urandom(32))
        secret = path.read_bytes()
    except OSError as exc:
        raise StoreError(f"the gateway's secret {str(path)!r} cannot be used: {exc}") from exc
    if len(secret) != 32:
        raise StoreError(f"{str(path)!r} does not hold 32 bytes: restore it or remove the folder")
    return secret


class IdMaker:
    """Makes and checks response ids.

    >>> ids = IdMaker(b"k" * 32)
    >>> one = ids.make()
    >>> ids.is_ours(one), ids.is_ours(one[:-1] + ("0" if one[-1] != "0" else "1")), len(one)
    (True, False, 37)
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        key = hashlib.sha256(b"response id\0" + secret).digest()
        self._keyed = hmac.new(key, digestmod="sha256")
        """Keyed once: each id copies it, which costs a tenth of keying anew."""
        self._clock = clock

    def make(self) -> str:
        """Return a new id: `tf_`, 26 characters of time and chance, 8 of digest."""
        value = (int(self._clock() * 1000) & (1 << 48) - 1) << 80
        value |= int.from_bytes(os.urandom(10))
        text = "".join([_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5)])
        return f"tf_{text}{self._mark(text)}"

    def is_ours(self, response_id: str) -> bool:
        """True for an id that this gateway has given out at some time."""
        return hmac.compare_digest(self._mark(response_id[3:29]), response_id[29:])

    def _mark(self, text: str) -> str:
        keyed = self._keyed.copy()
        keyed.update(text.encode("ascii"))
        return keyed.digest()[:4].hex()


def bare_id(text: object) -> str:
    """Return a response id without the prefix of its endpoint; empty where it cannot be one."""
    match = _RESPONSE.match(text) if isinstance(text, str) else None
    return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class Place:
    """What a path names: identities in front, the API's path behind."""

    path: str
    route: str = ""
    task_id: str = ""
    session_id: str = ""


def read_place(path: str) -> Place:
    """Split `/r/ROUTE/t/TASK/s/SESSION/v1/…`; each part may be left out, in that order.

    >>> read_place("/t/task-7/s/a/v1/models")
    Place(path='/v1/models', route='', task_id='task-7', session_id='a')
    """
    found = {"r": "", "t": "", "s": ""}
    rest = path
    for mark in found:
        if rest.startswith(f"/{mark}/"):
            name, slash, tail = rest[3:].partition("/")
            if not slash or not _ID.match(name):
                raise ApiError("not_found", f"the path {path!r:.200} names nothing")
            found[mark], rest = name, "/" + tail
    return Place(rest, found["r"], found["t"], found["s"])


@dataclass(frozen=True, slots=True)
class Extensions:
    """What a request says beyond the API it speaks."""

    task_id: str = ""
    session_id: str = ""
    group_id: str = ""
    end_user: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    samples: int = 1
    select: str = ""
    library: str = ""
    """`off`, a version, or empty for the route's."""
    max_cost_usd: float | None = None
    capture: bool = True
    """False keeps no content of this request."""


_PLAIN = Extensions()
_NAMES = ("task_id", "session_id", "group_id", "end_user", "samples", "select", "library",
          "max_cost_usd", "capture")  # fmt: skip
_HEADERS = {f"x-tfgrpo-{name.replace('_', '-')}": name for name in _NAMES}


def read_extensions(given: Any, headers: Mapping[str, str], place: Place) -> Extensions:
    """Return the extensions of a request.

    Args:
        given: the body's `tfgrpo` field, or None.
        headers: the request's.
        place: what its path names.

    Raises:
        ApiError: 400, naming the field.
    """
    values: dict[str, Any] = {}
    if place.task_id:
        values["task_id"] = place.task_id
    if place.session_id:
        values["session_id"] = place.session_id
    for header in headers.keys() & _HEADERS.keys():
        values[_HEADERS[header]] = unquote(headers[header])
    if "x-tfgrpo-metadata" in headers:
        values["metadata"] = _json(headers["x-tfgrpo-metadata"])
    if given is not None:
        if not isinstance(given, dict):
            raise ApiError("invalid_request", "tfgrpo must be an object", param="tfgrpo")
        for name in given:
            if name not in _NAMES and name != "metadata":
                raise ApiError(
                    "invalid_request",
                    f"tfgrpo.{name!s:.60} is unknown; there are {', '.join(_NAMES)}, metadata",
                    param="tfgrpo",
                )
        values |= given
    return _checked(values) if values else _PLAIN


def _checked(values: dict[str, Any]) -> Extensions:
    for name in ("task_id", "session_id", "group_id", "end_user"):
        if name in values and not (isinstance(values[name], str) and _ID.match(values[name])):
            raise _bad(name, "must be 1 to 128 letters, digits or . _ ~ -")
    row = {k: v for k, v in values.items() if k != "capture" or v is not None}
    if "samples" in row:
        row["samples"] = _whole(row["samples"])
    if row.get("select") not in (None, *_SELECTIONS):
        raise _bad("select", f"must be one of {', '.join(_SELECTIONS)}")
    if "library" in row and not (isinstance(row["library"], str) and _ID.match(row["library"])):
        raise _bad("library", "must be 'off' or a version")
    if "max_cost_usd" in row:
        row["max_cost_usd"] = _dollars(row["max_cost_usd"])
    if "capture" in row:
        row["capture"] = row["capture"] not in ("off", False)
    if "metadata" in row:
        row["metadata"] = _metadata(row["metadata"])
    return Extensions(**{k: v for k, v in row.items() if v is not None})


def _bad(name: str, why: str) -> ApiError:
    return ApiError("invalid_request", f"tfgrpo.{name} {why}", param=f"tfgrpo.{name}")


def _whole(value: Any) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 6:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad("samples", "must be a whole number of at least 1")
    return value


def _dollars(value: Any) -> float:
    try:
        amount = float(value) if isinstance(value, (str, int, float)) else -1.0
    except ValueError:
        amount = -1.0
    if isinstance(value, bool) or not 0 <= amount < float("inf"):
        raise _bad("max_cost_usd", "must be a number of dollars")
    return amount


def _json(text: str) -> Any:
    try:
        return json.loads(unquote(text))
    except (ValueError, RecursionError):
        raise _bad("metadata", "must be a JSON object where a header says it") from None


def _metadata(value: Any) -> dict[str, str]:
    if (
        not isinstance(value, dict)
        or len(value) > 16
        or not all(
            isinstance(k, str) and len(k) <= 64 and isinstance(v, str) and len(v) <= 512
            for k, v in value.items()
        )
    ):
        raise _bad("metadata", "must hold at most 16 pairs of texts of at most 64 and 512 letters")
    return value


def private_hash(secret: bytes, text: str) -> str:
    """Return 16 hex digits that stand for an end user in the journal."""
    return hmac.digest(secret, b"end user\0" + text.encode(), "sha256")[:8].hex() if text else ""
