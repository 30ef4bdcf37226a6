"""The settings of a fleet: which servers, which model, and the rules of placement and health.

Does not know connections. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.redaction import redact

__all__ = ["FleetSettings", "read_servers"]


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How a fleet is used."""

    servers: Sequence[str] | str
    """URLs including `/v1`; or a file of them, one a line, which is read again while it is used."""
    model: str
    """The name that every server must list."""
    revision: str = ""
    """Of the weights, in words of your own; part of every cache key."""
    load_factor: float = 1.25
    """A server takes at most so many times the mean of the calls in flight."""
    room: int = 16
    """Calls that a server may always have: batching makes the first ones free."""
    hedge_share: float = 0.05
    """Largest share of calls that are sent twice where the first token is late; 0 for never."""
    hedge_after: float = 0.95
    """Quantile of recent times to the first token after which a call is late."""
    health_s: float = 5.0
    """Seconds between two looks at a server's health."""
    rest_s: float = 10.0
    """First rest of a server that failed three times within ten seconds."""
    most_rest_s: float = 60.0
    """Longest rest; each further one in a row is twice as long."""
    queue_metrics: bool = False
    """Also count the requests that a server's own metrics call waiting, where others use it too."""
    same_root: bool = True
    """Refuse a server whose model list names other weights (`root`) than the first one's."""

    def __post_init__(self) -> None:
        rules = {
            "load_factor must be at least 1": self.load_factor >= 1,
            "room must be at least 1": self.room >= 1,
            "hedge_share must be from 0 to 0.5": 0 <= self.hedge_share <= 0.5,
            "hedge_after must be above 0.5 and below 1": 0.5 < self.hedge_after < 1,
            "health_s must be above 0": self.health_s > 0,
            "rest_s must be above 0": self.rest_s > 0,
            "model must be a name": bool(self.model),
        }
        wrong = [rule for rule, holds in rules.items() if not holds]
        if wrong:
            raise ConfigError(f"fleet of model {self.model!r}: {'; '.join(wrong)}")


def read_servers(servers: Sequence[str] | str) -> list[str]:
    """Return the URLs of a fleet, in order; of a file its lines without comments.

    Raises:
        ConfigError: the file cannot be read, a line is no URL, one stands twice, or there is none.
    """
    where = "servers"
    lines: Sequence[str]
    if isinstance(servers, str) and not servers.startswith(("http://", "https://")):
        where = f"servers file {servers!r}"
        try:
            text = Path(servers).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{where} cannot be read: {exc}") from exc
        lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
    else:
        lines = [servers] if isinstance(servers, str) else list(servers)
    if not lines:
        raise ConfigError(f"{where}: there is none; give at least one URL such as http://HOST/v1")
    urls = [_checked(line, where) for line in lines]
    twice = sorted({u for u in urls if urls.count(u) > 1})
    if twice:
        raise ConfigError(f"{where}: {', '.join(twice)} stands there twice")
    return urls


def _checked(url: object, where: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(redact(f"{where}: {url!r} is not a URL such as http://HOST:8000/v1"))
    if parts.username or parts.password:
        raise ConfigError(
            redact(f"{where}: a key in the URL of {parts.hostname!r} is refused; use api_key_env")
        )
    return parts.geturl().rstrip("/")
