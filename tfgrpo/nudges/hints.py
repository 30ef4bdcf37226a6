"""Hints: a failed task again under the next stronger hint, until something succeeds.

Hints stand in the task's metadata, are cut from its worked solution, or an LM writes them. A text
that holds the answer is dropped and counted; a cut ends before it.

Source: the climb of SAGE (arXiv 2602.03143, algorithm 1) without weights; cuts of 25, 50 and 75 %
are GHPO's. Formulas: none needed beyond the shares k/(L+1), so no approximation. SAGE draws a
fresh hint a visit; here an LM writes a task's hints once a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.context import ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import HintPlan, HintSource
from tfgrpo.hints.answer_leaks import cut_before_leak, leaks, share_of, solution_of
from tfgrpo.nudges.method import Nudge, StepView, has_failed
from tfgrpo.nudges.writing import TextWriter
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.json_text import shown


class Hints:
    """A `NudgeMethod` that climbs.

    Args:
        config: keys, levels, what a success is.
        writer: asked for tasks without written hints; None reads tasks only.
    """

    def __init__(self, config: NudgeConfig, writer: TextWriter | None = None) -> None:
        self._config = config
        self._levels = config.most_rounds or 1
        self._writer = writer
        self._author: HintSource = "self" if config.writer == "policy" else "teacher"
        self._parts: dict[str, tuple[ContextPart, ...]] = {}
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: StepView) -> None:
        """Read the hints of failed tasks, and have missing ones written.

        Raises:
            ConfigError: a task's hints or solution are malformed.
        """
        new = [g.task for g in seen.failed if g.task.task_id not in self._parts]
        wanted = [] if self._writer is None else [t for t in new if self._reads(t) is None]
        written: dict[str, tuple[str, ...]] = {}
        if self._writer is not None and wanted:
            written = await self._writer.hints(wanted, self._levels, self._config.solution_key)
        for task in new:
            found = self._reads(task)
            source, texts = found or (self._author, written.get(task.task_id, ()))
            if not texts and self._writer is not None:
                source, texts = "reference", cuts_of(task, self._levels, self._config.solution_key)
            safe = [t for t in dict.fromkeys(texts) if t.strip() and not leaks(t, task)]
            self.books["leaks"] += sum(leaks(t, task) for t in texts)
            plans = [HintPlan(t, level=i, source=source) for i, t in enumerate(safe, 1)]
            parts = (plan.part() for plan in plans[: self._levels])
            self._parts[task.task_id] = tuple(p for p in parts if p is not None)

    def _reads(self, task: Task) -> tuple[HintSource, tuple[str, ...]] | None:
        """Return writer and texts that stand in the task; with an LM as writer, no cuts."""
        written = hints_of(task, self._config.hints_key)
        if written is not None:
            return written
        if self._writer is not None:
            return None
        return "reference", cuts_of(task, self._levels, self._config.solution_key)

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the next stronger hint while the last group failed."""
        if not has_failed(tried[-1], self._config.success_above):
            return None
        parts = self._parts.get(tried[0].task.task_id, ())
        level = len(tried)
        return Nudge((parts[level - 1],)) if level <= len(parts) else None


def hints_of(task: Task, key: str = "hints") -> tuple[HintSource, tuple[str, ...]] | None:
    """Return who wrote a task's hints and the texts, weakest first, or None where it has none.

    Raises:
        ConfigError: the value is not a list of texts.

    >>> hints_of(Task("a", "?", metadata={"hints": ["Add."], "hints_source": "teacher"}))
    ('teacher', ('Add.',))
    """
    value = task.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(h, str) for h in value):
        raise ConfigError(
            f"task {task.task_id!r}: metadata.{key} is {shown(value)}; it must be a list of texts, "
            "weakest first"
        )
    told = task.metadata.get(f"{key}_source")
    return next((w for w in _WRITERS if w == told), "given"), tuple(value)


_WRITERS: tuple[HintSource, ...] = ("self", "teacher", "reference", "oracle")


def cuts_of(task: Task, levels: int, key: str = "solution") -> tuple[str, ...]:
    """Return the first k/(levels+1) of the worked solution for k from 1, ended before its answer.

    The shares are of the whole solution: an early answer must not make the first level stronger.
    Empty without a solution.

    Raises:
        ConfigError: the solution is not a text.

    >>> cuts_of(Task("a", "?", "9", {"solution": "add two, then four, then three: 9"}), 2)
    ('add two,', 'add two, then four,')
    """
    solution = solution_of(task, key)
    if not solution:
        return ()
    safe = cut_before_leak(solution, task)
    cuts = (share_of(solution, k / (levels + 1)) for k in range(1, levels + 1))
    return tuple(dict.fromkeys(c if len(c) <= len(safe) else safe for c in cuts if c and safe))


def check_hints(config: NudgeConfig, tasks: Sequence[Task]) -> None:
    """Check before anything is spent that the practice tasks have hints to give.

    Raises:
        ConfigError: a malformed field, or no task with hints or a solution and nobody to write.
    """
    helped = 0
    for task in tasks:
        written = hints_of(task, config.hints_key)
        helped += bool(written and written[1]) or bool(solution_of(task, config.solution_key))
    if tasks and not helped and not config.asks_lm:
        raise ConfigError(
            f"nudge.kind is 'hints' and none of {len(tasks)} practice tasks has "
            f"metadata.{config.hints_key} (texts, weakest first) or metadata.{config.solution_key} "
            "(a worked solution): give them, or set nudge.writer to 'critic' or 'policy'"
        )
