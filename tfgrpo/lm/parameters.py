"""Request fields that a model's server refuses, learnt from its refusals once per model.

A reasoning model takes `max_completion_tokens` and no temperature, an older server no seed, a
strict one no `stream_options`. The first refusal of a field changes every later request; a field
that carries meaning (messages, tools, response format) is never left out, nor one that the user
wrote into `extra`.

Does not know HTTP. Source: the error bodies of OpenAI, vLLM, Anthropic's and Gemini's compatible
endpoints, FastAPI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["Parameters"]

_RENAMES = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
_LEFT_OUT = (
    "temperature",
    "top_p",
    "seed",
    "stop",
    "top_logprobs",
    "logprobs",
    "reasoning_effort",
    "stream_options",
    "stream",
)
"""Fields that may be left out: `stop` is then applied here, `stream` means a plain answer."""
_CODES = frozenset(
    {"unsupported_parameter", "unsupported_value", "unknown_parameter", "extra_forbidden"}
)
_UNSUPPORTED = re.compile(
    r"unsupported|not (?:a )?supported|n[o']t (?:support|accept|recogni[sz]e)"
    r"|no such (?:parameter|field)|not (?:a )?(?:valid|recogni[sz]ed) (?:parameter|field|argument)"
    r"|unknown (?:name|parameter|field|argument)"
    r"|unrecogni[sz]ed|unexpected|not permitted|not allowed|extra (?:fields|inputs)"
    r"|only the default|deprecated|not available|cannot be (?:used|specified)|not compatible"
    r"|cannot both be|extra_forbidden|use '?\w+'? instead|must be verified to stream"
    r"|only \S{1,20} is allowed|(?:must|has to|can only) be (?:the default|1(?:\.0)?\b)|extraneous"
    r"|不支持|不支援|サポートされ|지원하지|nicht unterst|non (?:pris|support)"
    r"|no (?:es )?(?:compatible|soport)",
    re.IGNORECASE,
)


class Parameters:
    """What one model's server takes."""

    def __init__(self) -> None:
        self.renamed: dict[str, str] = {}
        self.left_out: set[str] = set()
        self._taken: set[str] = set()

    def apply(self, body: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's body as this server takes it; fields of `own` stay as they are."""
        fields: dict[str, Any] = {}
        for name, value in body.items():
            if name in own:
                fields[name] = value
            elif name not in self.left_out:
                fields[self.renamed.get(name, name)] = value
        return fields

    def is_proven(self, body: Mapping[str, Any]) -> bool:
        """True when every field of the body that a server may refuse was taken before."""
        return all(n in self._taken for n in body if n in _LEFT_OUT or n in _RENAMES)

    def taken(self, body: Mapping[str, Any]) -> None:
        """Note that the server accepted a request with these fields."""
        self._taken.update(body)

    def learn(self, body: Mapping[str, Any], answer: bytes, own: Mapping[str, Any]) -> str | None:
        """Learn from a refused request; return what to tell ("" where it was told), or None where
        the refusal is about something else.

        Args:
            body: the fields that were sent.
            answer: the body of the HTTP 400 or 422.
            own: fields that the user wrote, which stay.
        """
        text, param, code = _said(answer)
        if code not in _CODES and not _UNSUPPORTED.search(text):
            return None
        name = self._named(body, own, text, param)
        if name is None:
            return None
        better = _RENAMES.get(name)
        if better is not None:
            if better in self.renamed or (better not in text and name != "max_tokens"):
                return None  # both names were refused
            was_known = self.renamed.get(name) == better
            self.renamed[name] = better
            return "" if was_known else f"{name} is sent as {better}"
        dropped = {name, "top_logprobs"} if name == "logprobs" else {name}
        dropped |= {"stream_options"} if name == "stream" else set()
        was_known = dropped <= self.left_out
        self.left_out |= dropped
        return "" if was_known else f"{name} = {json.dumps(body[name])} is left out"

    def _named(
        self, body: Mapping[str, Any], own: Mapping[str, Any], text: str, param: str
    ) -> str | None:
        """The field that a refusal is about: the one it names first, of those that may go."""
        may_go = [n for n in (*_LEFT_OUT, *_RENAMES) if n in body and n not in own]
        if param in may_go:
            return param
        if param in body:
            return None
        both = "both" in text and {"temperature", "top_p"} <= set(may_go)
        places = {n: m.start() for n in may_go if (m := re.search(_spellings(n), text))}
        if both and "top_p" in places:
            return "top_p"
        return min(places, key=lambda n: places[n], default=None)


def _spellings(name: str) -> str:
    """Return a pattern for a field's name as servers write it: `top_p`, `topP`. Letters of other
    scripts beside it are none of the name."""
    first, *rest = name.split("_")
    camel = first + "".join(part.capitalize() for part in rest)
    return rf"(?<![A-Za-z0-9_])(?:{name}|{camel})(?![A-Za-z0-9_])"


def _said(answer: bytes) -> tuple[str, str, str]:
    """(text, param, code) of an error body."""
    text = answer[:20_000].decode("utf-8", "replace")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return text, "", ""
    if isinstance(row, list) and row:
        row = row[0]
    error = row.get("error", row) if isinstance(row, Mapping) else {}
    if not isinstance(error, Mapping):
        return text, "", ""
    return text, str(error.get("param") or ""), str(error.get("code") or "")
