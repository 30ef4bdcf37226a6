"""Drafts: the best own attempt at a failed task goes into the context, to be improved on.

The failed group is the first stage, already paid for. A draft is the policy's own text, made
without the reference, so it is not searched for the answer; that it may be wrong is the method's
point.

Source: iGRPO (arXiv 2602.09000; abstract and secondary summary, no code): the draft of the highest
reward, ties at random; wording of the prompt and the two stage sizes are ours (approximation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.context import ContextPart
from tfgrpo.experience.critic.evidence import fitted_trajectory
from tfgrpo.hints.second_tries.drafts import best_draft
from tfgrpo.nudges.method import Nudge, StepView, has_failed
from tfgrpo.rollout import RolloutGroup
from tfgrpo.runtime.token_estimates import estimate_tokens

DRAFT_TOKENS = 1500
"""Most of a draft that a prompt holds; more is cut in the middle, with marks."""


class Drafts:
    """A `NudgeMethod` that refines.

    Args:
        config: rounds, what a success is.
        seed: decides between drafts of equal reward.
    """

    def __init__(self, config: NudgeConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: StepView) -> None:
        """Nothing to get ready."""

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the best draft so far while the last group failed."""
        rounds = self._config.most_rounds or 1
        if len(tried) > rounds or not has_failed(tried[-1], self._config.success_above):
            return None
        draft = best_draft(tried, self._seed)
        if draft is None:
            return None
        whole = len(draft.steps) > 1
        text = fitted_trajectory(draft, DRAFT_TOKENS, estimate_tokens) if whole else draft.answer
        if not whole and estimate_tokens(text) > DRAFT_TOKENS:
            text = fitted_trajectory(draft, DRAFT_TOKENS, estimate_tokens)
        return Nudge((ContextPart("draft", text, source=f"draft:{draft.rollout_id}"),))
