"""`JournaledLM`: decides whether a call is needed, whether it is allowed, and writes what it costs.

For each draw: look under its content key; reserve the worst case; write the intent; call; write the
result and the reply in one transaction; only then hand the reply out. Equal draws asked for at the
same time share one call. A failure that may have been billed (a lost connection, a timeout) counts
at its worst case and is kept apart; one that the server refused counts as a call and nothing else.

Does not know retries, concurrency or what a reply means. Source: own; sharing of equal calls after
Go's `singleflight`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tfgrpo.errors import BudgetError, ProviderError
from tfgrpo.messages import ToolCall
from tfgrpo.protocols import LM, Completion, LMWrapper, Request
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import CallScope, current_scope, extra_calls, outer_allowance
from tfgrpo.runtime.canonical import jsonable
from tfgrpo.runtime.redaction import redact_known
from tfgrpo.store.booking import (
    LearntBound,
    WorstCase,
    book_failure,
    book_replies,
    checked_usage,
    require_price,
    settlement,
    with_cost,
    worst_case,
)
from tfgrpo.store.budget import Reservation
from tfgrpo.store.calls import CallEnd, CallStart, Flight
from tfgrpo.store.disk.cache import CallCache
from tfgrpo.store.journal import Journal
from tfgrpo.store.keys import KeyMaker, RequestKey
from tfgrpo.store.prices import Price, PriceTable

log = logging.getLogger(__name__)

_BYTES_A_TOKEN = 4
_TOKENS_A_MESSAGE = 8
_PAUSES_S = (0.05, 0.5)
"""The shortest and the longest pause while another writer asks for a draw."""


class JournaledLM(LMWrapper):
    """An `LM` whose calls are kept, counted and never paid twice.

    Draw i of a call has the sample index of the running scope plus i. Replies come back as the
    first so many draws in a row that could be had; the caller asks again for the rest.

    Args:
        lm: the LM to ask.
        store: the run's journal.
        cache: False asks again even for what is kept; what is asked is kept all the same.
        prices: dollars per million tokens by model id, over the package's table; or a table.
        shared: a cache over several runs.
        clock: monotonic seconds.

    Raises:
        ConfigError: the run's budget limits money and the model's price is unknown.
    """

    def __init__(
        self,
        lm: LM,
        store: Journal,
        *,
        cache: bool = True,
        prices: PriceTable | Mapping[str, Mapping[str, Any]] | None = None,
        shared: CallCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lm)
        self._store = store
        self._cache = cache
        self._shared = shared
        self._clock = clock
        self._keys = KeyMaker()
        self._sized: tuple[RequestKey | None, int] = (None, 0)
        """The newest request that was sized, by its key, and the tokens of its prompt."""
        table = prices if isinstance(prices, PriceTable) else PriceTable(prices)
        self._price = table.find(lm.model_id)
        self._bound: LearntBound | None = None
        self._patience = _Patience()
        self._has_told = False
        """True once it was said that calls use more than their text suggests."""
        require_price(store.ledger, self._price, lm.model_id)
        if self._price is None:
            log.info("the price of %s is unknown: its cost is shown as unknown", lm.model_id)

    @property
    def price(self) -> Price | None:
        """The model's price, or None where it is unknown."""
        return self._price

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return 1 to n replies, each kept before it is returned.

        Raises:
            BudgetError: the worst case would pass a limit, also when the calls in flight end.
            ProviderError: as the wrapped LM; the failed call is counted.
            StoreError: the journal cannot be written.
        """
        scope = current_scope()
        key = self._keys.key(request, self._lm.identity)
        if self._sized[0] is not key:
            self._sized = (key, estimate_prompt_tokens(request, self._lm))
        asked = _Asked(request, self._sized[1], scope)
        first = scope.sample_index
        if n == 1 and self._cache:
            return [await self._one(asked, _Draw(key.draw(first, seeds[0]), seeds[0]))]
        draws = [_Draw(key.draw(first + i, seeds[i]), seeds[i]) for i in range(n)]
        if not self._cache:
            return [reply for _, reply in await self._ask(asked, draws)]
        while True:
            found = [self._find(draw.key, scope) for draw in draws]
            missing = [d for d, reply in zip(draws, found) if reply is None]
            if missing:
                made = await self._share(asked, missing)
                found = [reply or made.get(d.key) for d, reply in zip(draws, found)]
            had = found.index(None) if None in found else n
            if had:
                return [reply for reply in found[:had] if reply is not None]

    async def _one(self, asked: _Asked, draw: _Draw) -> Completion:
        reply = self._find(draw.key, asked.scope)
        while reply is None:
            made = await self._share(asked, (draw,))
            reply = made.get(draw.key) or self._find(draw.key, asked.scope)
        return reply

    def _find(self, key: bytes, scope: CallScope) -> Completion | None:
        reply = self._store.calls.find_reply(key)
        if reply is None and self._shared is not None:
            reply = self._shared.find(key)
            if reply is not None:
                self._store.calls.keep_reply(key, reply)
        if reply is not None:
            self._store.calls.count_hit(scope.stage, redact_known(self.model_id))
        return reply

    async def _share(self, asked: _Asked, missing: Sequence[_Draw]) -> dict[bytes, Completion]:
        """Ask for the draws that nobody asks for yet, then wait for those that others ask for."""
        loop = asyncio.get_running_loop()
        flights = self._store.calls.flights
        made: dict[bytes, Completion] = {}
        others: list[tuple[bytes, Flight]] = []
        mine: list[_Draw] = []
        for draw in missing:
            place = (loop, draw.key)
            if place not in flights:
                flights[place] = None
                mine.append(draw)
                continue
            flight = flights[place]
            if flight is None:
                flight = flights[place] = loop.create_future()
            others.append((draw.key, flight))
        if mine:
            failure: ProviderError | None = None
            try:
                made.update(await self._ask(asked, mine))
            except ProviderError as exc:
                failure = exc
                raise
            finally:
                for draw in mine:
                    flight = flights.pop((loop, draw.key))
                    if flight is not None:
                        flight.set_result(failure)
        for key, flight in others:
            await asyncio.wait([flight])
            failed = flight.result()
            if failed is not None:
                raise copy.copy(failed) from failed
            found = self._find(key, asked.scope)
            if found is not None:
                made[key] = found
        return made

    async def _ask(self, asked: _Asked, draws: Sequence[_Draw]) -> list[_Reply]:
        """Call for several draws; without `prefers_n` each is a call of its own.

        Draws that another writer of the run asks for are left out; they are found later.
        """
        if len(draws) == 1 or self._lm.prefers_n:
            return await self._call(asked, draws)
        calls = [self._call(asked, [draw]) for draw in draws]
        results = await asyncio.gather(*calls, return_exceptions=True)
        replies: list[_Reply] = []
        for result in results:
            if isinstance(result, BaseException):
                if not replies or not isinstance(result, ProviderError):
                    raise result
                break
            replies.extend(result)
        return replies

    async def _call(self, asked: _Asked, draws: Sequence[_Draw]) -> list[_Reply]:
        n, limit = len(draws), asked.request.sampling.max_tokens
        plain = worst_case(asked.prompt_tokens, limit, n, self._price)
        prompt, completion = self._learnt().widen(plain.prompt_tokens, plain.completion_tokens // n)
        worst = worst_case(prompt, completion, n, self._price)
        reservation = await self._store.reserve(**worst.amounts)
        calls = self._store.calls
        calls.began()
        try:
            keys = [draw.key for draw in draws] if self._cache else ()
            claim = await calls.claim(self._start(asked, draws, worst), keys)
            if claim.keys is not None:
                draws = [draw for draw in draws if draw.key in claim.keys]
            if claim.call is not None:
                self._patience.clear()
                return await self._send(asked.request, draws, claim.call, reservation, plain)
        finally:
            reservation.release()
            calls.ended()
        await self._patience.wait()
        return []

    def _start(self, asked: _Asked, draws: Sequence[_Draw], worst: WorstCase) -> CallStart:
        return CallStart(
            key=draws[0].key,
            stage=asked.scope.stage,
            model=redact_known(self._lm.model_id),
            rollout_id=asked.scope.rollout_id,
            n=len(draws),
            prompt_tokens=worst.prompt_tokens,
            completion_tokens=worst.completion_tokens,
            cost_usd=worst.cost_usd,
        )

    async def _send(
        self,
        request: Request,
        draws: Sequence[_Draw],
        number: int,
        reservation: Reservation,
        plain: WorstCase,
    ) -> list[_Reply]:
        calls, n = self._store.calls, len(draws)
        began = self._clock()
        extra = 0
        end: CallEnd | None = None

        ask_outer = outer_allowance()

        def one_more(is_reported: bool, failure: ProviderError | None) -> None:
            nonlocal extra
            ask_outer(is_reported, failure)
            reservation.extend(calls=1)
            extra += 1

        try:
            with extra_calls(one_more):
                replies = await self._lm.complete(request, n, [d.seed for d in draws])
            if not replies:
                raise ProviderError(f"{self.model_id} returned no reply", kind="bad_reply")
            kept = [self._kept(reply, plain, n, i == 0) for i, reply in enumerate(replies[:n])]
            end = book_replies(
                [reply.usage for reply in kept],
                duration_s=self._clock() - began,
                model=kept[0].model,
                extra_calls=extra,
            )
        except ProviderError as exc:
            seconds = self._clock() - began
            end = book_failure(exc, duration_s=seconds, price=self._price, extra_calls=extra)
            await self._end(number, end, reservation)
            raise
        except BudgetError as exc:  # the LM was refused a further call: what was sent was refused
            end = CallEnd("rejected", Usage(calls=1 + extra), self._clock() - began, error=str(exc))
            await self._end(number, end, reservation)
            raise
        finally:
            if end is None:  # cancelled, or an error that no LM should raise: perhaps billed
                ended = CallEnd("unsettled", Usage(), self._clock() - began, error="cancelled")
                reservation.settle()
                calls.end_soon(number, ended)
        self._learn(plain, end)
        pairs = [(draw.key, reply) for draw, reply in zip(draws, kept)]
        await self._end(number, end, reservation, pairs)
        if self._shared is not None:
            self._shared.keep(pairs)
        return pairs

    async def _end(
        self, number: int, end: CallEnd, reservation: Reservation, replies: Sequence[_Reply] = ()
    ) -> None:
        """Write how a call ended and give back what it did not use: in this order, so that nobody
        is given what the journal still books for it."""
        try:
            await self._store.calls.end(number, end, replies)
        finally:
            reservation.settle(**settlement(end, reservation.amounts))

    def _learnt(self) -> LearntBound:
        """What earlier calls taught, those of earlier sessions included: read before the first
        call, so that a rerun without calls does not pay for it."""
        if self._bound is None:
            self._bound = LearntBound()
            self._bound.prompt, self._bound.completion = self._store.calls.most_used(
                redact_known(self._lm.model_id)
            )
        return self._bound

    def _learn(self, plain: WorstCase, end: CallEnd) -> None:
        grew = self._learnt().observe((plain.prompt_tokens, plain.completion_tokens), end.usage)
        if grew and not self._has_told:
            self._has_told = True
            log.warning(
                "%s: a call used %d + %d tokens where at most %d + %d were expected; the worst "
                "case of later calls grows with it, so a cap can be passed by the calls in flight",
                self.model_id,
                end.usage.prompt_tokens,
                end.usage.completion_tokens,
                plain.prompt_tokens,
                plain.completion_tokens,
            )

    def _kept(self, reply: Completion, plain: WorstCase, n: int, is_first: bool) -> Completion:
        """Return the reply with believable usage and its cost, and without any secret of this
        process."""
        size = estimate_reply_tokens(reply)
        usage = checked_usage(reply.usage, plain.prompt_tokens if is_first else 0, size)
        usage = with_cost(usage, self._price)
        changes: dict[str, Any] = {} if usage == reply.usage else {"usage": usage}
        for name in ("text", "reasoning", "model"):
            value = getattr(reply, name)
            clean = redact_known(value)
            if clean != value:
                changes[name] = clean
        calls = tuple(_clean_call(call) for call in reply.tool_calls)
        if calls != reply.tool_calls:
            changes["tool_calls"] = calls
        return replace(reply, **changes) if changes else reply


class _Draw(NamedTuple):
    key: bytes
    seed: int | None


_Reply = tuple[bytes, Completion]
"""A reply under its draw's key."""


