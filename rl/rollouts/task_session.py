"""One task in one call of a maker: the sets that a hint scheduler asks for, and what it accepts.

Both makers drive it: they roll sets and draw texts, it keeps the order and asks the scheduler what
follows. Does not know tokens' making. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tfgrpo.hint_plan import BARE, Ask, HintPlan, PlannedGroup, Write, WriteResult
from tfgrpo.messages import Message
from tfgrpo.protocols import Generated, HintScheduler
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rollout import Rollout, RolloutGroup, Step, Task
from tfgrpo.runtime.canonical import derive_seed


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a visit gives to train on."""

    group: RolloutGroup
    label: str
    """Of the accepted plan, `mixed` where there are several."""
    beside: tuple[RolloutGroup, ...] = ()
    """Further groups with baselines of their own."""


@dataclass(slots=True)
class TaskSession:
    """A task being rolled."""

    task: Task
    size: int
    """Its group size."""
    hints: HintScheduler | None
    sets: list[PlannedGroup | None] = field(default_factory=list)
    """One entry a plan that is rolled, None until it is graded."""
    open: int = 0
    """Sets and texts that are being made."""
    texts: int = 0
    """Texts asked for so far."""
    _written: list[WriteResult] = field(default_factory=list)
    """Texts since the scheduler was last asked."""

    def first(self) -> Sequence[Ask]:
        """Return what is made at once."""
        return [BARE] if self.hints is None else self.hints.start(self.task, self.size)

    def begin_set(self) -> int:
        """Open a set; its number gives it draws of its own."""
        self.sets.append(None)
        self.open += 1
        return len(self.sets) - 1

    def end_set(self, number: int, plan: HintPlan, group: RolloutGroup) -> None:
        """Take a graded set."""
        self.sets[number] = PlannedGroup(plan, group)
        self.open -= 1

    def begin_text(self) -> int:
        """Open a text and return its number."""
        self.open += 1
        self.texts += 1
        return self.texts - 1

    def end_text(self, result: WriteResult) -> None:
        """Take a text."""
        self._written.append(result)
        self.open -= 1

    def following(self) -> Sequence[Ask]:
        """Return what the scheduler asks for next; empty for enough."""
        made = self._made()
        return () if self.hints is None else self.hints.after(self.task, made)

    def accept(self) -> Accepted:
        """Return what is trained on."""
        made = self._made()
        if self.hints is None:
            return Accepted(made[0].group, made[0].plan.label)
        beside = getattr(self.hints, "beside", None)
        further = () if beside is None else tuple(beside(self.task, made))
        group = self.hints.accept(self.task, made)
        label = next((x.plan.label for x in made if x.group is group), "mixed")
        return Accepted(group, label, further)

    def _made(self) -> list[PlannedGroup]:
        made = [x for x in self.sets if x is not None]
        if self._written and made:
            at = next(i for i, x in enumerate(self.sets) if x is made[-1])
            made[-1] = replace(made[-1], written=(*made[-1].written, *self._written))
            self.sets[at] = made[-1]
            self._written = []
        return made


@dataclass(slots=True)
class TextDraw:
    """A text that is being drawn, and its tries."""

    visit: TaskSession
    number: int
    ask: Write
    prompt_ids: tuple[int, ...]
    attempt: int = 0

    def seed(self, seed: int) -> int:
        """Return the seed of the present try."""
        return derive_seed(seed, self.visit.task.task_id, "write", self.number, self.attempt)

    def read(self, row: Generated, prompter: Prompter, figures: RolloutFigures) -> bool:
        """Take a reply; False where it could not be read and another try is left."""
        text = prompter.text(row.token_ids)
        value = self.ask.read(text)
        figures.writes += 1
        figures.writes_unread += value is None
        figures.write_tokens += len(row.token_ids)
        if value is None and self.attempt < self.ask.retries:
            self.attempt += 1
            return False
        task_id = self.visit.task.task_id
        step = Step(Message("assistant", text), (), row.token_ids, row.logprobs, self.prompt_ids)
        rollout = Rollout(f"{task_id}:write:{self.number}", task_id, steps=(step,))
        self.visit.end_text(WriteResult(self.ask.key, value, self.attempt + 1, rollout))
        return True


def begin_text(visit: TaskSession, ask: Write, prompter: Prompter) -> TextDraw | None:
    """Open a text; None where its prompt fills the model's context, which the visit is told."""
    ids = prompter.text_ids(ask.prompt)
    draw = TextDraw(visit, visit.begin_text(), ask, ids)
    if len(ids) < prompter.context_tokens:
        return draw
    visit.end_text(WriteResult(ask.key, None, 0))
    return None
