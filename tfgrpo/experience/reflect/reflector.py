"""The flow `reflect`: from the groups of one step to a proposed library.

Panels are asked one after the other, each shown the rules of the ones before, so that evidence adds
up over a step. Every rule passes the guards; supporting practice tasks are rolled again under all
of them (`replay`), and what turned none, or was refused as a memory, goes back to the critic once.
Crowded topics are rewritten as a whole, as a rival of the increment. Does not know how rollouts are
made, the gate, files. Source: group-relative contrast over panels, own; reflection on feedback as
in GEPA, itemised libraries as in ACE.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.experience.critic.asker import Asker, Refusals, Where
from tfgrpo.experience.critic.proposal import LibraryProposal, Settled, close_books
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.edits import Edit
from tfgrpo.experience.entry import Experience
from tfgrpo.experience.exemplars import exemplar_edits
from tfgrpo.experience.informative import Teaching, teaching_groups
from tfgrpo.experience.library import Library
from tfgrpo.experience.reflect.consolidate import crowded_topics, read_rewrite
from tfgrpo.experience.reflect.conventions import Conventions
from tfgrpo.experience.reflect.panel_text import PanelText
from tfgrpo.experience.reflect.panels import LEAST_TOKENS, Panel, compose, panel_size
from tfgrpo.experience.reflect.prompts import ReflectPrompts
from tfgrpo.experience.reflect.replay_check import (
    ReplayCheck,
    check_replays,
    joined,
    replay_tasks,
)
from tfgrpo.experience.reflect.reply import PanelReply, read_reply
from tfgrpo.experience.reflect.working_draft import WorkingDraft
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.protocols import LM
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.token_estimates import estimate_tokens

Replay = Callable[[Library, Sequence[Task], str], Awaitable[Sequence[RolloutGroup]]]
"""Rolls practice tasks out under a library once each; the text names the draw."""


_GIVE_UP_AFTER = 2
"""First calls that may fail alike before the run ends: a call carries a whole panel."""


class Reflector:
    """Turns groups into a proposed library, over panels.

    Args:
        lm: what is asked.
        settings: sizes, repairs, caps; `flow` is `reflect`.
        conventions: what may be said; built from a step's own tasks where None.
        replay: rolls supporting tasks again; None tries nothing.
        count: tokens of a text for the critic's and the policy's model.
    """

    def __init__(
        self,
        lm: LM,
        settings: ExperienceSettings | None = None,
        *,
        conventions: Conventions | None = None,
        replay: Replay | None = None,
        count: TokenCounter = estimate_tokens,
    ) -> None:
        self.settings = settings or ExperienceSettings()
        if self.settings.flow != "reflect":
            raise ConfigError(f"the settings' flow is {self.settings.flow!r}: use make_critic")
        self._lm = lm
        self._conventions = conventions
        self._replay = replay
        self._count = count
        self._refusals = Refusals(_GIVE_UP_AFTER)
        self._past: dict[str, RolloutGroup] = {}
        self._epochs: dict[int, int] = {}
        self._has_offered = False
        self._marks: tuple[Edit, ...] = ()

    async def propose(
        self, groups: Sequence[RolloutGroup], library: Library, *, step: int | None = None
    ) -> LibraryProposal:
        """Return the library that these groups speak for.

        Raises:
            ProviderError: no further call can succeed.
            BudgetError: a cap was reached.
        """
        step = library.step + 1 if step is None else step
        teaching = teaching_groups(groups, self.settings)
        conventions = self._conventions or Conventions.of(
            (g.task for g in groups), agent=self.settings.agent
        )
        asker = Asker(self._lm, self.settings, self._count, self._refusals)
        run = _Step(asker, self.settings, conventions, library, step)
        run.draft.mark(self._marks)
        past = [g for g in self._past.values() if g.task.task_id not in {
            new.task.task_id for new in groups}]  # fmt: skip
        epoch = max((int(g.metadata.get("epoch", 0)) for g in groups), default=0)
        self._epochs[step] = epoch
        await run.panels(teaching, past)
        await run.try_rules(groups, self._replay)
        if run.details["panels"]:
            run.draft.drop_unconfirmed(lambda made: self._epochs.get(made, epoch) < epoch)
        rewrites = await run.rewrite_topics()
        self._past.update({g.task.task_id: g for g in groups})
        # Examples that the gate has turned down once are not worth further looks.
        is_refused = self._has_offered and not any(e.kind == "exemplar" for e in library.shown)
        examples = [] if is_refused else exemplar_edits(teaching, library, self.settings)
        self._has_offered = self._has_offered or bool(examples)
        proposal = run.finish(teaching, rewrites, examples)
        self._marks = run.draft.pending_marks()
        return proposal


class _Step:
    """One step while it runs."""

    def __init__(
        self,
        asker: Asker,
        settings: ExperienceSettings,
        conventions: Conventions,
        library: Library,
        step: int,
    ) -> None:
        self.settings = settings
        self.count = count = asker.count
        self.step = step
        self.asker = asker
        self.words = PanelText(settings, count)
        self.prompts = ReflectPrompts(settings, self.words, count)
        self.draft = WorkingDraft(library, settings, conventions, count, step)
        self.replayed: tuple[RolloutGroup, ...] = ()
        self.details: dict[str, Any] = {"panels": [], "replays": [], "verdicts": []}

    async def panels(self, teaching: Teaching, past: Sequence[RolloutGroup]) -> None:
        """Ask panel by panel; each is shown what the ones before added."""
        sizes = self.settings.reflect
        limit = self.asker.input_tokens(self.asker.reply_tokens)
        room = limit - self.count(self.prompts.panel(Panel(()), self.draft.library, 16))
        if room < LEAST_TOKENS and teaching.informative:
            window = self.settings.budget.context_tokens
            why = (
                f"no panel fits the critic's window of {window} tokens: preset contrast needs less"
            )
            self.asker.books.note("failed", "panel", "the whole step", why)
            self.asker.books.counts["not_asked"] += len(teaching.informative)
            return
        ids = {g.group_id for g in teaching.informative}
        panels = compose(
            teaching.informative,
            [g for g in teaching.groups if g.group_id not in ids and g.graded],
            past,
            size=panel_size(room, sizes.panel_groups),
            counter=sizes.counter_evidence,
            lines=sizes.other_tasks,
        )
        least = self.settings.give_up_after
        for done, panel in enumerate(panels):
            asked = sum(len(p.groups) for p in panels[:done])
            if least and asked >= least and self.asker.books.unread("panel") == done:
                left = sum(len(p.groups) for p in panels[done:])
                self.asker.books.counts["not_asked"] += left
                return
            await self._panel(panel)

    async def _panel(self, panel: Panel) -> None:
        library = self.draft.library
        reply = await self.asker.ask(
            Where("panel", panel.groups[0].task.task_id),
            lambda room: self.prompts.fitted_panel(panel, library, room),
            lambda text: read_reply(text, panel.task_ids, self.draft.lesson_ids),
        )
        row: dict[str, Any] = {
            "tasks": [g.task.task_id for g in panel.groups],
            "others": len(panel.others),
            "rules": 0,
        }
        self.details["panels"].append(row)
        if reply is None:
            return
        row["rules"] = len(reply.rules)
        self._take(reply, panel)

    def _take(self, reply: PanelReply, panel: Panel) -> None:
        self.draft.reject_rows(reply.rejected)
        self.draft.judge(reply.verdicts)
        self.details["verdicts"] += [
            {"entry": v.entry_id, "verdict": v.verdict, "tasks": list(v.tasks)}
            for v in reply.verdicts
        ]
        for rule in reply.rules[: self.settings.reflect.rules]:
            self.draft.take(rule, panel)

    async def try_rules(self, groups: Sequence[RolloutGroup], replay: Replay | None) -> None:
        """Roll supporting tasks again; what turned none of them goes back to the critic once."""
        checks: list[ReplayCheck] = []
        rules = self.draft.changed()
        if replay is not None and self.settings.reflect.replays and self.settings.ground_truth:
            tasks = replay_tasks(rules, groups, self.settings)
            if tasks:
                checks = await self._replayed(rules, groups, tasks, replay)
                self.draft.record_replays(checks)
                self.details["replays"] = [c.to_dict() for c in checks]
        await self._send_back([c for c in checks if c.is_idle])

    async def _replayed(
        self,
        rules: Sequence[Experience],
        groups: Sequence[RolloutGroup],
        tasks: Sequence[Task],
        replay: Replay,
    ) -> list[ReplayCheck]:
        """Return what replays say; where a rule turned nothing, its tasks are drawn once more, so
        that one slip of the policy sends no rule back."""
        first = await replay(self.draft.library, tasks, f"{self.step}.1")
        self.replayed = tuple(first)
        checks = check_replays(rules, groups, first, self.settings)
        doubted = {t for c in checks if c.is_idle for t in c.tasks}
        if not doubted:
            return checks
        some = [t for t in tasks if t.task_id in doubted]
        second = await replay(self.draft.library, some, f"{self.step}.2")
        self.replayed = (*first, *second)
        return check_replays(rules, groups, joined(first, second), self.settings)

    async def _send_back(self, idle: Sequence[ReplayCheck]) -> None:
        refused = self.draft.returnable
        if not idle and not refused:
            return
        names = {c.experience_id: c.experience_id for c in idle} | {
            f"R{i}": "" for i in range(1, len(refused) + 1)
        }
        cited = {t for c in idle for t in c.tasks} | {
            t for rule in refused for t in (*rule.rule.support, *rule.rule.against)
        }
        reply = await self.asker.ask(
            Where("revise", min(cited, default="")),
            lambda room: self.prompts.fitted_revision(idle, refused, self.draft.library, room),
            lambda text: read_reply(text, sorted(cited), list(names)),
        )
        if reply is None:
            return
        answered = {r.entry_id for r in reply.rules if r.entry_id in names}
        for check in idle:
            if check.experience_id not in answered:
                self.draft.withdraw(check.experience_id, "withdrawn: it turned no supporting task")
        for rule in reply.rules:
            if rule.entry_id in names:
                known = names[rule.entry_id]
                self.draft.take(replace(rule, entry_id=known), None, is_final=True)

    async def rewrite_topics(self) -> list[Edit]:
        """Ask for whole rewrites of crowded topics; none where a value would be lost."""
        edits: list[Edit] = []
        for topic, entries in crowded_topics(self.draft.library, self.settings.reflect.crowded):
            reply = await self.asker.ask(
                Where("consolidate"),
                lambda room, t=topic, e=entries: self.prompts.rewrite(t, e, room),  # type: ignore[misc]
                lambda text, e=entries: read_reply(text, (), [x.experience_id for x in e]),  # type: ignore[misc]
            )
            if reply is None:
                continue
            found, problem = read_rewrite(reply.rules, entries, topic)
            if problem:
                self.details.setdefault("rewrites_refused", []).append([topic, problem])
            edits += found
        return edits

    def finish(
        self, teaching: Teaching, rewrites: Sequence[Edit], examples: Sequence[Edit]
    ) -> LibraryProposal:
        """Apply what is left and close the books."""
        edits = [*self.draft.net_edits(), *examples]
        settled = Settled(tuple(self.draft.settled), tuple(self.draft.rejected), self.asker.books)
        proposal = close_books(
            self.draft.base, edits, settled, teaching, self.settings,
            step=self.step, count=self.count,
        )  # fmt: skip
        library = self.draft.with_replays(proposal.library)
        rewritten = None
        if rewrites and proposal.has_change:
            rewritten = library.apply(rewrites, step=self.step, count=self.count).library
        self.details["questions"] = [e.claim.question for e in library.shown if e.claim.question]
        return replace(
            proposal, library=library, rewrite=rewritten, replayed=self.replayed,
            details=self.details,
        )  # fmt: skip
