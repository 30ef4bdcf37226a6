"""Scaf-GRPO: a failed group gets the success that needed the least of a ladder of hints.

After a warm-up, a group in which all failed is offered tiers of hints written beforehand (idea,
plan, solution), each shown in growing parts, one rollout a rung; `replace_k` puts the success of
the lowest rung into the group. Does not know who wrote the hints.

Source: Scaf-GRPO (arXiv 2510.19807) and its released code, where the plan tier is switched off
although twelve levels are counted. Caution: the baseline mixes two contexts, so the group's own
failures are pushed down because a hinted rollout succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, Condition, HintPlan, PlannedGroup
from tfgrpo.hints.answer_leaks import leaks
from tfgrpo.hints.merge import noted, replace_k
from tfgrpo.hints.metadata import MetadataHints, PlansOf
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.json_text import shown


def ladder(
    task: Task, tiers: Sequence[Sequence[str]], *, original_prompt: bool = False
) -> tuple[HintPlan, ...]:
    """Return one plan a rung: the tiers in order, within each the first 1, 2, … parts.

    Rungs that contain the answer are left out; the others keep their numbers. Every plan asks for
    one rollout.

    Args:
        task: whose answer must not stand in a hint.
        tiers: parts of each tier, most abstract tier first; the paper has three tiers of four.
        original_prompt: train the hinted answer under the bare prompt (off-policy).
    """
    texts = [
        "\n".join(parts[: k + 1]) for parts in tiers for k in range(len(parts)) if parts[k].strip()
    ]
    return tuple(
        HintPlan(
            text=text,
            n=1,
            level=level,
            source="teacher",
            condition="original" if original_prompt else "as_rolled",
        )
        for level, text in enumerate(texts, 1)
        if not leaks(text, task)
    )


class Scaf(RecordedScheduler):
    """A `HintScheduler` that puts the weakest-hinted success into a failed group.

    Rungs are `metadata.scaffold` (tiers of parts), else the task's plans, weakest first.

    Args:
        plans_of: the rungs of a task without a scaffold.
        scaffold_key: where tiers stand in a task's metadata.
        replacements: most rollouts replaced in a group, at least 1.
        warmup_groups: groups accepted before the first ladder; the released configuration has 0,
            its recipe 50 steps.
        original_prompt: train the hinted success under the bare prompt (off-policy).
        graft: a second failure is replaced by the same answer under the bare prompt, beside the
            first one as rolled (the release's 6+1+1 for groups of 8).
        success_above: a rollout with a larger reward is a success.

    Raises:
        ConfigError: `graft` with `original_prompt` or several replacements.
    """

    name = "scaf"

    def __init__(
        self,
        plans_of: PlansOf | None = None,
        *,
        scaffold_key: str = "scaffold",
        replacements: int = 1,
        warmup_groups: int = 0,
        original_prompt: bool = False,
        graft: bool = False,
        success_above: float = 0.0,
    ) -> None:
        if graft and (original_prompt or replacements > 1):
            raise ConfigError(
                "hints.graft puts one answer into the group twice, as rolled and under the bare "
                "prompt: leave hints.original_prompt and hints.replacements out"
            )
        self._plans_of = plans_of if plans_of is not None else MetadataHints(levels=4)
        self._graft = graft
        self._key = scaffold_key
        self._replacements = replacements
        self._warmup = warmup_groups
        self._original_prompt = original_prompt
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the bare task."""
        self._rungs(task)  # read first, so that a task without help is told early
        return [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return one rollout a rung where the bare group failed, past the warm-up."""
        warm = sum(self.record.accepted.values()) >= self._warmup
        if len(made) > 1 or not warm or not self.record.has_failed(made[0].group):
            return ()
        return self._rungs(task)

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the bare group, its first failures replaced by the weakest-hinted successes."""
        bare, *rungs = made
        group = replace_k(
            bare.group,
            [(one.plan.level, r) for one in rungs for r in one.group.rollouts],
            k=self._replacements,
            success_above=self.record.success_above,
        )
        if self._graft:
            group = _grafted(group, bare.group, self.record.success_above)
        levels = group.metadata.get("replaced_from_level", {}).values()
        lowest = min(levels, default=0)
        plan = next(one.plan for one in made if one.plan.level == lowest)
        self.record.close(made, plan, group).level = lowest
        return group

    def _rungs(self, task: Task) -> tuple[HintPlan, ...]:
        tiers = task.metadata.get(self._key)
        if tiers is not None:
            if not isinstance(tiers, list | tuple) or not all(
                isinstance(t, list | tuple) and all(isinstance(p, str) for p in t) for t in tiers
            ):
                raise ConfigError(
                    f"task {task.task_id!r}: metadata.{self._key} is {shown(tiers)}; it must be a "
                    "list of tiers, most abstract first, each a list of texts"
                )
            return ladder(task, tiers, original_prompt=self._original_prompt)
        condition: Condition = "original" if self._original_prompt else "as_rolled"
        return tuple(replace(p, n=1, condition=condition) for p in self._plans_of(task))


def _grafted(group: RolloutGroup, bare: RolloutGroup, above: float) -> RolloutGroup:
    """Return the group with a second failure replaced by its hinted success, bare prompt."""
    hinted = next((r for r in group.rollouts if (r.reward or 0.0) > above), None)
    failed = [i for i, r in enumerate(group.rollouts) if r.reward is not None and r is not hinted]
    prompt = next((r.steps[0].prompt_token_ids for r in bare.rollouts if r.steps), None)
    if group is bare or hinted is None or not failed:
        return group
    rollouts = list(group.rollouts)
    copy = replace(hinted, sample_index=rollouts[failed[0]].sample_index)
    rollouts[failed[0]] = noted(copy, bare_prompt=list(prompt or ()))
    return replace(group, rollouts=tuple(rollouts))
