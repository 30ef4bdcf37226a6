"""What may not become a lesson, and what must wait for a person.

Refused: our own prompts' words, practice answers, long passages of tasks, personal or secret data,
words of a tool or page taken over as a rule, empty or overlong text. Held in quarantine: web
addresses, commands, requests for secrets, "ignore previous", role claims, tool calls, and rules
that follow a text which asked to be remembered. Patterns find the plain cases; a paraphrase
passes, and the gate is the next line. Does not know the library or who is asked.
Idea: leak and injection guards (own; OWASP ASI06, defects 4 and 16 of the published code).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tfgrpo import prompts
from tfgrpo.context import Context
from tfgrpo.experience.patterns import (
    HOLD,
    IGNORE_ORDER,
    MEMORY_ORDER,
    MEMORY_WORD,
    NAME,
    PERSONAL,
    ROLE_CLAIM,
    STOP_WORDS,
)
from tfgrpo.experience.similarity import containment, ngrams, shingles, words
from tfgrpo.rollout import Rollout, Task

Verdict = Literal["pass", "quarantine", "refuse"]
_PROMPT_N = 6
_TASK_N = 8
_FOREIGN_N = 3
_FOREIGN_SHARE = 0.6
_COMMON_LABEL_TASKS = 3
"""An answer that at least so many tasks share is a class name and may be named in a lesson."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the guards say about one text."""

    verdict: Verdict = "pass"
    reason: str = ""
    """For people and the reject list; never quotes the text that was found."""


PASS = Finding()


