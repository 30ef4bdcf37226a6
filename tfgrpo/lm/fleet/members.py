"""The servers of a fleet while it is used: who may be asked, in which order, and what they did.

A server is `new` until it was looked at, then `up`, `down` (no connection), `draining` (it says
that it is not healthy, or it has left the list: no new calls, those in flight end) or `refused`
(another model). Beside that it rests after failures, with one call as probe when the rest is over.

Does not know HTTP. Source: own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tfgrpo.errors import ProviderError
from tfgrpo.lm.fleet.placement import Placement
from tfgrpo.lm.fleet.settings import FleetSettings
from tfgrpo.runtime.cooldown import Cooldowns

__all__ = ["Members", "Server", "State"]

State = Literal["new", "up", "down", "draining", "refused"]
_FAILURES = 3
_WINDOW_S = 10.0


@dataclass(slots=True)
class Server:
    """One server and its figures."""

    url: str
    state: State = "new"
    why: str = ""
    """Why it is not up."""
    has_left: bool = False
    """True once it no longer stands in the list."""
    in_flight: int = 0
    waiting: float = 0.0
    """Requests that its own metrics call waiting."""
    calls: int = 0
    failures: int = 0
    rests: int = 0
    at_home: int = 0
    """Calls whose key is at home here."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server had in its cache."""

    @property
    def load(self) -> float:
        """What placement compares."""
        return self.in_flight + self.waiting


class Members:
    """The servers of a fleet.

    Args:
        name: the fleet's, for messages.
        settings: rules of placement and rest.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        settings: FleetSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.servers: dict[str, Server] = {}
        self.placement = Placement(settings.load_factor, settings.room)
        self.cooldowns = Cooldowns(
            cooldown_s=settings.rest_s,
            allowed_failures=_FAILURES - 1,
            window_s=_WINDOW_S,
            most_s=settings.most_rest_s,
            clock=clock,
        )

    def keep(self, urls: Sequence[str]) -> list[str]:
        """Make these the servers; returns the URLs of those that have left and are idle."""
        for url in urls:
            if url not in self.servers or self.servers[url].has_left:
                self.servers[url] = Server(url)
        for url, server in self.servers.items():
            if url not in urls:
                server.has_left = True
                server.state, server.why = "draining", "it no longer stands in the list of servers"
        gone = [u for u, s in self.servers.items() if s.has_left and not s.in_flight]
        for url in gone:
            del self.servers[url]
        return gone

    def candidates(self, key: str) -> list[Server]:
        """Return the servers in the order in which a call should try them; empty where none is up.

        Those that rest come into question only where all do.
        """
        usable = {u: s.load for u, s in self.servers.items() if s.state == "up"}
        ready = set(self.cooldowns.available(list(usable)))
        order = self.placement.order(key, {u: v for u, v in usable.items() if u in ready})
        return [self.servers[url] for url in order]

    def none_up(self) -> ProviderError:
        """Return the error of a call that no server can take."""
        servers = self.servers.values()
        said = "; ".join(f"{s.url} is {s.state}: {s.why or 'not tried'}" for s in servers)
        is_wrong = bool(servers) and all(s.state == "refused" for s in servers)
        return ProviderError(
            f"fleet {self.name!r}: no server can be asked ({said}); they are looked at again",
            kind="not_found" if is_wrong else "connection",
            was_sent=False,
        )

    def began(self, server: Server, key: str) -> None:
        """Count a call that goes to a server now."""
        server.calls += 1
        server.in_flight += 1
        server.at_home += bool(key) and self.placement.home(key) == server.url
        self.cooldowns.started(server.url)

    def ended(self, server: Server, failure: BaseException | None) -> None:
        """Count the end of a call, and what it says about the server: of a call that was cancelled
        nothing."""
        server.in_flight -= 1
        if failure is None:
            self.cooldowns.succeeded(server.url)
        elif isinstance(failure, ProviderError):
            server.failures += 1
            rested = self.cooldowns.state(server.url) == "cooling"
            self.cooldowns.failed(server.url, failure)
            server.rests += not rested and self.cooldowns.state(server.url) == "cooling"
        else:
            self.cooldowns.abandoned(server.url)
