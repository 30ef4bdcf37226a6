"""Conventions and memories: which labels, values and formats a rule may say.

A convention holds for a kind of task; a memory tells of one. Refused, beside everything that the
common guards refuse: the complete answer of one task, a person or an identifier that stands in one
task alone. A value that a rule says must stand in the keys of the tasks that it cites, otherwise
the citation does not count. How many citations are left decides between a confirmed rule and one
on trial; that is the caller's business (`claim`). Patterns find plain forms; the gate is next.
Does not know the library or who is asked. Source: own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfgrpo.experience.guards import PASS, Finding, Foreign, Guards, leaves, passages_of
from tfgrpo.experience.patterns import HOLD
from tfgrpo.experience.similarity import ngrams, words
from tfgrpo.rollout import Task

__all__ = ["Conventions", "values_of"]

Words = tuple[str, ...]

_QUOTED = re.compile(r"[\"“`]([^\"”`\n]{1,60})[\"”`]|(?<!\w)'([^'\n]{1,60})'(?!\w)")
_VALUE = re.compile(r"(?<![\w.])(?:[A-Z][A-Z0-9]+(?:[-_/.][A-Za-z0-9]+)*|\w*\d[\w.,:/%-]*\w|\d)")
_NAME = re.compile(r"\b(?=([A-Z][a-z]+ [A-Z][a-z]+)\b)")
"""Two capitalised words in a row, overlapping: a beginning of a sentence hides no name."""
_IDENTIFIER = re.compile(
    r"(?<![\w-])(?=[\w-]*\d)(?:[A-Za-z]+[-_]?\d[\w-]{2,}|\d{4}-\d\d-\d\d|\d[\d-]{4,})(?![\w-])"
)
_SHORT_ID = re.compile(r"(?<![\w-])[A-Za-z]{1,4}[-_]?\d+(?![\w-])")
_NUMBER = re.compile(r"(?<![\w.,])\d[\d.,]*(?<![.,])")
_LIMIT = re.compile(
    r"\b(?:over|under|above|below|between|up to|at least|at most|(?:more|less|fewer|later|earlier|"
    r"older|younger|longer|shorter|larger|smaller) than|until|from)\s+\D{0,12}\d"
    r"|\d\S*\s+(?:\w+\s+)?or (?:more|less|fewer|later|earlier|older|longer)\b|[<>≤≥]\s*\d",
    re.IGNORECASE,
)
"""A number as a limit: the rule holds for a range, not for one task."""
_SITUATION_WORDS = 3
"""Words beside the name of a class that can say in which situation it is given."""
_RETOLD = 3
"""So many numbers of one task's text in a rule tell that task again."""
_ASKING = re.compile(
    r"\b(?:ask|request|send|give|reveal|share|post|print|return|tell|forward|include|expose)\b",
    re.IGNORECASE,
)
_PARTED = re.compile(r"[/|;,\n]")
_LABEL_TOKENS = 3
"""An answer of so few tokens, without separators, is a label or a value, not an account."""


def values_of(text: str) -> list[str]:
    """Return the values that a text says: quoted words, codes in capitals, anything with a digit.

    >>> values_of("When the caller is 'new', use queue HW and 24 h; limit 2.5%")
    ['new', 'HW', '24', '2.5']
    """
    found: list[tuple[int, str]] = []
    for match in _QUOTED.finditer(text):
        found.append((match.start(), (match[1] or match[2]).strip()))
    found += [(m.start(), m[0].strip(".,:")) for m in _VALUE.finditer(text)]
    found.sort(key=lambda pair: pair[0])
    return list(dict.fromkeys(v for _, v in found if v))


