"""An LM writes hints or strategies for tasks: one call a task, read leniently.

The task (and the solution, for hints) stands between data marks. A reply without texts is asked
for once more with the error. Does not know when texts are used or whether they leak.
Source: SAGE's tutoring call for hints (arXiv 2602.03143), NudgeRL's for strategies; prompts and
reading are own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tfgrpo.experience.critic.asker import Asker, Where, together
from tfgrpo.experience.critic.evidence import cut, fence
from tfgrpo.experience.replies import ReplyError, json_values, strip_thinking
from tfgrpo.hints.answer_leaks import solution_of
from tfgrpo.prompts import render
from tfgrpo.rollout import Task

_NUMBERED = re.compile(
    r"^[\s#*_>\[(-]*(?:(?:level|hint|step|strategy)[\s_-]*)?\d{1,2}[\s*_]*[.):\]-][\s*_:.)-]*",
    re.IGNORECASE | re.MULTILINE,
)
_MOST_CHARACTERS = 2000
"""Of one text; a longer one is no hint."""


class TextWriter:
    """Asks one LM.

    Args:
        asker: the LM with its window, repairs and books.
        seed: salt of the data marks.
    """

    def __init__(self, asker: Asker, seed: int = 0) -> None:
        self._asker = asker
        self._seed = seed

    async def hints(
        self, tasks: Sequence[Task], levels: int, solution_key: str = "solution"
    ) -> dict[str, tuple[str, ...]]:
        """Return hints by task id, weakest first; tasks without solution or reference get none.

        Raises:
            ProviderError: no further call can succeed.
            BudgetError: a cap was reached.
        """
        known = [(t, solution_of(t, solution_key) or _reference(t)) for t in tasks]
        asked = [(t, s) for t, s in known if s]

        async def one(task: Task, solution: str) -> tuple[str, ...]:
            def build(room: int) -> str:
                return render(
                    "nudge_hints",
                    count=str(levels),
                    task=self._data(task.text, room // 2, "task"),
                    solution=self._data(solution, room // 3, "solution"),
                )

            return await self._ask(task, levels, build)

        texts = await together(one(t, s) for t, s in asked)
        return {t.task_id: found for (t, _), found in zip(asked, texts, strict=True)}

    async def strategies(self, tasks: Sequence[Task], count: int) -> dict[str, tuple[str, ...]]:
        """Return strategies by task id; nobody is shown a reference. Raises like `hints`."""

        async def one(task: Task) -> tuple[str, ...]:
            def build(room: int) -> str:
                data = self._data(task.text, room // 2, "task")
                return render("nudge_strategies", count=str(count), task=data)

            return await self._ask(task, count, build)

        texts = await together(one(t) for t in tasks)
        return {t.task_id: found for t, found in zip(tasks, texts, strict=True)}

    async def _ask(self, task: Task, most: int, build: Callable[[int], str]) -> tuple[str, ...]:
        found = await self._asker.ask(
            Where("nudge_text", task.task_id), build, lambda reply: read_texts(reply, most)
        )
        return found or ()

    def _data(self, text: str, room: int, label: str) -> str:
        return fence(cut(text, max(200, room), self._asker.count), seed=self._seed, label=label)


def read_texts(reply: str, most: int) -> tuple[str, ...]:
    """Return at most `most` texts of a reply: a JSON list, or numbered or labelled parts.

    Raises:
        ReplyError: there is none.

    >>> read_texts('Sure: {"hints": ["Add.", "Add two."]}', 3)
    ('Add.', 'Add two.')
    >>> read_texts("Level 1: Add.\\n\\n**2.** Add two.", 3)
    ('Add.', 'Add two.')
    """
    listed, lines = _listed(reply), _numbered(strip_thinking(reply))
    texts = listed if len(listed) >= len(lines) else lines  # brackets in prose are short lists
    kept = [t for t in (" ".join(t.split()) for t in texts) if t and len(t) <= _MOST_CHARACTERS]
    if not kept:
        raise ReplyError("there is no JSON list of texts in it, and no numbered lines")
    return tuple(kept[:most])


def _listed(reply: str) -> list[str]:
    try:
        values = json_values(reply)
    except ReplyError:
        return []  # the numbered form is read next
    for value in values:
        found = _texts_in(value)
        if found:
            return found
    return []


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, list):
        rows = [r if isinstance(r, str) else _only_text(r) for r in value]
        return [r for r in rows if r] if all(rows) else []
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list)]
        return _texts_in(lists[0]) if len(lists) == 1 else _texts_in(list(value.values()))
    return []


def _only_text(row: Any) -> str:
    """Return the one text of an object, such as {"level": 1, "hint": "Add."}."""
    texts = [v for v in row.values() if isinstance(v, str)] if isinstance(row, dict) else []
    return texts[0] if len(texts) == 1 else ""


def _numbered(reply: str) -> list[str]:
    marks = list(_NUMBERED.finditer(reply))
    ends = [*(m.start() for m in marks[1:]), len(reply)][: len(marks)]
    return [reply[m.end() : end].strip().strip("*_") for m, end in zip(marks, ends, strict=True)]


def _reference(task: Task) -> str:
    """Return a reference that can be told as text, or an empty one."""
    value = task.reference
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if is_plain else ""
