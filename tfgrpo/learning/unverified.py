"""Practice without a verifier: the majority of a group stands in for one.

Rewards are 1 for an attempt whose answer most attempts of its group gave, else 0; they are
unverified, a run that uses them proves nothing, and says so. Pure. Does not know sampling.
Source: self-consistency as in test-time majority rewards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tfgrpo.experience.similarity import normal
from tfgrpo.rollout import RolloutGroup, Score

UNVERIFIED = "no verifier: what was learnt is unverified; nothing was gated and nothing is proven"


def majority_graded(group: RolloutGroup) -> RolloutGroup:
    """Return a group whose finished attempts are graded by agreement; ties count as right."""
    answers = {r.rollout_id: normal(r.answer) for r in group.rollouts if r.outcome == "ungraded"}
    counts = Counter(answers.values())
    most = max(counts.values(), default=0)
    rollouts = []
    for rollout in group.rollouts:
        if rollout.rollout_id not in answers:
            rollouts.append(rollout)
            continue
        agree = counts[answers[rollout.rollout_id]]
        said = f"{agree} of {len(answers)} attempts gave this answer (no verifier)"
        rollouts.append(rollout.graded(Score(float(agree == most), said)))
    return replace(group, rollouts=tuple(rollouts))
