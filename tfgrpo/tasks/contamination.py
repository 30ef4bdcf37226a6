"""Leak checks: practice tasks among held-out ones, answers in the library, and the refusal.

A held-out score says something only about tasks that the library has not seen. Overlap is exact
(equal texts after Unicode, case and spacing are evened out) or near (most word runs of the shorter
text stand in the other). Runs that many tasks share are a template and count for nothing.

Does not know scores or how tasks were split. Idea: shingles and containment (Broder, "On the
resemblance and containment of documents"); template removal and the refusal are our own.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Task

__all__ = [
    "Leak",
    "LeakReport",
    "find_leaks",
    "leaks_in_library",
    "normalised",
    "refuse_contaminated",
]

LeakKind = Literal["same_id", "exact", "near", "answer_in_library", "task_in_library"]

_WORD = re.compile(r"\w+(?:[.,]\d+)*", re.UNICODE)
_Run = tuple[str, ...]
_RUN = 3
"""Words a run: one changed word costs three runs, and few texts share most runs by chance."""
_QUOTE = 8
"""Words in a row that make a library text a quotation of a task."""


@dataclass(frozen=True, slots=True)
class Leak:
    """One way in which a held-out task is known already."""

    kind: LeakKind
    task_id: str
    """The held-out task."""
    source: str
    """The practice task or the experience that gives it away."""
    similarity: float
    """Share of the shorter text's word runs that are shared, in 0..1; 1 for the exact kinds."""
    evidence: str = ""
    """The held-out text, its answer, or the words quoted."""


@dataclass(frozen=True, slots=True)
class LeakReport:
    """All leaks found, and what was looked at."""

    leaks: tuple[Leak, ...]
    n_practice: int
    n_held_out: int
    n_experiences: int

    @property
    def contaminated(self) -> frozenset[str]:
        """Held-out tasks that no figure may use."""
        return frozenset(leak.task_id for leak in self.leaks)

    def clean(self, scores: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
        """Return the scores of the tasks that are not contaminated."""
        return {t: r for t, r in scores.items() if t not in self.contaminated}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "practice": self.n_practice,
            "held_out": self.n_held_out,
            "experiences": self.n_experiences,
            "contaminated": sorted(self.contaminated),
            "leaks": [
                {
                    "kind": leak.kind,
                    "task_id": leak.task_id,
                    "source": leak.source,
                    "similarity": leak.similarity,
                    "evidence": leak.evidence,
                }
                for leak in self.leaks
            ],
        }


def find_leaks(
    practice: Iterable[Task],
    held_out: Iterable[Task],
    library: Mapping[str, str] | None = None,
    *,
    near: float = 0.8,
) -> LeakReport:
    """Return every leak from practice tasks and library texts into held-out tasks.

    Args:
        practice: tasks that lessons were learnt from; gone through several times and never held,
            so that they may be read from a file each time (no iterator).
        held_out: tasks whose scores are to be reported.
        library: text by experience id; a worked example counts with all its turns.
        near: share of shared word runs, in (0, 1], from which two texts are near-equal.
    """
    held_out = list(held_out)
    count = sum(1 for _ in practice)
    template = _template(practice, held_out, count + len(held_out))
    leaks = [*_overlaps(practice, held_out, template, near)]
    if library:
        leaks += _in_library(practice, held_out, template, library)
    return LeakReport(tuple(leaks), count, len(held_out), len(library or {}))


def leaks_in_library(
    practice: Iterable[Task], held_out: Iterable[Task], library: Mapping[str, str]
) -> tuple[Leak, ...]:
    """Return those leaks of `find_leaks` that a library's texts make; of an empty one none, and
    no task is read for that."""
    if not library:
        return ()
    held_out = list(held_out)
    count = sum(1 for _ in practice)
    template = _template(practice, held_out, count + len(held_out))
    return tuple(_in_library(practice, held_out, template, library))


def refuse_contaminated(report: LeakReport, *, share: float = 1.0) -> None:
    """Refuse figures where at least `share` of the held-out tasks are contaminated.

    Raises:
        ConfigError: the figures would describe what was memorised.
    """
    bad = report.contaminated
    if not bad or len(bad) < share * report.n_held_out:
        return
    first = report.leaks[0]
    raise ConfigError(
        f"{len(bad)} of {report.n_held_out} held-out tasks are contaminated, first "
        f"{first.task_id!r} ({first.kind.replace('_', ' ')}, from {first.source!r}): a score on "
        "them would describe what was memorised. Take other held-out tasks, or remove the "
        "practice tasks or experiences named"
    )