class _Asked(NamedTuple):
    request: Request
    prompt_tokens: int
    scope: CallScope


class _Patience:
    """Pauses while other writers ask for what is wanted; longer each time until a call is made."""

    def __init__(self) -> None:
        self._next_s = _PAUSES_S[0]

    def clear(self) -> None:
        """Begin with short pauses again."""
        self._next_s = _PAUSES_S[0]

    async def wait(self) -> None:
        """Sleep."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(_PAUSES_S[1], 1.2 * self._next_s)
        await asyncio.sleep(pause_s)


def _clean_call(call: ToolCall) -> ToolCall:
    return replace(call, name=redact_known(call.name), arguments=redact_known(call.arguments))


def estimate_reply_tokens(reply: Completion) -> int:
    """Return how many tokens a reply has, by its bytes / 4."""
    texts = [reply.text, reply.reasoning, *(c.name + c.arguments for c in reply.tool_calls)]
    return -(-sum(len(t.encode("utf-8", "replace")) for t in texts) // _BYTES_A_TOKEN)


def estimate_prompt_tokens(request: Request, lm: object = None) -> int:
    """Return how many tokens a prompt has: the LM's own count where it has one, else bytes / 4.

    Counts messages, tool calls and tool schemas, and 8 tokens per message, the reply included, for
    the chat template.
    """
    count = getattr(lm, "count_tokens", None)
    texts = [m.content for m in request.messages]
    for message in request.messages:
        texts.extend(call.name + call.arguments for call in message.tool_calls)
    if request.tools:
        texts.append(json.dumps([jsonable(t.to_dict()) for t in request.tools]))
    frame = _TOKENS_A_MESSAGE * (len(request.messages) + 1)  # the reply has a beginning too
    if count is not None:
        return int(count("\n".join(texts))) + frame
    size = sum(len(t) if t.isascii() else len(t.encode("utf-8", "replace")) for t in texts)
    return -(-size // _BYTES_A_TOKEN) + frame
