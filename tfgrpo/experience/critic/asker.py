"""Asking a critic: one place for size, cut replies, repairs, second askings and the books.

Every call fits the model's window. A reply that was cut or is only thinking is asked for once more
with a larger limit and a smaller input, and otherwise dropped and counted. A reply that cannot be
read is asked for once more with the error. Provider errors that end the run pass; any other is
kept as a note and the stage goes on without this reply. Does not know prompts or the library.
Idea: repair first, ask again second, count everything (own).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tfgrpo.errors import ProviderError
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.replies import visible
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.messages import Message
from tfgrpo.prompts import render
from tfgrpo.protocols import LM, Completion, Request
from tfgrpo.runtime.call_scope import CallScope, call_scope
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.lenient_json import ReplyError

T = TypeVar("T")
Stage = Literal[
    "summarise", "contrast", "update", "merge", "nudge_text", "panel", "revise", "consolidate"
]
_MARGIN_TOKENS = 200
"""For chat marks and our own re-asking words."""


@dataclass(frozen=True, slots=True)
class CallNote:
    """Something that went wrong in one call and did not stop the step."""

    stage: Stage
    where: str
    """Task or rollout id."""
    problem: str
    kind: str = ""
    """`failed` (the call), `cut` or `unusable` (its reply)."""

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {
            "stage": self.stage,
            "where": self.where,
            "problem": self.problem,
            "kind": self.kind,
        }


@dataclass
class CallBooks:
    """What the calls of one step came to."""

    counts: Counter[str] = field(default_factory=Counter)
    """`calls`, `calls:STAGE`, `cut`, `reasked`, `shortened`, `failed`, `unusable`."""
    notes: list[CallNote] = field(default_factory=list)

    def note(self, kind: str, stage: Stage, where: str, problem: str) -> None:
        """Count a problem and keep its words."""
        self.counts[kind] += 1
        self.notes.append(CallNote(stage, where, problem, kind))

    def unread(self, stage: Stage) -> int:
        """Return how many askings of a stage ended without a usable reply."""
        return sum(note.stage == stage for note in self.notes)


@dataclass(frozen=True, slots=True)
class Where:
    """What a call is about, for scope and notes."""

    stage: Stage
    task_id: str = ""
    rollout_id: str = ""

    @property
    def name(self) -> str:
        """The most exact id known."""
        return self.rollout_id or self.task_id or "the whole step"


class Refusals:
    """The failures of an LM that has not answered yet; the run ends when the first all are alike.

    Args:
        give_up_after: failures of one kind, with no answer among them, before the run stops.
    """

    def __init__(self, give_up_after: int = 5) -> None:
        self._give_up_after = give_up_after
        self._has_answered = False
        self._failures: list[ProviderError] = []

    def answered(self) -> None:
        """Take an answer: from now on a failure costs its call alone."""
        self._has_answered = True
        self._failures.clear()

    def failed(self, failure: ProviderError) -> None:
        """Take a failure.

        Raises:
            ProviderError: it is the last of the first few, and all were of its kind.
        """
        if self._has_answered:
            return
        self._failures.append(failure)
        same = sum(f.kind == failure.kind for f in self._failures)
        if same >= self._give_up_after:
            raise ProviderError(
                f"the first {same} calls of the critic all failed alike: {failure}",
                kind=failure.kind,
                status=failure.status,
            )


class Asker:
    """Asks one LM under the critic's settings, some calls at a time."""

    def __init__(
        self,
        lm: LM,
        settings: ExperienceSettings,
        count: TokenCounter,
        refusals: Refusals | None = None,
    ) -> None:
        self._lm = lm
        self._refusals = refusals or Refusals()
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.budget.concurrency)
        self.count = count
        self.books = CallBooks()

    @property
    def reply_tokens(self) -> int:
        """Limit of a first reply: at most a quarter of the window."""
        budget = self._settings.budget
        return max(1, min(budget.reply_tokens, budget.context_tokens // 4))

    def input_tokens(self, reply_tokens: int) -> int:
        """Room of a prompt such that a second asking of the reply still fits the window."""
        room = self._settings.budget.context_tokens - 2 * reply_tokens - _MARGIN_TOKENS
        return max(room, self._settings.budget.context_tokens // 4)

    async def ask(
        self,
        where: Where,
        build: Callable[[int], str],
        read: Callable[[str], T],
        *,
        tries: int = 2,
    ) -> T | None:
        """Return what `read` makes of the reply, or None with a note where there is none.

        Args:
            where: stage and ids.
            build: the prompt for a limit in tokens.
            read: raises `ReplyError` for a reply that it cannot use.
            tries: how often a reply may be read; the second asking carries the error.

        Raises:
            ProviderError: no further call can succeed (key, model, quota), or the first few calls
                of this LM all failed alike.
            BudgetError: a cap was reached.
        """
        reply = self.reply_tokens
        prompt = build(self.input_tokens(reply))
        messages: tuple[Message, ...] = (Message("user", prompt),)
        problem = ""
        for attempt in range(tries):
            text = await self._whole_reply(where, build, messages, attempt)
            if text is None:
                return None
            try:
                return read(text)
            except ReplyError as exc:
                problem = str(exc)
            if attempt + 1 < tries:
                self.books.counts["reasked"] += 1
                messages = self._again(prompt, text, problem)
        self.books.note("unusable", where.stage, where.name, problem)
        return None

    def _again(self, prompt: str, text: str, problem: str) -> tuple[Message, ...]:
        if not self._settings.repairs.lenient_operations:
            return (Message("user", prompt),)
        again = render("critic_again", problem=problem[:400])
        return (
            Message("user", prompt),
            Message("assistant", text or "(empty)"),
            Message("user", again),
        )

    async def _whole_reply(
        self,
        where: Where,
        build: Callable[[int], str],
        messages: tuple[Message, ...],
        attempt: int,
    ) -> str | None:
        """Return a reply that was neither cut nor only thinking, asking at most twice."""
        reply = self.reply_tokens
        for retry in range(2):
            try:
                completion = await self._call(where, messages, reply, 2 * attempt + retry)
            except ProviderError as exc:
                if exc.is_fatal:
                    raise
                if exc.kind != "context_too_long" or retry:
                    self._refusals.failed(exc)
                    self.books.note("failed", where.stage, where.name, f"{exc.kind}: {exc}")
                    return None
                self.books.counts["shortened"] += 1
                half = min(self.input_tokens(reply), self.count(messages[0].content)) // 2
                messages = (Message("user", build(half)),)
                continue
            self._refusals.answered()
            seen = visible(completion)
            if not seen.cut:
                return seen.text
            if seen.cut == "filter":
                self.books.note("failed", where.stage, where.name, "refused by a content filter")
                return None
            if retry:
                self.books.note("cut", where.stage, where.name, f"the reply was cut ({seen.cut})")
                return None
            self.books.counts["cut_once"] += 1
            reply = min(2 * reply, self._settings.budget.context_tokens // 2)
            if len(messages) == 1:
                room = self._settings.budget.context_tokens - reply - _MARGIN_TOKENS
                messages = (
                    Message("user", build(min(room, self.input_tokens(self.reply_tokens)))),
                )
        return None

    async def _call(
        self, where: Where, messages: tuple[Message, ...], reply: int, index: int
    ) -> Completion:
        settings = self._settings
        request = Request(messages, sampling=settings.sampling, limits=settings.limits)
        request = request.with_sampling(max_tokens=reply if settings.budget.send_limit else None)
        seed = derive_seed(settings.seed, where.stage, where.task_id, where.rollout_id, index)
        scope = CallScope(where.stage, where.task_id, where.rollout_id, index)
        async with self._slots:
            self.books.counts["calls"] += 1
            self.books.counts[f"calls:{where.stage}"] += 1
            with call_scope(scope):
                (completion, *_) = await self._lm.complete(request, 1, [seed])
        return completion


async def together(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """Await all jobs; the first error cancels the rest, awaits them and is raised alone."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
