"""`RemoteLM`: an LM of the run, asked for at the run's endpoint.

What it says of itself (id, identity, whether it prefers several draws) is the real LM's, so that
policies built on it have the same ids as in the run. Failures come back as the same errors.

Does not know keys, prices, retries: the endpoint's LM has them. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import ExecutorError, MissingExtraError
from tfgrpo.protocols import LM, Completion, Request
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.store.codec import completion_from_dict
from tfgrpo.workers.codec import error_from_dict, request_to_dict, scope_to_dict
from tfgrpo.workers.endpoint import PATH

if TYPE_CHECKING:
    import aiohttp

__all__ = ["EndpointClient", "LmFacts", "RemoteLM"]

_TRIES = 6
_FIRST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class LmFacts:
    """What an LM says of itself."""

    model_id: str
    identity: Mapping[str, Any]
    prefers_n: bool

    @classmethod
    def of(cls, lm: LM) -> LmFacts:
        """Return the facts of an LM."""
        return cls(lm.model_id, dict(lm.identity), lm.prefers_n)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "model_id": self.model_id,
            "identity": dict(self.identity),
            "prefers_n": self.prefers_n,
        }


class EndpointClient:
    """The connections of one worker to the run's endpoint.

    Args:
        url: `http://HOST:PORT` or `unix:PATH`.
        token: of the run.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Post a call and return its answer; a connection that is lost is made again, since what
        was asked is found by its key.

        Raises:
            ExecutorError: the endpoint cannot be reached, or refuses the worker.
        """
        import aiohttp

        said = ""
        for attempt in range(_TRIES):
            try:
                return await self._post(row)
            except (aiohttp.ClientError, ConnectionError) as exc:
                said = f"{type(exc).__name__}: {exc}"
            await asyncio.sleep(_FIRST_WAIT_S * 2.0**attempt)
        raise ExecutorError(f"the run's endpoint {self._url} cannot be reached ({said})")

    async def _post(self, row: Mapping[str, Any]) -> dict[str, Any]:
        session = self._open()
        base = "http://run" if self._url.startswith("unix:") else self._url
        async with session.post(base + PATH, json=row) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise ExecutorError(
                    f"the run's endpoint {self._url} refused a worker: HTTP {response.status}, "
                    f"{answer.get('error')!r:.200}"
                )
            return answer

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            try:
                import aiohttp
            except ImportError as exc:
                raise MissingExtraError.of("serve", "a worker", "aiohttp") from exc
            connector: aiohttp.BaseConnector
            if self._url.startswith("unix:"):
                connector = aiohttp.UnixConnector(self._url.removeprefix("unix:"), limit=0)
            else:
                connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={"authorization": f"Bearer {self._token}"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
                trust_env=False,
            )
        return self._session

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class RemoteLM:
    """One LM of the run.

    Args:
        client: the worker's connections.
        name: the LM's at the endpoint.
        facts: what the real one says of itself.
    """

    def __init__(self, client: EndpointClient, name: str, facts: LmFacts) -> None:
        self._client, self._name, self._facts = client, name, facts

    @property
    def model_id(self) -> str:
        """The real one's."""
        return self._facts.model_id

    @property
    def identity(self) -> Mapping[str, Any]:
        """The real one's."""
        return self._facts.identity

    @property
    def prefers_n(self) -> bool:
        """The real one's, when the work began."""
        return self._facts.prefers_n

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return n replies, or raise what the run's LM raised."""
        answer = await self._client.ask(
            {
                "lm": self._name,
                "request": request_to_dict(request),
                "n": n,
                "seeds": list(seeds),
                "scope": scope_to_dict(current_scope()),
            }
        )
        if "error" in answer:
            raise error_from_dict(answer["error"])
        return [completion_from_dict(row) for row in answer["replies"]]

    async def aclose(self) -> None:
        """The connections are the worker's."""