@dataclass(frozen=True, slots=True)
class Conventions:
    """The checks of one run on rules.

    Build it with `of`; `check` judges one rule, `support_of` says which citations hold.
    """

    guards: Guards
    """Prompts' words, secrets, injections, passages of eight words."""
    whole: Mapping[Words, int] = field(default_factory=dict)
    """In how many practice tasks a text is the whole answer; 0 for held-out answers only."""
    labels: frozenset[Words] = frozenset()
    """Whole answers that are one label or value."""
    classes: frozenset[Words] = frozenset()
    """Labels that read like the name of a class: a code in capitals, or words in lower case."""
    keys: Mapping[str, Words] = field(default_factory=dict)
    """Words of each practice task's key."""
    in_texts: Mapping[str, int] = field(default_factory=dict)
    """In how many tasks' texts each name or identifier stands."""
    known: frozenset[str] = frozenset()
    """Words of the agent's instructions and of wording that the tasks share."""
    instructions: str = ""
    practice_texts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tasks: Iterable[Task],
        held_out: Iterable[Task] = (),
        *,
        agent: str = "",
        max_words: int = 400,
    ) -> Conventions:
        """Index practice tasks, held-out ones and the agent's instructions."""
        practice, others = list(tasks), list(held_out)
        base = Guards.of(practice, others, max_words=max_words)
        told = passages_of(words(agent))
        guards = replace(base, answers=frozenset(), passages=base.passages - told)
        whole: Counter[Words] = Counter()
        whole.update(_answer(task) for task in practice)
        for task in others:
            whole.setdefault(_answer(task), 0)
        every = [*practice, *others]
        labels = frozenset(_answer(t) for t in every if _is_label(t))
        classes = frozenset(_answer(t) for t in practice if _is_label(t) and _is_class(t))
        whole.pop((), None)
        shared = Counter(w for t in practice for w in set(words(t.text)))
        common = max(2, (len(practice) + 1) // 2)
        return cls(
            guards,
            dict(whole),
            labels,
            classes,
            {t.task_id: tuple(w for leaf in leaves(t.reference) for w in words(leaf))
             for t in practice},
            _details([*practice, *others]),
            frozenset(words(agent)) | {w for w, n in shared.items() if n >= common},
            " ".join(words(agent)),
            tuple(" ".join(words(t.text)) for t in practice),
        )  # fmt: skip

    def check(
        self, text: str, support: Sequence[str] = (), *, foreign: Foreign | None = None
    ) -> Finding:
        """Judge one rule with the tasks that it cites."""
        found = self.guards.check(self._without_known_values(text), foreign=None)
        if found.verdict == "quarantine" and self._is_topic(text, found.reason):
            found = PASS
        if found.verdict != "pass":
            return found
        reason = self._memory(text, support)
        if reason:
            return Finding("refuse", reason)
        return foreign.check(text) if foreign is not None else PASS

    def support_of(self, text: str, cited: Sequence[str]) -> tuple[str, ...]:
        """Return the cited tasks whose key holds a value of the rule.

        A rule without any value that stands in a key (a way of working, a format) keeps all
        citations, and so does a task without a key.
        """
        said = set(words(text))
        in_keys = {w for key in self.keys.values() for w in key} & said - self._stop(text)
        if not in_keys:
            return tuple(cited)
        return tuple(t for t in cited if not self.keys.get(t) or in_keys.intersection(self.keys[t]))

    def _stop(self, text: str) -> set[str]:
        """Return words of a rule that are no values although they may stand in keys."""
        values = {w for v in values_of(text) for w in words(v)}
        return {w for w in words(text) if w not in values} if values else set()

    def _memory(self, text: str, support: Sequence[str]) -> str:
        found, has_limit = words(text), _LIMIT.search(text) is not None
        for length in {len(a) for a in self.whole if len(a) <= len(found)}:
            for gram in set(ngrams(found, length)):
                if self._is_memory(gram, found, support, has_limit):
                    return "quotes the complete answer of one task"
        if any(self._is_single(name) for name in _NAME.findall(text)):
            return "names a person or thing of one task"
        if any(self._is_single(m[0]) for m in _IDENTIFIER.finditer(text)):
            return "holds an identifier of one task"
        if any(self._is_copied_id(m[0]) for m in _SHORT_ID.finditer(text)):
            return "holds an identifier of one task"
        return "tells one task again" if self._is_retold(text) else ""

    def _is_memory(
        self, gram: Words, found: Sequence[str], support: Sequence[str], has_limit: bool
    ) -> bool:
        times = self.whole.get(gram)
        if times is None or times >= 2 or len("".join(gram)) < 2:
            return False
        if f" {' '.join(gram)} " in f" {self.instructions} ":
            return False
        if gram not in self.labels:
            return True
        if times == 0:  # a held-out answer that nothing in practice shows
            shown = any(f" {' '.join(gram)} " in f" {t} " for t in self.practice_texts)
            return not shown and not self._in_keys(gram)
        if gram in self.classes and len(found) >= _SITUATION_WORDS + len(gram):
            return False
        return len(support) < 2 and not has_limit and self._in_keys(gram) < 2

    def _in_keys(self, gram: Sequence[str]) -> int:
        """Return in how many practice tasks' keys all these words stand."""
        return sum(set(gram) <= set(key) for key in self.keys.values())

    def _is_copied_id(self, detail: str) -> bool:
        """True where one task alone has it, in its text and in its key: an id handed through."""
        folded = " ".join(words(detail))
        texts = [f" {folded} " in f" {t} " for t in self.practice_texts]
        inside = [set(folded.split()) <= set(key) for key in self.keys.values()]
        return sum(texts) == 1 == sum(inside) and texts.index(True) == inside.index(True)

    def _is_retold(self, text: str) -> bool:
        """True where several numbers of the rule stand together in one task's text alone."""
        numbers = {m[0] for m in _NUMBER.finditer(text) if len(m[0]) > 1}
        numbers = {n for n in numbers if self._in_keys(words(n)) < 2 and not self._is_told(n)}
        for task_text in self.practice_texts:
            if sum(f" {' '.join(words(n))} " in f" {task_text} " for n in numbers) >= _RETOLD:
                return True
        return False

    def _is_told(self, value: str) -> bool:
        return f" {' '.join(words(value))} " in f" {self.instructions} "

    def _is_single(self, detail: str) -> bool:
        folded = " ".join(words(detail))
        if self.in_texts.get(folded, 0) != 1 or set(folded.split()) <= self.known:
            return False
        return self._in_keys(folded.split()) < 2

    def _without_known_values(self, text: str) -> str:
        """Blank long numbers and codes that keys of two tasks or the instructions hold."""
        for value in values_of(text):
            parts = set(words(value))
            common = self._in_keys(tuple(parts)) >= 2
            if len(value) >= 6 and (common or parts <= self.known):
                text = text.replace(value, "value")
        return text

    def _is_topic(self, text: str, reason: str) -> bool:
        """True where a word for secrets is what the tasks are about and nobody is asked for one."""
        if reason != "holds a request for secrets" or _ASKING.search(text):
            return False
        named = {" ".join(words(m[0])) for m in HOLD["a request for secrets"].finditer(text)}
        texts = (*self.practice_texts, self.instructions)
        return all(sum(n in t for t in texts) >= 2 or n in self.instructions for n in named)


def _answer(task: Task) -> Words:
    """Return the words of a whole answer; of several leaves all of them in order."""
    return tuple(w for leaf in leaves(task.reference) for w in words(leaf))


def _is_label(task: Task) -> bool:
    found = list(leaves(task.reference))
    if len(found) != 1:
        return False
    text = found[0].strip()
    return len(text.split()) <= _LABEL_TOKENS and not _PARTED.search(text)


def _is_class(task: Task) -> bool:
    (text,) = leaves(task.reference)
    return bool(re.fullmatch(r"[A-Z][A-Z0-9_-]+|[a-z][a-z _-]*", text.strip()))


def _details(tasks: Sequence[Task]) -> dict[str, int]:
    """Count, over tasks, the names and identifiers that stand in their texts."""
    found: Counter[str] = Counter()
    for task in tasks:
        details = {*_NAME.findall(task.text), *(m[0] for m in _IDENTIFIER.finditer(task.text))}
        found.update({" ".join(words(d)) for d in details})
    return dict(found)
