"""One call to a fleet: which servers are tried, and the race of two for the first token.

A server that refuses a call before it has answered anything costs nothing, and the next one is
asked at once. A reply that breaks off is a failure that leaves: whoever books and repeats calls
stands outside. Where a first token is late and few calls were sent twice, a second server gets the
call, and the one that begins first keeps it.

Does not know what a call is: bytes or records. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from tfgrpo.errors import BudgetError, ProviderError
from tfgrpo.lm.fleet.hedging import Hedging
from tfgrpo.lm.fleet.members import Members, Server
from tfgrpo.runtime.call_scope import count_extra_call
from tfgrpo.runtime.cooldown import COUNTED

__all__ = ["Attempt", "Begin", "FleetCalls"]

T = TypeVar("T")
Begin = Callable[[str, Callable[[], None]], Coroutine[Any, Any, T]]
"""Makes the call at a server's URL; calls the function once the reply has begun."""


class Attempt(Generic[T]):
    """A call at one server, in a task of its own."""

    def __init__(self, members: Members, server: Server, key: str, begin: Begin[T]) -> None:
        self.server = server
        self._members = members
        loop = asyncio.get_running_loop()
        self.started = loop.time()
        self.has_begun = False
        self.decided = loop.create_future()
        """Done once the reply has begun or the call has ended."""
        # Not in the task, or calls that begin in the same turn would not see each other.
        members.began(server, key)
        self.task: asyncio.Task[T] = asyncio.create_task(begin(server.url, self._begun))
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        is_cancelled = task.cancelled()
        failure = asyncio.CancelledError() if is_cancelled else task.exception()
        self._members.ended(self.server, failure)
        self._decide()

    def _begun(self) -> None:
        self.has_begun = True
        self._decide()

    def _decide(self) -> None:
        if not self.decided.done():
            self.decided.set_result(None)

    @property
    def failure(self) -> BaseException | None:
        """What the call failed with before its reply had begun; None while it may still answer."""
        if self.has_begun or not self.task.done():
            return None
        return asyncio.CancelledError() if self.task.cancelled() else self.task.exception()

    @property
    def is_won(self) -> bool:
        """True once the reply has begun, or is whole."""
        return self.has_begun or (self.task.done() and self.failure is None)


class FleetCalls:
    """Makes calls at the servers of a fleet."""

    def __init__(self, members: Members, hedging: Hedging) -> None:
        self.members = members
        self.hedging = hedging

    async def first(
        self, key: str, begin: Begin[T], *, may_hedge: bool, may_repeat: bool = False
    ) -> Attempt[T]:
        """Return the attempt whose reply has begun, or is whole; its task is the caller's.

        Args:
            key: of affinity; empty for none.
            begin: makes the call at one server.
            may_hedge: the reply is streamed, so that its beginning is known.
            may_repeat: also go on to the next server where a connection was lost before anything
                was received; for callers outside of which nobody asks again.

        Raises:
            ProviderError: the last server's failure, or no server can be asked.
            BudgetError: a further call is not allowed.
        """
        self.hedging.calls += 1
        tried: set[str] = set()
        while True:
            servers = [s for s in self.members.candidates(key) if s.url not in tried]
            if not servers:
                raise self.members.none_up()
            racing = [Attempt(self.members, servers[0], key, begin)]
            winner: Attempt[T] | None = None
            try:
                winner = await self._race(racing, servers[1:], key, begin, may_hedge)
            finally:
                await _end(a for a in racing if a is not winner)
            if winner is not None:
                return winner
            tried |= {a.server.url for a in racing}
            failure = racing[-1].failure
            assert failure is not None
            left = [s for s in self.members.candidates(key) if s.url not in tried]
            if not (isinstance(failure, ProviderError) and left and _moves_on(failure, may_repeat)):
                raise failure
            if failure.was_sent is not False:
                count_extra_call(failure=failure)

    async def _race(
        self,
        racing: list[Attempt[T]],
        others: Sequence[Server],
        key: str,
        begin: Begin[T],
        may_hedge: bool,
    ) -> Attempt[T] | None:
        """Wait for the first beginning; None where every attempt failed before that."""
        delay = self.hedging.delay() if may_hedge and others else None
        if delay is not None:
            await asyncio.wait([racing[0].decided], timeout=delay)
            if not racing[0].decided.done() and self.hedging.may_hedge() and _is_allowed():
                self.hedging.hedges += 1
                racing.append(Attempt(self.members, others[0], key, begin))
        while True:
            for attempt in racing:
                if attempt.is_won:
                    if attempt.has_begun:
                        # Where the copy wins, the first one took at least until now.
                        now = asyncio.get_running_loop().time()
                        self.hedging.observe(now - racing[0].started)
                    return attempt
            waiting = [a.decided for a in racing if a.failure is None]
            if not waiting:
                return None
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


def _is_allowed() -> bool:
    """Ask whoever counts calls for one more; a cap that is reached forbids the second copy of a
    call, and the first one goes on."""
    try:
        count_extra_call()
    except BudgetError:
        return False
    return True


def _moves_on(failure: ProviderError, may_repeat: bool) -> bool:
    """True where the server gave nothing, so that another one may be asked at once."""
    if failure.was_sent is False or (may_repeat and failure.kind in ("connection", "bad_reply")):
        return True
    is_refusal = failure.status is not None and failure.status >= 300
    return is_refusal and failure.kind in COUNTED and not failure.had_output


async def _end(attempts: Iterable[Attempt[Any]]) -> None:
    """Cancel attempts and wait until they have let go of their servers."""
    tasks = [attempt.task for attempt in attempts]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
