"""HTTP answers that are no replies, as typed `ProviderError`s; and the server's wait hints.

    401 403 → auth          404 (and 400 "model not found") → not_found    402, quota → quota
    429 → rate_limit        408 409 425 5xx 529 → overloaded                3xx → not_found
    400 413 422 → context_too_long | refused | bad_request
    200 with HTML, nothing, or {"error": …} → by content, else bad_reply

Messages name the base URL and the source of the key, never the key. Does not know whether
anything is tried again. Source: own; the shapes of hints after field reports on servers that send
dates, fractions and milliseconds.
"""

from __future__ import annotations

import email.utils
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from tfgrpo.errors import ProviderError, ProviderFailure
from tfgrpo.lm.error_fields import said_in
from tfgrpo.runtime.redaction import redact
from tfgrpo.runtime.terminal import printable

_EXCERPT = 200

_QUOTA = re.compile(
    r"insufficient_quota|quota[^.]{0,40}(exceed|exhaust)|exceeded your current quota|billing"
    r"|insufficient (funds|credit|balance)|credit balance|payment required",
    re.IGNORECASE,
)
_CONTEXT = re.compile(
    r"context_length_exceeded|maximum context length|context (length|window|size)|max_model_len"
    r"|prompt is too long|too many (input )?tokens|input (is )?too long|longer than the maximum"
    r"|exceeds? (the )?(max|limit)[^.]{0,40}tokens|string_above_max_length",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"content[_ ]?(filter|policy|management)|safety (system|filter)|responsible ?ai|moderation",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(
    r"model_not_found|(model|engine|deployment)[^.]{0,80}(not found|does not exist|not exist"
    r"|unknown|not available|not supported)|(unknown|no such|invalid) model",
    re.IGNORECASE,
)
_AUTH = re.compile(
    r"invalid[_ ]api[_ ]key|incorrect api key|unauthori[sz]ed|authentication", re.IGNORECASE
)
_RATE = re.compile(r"rate[_ ]?limit|too many requests|throttl", re.IGNORECASE)
_BUSY = re.compile(r"overloaded|capacity|temporarily|unavailable|try again|timeout", re.IGNORECASE)


def retry_after(headers: Mapping[str, str], *, now: float | None = None) -> float | None:
    """Return the server's wait in seconds, from whichever header says it; garbage is None.

    Understood: `retry-after-ms`, `retry-after` in (fractional) seconds or as an HTTP date,
    `x-ms-retry-after-ms`. Negative and non-finite values are ignored.

    Args:
        headers: response headers, names in lower case.
        now: Unix time for dates; the clock's where None.

    >>> retry_after({"retry-after": "1.5"})
    1.5
    >>> retry_after({"retry-after-ms": "250", "retry-after": "9"})
    0.25
    >>> retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, now=45.0)
    15.0
    >>> retry_after({"retry-after": "soon"}) is retry_after({"retry-after": "-3"}) is None
    True
    """
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        milliseconds = _number(headers.get(name))
        if milliseconds is not None:
            return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None and "GMT" not in text and "UTC" not in text and "-0000" not in text:
        return None
    wait = _timestamp(moment) - (time.time() if now is None else now)
    return max(0.0, wait)


def _timestamp(moment: Any) -> float:
    import datetime

    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return float(moment.timestamp())


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text.strip())
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def failure_kind(status: int, body: str) -> ProviderFailure:
    """Classify an HTTP status with its body."""
    if status in (401, 403):
        return "refused" if status == 403 and _REFUSED.search(body) else "auth"
    if status == 402 or (status == 429 and _QUOTA.search(body)):
        return "quota"
    if status == 429:
        return "rate_limit"
    if status == 404 or 300 <= status < 400:
        return "not_found"
    if status in (408, 504):
        return "timeout"
    if status in (409, 425) or status >= 500:
        return "overloaded"
    if status in (413, 400, 422):
        return _request_kind(body)
    return "bad_request"


def _request_kind(body: str) -> ProviderFailure:
    if _CONTEXT.search(body):
        return "context_too_long"
    if _REFUSED.search(body):
        return "refused"
    if _NO_MODEL.search(body):
        return "not_found"
    if _QUOTA.search(body):
        return "quota"
    if _AUTH.search(body):
        return "auth"
    return "bad_request"


def error_in_body(error: Any) -> ProviderFailure:
    """Classify an `{"error": …}` object that came with status 200 or in the middle of a stream."""
    text = json.dumps(error, ensure_ascii=False, default=str)[:20_000]
    code = error.get("code") if isinstance(error, Mapping) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        return failure_kind(code, text)
    if _RATE.search(text):
        return "quota" if _QUOTA.search(text) else "rate_limit"
    kind = _request_kind(text)
    if kind != "bad_request":
        return kind
    if isinstance(error, Mapping) and "invalid_request" in str(error.get("type", "")):
        return "bad_request"
    return "overloaded" if _BUSY.search(text) else "bad_reply"


def excerpt(body: str | bytes) -> str:
    """Return what a server said: the message of an error object where there is one, else the first
    200 characters of the body; on one line, without secrets."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    # Redact before cutting, or the cut could leave a piece of a key that is too short to be known.
    said = _message_in(text)
    most = _EXCERPT if said is None else 3 * _EXCERPT
    return redact(" ".join((said or text)[: 20 * _EXCERPT].split()))[:most]


def _message_in(text: str) -> str | None:
    """Return the message of an error body in any of the usual shapes."""
    if len(text) > 100_000 or text[:1] not in "{[":
        return None
    try:
        return said_in(json.loads(text))
    except (ValueError, RecursionError):
        return None


_ADVICE: Mapping[str, str] = {
    "auth": "check the key",
    "not_found": "check the model's name and the base URL",
    "quota": "the account has no credit left: top it up or use another key",
    "context_too_long": "the prompt and max_tokens do not fit the model's context: shorten them",
    "refused": "the provider's content filter refused the request",
}


def http_failure(
    status: int, headers: Mapping[str, str], body: str | bytes, *, where: str, key_source: str
) -> ProviderError:
    """Return the error for an HTTP answer outside 2xx.

    Args:
        where: model and base URL, for the message.
        key_source: where the key came from, in words.
    """
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    kind = failure_kind(status, text[:4000])
    advice = _ADVICE.get(kind, "")
    if kind == "auth":
        advice = f"check the key ({key_source})"
    if 300 <= status < 400:
        target = headers.get("location", "elsewhere")
        advice = f"the server redirects to {target}, which is not followed: fix the base URL"
    return ProviderError(
        redact(_message(where, f"HTTP {status}", excerpt(text), advice)),
        kind=kind,
        status=status,
        retry_after_s=retry_after(headers),
    )


def body_failure(
    kind: ProviderFailure, body: str | bytes, why: str, *, where: str
) -> ProviderError:
    """Return the error for a 200 whose body is no reply; the body's start is kept."""
    return ProviderError(
        redact(_message(where, why, excerpt(body), _ADVICE.get(kind, ""))), kind=kind, status=200
    )


def _message(where: str, what: str, body: str, advice: str) -> str:
    said = f", the server said: {printable(body)}" if body else ""
    return f"{where}: {what}{said}" + (f"; {advice}" if advice else "")
