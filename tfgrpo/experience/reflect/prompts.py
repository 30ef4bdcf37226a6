"""The prompts of the flow `reflect`: fixed text first, then what holds for the run, then data.

Providers cache equal beginnings, so nothing that changes stands before what does not. Does not know
how a model is asked. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.experience.critic.evidence import fits
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.entry import Experience
from tfgrpo.experience.library import Library
from tfgrpo.experience.reflect.panel_text import PanelText
from tfgrpo.experience.reflect.panels import Panel
from tfgrpo.experience.reflect.replay_check import ReplayCheck
from tfgrpo.experience.reflect.working_draft import Refused
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.prompts import render

_FIRST_SHARE = 1200


class ReflectPrompts:
    """Builds the prompts of one step."""

    def __init__(self, settings: ExperienceSettings, words: PanelText, count: TokenCounter) -> None:
        self._settings = settings
        self._words = words
        self._count = count

    def panel(self, panel: Panel, library: Library, share: int) -> str:
        """Ask what rules a panel shows, with about `share` tokens for each group."""
        sizes = self._settings.reflect
        return render(
            "critic_panel",
            count=str(sizes.rules),
            tokens=str(sizes.entry_tokens),
            objective="\n".join(
                t for t in (self._settings.objective, self._settings.learning_objective) if t
            ),
            agent=self._words.agent(4 * share),
            library=self._words.library(library, sizes.entry_tokens),
            panel=self._words.panel(panel, share),
        )

    def fitted_panel(self, panel: Panel, library: Library, limit: int) -> str:
        """Return the panel's prompt within a limit in tokens."""
        return fits(
            lambda share: self.panel(panel, library, share), limit, self._count, _FIRST_SHARE
        )

    def fitted_revision(
        self,
        idle: Sequence[ReplayCheck],
        refused: Sequence[Refused],
        library: Library,
        limit: int,
    ) -> str:
        """Ask what becomes of rules that a check or a replay spoke against."""
        rows = []
        for check in idle:
            entry = library.get(check.experience_id)
            rows.append(
                f"[{entry.experience_id}] {entry.text}\n    (tried again on "
                f"{', '.join(check.tasks)}: no better than before)"
            )
        for number, row in enumerate(refused, 1):
            rows.append(f"[R{number}] {row.rule.text}\n    (refused: {row.reason})")
        groups = {g.task.task_id: g for check in idle for g in check.groups}

        def build(share: int) -> str:
            blocks = [self._words.group(g, share) for g in groups.values()]
            return render(
                "critic_replay",
                tokens=str(self._settings.reflect.entry_tokens),
                agent=self._words.agent(4 * share),
                rules=self._words.data("\n".join(rows), "rules"),
                panel="\n\n".join(blocks) or "(nothing was tried)",
            )

        return fits(build, limit, self._count, _FIRST_SHARE)

    def rewrite(self, topic: str, entries: Sequence[Experience], limit: int) -> str:
        """Ask for a topic as a whole."""

        def build(share: int) -> str:
            rows = [f"[{e.experience_id}] {e.text}" for e in entries]
            return render(
                "critic_consolidate",
                topic=topic,
                tokens=str(self._settings.reflect.entry_tokens),
                library=self._words.data("\n".join(rows), topic),
            )

        return fits(build, limit, self._count, _FIRST_SHARE)
