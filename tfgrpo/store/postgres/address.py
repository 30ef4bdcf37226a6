"""Where a run's journal lies on a server, and how that is said without its password.

`postgresql://USER@HOST:PORT/DATABASE#RUN`, as libpq reads it, with the run's name behind `#`. The
password belongs into the environment (`PGPASSWORD`) or a passfile; one that stands in the address
is registered with the redactor and never shown or written.

Does not know connections. Source: own; libpq's connection URIs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.redaction import MASK, redact, register

__all__ = ["Address", "is_address", "parse_address"]

_SCHEME = re.compile(r"(?i)^postgres(?:ql)?:(/{1,3})(?=[^/])")
_SECRET_FIELDS = ("password", "sslpassword")
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """A database, and the run in it; shown without any password.

    >>> str(parse_address("postgresql://me:canary-pass@db.example/tfgrpo#first"))
    'postgresql://me@db.example/tfgrpo#first'
    """

    url: str = field(repr=False)
    """For libpq, password included."""
    shown: str
    """For people and files."""
    run: str = ""
    """The run's name; empty where the address names a database only."""
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.shown}#{quote(self.run, safe='')}" if self.run else self.shown

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    @property
    def whole(self) -> str:
        """The address to connect with, password included: never shown or written."""
        return f"{self.url}#{quote(self.run, safe='')}" if self.run else self.url

    def named(self, run: str) -> Address:
        """Return the address of a run in the same database."""
        return Address(self.url, self.shown, _checked_name(run), self.secrets)

    def clean(self, text: str) -> str:
        """Return a text, such as a library's error, without the address's secrets."""
        for secret in self.secrets:
            for form in {secret, quote(secret, safe="")}:
                text = text.replace(form, MASK)
        return redact(text)


def is_address(where: str | Path) -> bool:
    """Tell whether a text or a path (which has lost a slash) is an address of a server.

    >>> is_address("postgresql://host/db#run"), is_address(Path("postgres:/host/db")), \
is_address("runs/first")
    (True, True, False)
    """
    return _SCHEME.match(str(where)) is not None


def parse_address(where: str | Path, run: str = "") -> Address:
    """Read an address; `run` is the run's name where the address gives none.

    Raises:
        ConfigError: it is no address of a PostgreSQL database; secrets are not repeated.
    """
    text = _with_slashes(str(where).strip())
    try:
        parts = urlsplit(text)
        fields = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        secrets = _secrets(parts.password, fields)
    except ValueError as exc:
        raise ConfigError(
            f"{redact(text)!r} is no address: expected postgresql://USER@HOST/DATABASE#RUN ({exc})"
        ) from exc
    if parts.scheme != "postgresql" or not parts.path.strip("/"):
        raise ConfigError(
            f"{redact(text)!r} is no address: expected postgresql://USER@HOST/DATABASE#RUN"
        )
    for secret in secrets:
        register(secret)
    kept = urlencode([(n, v) for n, v in fields if n not in _SECRET_FIELDS], safe="/")
    place = parts.netloc.rpartition("@")
    user = place[0].partition(":")[0]
    host = f"{user}@{place[2]}" if user else place[2]
    shown = f"postgresql://{host}{parts.path}" + (f"?{kept}" if kept else "")
    name = unquote(parts.fragment) or run
    return Address(
        text.partition("#")[0], redact(shown), _checked_name(name) if name else "", secrets
    )


def _with_slashes(text: str) -> str:
    """Return an address whole again of which a path has made `//` one slash."""
    found = _SCHEME.match(text)
    if found is None:
        return text
    rest = text[found.end() :]
    has_host = len(found[1]) == 2
    if len(found[1]) == 1:  # `///database` and `//host/database` look alike but for their parts
        has_host = "/" in re.split("[?#]", rest, maxsplit=1)[0]
    return f"postgresql://{rest}" if has_host else f"postgresql:///{rest}"


def _secrets(password: str | None, fields: list[tuple[str, str]]) -> tuple[str, ...]:
    found = [unquote(password)] if password else []
    return tuple(s for s in [*found, *(v for n, v in fields if n in _SECRET_FIELDS)] if s)


def _checked_name(name: str) -> str:
    is_plain = name.isprintable() and not set(name) & set("/\\") and name.strip(". ")
    if not is_plain or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"run name {name[:80]!r} cannot be used: give printable text without slashes, at most "
            f"{_LONGEST_NAME} characters"
        )
    return name