def normalised(text: str) -> str:
    """Return the text with Unicode forms, case, punctuation and spacing evened out.

    >>> normalised("  What IS ２+2 ?\\n")
    'what is 2 2'
    """
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _runs(words: Sequence[str], length: int) -> set[_Run]:
    """All runs of `length` words; a shorter text is one run."""
    if len(words) <= length:
        return {tuple(words)} if words else set()
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def _overlaps(
    practice: Iterable[Task], held_out: Sequence[Task], template: set[_Run], near: float
) -> Iterator[Leak]:
    """Yield the overlaps; only the held-out tasks are indexed, the others pass by one by one."""
    texts = {task.task_id: normalised(task.text) for task in held_out}
    wanted = set(texts.values())
    own = {task.task_id: _runs(_words(task.text), _RUN) - template for task in held_out}
    by_run: dict[_Run, list[str]] = {}
    for task_id, runs in own.items():
        for run in runs:
            by_run.setdefault(run, []).append(task_id)
    practised: set[str] = set()
    by_text: dict[str, str] = {}
    nearest: dict[str, tuple[int, str, int]] = {}
    for task in practice:
        words = _words(task.text)
        if task.task_id in texts:
            practised.add(task.task_id)
        if (text := " ".join(words)) in wanted:
            by_text.setdefault(text, task.task_id)
        runs = _runs(words, _RUN) - template
        for held, n in Counter(h for run in runs for h in by_run.get(run, ())).items():
            if n > nearest.get(held, (0,))[0]:
                nearest[held] = (n, task.task_id, len(runs))
    for task in held_out:
        text = texts[task.task_id]
        if task.task_id in practised:
            yield Leak("same_id", task.task_id, task.task_id, 1.0)
        elif text in by_text:
            yield Leak("exact", task.task_id, by_text[text], 1.0, text[:200])
        elif task.task_id in nearest:
            n, source, size = nearest[task.task_id]
            similarity = n / min(len(own[task.task_id]), size)
            if similarity >= near:
                yield Leak("near", task.task_id, source, similarity, text[:200])


_SAMPLE = 2000
"""Texts among which a template's runs are looked for; they are counted in all."""


def _template(practice: Iterable[Task], held_out: Sequence[Task], count: int) -> set[_Run]:
    """Runs that stand in more than a tenth of the texts and in at least four."""
    every = max(1, count // _SAMPLE)
    tasks = chain(practice, held_out)
    found = Counter(run for t in islice(tasks, 0, None, every) for run in _runs_of(t))
    if every == 1:
        return {run for run, n in found.items() if n >= 4 and n > count / 10}
    likely = {run for run, n in found.items() if n > count / every / 20}
    counts: Counter[_Run] = Counter()
    for task in chain(practice, held_out):
        counts.update(likely & _runs_of(task))
    return {run for run, n in counts.items() if n >= 4 and n > count / 10}


def _runs_of(task: Task) -> set[_Run]:
    return _runs(_words(task.text), _RUN)


def _in_library(
    practice: Iterable[Task],
    held_out: Sequence[Task],
    template: set[_Run],
    library: Mapping[str, str],
) -> Iterator[Leak]:
    spaced = {e: f" {normalised(text)} " for e, text in library.items()}
    answers = {t.task_id: set(_answers(t.reference)) for t in held_out}
    told = {a for own in answers.values() for a in own}
    told = {a for a in told if any(f" {a} " in text for text in spaced.values())}
    labels = _labels(chain(practice, held_out), told) if told else set()
    for task in held_out:
        telling = sorted((answers[task.task_id] & told) - labels)
        phrases = [
            " ".join(quote)
            for quote in sorted(_runs(_words(task.text), _QUOTE))
            if len(quote) == _QUOTE and _is_own(quote, template)
        ]
        for experience_id, text in spaced.items():
            if (answer := _first_inside(telling, text)) is not None:
                yield Leak("answer_in_library", task.task_id, experience_id, 1.0, answer)
            if (phrase := _first_inside(phrases, text)) is not None:
                yield Leak("task_in_library", task.task_id, experience_id, 1.0, phrase)


def _is_own(quote: Sequence[str], template: set[_Run]) -> bool:
    """True when at least half of a quotation's runs stand in no template."""
    runs = _runs(quote, _RUN)
    return 2 * len(runs - template) >= len(runs)


def _first_inside(phrases: Sequence[str], text: str) -> str | None:
    return next((p for p in phrases if f" {p} " in text), None)


def _labels(tasks: Iterable[Task], answers: set[str]) -> set[str]:
    """Answers that are no secret, since lessons may name them: several tasks share them as an
    answer, or three or more name them in their text as a choice."""
    as_answer: Counter[str] = Counter()
    in_text: Counter[str] = Counter()
    seen: set[int] = set()
    for task in tasks:
        as_answer.update(answers & set(_answers(task.reference)))
        text = f" {normalised(task.text)} "
        if (mark := hash(text)) not in seen:
            seen.add(mark)
            in_text.update(a for a in answers if f" {a} " in text)
    return {a for a in answers if as_answer[a] > 1 or in_text[a] >= 3}


def _answers(reference: Any) -> Iterable[str]:
    """The telling answers inside a reference: numbers of 3 or more digits, texts of 4 or more
    letters that are not one common word such as `true`."""
    if isinstance(reference, Mapping):
        for value in reference.values():
            yield from _answers(value)
    elif isinstance(reference, (list, tuple)):
        for value in reference:
            yield from _answers(value)
    elif isinstance(reference, (str, int, float)) and not isinstance(reference, bool):
        answer = normalised(str(reference))
        digits = sum(c.isdigit() for c in answer)
        letters = sum(c.isalpha() for c in answer)
        if (digits >= 3 or letters >= 4) and answer not in _PLAIN:
            yield answer


_PLAIN = frozenset({"true", "false", "none", "null", "unknown", "other", "both", "neither"})
