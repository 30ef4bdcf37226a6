"""Where an answer says that it is an error: the many fields that servers use, read in one place.

Errors come with status 200, beside choices that look whole, in a choice, or in the middle of a
stream. Does not know HTTP or kinds of failures. Source: field reports; own rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["error_in_answer", "said_in"]

_FINE = frozenset(
    ["", "0", "200", "201", "none", "null", "ok", "okay", "success", "successful", "succeeded",
     "succeed", "true", "false", "no_error", "noerror", "no error", "normal", "done", "completed"]
)  # fmt: skip
"""Words in a field for errors that say: there is none."""
_FAILED = re.compile(r"error|fail|abort|cancel|reject|denied|timed?[ _-]?out|unavailable")
_CODES = (
    *("code", "error_code", "errcode", "err_code", "errno", "status_code", "statusCode"),
    *("errorCode", "ret_code"),
)
_SAYINGS = (
    *("message", "msg", "error_msg", "errmsg", "error_message", "errorMessage", "status_msg"),
    *("detail", "faultstring"),
)
_MOST_DEPTH = 20


_PLAIN_ANSWER = frozenset(
    ["id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier"]
)
_PLAIN_CHOICE = frozenset(["index", "message", "delta", "finish_reason", "logprobs"])


def _is_plain(answer: Mapping[str, Any]) -> bool:
    """True for an answer none of whose fields could say an error: most pieces of most streams."""
    choices = answer.get("choices")
    if type(answer) is not dict or type(choices) is not list or not answer.keys() <= _PLAIN_ANSWER:
        return False
    if answer.get("object") == "error":
        return False
    for choice in choices:
        if type(choice) is not dict or not choice.keys() <= _PLAIN_CHOICE:
            return False
        for body in (choice.get("message"), choice.get("delta")):
            if body is not None and (type(body) is not dict or "error" in body):
                return False
    return True


def error_in_answer(answer: Mapping[str, Any]) -> Any:
    """Return what an answer says of its own failure, whichever field it uses; None for no error.

    Looked at are the answer, its `base_resp`, and each of its choices: `error`, `errors`,
    `success: false`, a status of failure, an error code.

    >>> error_in_answer({"success": False, "msg": "busy"})["message"]
    'busy'
    >>> error_in_answer({"code": 0, "message": "ok", "error": {"code": 0, "message": ""}})
    """
    if _is_plain(answer):
        return None
    rows = [answer, answer.get("base_resp")]
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        rows.append(choice)
        if isinstance(choice, Mapping):
            bodies = (choice.get("message"), choice.get("delta"))
            rows += [{"error": b.get("error")} for b in bodies if isinstance(b, Mapping)]
    found = (_error_of(row) for row in rows if isinstance(row, Mapping))
    return next((error for error in found if error is not None), None)


def said_in(row: Any, depth: int = 0) -> str | None:
    """Return the message of an error in any of the usual shapes.

    >>> said_in([{"error": {"message": "busy", "code": 503}}]), said_in({"a": 1})
    ('busy', None)
    """
    if isinstance(row, str):
        return row if row.strip() else None
    inner: list[Any] = []
    if isinstance(row, Mapping):
        inner = [row[n] for n in ("error", "errors", "fault", "base_resp", *_SAYINGS) if n in row]
    elif isinstance(row, list):
        inner = [item for item in row[:3] if isinstance(item, (Mapping, str) if depth else Mapping)]
    if depth > _MOST_DEPTH:
        return None
    return next((said for item in inner if (said := said_in(item, depth + 1))), None)


def _error_of(row: Mapping[str, Any]) -> Any:
    for name in ("error", "errors", "fault"):
        if not _is_fine(row.get(name)):
            return row[name]
    if row.get("object") == "error" or row.get("type") == "error":
        return row
    if not _says_failed(row):
        return None
    code = next((row[n] for n in (*_CODES, "status") if not _is_fine(row.get(n))), None)
    return {"message": said_in(row) or "", "code": code}


def _is_fine(value: Any) -> bool:
    """Whether a field for errors says that there is none."""
    if isinstance(value, Mapping):
        told = [value[n] for n in (*_CODES, *_SAYINGS) if n in value]
        return all(map(_is_fine_word, told)) and bool(told or not value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_fine_word, value))
    return _is_fine_word(value)


def _is_fine_word(value: Any) -> bool:
    return value is None or str(value).strip().lower() in _FINE


def _says_failed(row: Mapping[str, Any]) -> bool:
    success = [str(row[n]).strip().lower() for n in ("success", "ok") if n in row]
    if any(word in ("false", "0", "no") for word in success) or row.get("is_error") is True:
        return True
    status = row.get("status")
    if isinstance(status, str) and not _is_fine_word(status) and _FAILED.search(status.lower()):
        return True
    codes = [row[n] for n in _CODES if not _is_fine_word(row.get(n))]
    if str(status).isdecimal():
        codes.append(status)
    return any(_is_failed_code(code, said_in(row)) for code in codes)


def _is_failed_code(code: Any, said: str | None) -> bool:
    """Whether a code tells of a failure: as a word, as a status of HTTP, or by a message beside it
    that says more than that all is well."""
    text = str(code).strip()
    if not text.lstrip("-").isdecimal():
        return isinstance(code, str)
    if len(text) == 3 and text[0] in "45":
        return True
    return text[0] != "2" and said is not None and not _is_fine_word(said)
