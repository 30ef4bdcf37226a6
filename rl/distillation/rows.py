"""Replies made under a context as training rows under the bare prompt.

Context distillation moves what a library does into the weights: the tokens of a reply that was
made with the library are scored under the prompt without it. A reply may come from this model
(its own token ids are kept), from another one, or from a library's worked example (its text is
tokenised and ended as this model ends a turn). Each task has the same weight however many replies
it has; equal replies of a task are one row that counts as often as it occurred.

Does not know losses or where groups come from. Source: context distillation (Askell et al.,
arXiv 2112.00861; Snell et al., arXiv 2209.15189); equal weight by task is own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError
from tfgrpo.rl.model.packing import Row
from tfgrpo.rl.rollouts.turns import TurnTokens
from tfgrpo.rl.saved_groups import Reading, with_tokens
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.runtime.texts.surrogates import without_surrogates


class Prompts(Protocol):
    """Tasks to prompts as token ids, as `rollouts.Prompter` does."""

    tokenizer: Any

    def ids(self, task: Task, context: Context = EMPTY_CONTEXT) -> tuple[int, ...]:
        """Return the prompt's token ids."""
        ...


@dataclass(frozen=True, slots=True)
class DistillRow:
    """One distinct reply of one task."""

    row: Row
    """The reply under the bare prompt."""
    teacher: Row | None
    """The same reply under the context that it was made with; None without one."""
    task_id: str
    source: str
    """`library` (made with it by this model), `journal` (found in the run) or `exemplar`."""
    count: int = 1
    """How often the reply occurred."""
    weight: float = 0.0
    """Share of the whole: all rows add up to 1, the rows of every task to the same."""


Keep = Callable[[Rollout], bool]


def verified(full_marks: float) -> Keep:
    """Return the test of rejection sampling: graded, at least full marks, and not cut.

    A cut reply has no end, so training on it would teach not to stop.
    """

    def keep(rollout: Rollout) -> bool:
        score = rollout.score
        return score is not None and score.reward >= full_marks and not rollout.is_truncated

    return keep


def graded(rollout: Rollout) -> bool:
    """True for any graded reply, also a cut one: for objectives that match distributions token by
    token, which a missing end does not mislead."""
    return rollout.score is not None


def rows_of_groups(
    groups: Iterable[RolloutGroup],
    prompts: Prompts,
    *,
    keep: Keep,
    source: str,
    end_id: int,
    own_tokens: bool,
    turns: TurnTokens | None = None,
) -> list[DistillRow]:
    """Return one row for every distinct kept rollout; of several turns only what the policy wrote
    bears a loss.

    Args:
        groups: of the tasks to train on; a group's context is the teacher's.
        prompts: of the model to train.
        keep: which rollouts.
        source: where the groups come from.
        end_id: ends a reply that is tokenised here.
        own_tokens: take the ids that the groups hold; they must be this model's.
        turns: renders answers between turns; None refuses rollouts of several.

    Raises:
        ConfigError: a rollout has several steps or calls tools, and `turns` is not given.
    """
    rows: dict[tuple[str, Row], DistillRow] = {}
    for group in groups:
        bare = prompts.ids(group.task)
        told = None if group.context.is_empty else prompts.ids(group.task, group.context)
        for rollout in filter(keep, group.rollouts):
            if turns is not None and (len(rollout.steps) > 1 or rollout.steps[0].action.tool_calls):
                reading = Reading(prompts.tokenizer, turns, end_id, own_tokens)
                row = replace(row_of(with_tokens(rollout, bare, reading), index=0), prompt_ids=bare)
            else:
                ids = _reply_ids(rollout, prompts.tokenizer, end_id, own_tokens)
                row = Row(0, bare, ids)
            if not row.n_loss:
                continue
            key = (group.task.task_id, row)
            if key in rows:
                rows[key] = replace(rows[key], count=rows[key].count + 1)
                continue
            teacher = None if told is None else replace(row, prompt_ids=told)
            rows[key] = DistillRow(row, teacher, group.task.task_id, source)
    return list(rows.values())


def _reply_ids(rollout: Rollout, tokenizer: Any, end_id: int, own: bool) -> tuple[int, ...]:
    if len(rollout.steps) != 1 or rollout.steps[0].action.tool_calls:
        raise ConfigError(
            f"rollout {rollout.rollout_id!r} has {len(rollout.steps)} steps or calls tools: only "
            "single replies can be distilled"
        )
    step = rollout.steps[0]
    if own:
        return step.token_ids or ()
    text = without_surrogates(step.action.content.strip())
    if not text:
        return ()
    return (*tokenizer(text, add_special_tokens=False)["input_ids"], end_id)


def balanced(rows: Sequence[DistillRow], *, per_task: int = 0) -> list[DistillRow]:
    """Return the rows numbered and weighted; every task gets the same share.

    Rows of a task with equal replies are joined (the first one's teacher is kept). Of a task's
    replies the `per_task` most frequent stay, earlier ones first among equals; 0 keeps all.

    >>> rows = [DistillRow(Row(0, (1,), (n,)), None, t, "") for t, n in (("a", 5), ("b", 6))]
    >>> [(r.row.index, r.weight) for r in balanced([*rows, rows[0]])]
    [(0, 0.5), (1, 0.5)]
    """
    tasks: dict[str, dict[Any, DistillRow]] = {}
    for row in rows:
        mine = tasks.setdefault(row.task_id, {})
        key = (row.row.suffix_ids, row.row.loss_positions)
        known = mine.get(key)
        if known is None:
            mine[key] = row
        else:
            teacher = known.teacher or row.teacher
            mine[key] = replace(known, count=known.count + row.count, teacher=teacher)
    found: list[DistillRow] = []
    for mine in tasks.values():
        kept = sorted(mine.values(), key=lambda r: -r.count)  # stable: earlier ones first
        kept = kept[:per_task] if per_task else kept
        total = sum(r.count for r in kept)
        for row in kept:
            index = len(found)
            found.append(
                replace(
                    row,
                    row=replace(row.row, index=index),
                    teacher=None if row.teacher is None else replace(row.teacher, index=index),
                    weight=row.count / total / len(tasks),
                )
            )
    return found


def counts_by_source(rows: Iterable[DistillRow]) -> dict[str, int]:
    """Return how many distinct replies came from where."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.source] = found.get(row.source, 0) + 1
    return found
