"""What makes two calls the same call: the content key of one draw.

The key covers the whole canonical request, where it goes, which draw it is and its seed. Time
limits are left out: they say how long to wait, not what is asked. The order of keys in a mapping,
the process and the day do not matter. Two draws of one request differ by their sample index.

Does not know who asks. Source: own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tfgrpo.messages import Message
from tfgrpo.protocols import Request, Sampling
from tfgrpo.runtime.canonical import jsonable

FORMAT = 1
"""Part of every key; raised when the canonical form changes."""


_canonical = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, check_circular=False
).encode
"""`canonical_json` of what is plain JSON already, which spares a walk over every message."""


def sampling_to_dict(sampling: Sampling) -> dict[str, Any]:
    """Return how tokens are drawn, as JSON types."""
    return {
        "temperature": _number(sampling.temperature),
        "top_p": _number(sampling.top_p),
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "logprobs": sampling.logprobs,
        "top_logprobs": sampling.top_logprobs,
        "reasoning_effort": sampling.reasoning_effort,
        "extra": jsonable(sampling.extra),
    }


def _number(value: float | None) -> float | None:
    """Return 1 and 1.0 as one number."""
    return None if value is None else float(value)


class RequestKey:
    """The keys of one request's draws at one model; hashing the request is done once."""

    __slots__ = ("_start",)

    def __init__(
        self, request: Request, identity: Mapping[str, Any], settings: str | None = None
    ) -> None:
        """Args: `settings` is `KeyMaker`'s shortcut for what many requests share."""
        settings = settings or settings_text(request, identity)
        messages = _canonical([m.to_dict() for m in request.messages])
        self._start = hashlib.sha256(f"[{settings},{messages}]".encode("ascii"))

    def draw(self, sample_index: int, seed: int | None) -> bytes:
        """Return the 32-byte key of one draw."""
        state = self._start.copy()
        state.update(f"|{sample_index}|{seed}".encode("ascii"))
        return state.digest()


def settings_text(request: Request, identity: Mapping[str, Any]) -> str:
    """Return the canonical text of everything but the messages."""
    form = request.response_format
    return _canonical(
        {
            "format": FORMAT,
            "identity": jsonable(identity),
            "tools": [jsonable(t.to_dict()) for t in request.tools],
            "tool_choice": request.tool_choice,
            "response_format": None if form is None else jsonable(form),
            "sampling": sampling_to_dict(request.sampling),
        }
    )


class KeyMaker:
    """Makes keys for requests that share their settings, as those of one role do.

    The settings' text is kept as long as equal settings come back, and the whole key as long as
    equal messages do, as those of a group do; all of them are frozen.
    """

    __slots__ = ("_key", "_messages", "_shared", "_text")

    def __init__(self) -> None:
        self._shared: tuple[Any, ...] = ()
        self._text = ""
        self._messages: tuple[Message, ...] = ()
        self._key: RequestKey | None = None

    def key(self, request: Request, identity: Mapping[str, Any]) -> RequestKey:
        """Return the key of a request."""
        shared = (request.sampling, request.tools, request.tool_choice, request.response_format)
        if request.response_format is not None or request.tools or request.sampling.extra:
            return RequestKey(request, identity)  # may hold mappings that somebody changes
        if not self._shared or self._shared[0] != identity or self._shared[1:] != shared:
            self._shared, self._text = (dict(identity), *shared), settings_text(request, identity)
        elif self._key is not None and self._messages == request.messages:
            return self._key
        self._key = RequestKey(request, identity, self._text)
        self._messages = request.messages
        return self._key
