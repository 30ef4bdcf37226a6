"""The one shape of every error that a client sees, with the headers that steer its retries.

`x-should-retry` is obeyed by the official clients before their own rule: without it they repeat a
refusal of the budget twice and may pay for a timed-out call again. It is true only where nothing
was billed and a later try may succeed.

Does not know routes or calls. Source: the chat-completions error object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from tfgrpo.errors import ProviderError, ProviderFailure
from tfgrpo.runtime.redaction import redact

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Kind:
    """What one code means on the wire."""

    status: int
    type: str
    should_retry: bool


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "invalid_request": Kind(400, "invalid_request_error", False),
        "context_length_exceeded": Kind(400, "invalid_request_error", False),
        "content_filter": Kind(400, "invalid_request_error", False),
        "invalid_api_key": Kind(401, "authentication_error", False),
        "forbidden": Kind(403, "permission_error", False),
        "origin_not_allowed": Kind(403, "permission_error", False),
        "not_found": Kind(404, "invalid_request_error", False),
        "model_not_found": Kind(404, "invalid_request_error", False),
        "unknown_response": Kind(404, "invalid_request_error", False),
        "method_not_allowed": Kind(405, "invalid_request_error", False),
        "deadline": Kind(408, "timeout_error", False),
        "body_timeout": Kind(408, "timeout_error", False),
        "idempotency_in_progress": Kind(409, "conflict_error", True),
        "group_closed": Kind(409, "conflict_error", False),
        "task_changed": Kind(409, "conflict_error", False),
        "version_conflict": Kind(409, "conflict_error", False),
        "gone": Kind(410, "invalid_request_error", False),
        "body_too_large": Kind(413, "invalid_request_error", False),
        "host_not_allowed": Kind(421, "permission_error", False),
        "idempotency_key_reused": Kind(422, "invalid_request_error", False),
        "headers_too_large": Kind(431, "invalid_request_error", False),
        "rate_limit": Kind(429, "rate_limit_error", True),
        "queue_full": Kind(429, "rate_limit_error", True),
        "upstream_rate_limit": Kind(429, "rate_limit_error", True),
        "budget_exceeded": Kind(429, "insufficient_quota", False),
        "internal": Kind(500, "server_error", False),
        "upstream_error": Kind(502, "server_error", False),
        "bad_reply": Kind(502, "server_error", False),
        "no_upstream": Kind(503, "server_error", True),
        "draining": Kind(503, "server_error", True),
        "storage": Kind(503, "server_error", True),
        "upstream_timeout": Kind(504, "timeout_error", False),
    }
)
"""Every code there is."""

_OF_FAILURE: Mapping[ProviderFailure, str] = MappingProxyType(
    {
        "rate_limit": "upstream_rate_limit",
        "timeout": "upstream_timeout",
        "context_too_long": "context_length_exceeded",
        "refused": "content_filter",
        "bad_request": "invalid_request",
        "bad_reply": "bad_reply",
        "overloaded": "upstream_error",
        "connection": "upstream_error",
        "auth": "upstream_error",
        "not_found": "upstream_error",
        "quota": "upstream_error",
    }
)


class ApiError(Exception):
    """A refusal or failure as the client is to see it.

    Args:
        code: a key of `KINDS`, which gives status and type.
        message: for people; secrets are removed.
        param: the field of the body that is wrong.
        retry_after_s: when to come again.
        should_retry: in place of the code's own.
        status: in place of the code's own.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        kind = KINDS[code]
        self.code = code
        self.status = kind.status if status is None else status
        self.type = kind.type
        self.message = redact(message)
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = kind.should_retry if should_retry is None else should_retry

    def to_dict(self) -> dict[str, dict[str, str | None]]:
        """Return the error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """Return the error object as JSON."""
        return orjson.dumps(self.to_dict())

    def headers(self) -> dict[str, str]:
        """Return the headers that steer retries."""
        rows = {"x-should-retry": "true" if self.should_retry else "false"}
        if self.retry_after_s is not None:
            seconds = max(0.0, self.retry_after_s)
            rows["retry-after"] = str(int(-(-seconds // 1)))
            rows["retry-after-ms"] = str(round(seconds * 1000))
        return rows


def from_failure(error: ProviderError, *, is_billed: bool) -> ApiError:
    """Return what a client sees of an upstream's failure.

    Args:
        error: the last failure.
        is_billed: something may have been billed, so a retry could pay again.
    """
    code = _OF_FAILURE[error.kind]
    status = KINDS[code].status
    if status >= 500 or status == 429:
        return ApiError(
            code,
            str(error),
            retry_after_s=error.retry_after_s,
            should_retry=not is_billed and error.is_retryable,
        )
    return ApiError(code, str(error))
