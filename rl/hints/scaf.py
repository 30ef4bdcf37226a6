"""Scaf-GRPO: a failed group gets the success that needed the least of a ladder of hints.

After a warm-up, a group in which all failed is offered tiers of hints written beforehand (idea,
plan, solution), each shown in growing parts, one rollout a rung; `replace_k` puts the success of
the lowest rung into the group. Pure functions; does not know how rollouts are made.

Source: Scaf-GRPO (arXiv 2510.19807) and its released code, where the plan tier is switched off
although twelve levels are counted. Caution: the baseline mixes two contexts, so the group's own
failures are pushed down because a hinted rollout succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.rl.hints.plan import HintPlan, leaks
from tfgrpo.rollout import RolloutGroup, Task


def ladder(
    task: Task, tiers: Sequence[Sequence[str]], *, original_prompt: bool = False
) -> tuple[HintPlan, ...]:
    """Return one plan a rung: the tiers in order, within each the first 1, 2, … parts.

    Rungs that contain the answer are left out; the others keep their numbers. Every plan asks for
    one rollout and shares the bare group's baseline.

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
            group_key=task.task_id,
            condition="original" if original_prompt else "as_rolled",
        )
        for level, text in enumerate(texts, 1)
        if not leaks(text, task)
    )


def wants_ladder(
    group: RolloutGroup, *, step: int, warmup_steps: int = 0, success_above: float = 0.0
) -> bool:
    """Return whether a group is offered hints: past the warm-up, graded, and without a success.

    The released configuration's warm-up is 0, its recipe's 50 steps.
    """
    rewards_G = group.rewards_G
    return step >= warmup_steps and bool(rewards_G) and max(rewards_G) <= success_above