@dataclass(frozen=True, slots=True)
class Guards:
    """The checks of one run, with what must not leak."""

    answers: frozenset[tuple[str, ...]] = frozenset()
    """Word lists of references that belong to few tasks."""
    passages: frozenset[int] = frozenset()
    """Long word sequences of tasks that are no common wording, see `passages_of`."""
    max_words: int = 120

    @classmethod
    def of(
        cls, tasks: Iterable[Task], held_out: Iterable[Task] = (), *, max_words: int = 120
    ) -> Guards:
        """Index practice tasks, and gate and test tasks where they are known.

        Wording that at least half of the tasks share (an instruction around the data) is nobody's
        secret, and neither is an answer that three or more tasks share or name (a class name).
        """
        every = [*tasks, *held_out]
        answer_tasks: Counter[tuple[str, ...]] = Counter()
        passage_tasks: Counter[int] = Counter()
        for task in every:
            answer_tasks.update({tuple(words(a)) for a in leaves(task.reference)})
            passage_tasks.update(passages_of(words(task.text)))
        named = _named_by_tasks(answer_tasks.keys(), every)
        common = max(2, (len(every) + 1) // 2)
        return cls(
            frozenset(
                a
                for a, n in answer_tasks.items()
                if a and max(n, named[a]) < _COMMON_LABEL_TASKS and not _is_trivial(a)
            ),
            frozenset(p for p, n in passage_tasks.items() if n < common),
            max_words,
        )

    def check(self, text: str, *, foreign: Foreign | None = None) -> Finding:
        """Judge one lesson.

        Args:
            text: the lesson.
            foreign: third-party text that the critic saw while it wrote the lesson.
        """
        found = words(text)
        refused = self._refusal(text, found)
        if refused:
            return Finding("refuse", refused)
        for what, pattern in HOLD.items():
            if pattern.search(text):
                return Finding("quarantine", f"holds {what}")
        if MEMORY_ORDER.search(text) and MEMORY_WORD.search(text):
            return Finding("quarantine", "speaks about the memory itself")
        return foreign.check(text) if foreign is not None else PASS

    def _refusal(self, text: str, found: Sequence[str]) -> str:
        if not found:
            return "there are no words in it"
        if len(found) > self.max_words:
            return f"{len(found)} words; at most {self.max_words} are allowed"
        if repeats_prompt(text):
            return "repeats wording of the package's own prompts"
        for what, pattern in PERSONAL.items():
            if pattern.search(text):
                return f"holds {what}"
        lengths = {len(answer) for answer in self.answers}
        if any(self.answers & set(ngrams(found, n)) for n in lengths if n <= len(found)):
            return "quotes the answer of a task"
        if passages_of(found) & self.passages:
            return f"quotes {_TASK_N} or more words of a task"
        return ""


def passages_of(found: Sequence[str]) -> set[int]:
    """Return the long word sequences of a text, as hashes: a large run has hundreds of thousands.

    Of 61 bits: among a million passages a text of a hundred is taken for another once in 10¹⁰.
    """
    return {hash(gram) for gram in ngrams(found, _TASK_N)} if len(found) >= _TASK_N else set()


@dataclass(frozen=True, slots=True)
class Foreign:
    """Third-party text of a group: tool and page text, and the task's own words."""

    grams: frozenset[tuple[str, ...]] = frozenset()
    orders: tuple[frozenset[str], ...] = ()
    """Content words around each place that asks to be remembered."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Foreign:
        """Index what outsiders wrote."""
        grams: set[tuple[str, ...]] = set()
        orders: list[frozenset[str]] = []
        for text in dict.fromkeys(texts):
            grams |= shingles(text, _FOREIGN_N)
            orders.extend(_orders(text))
        return cls(frozenset(grams), tuple(orders))

    def check(self, text: str) -> Finding:
        """Hold back a lesson whose author would be an outsider."""
        if containment(text, set(self.grams), _FOREIGN_N) >= _FOREIGN_SHARE:
            return Finding("quarantine", "is taken over from text of a task, tool or page")
        content = _content(text)
        names = {w for name in NAME.findall(text) for w in words(name)} - STOP_WORDS
        for order in self.orders:
            if names & order:
                return Finding("quarantine", "names what a text that asked to be remembered names")
            if content and len(content & order) >= max(2, 0.4 * len(content)):
                return Finding("quarantine", "follows a text that asked to be remembered")
        return PASS


def foreign_texts(task: Task, rollouts: Iterable[Rollout]) -> Iterator[str]:
    """Yield the texts of a group that neither the policy model nor we wrote."""
    yield task.text
    for rollout in rollouts:
        for step in rollout.steps:
            for message in step.observations:
                yield message.content


def hint_texts(context: Context) -> Iterator[str]:
    """Yield the hints of a context: a lesson that repeats one would hold a task's solution."""
    for part in context.of_kind("hint"):
        yield part.text


def has_third_party(rollouts: Iterable[Rollout]) -> bool:
    """True when a tool, page or environment spoke in one of the rollouts."""
    return any(step.observations for rollout in rollouts for step in rollout.steps)


def _orders(text: str) -> Iterator[frozenset[str]]:
    for match in MEMORY_ORDER.finditer(text):
        yield _content(text[max(0, match.start() - 200) : match.end() + 300])
    for pattern in (IGNORE_ORDER, ROLE_CLAIM):
        for match in pattern.finditer(text):
            yield _content(text[max(0, match.start() - 200) : match.end() + 300])


def _content(text: str) -> frozenset[str]:
    return frozenset(w for w in words(text) if w not in STOP_WORDS)


@cache
def _prompt_grams() -> frozenset[tuple[str, ...]]:
    grams: set[tuple[str, ...]] = set()
    for name in prompts.names():
        grams |= shingles(prompts.load(name), _PROMPT_N)
    return frozenset(grams)


@cache
def _prompt_quads() -> frozenset[tuple[str, ...]]:
    grams: set[tuple[str, ...]] = set()
    for name in prompts.names():
        grams |= shingles(prompts.load(name), 4)
    return frozenset(grams)


def repeats_prompt(text: str) -> bool:
    """True when a text shares six words in a row, or half of its four-word runs, with a prompt.

    >>> repeats_prompt("Check that every unit of the answer agrees with the question asked.")
    False
    """
    found = words(text)
    if len(found) < 4:
        return False
    if len(found) >= _PROMPT_N and set(ngrams(found, _PROMPT_N)) & _prompt_grams():
        return True
    return containment(text, set(_prompt_quads()), 4) >= 0.5


def leaves(reference: Any) -> Iterator[str]:
    """Yield every text or number inside a reference, as text."""
    if isinstance(reference, dict):
        for value in reference.values():
            yield from leaves(value)
    elif isinstance(reference, (list, tuple)):
        for value in reference:
            yield from leaves(value)
    elif isinstance(reference, (str, int, float)) and not isinstance(reference, bool):
        yield str(reference)


def _named_by_tasks(
    answers: Iterable[tuple[str, ...]], tasks: Sequence[Task]
) -> Counter[tuple[str, ...]]:
    """In how many tasks' own texts each answer stands."""
    by_length: dict[int, set[tuple[str, ...]]] = {}
    for answer in answers:
        by_length.setdefault(len(answer), set()).add(answer)
    found: Counter[tuple[str, ...]] = Counter()
    for task in tasks:
        tokens = words(task.text)
        for length, wanted in by_length.items():
            if 0 < length <= len(tokens):
                found.update(wanted & set(ngrams(tokens, length)))
    return found


def _is_trivial(answer: tuple[str, ...]) -> bool:
    """One letter, one digit, or yes/no: too common to be anybody's answer."""
    joined = "".join(answer)
    return len(joined) < 2 or joined in {"yes", "no", "true", "false", "none", "unknown"}
