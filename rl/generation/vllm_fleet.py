"""Several vLLM servers of one model behind one `protocols.Generator`.

Draws of a prompt go to one server, which has its prefix cached, and prompts to the server with the
fewest requests in flight. A draw's seed travels with it, so it does not matter who answers. A
server that fails is left for the next one; one that may have other weights than the last that were
handed over answers nothing until it has read those.

Does not know rewards or training. Source: own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl import distributed
from tfgrpo.rl.generation.vllm_server import AWAY, TRIES_S, FolderReload, VllmServer, each_draw

log = logging.getLogger(__name__)

FAILURES = 3
"""Failures in a row after which a busy server rests."""
REST_S = 10.0
"""How long it is asked only where no other is left."""
_UNKNOWN = -1
"""Version of weights that nobody confirmed."""


@dataclass(slots=True, eq=False)
class _Member:
    """One server and where it stands."""

    server: VllmServer
    reload: FolderReload
    version: int = 0
    """Of the weights that it said it has read."""
    context: int | None = None
    """Tokens that it takes, where it says so."""
    in_flight: int = 0
    begun: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0


Homes = dict[tuple[int, ...], _Member]
"""Prompt to the server that has it cached."""


class VllmFleet:
    """Servers that were started from one folder.

    Args:
        servers: each with what has it read the folder's weights; two or more.
        concurrency: requests in flight, times the number of servers.
    """

    def __init__(
        self, servers: Sequence[tuple[VllmServer, FolderReload]], *, concurrency: int = 64
    ) -> None:
        self._members = [_Member(server, reload) for server, reload in servers]
        self._width = concurrency * len(servers)
        self._version = 0
        self._lock = threading.Lock()
        self._returning = threading.Lock()

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt: one request a draw.

        Raises:
            ProviderError: every server is away, or one refuses the request.
        """
        del n
        homes: Homes = {}
        return each_draw(
            token_ids, seeds, self._width, lambda ids, seed: self._draw(homes, ids, seed, sampling)
        )

    def _draw(self, homes: Homes, ids: tuple[int, ...], seed: int, sampling: Sampling) -> Generated:
        """Ask one server after the other; when all failed, wait and ask them again."""
        cause = ProviderError("no vLLM server has the present weights", kind="connection")
        for wait_s in (0.0, *TRIES_S):
            if wait_s:
                time.sleep(wait_s)
                self._call_back()
            tried: list[_Member] = []
            while (member := self._pick(homes, ids, tried)) is not None:
                try:
                    made = member.server.draw(ids, seed, sampling, ())
                except ProviderError as exc:
                    self._ended(member, exc)
                    if exc.kind not in AWAY:
                        raise
                    cause = exc
                else:
                    if self._ended(member, None):
                        return made
                tried.append(member)
        raise ProviderError(
            f"none of {len(self._members)} vLLM servers answers; the last: {cause}",
            kind=cause.kind,
            status=cause.status,
        )

    def _pick(
        self, homes: Homes, ids: tuple[int, ...], tried: Collection[_Member]
    ) -> _Member | None:
        """Return the prompt's server, or the one with the fewest requests in flight."""
        now = time.monotonic()
        with self._lock:
            ready = [m for m in self._members if m.version == self._version and m not in tried]
            if not ready:
                return None
            found = homes.get(ids)
            if found not in ready or found.rests_until > now:
                found = min(ready, key=lambda m: (m.rests_until > now, m.in_flight, m.begun))
                homes[ids] = found
            found.in_flight += 1
            found.begun += 1
            return found

    def _ended(self, member: _Member, error: ProviderError | None) -> bool:
        """Note how a request ended; True where its server had the present weights throughout.

        One that went away may come back with other weights, so it is out until it has read them.
        """
        with self._lock:
            member.in_flight -= 1
            if error is None:
                member.failures = 0
            elif error.kind == "connection":
                if member.version != _UNKNOWN:
                    log.warning("%s is away and left out: %s", member.server.url, error)
                member.version = _UNKNOWN
            elif error.kind in AWAY:
                member.failures += 1
                if member.failures >= FAILURES:
                    member.failures, member.rests_until = 0, time.monotonic() + REST_S
            return member.version == self._version

    def stop(self) -> None:
        """Begin no further request until new weights come; those in flight end."""
        for member in self._members:
            member.server.stop()

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Write the weights once and have every server read them; those that are away are left out.

        One process of several does, and the others learn from it who has them.

        Raises:
            ConfigError: a server cannot read weights, or the servers' context sizes differ.
            ProviderError: every server is away.
        """
        self._version += 1
        if not distributed.world()[0]:
            self._members[0].reload.write(named_params)
            self._hand_over()
        known = distributed.gather_objects([m.version for m in self._members])[0]
        for member, version in zip(self._members, known, strict=True):
            member.version = version
            member.server.go_on()
        if self._version not in known:
            raise ProviderError(
                f"none of {len(self._members)} vLLM servers took the new weights",
                kind="connection",
            )

    def _call_back(self) -> None:
        """Where no server is left, have those that were away read the weights."""
        with self._returning:
            if all(m.version != self._version for m in self._members):
                self._hand_over()

    def _hand_over(self) -> None:
        with ThreadPoolExecutor(len(self._members)) as pool:
            list(pool.map(self._read_weights, self._members))
        sizes = {m.server.url: m.context for m in self._members if m.context is not None}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{url}: {n}" for url, n in sizes.items())
            raise ConfigError(
                f"the vLLM servers take sequences of different lengths ({told}), so a reply would "
                "depend on who gives it: start all with one --max-model-len"
            )

    def _read_weights(self, member: _Member) -> None:
        """Have a server read the folder; it counts again once it says that it has."""
        try:
            member.context = member.server.context_tokens()
            member.reload.tell(())
        except ProviderError as exc:
            log.warning("%s took no new weights and is left out: %s", member.server.url, exc)
            return
        with self._lock:
            member.version, member.failures, member.rests_until = self._version, 0, 0.0
