"""An LM writes hints or strategies for tasks: one call a task, read leniently.

The task (and the solution, for hints) stands between data marks. A reply without texts is asked
for once more with the error. Does not know when texts are used or whether they leak.
Source: SAGE's tutoring call for hints (arXiv 2602.03143), NudgeRL's for strategies; prompts and
reading are own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfgrpo.experience.critic.asker import Asker, Where, together
from tfgrpo.experience.critic.evidence import cut, fence
from tfgrpo.hints.answer_leaks import solution_of
from tfgrpo.hints.writer import read_texts, reference_text
from tfgrpo.prompts import render
from tfgrpo.rollout import Task


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
        known = [(t, solution_of(t, solution_key) or reference_text(t)) for t in tasks]
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
