"""The prompts of the critic's stages: what each shows, within a limit in tokens.

Pure functions from records to text; every trajectory, task and lesson stands between data marks.
Does not know how a model is asked or what its reply does.
Source: the stages of Training-Free GRPO (summarise, group advantage, group update, batch merge);
numeric advantages and data marks are our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfgrpo.experience.critic.evidence import (
    advantages,
    cut,
    data_block,
    extremes,
    fits,
    fitted_trajectory,
)
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.informative import usable
from tfgrpo.experience.library import Library
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.prompts import render
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import canonical_json

_LEAST_SHARE = 120
"""Fewer tokens of an attempt tell nothing; rather fewer attempts."""


class StagePrompts:
    """Builds the prompts of one step."""

    def __init__(self, settings: ExperienceSettings, count: TokenCounter) -> None:
        self._settings = settings
        self._count = count

    def summarise(self, group: RolloutGroup, rollout: Rollout, limit: int) -> str:
        """Ask for an account of one attempt."""

        def build(share: int) -> str:
            return render(
                "critic_summarise",
                objective=self._settings.objective,
                task=self._data(cut(group.task.text, max(200, share // 3), self._count)),
                steps=str(len(rollout.steps)),
                attempt=self._data(fitted_trajectory(rollout, share, self._count)),
            )

        first = min(self._settings.budget.rollout_tokens, limit)
        return fits(build, limit, self._count, first)

    def contrast(self, group: RolloutGroup, summaries: Mapping[str, str], limit: int) -> str:
        """Ask what made the difference between the attempts of a group."""
        rollouts = extremes(usable(group, self._settings), max(2, limit // (2 * _LEAST_SHARE)))
        numeric = advantages(group)

        def build(share: int) -> str:
            texts = [
                self._attempt(i, r, summaries.get(r.rollout_id), numeric, share)
                for i, r in enumerate(rollouts, 1)
            ]
            return render(
                "critic_contrast",
                objective=self._settings.objective,
                learning_objective=self._settings.learning_objective,
                task=self._data(cut(group.task.text, max(200, share), self._count)),
                reference=self._reference(group),
                attempts="\n\n".join(texts),
                count=str(self._settings.lessons_per_group),
                words=str(self._settings.max_words),
            )

        first = min(self._settings.budget.rollout_tokens, limit // max(1, len(rollouts)))
        return fits(build, limit, self._count, first)

    def shown_attempts(self, group: RolloutGroup, limit: int) -> list[Rollout]:
        """Return the attempts that `contrast` shows under the same limit, in its numbering."""
        return extremes(usable(group, self._settings), max(2, limit // (2 * _LEAST_SHARE)))

    def update(self, proposals: Sequence[Edit], library: Library, limit: int) -> str:
        """Ask how a group's lessons relate to the library."""
        return self._against_library("critic_update", proposals, library, limit)

    def merge(self, proposals: Sequence[Edit], library: Library, limit: int) -> str:
        """Ask for one list out of the proposals of several groups."""
        return self._against_library("critic_merge", proposals, library, limit)

    def _against_library(
        self, name: str, proposals: Sequence[Edit], library: Library, limit: int
    ) -> str:
        lessons = [e for e in library.shown if e.kind == "lesson"]

        def build(share: int) -> str:
            rows = [cut(f"[{e.experience_id}] {e.text}", share, self._count) for e in lessons]
            offered = [cut(proposal_line(e), share, self._count) for e in proposals]
            return render(
                name,
                learning_objective=self._settings.learning_objective,
                library=self._data("\n".join(rows) or "(empty)"),
                proposals=self._data("\n".join(offered), "proposals"),
                words=str(self._settings.max_words),
            )

        return fits(build, limit, self._count, 400)

    def _attempt(
        self,
        number: int,
        rollout: Rollout,
        summary: str | None,
        numeric: Mapping[str, float],
        share: int,
    ) -> str:
        text = (
            fitted_trajectory(rollout, share, self._count)
            if summary is None
            else cut(summary, share, self._count)
        )
        if not self._settings.ground_truth or rollout.score is None:
            return f"Attempt {number}:\n{self._data(text, str(number))}"
        head = (
            f"Attempt {number}: reward {rollout.score.reward:g}, "
            f"advantage {numeric[rollout.rollout_id]:+.3g}"
        )
        if rollout.score.feedback:
            text += "\nverifier: " + cut(rollout.score.feedback, max(40, share // 4), self._count)
        return f"{head}\n{self._data(text, str(number))}"

    def _reference(self, group: RolloutGroup) -> str:
        if not self._settings.ground_truth or group.task.reference is None:
            return ""
        reference = group.task.reference
        text = reference if isinstance(reference, str) else canonical_json(reference)
        return "The right answer, for you alone:\n" + self._data(cut(text, 300, self._count))

    def _data(self, text: str, label: str = "") -> str:
        return data_block(text, self._settings, label)


def proposal_line(edit: Edit) -> str:
    """Return a proposal as one line of a prompt."""
    about = f" {edit.target}" if edit.target else ""
    return f"[{edit.edit_id}] {edit.op}{about}: {edit.text}".rstrip(": ")
