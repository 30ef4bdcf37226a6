"""One redactor for every text that leaves the process: errors, logs, reports, journals.

It knows the actual secrets that the process has read (they register here when they are resolved)
and, beside them, patterns of keys that nobody registered. A known secret is found in any piece of
six or more consecutive characters, also URL-encoded, base64-encoded (at any alignment) or in hex,
because servers echo shortened keys and HTTP libraries put whole URLs into exceptions.

The registry is process-wide on purpose: a secret that one client resolved must not leave through
another's error message. Does not know where texts go. Idea: redact what is known, not only a
prefix (own; field report BerriAI/litellm#15799 and #5433).
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus

from tfgrpo.errors import ConfigError

__all__ = [
    "RedactingFilter",
    "Secret",
    "forget_secrets",
    "redact",
    "redact_known",
    "redact_logs",
    "register",
    "register_headers",
]

MASK = "[redacted]"
_PIECE = 6
_SHORTEST = 8
_KEY_NAME = re.compile(
    r"(?i)auth|key|token|secret|passw|cookie|credential|signature|\bsig\b|bearer"
)
_PLACEHOLDERS = frozenset({"", "none", "null", "empty", "dummy", "not-needed", "unused", "no-key"})

_PATTERNS = (
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?i)(?<=basic )[A-Za-z0-9+/=]{12,}"),
    re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{12,}"),
    re.compile(r"\b(?:gh[pousr]_|hf_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{12,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"),
    re.compile(r"\bAIza[A-Za-z0-9_-]{20,}"),
    re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(
        r"(?i)(?:(?<=api_key)|(?<=api-key)|(?<=apikey)|(?<=[?&]key)|(?<=access_token)"
        r"|(?<=client_secret)|(?<=password))(?:%3D|[\"']?\s*[=:]\s*[\"']?)([^\s\"'&,;)]{6,})"
    ),
)


@dataclass(slots=True)
class _Known:
    """The secrets seen so far: pieces of all their forms, for one linear scan."""

    values: set[str] = field(default_factory=set)
    pieces: set[str] = field(default_factory=set)
    blocks: dict[tuple[str, int], str] = field(default_factory=dict)
    """Each (form, place) of a block to the block: whoever finds one looks at what is around it."""


_KNOWN = _Known()


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A key and where it came from; only the source is ever shown.

    >>> Secret("CANARY-0123456789", "environment variable X")
    Secret(from environment variable X)
    """

    value: str
    source: str
    """Words for messages: `environment variable OPENAI_API_KEY`, `argument api_key`."""

    def __post_init__(self) -> None:
        register(self.value)

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Secret is not written anywhere; name its environment variable instead")

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the key and do not lead back to it (salted SHA-256)."""
        salted = b"tfgrpo credential identity\0" + self.value.encode("utf-8", "surrogatepass")
        return hashlib.sha256(salted).hexdigest()[:16]

    @classmethod
    def from_environment(cls, variable: str) -> Secret | None:
        """Return the key that an environment variable holds, or None where it is unset or blank.

        Raises:
            ConfigError: the value holds line breaks or non-ASCII characters, which no header takes.
        """
        value = os.environ.get(variable, "").strip()
        if not value:
            return None
        if not value.isascii() or not value.isprintable():
            register(value)
            raise ConfigError(
                f"environment variable {variable} holds characters that no HTTP header can carry "
                "(line breaks or non-ASCII): set it to the bare key"
            )
        return cls(value, f"environment variable {variable}")


def register(value: str) -> None:
    """Make `redact` remove `value` from now on. Values under 8 characters and the usual
    placeholders (`EMPTY`, `none`) are no secrets and are ignored."""
    if len(value) < _SHORTEST or value.lower() in _PLACEHOLDERS or value in _KNOWN.values:
        return
    _KNOWN.values.add(value)
    for form in _forms(value):
        _KNOWN.pieces.update(form[i : i + _PIECE] for i in range(len(form) - _PIECE + 1))
        if '"' not in form and "\\" not in form:
            size = (_half(form) + 1) // 2
            for at in range(0, len(form) - size + 1, size):
                _KNOWN.blocks[form, at] = form[at : at + size]


def register_headers(fields: Mapping[str, str]) -> None:
    """Register the values of headers or query fields whose names say that they hold a key."""
    for name, value in fields.items():
        if _KEY_NAME.search(name):
            register(value)
            register(value.partition(" ")[2])  # what follows a scheme such as Bearer


def forget_secrets() -> None:
    """Empty the registry (for tests)."""
    _KNOWN.values.clear()
    _KNOWN.pieces.clear()
    _KNOWN.blocks.clear()


def _half(form: str) -> int:
    """The length from which a run of a secret's form is taken out of data: half of it."""
    return max(_SHORTEST, (len(form) + 1) // 2)


def _forms(value: str) -> Iterable[str]:
    raw = value.encode("utf-8", "surrogatepass")
    yield value
    yield quote(value, safe="", errors="replace")
    yield quote_plus(value, errors="replace")
    yield quote(quote(value, safe="", errors="replace"), safe="")
    yield raw.hex()
    yield raw.hex().upper()
    for shift in range(3):  # base64 depends on the alignment: the key may follow "user:"
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(b"\0" * shift + raw).decode("ascii")
            inner = text[(0, 2, 3)[shift] :].rstrip("=")
            yield inner if (shift + len(raw)) % 3 == 0 else inner[:-1]


def redact(text: str) -> str:
    """Return `text` without any known secret (or piece of one) and without what looks like a key.

    >>> redact("Authorization: Bearer abcdefghijklmnop")
    'Authorization: Bearer [redacted]'
    """
    pieces = _KNOWN.pieces
    if pieces:
        text = _redact_known(text, pieces)
    for pattern in _PATTERNS:
        text = pattern.sub(_mask, text)
    return text


def redact_known(text: str) -> str:
    """Return `text` without the secrets that this process has read: whole, or any half of one in a
    row, as they are or URL-encoded, in hex or in base64.

    For text that is data and must come back as it was: what merely looks like a key stays, and so
    do shorter pieces of secrets. JSON stays JSON.
    """
    for value in _KNOWN.values:
        if value in text:
            text = text.replace(value, MASK)
    for (form, at), block in _KNOWN.blocks.items():
        if block in text:
            text = _without_runs(text, form, at, len(block))
    return text


def _without_runs(text: str, form: str, at: int, size: int) -> str:
    """Replace the runs of at least half a form that hold its block at `at`."""
    block, least = form[at : at + size], _half(form)
    out: list[str] = []
    kept, found = 0, text.find(block)
    while found >= 0:
        before, after = 0, 0
        while before < min(at, found - kept) and text[found - before - 1] == form[at - before - 1]:
            before += 1
        rest = min(len(form) - at, len(text) - found) - size
        while after < rest and text[found + size + after] == form[at + size + after]:
            after += 1
        end = found + size + after
        if end - found + before >= least:
            out += (text[kept : found - before], MASK)
            kept = end
        found = text.find(block, end)
    return "".join((*out, text[kept:])) if out else text


def _mask(match: re.Match[str]) -> str:
    if match.re.groups and match[1] is not None:
        return match[0].replace(match[1], MASK) if match[1] != MASK else match[0]
    return MASK


def _redact_known(text: str, pieces: set[str]) -> str:
    out: list[str] = []
    kept, i, last = 0, 0, len(text) - _PIECE
    while i <= last:
        if text[i : i + _PIECE] not in pieces:
            i += 1
            continue
        end = i + _PIECE
        while end < len(text) and text[end - _PIECE + 1 : end + 1] in pieces:
            end += 1
        out += (text[kept:i], MASK)
        kept = i = end
    if not out:
        return text
    return "".join((*out, text[kept:]))


class RedactingFilter(logging.Filter):
    """A logging filter that redacts the finished message and its traceback; attach it to a handler
    or a logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the record in place; never drops one."""
        message = record.getMessage()
        clean = redact(message)
        if clean != message:
            record.msg, record.args = clean, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
            record.exc_info = None
        return True


_FILTER = RedactingFilter()


def redact_logs(*roots: str) -> None:
    """Attach the filter to every existing logger at or below the given names.

    A filter on a logger does not see its children's records, hence each one by name. Libraries
    create their loggers when they are imported: call this afterwards. May be called again.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.split(".", 1)[0] in roots:
            logging.getLogger(name).addFilter(_FILTER)
