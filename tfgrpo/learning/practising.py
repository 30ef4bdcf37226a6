"""Practice of one run: draws batches, rolls them out under a version, keeps what was seen.

Entries are left out by chance so that each one's effect can be told; an allocator may share out the
rollouts; without a verifier the majority of a group may stand in for one. Does not know critics,
the gate or the journal. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfgrpo.config.learn import Config
from tfgrpo.context import Context
from tfgrpo.experience import ExperienceSettings, Library, Value, prompt_context
from tfgrpo.experience.entry_value import inclusion_plan, observations_of, value_entries
from tfgrpo.group_figures import GroupFigures, OneOfEach, figures_of
from tfgrpo.group_sizes import GroupSizes
from tfgrpo.learning.practice import Batch, first_pass, focused_pass, task_needs
from tfgrpo.learning.unverified import majority_graded
from tfgrpo.learning.version import Version
from tfgrpo.protocols import Allocator
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.sampling import GroupSpec, Sampler

__all__ = ["PracticeSampler"]


class PracticeSampler:
    """What a run practises.

    Args:
        config: epochs, batch, group size, seed.
        settings: how libraries are injected, full marks.
        sampler: runs practice rollouts.
        tasks: the practice split.
        traces: saved groups that stand in for fresh rollouts.
        allocate: how many rollouts each task of a batch gets; uniform by default.
        keeps_texts: hold the practised groups whole, for who reads them later; an allocator does.
    """

    def __init__(
        self,
        config: Config,
        settings: ExperienceSettings,
        sampler: Sampler,
        tasks: Sequence[Task],
        *,
        traces: Sequence[RolloutGroup] = (),
        allocate: Allocator | None = None,
        keeps_texts: bool = False,
    ) -> None:
        self._config = config
        self._settings = settings
        self._sampler = sampler
        self._tasks = tasks
        self._traces = traces
        self._allocate = allocate
        self.groups: list[RolloutGroup] = []
        """Practised groups, in order, where their texts are kept."""
        self._keeps_texts = keeps_texts or allocate is not None
        self._practised: list[GroupFigures] = []
        self._seen: list[GroupFigures] = []
        self._shared = OneOfEach()
        self._measured_at = 0

    def batches(self, library: Callable[[], Library]) -> Iterator[Batch]:
        """Yield what each step practises; a later pass is drawn once the one before is over."""
        learn = self._config.learn
        source: Sequence[Any] = self._traces or self._tasks
        is_focused = self._settings.flow == "reflect" and not self._traces
        for epoch in range(learn.epochs):
            if epoch == 0 or not is_focused:
                yield from first_pass(source, epoch, learn.seed, learn.batch)
                continue
            full = self._settings.exemplar_reward
            needs = task_needs(self._tasks, self._seen, library(), full)
            yield from focused_pass(
                self._tasks, needs, epoch, learn.seed,
                size=learn.batch, random_share=learn.random_share,
            )  # fmt: skip

    async def roll(self, step: int, batch: Batch, version: Version) -> list[RolloutGroup]:
        """Return the groups of a batch, rolled out under a version; raises like the sampler."""
        groups = list(batch.items)
        if not self._traces:
            groups = await self._rolled(step, batch, version)
        if self._config.verifier.get("by") == "majority" and not self._sampler.verifier_id:
            groups = [majority_graded(g) for g in groups]
        self.groups += groups if self._keeps_texts else []
        figures = [f.sharing(self._shared) for f in figures_of(groups)]
        self._practised += figures
        self._seen += figures
        return groups

    def take_replays(self, groups: Sequence[RolloutGroup]) -> None:
        """Remember what supporting tasks came to under proposed rules."""
        self._seen += [f.sharing(self._shared) for f in figures_of(groups)]

    def measured(self, version: Version) -> Version | None:
        """Return a version with its entries' measured values, None where nothing was measured.

        Only tasks that chance drew count: those drawn for failing would praise every entry. In a
        long run some more practice changes nothing; values are measured again when it was a
        fiftieth.
        """
        if 50 * (len(self._practised) - self._measured_at) < self._measured_at:
            return None
        self._measured_at = len(self._practised)
        drawn = [g for g in self._practised if not g.metadata.get("focused")]
        known = {e.experience_id for e in version.library.entries}
        values = {
            v.experience_id: Value.of(v.effect)
            for v in value_entries(observations_of(drawn))
            if v.experience_id in known
        }
        return Version(version.library.measured(values), version.selector) if values else None

    async def _rolled(self, step: int, batch: Batch, version: Version) -> list[RolloutGroup]:
        learn, tasks = self._config.learn, batch.items
        contexts, offered = self._contexts(step, tasks, version)
        metadata: dict[str, Any] = {
            "step": step,
            "epoch": batch.epoch,
            "arm": "current",
            "library_version": version.version_id,
        }
        if offered:
            metadata |= {"offered": offered, "keep": learn.keep_share}
        if self._allocate is None:
            return await self._of_sizes(batch, metadata, contexts, None)
        budget = len(tasks) * learn.group_size
        sizes = GroupSizes(self._allocate, tasks, self.groups, budget)
        groups = await self._of_sizes(batch, metadata, contexts, sizes.now)
        while sizes.grow(groups):
            # What a group has already is found in the journal, not drawn again.
            groups = await self._of_sizes(batch, metadata, contexts, sizes.now)
        return groups

    async def _of_sizes(
        self,
        batch: Batch,
        metadata: dict[str, Any],
        contexts: dict[str, Context],
        sizes: Sequence[int] | None,
    ) -> list[RolloutGroup]:
        """Draw the groups of a batch: tasks that chance chose, then those chosen for failing."""
        by_task = None
        if sizes is not None:
            by_task = dict(zip([t.task_id for t in batch.items], sizes, strict=True))
        by_chance = [t for t in batch.items if t.task_id not in batch.focused]
        focused = [t for t in batch.items if t.task_id in batch.focused]
        groups = await self._drawn(batch, by_chance, metadata, contexts, by_task)
        metadata = metadata | {"focused": True}
        return groups + await self._drawn(batch, focused, metadata, contexts, by_task)

    async def _drawn(
        self,
        batch: Batch,
        tasks: Sequence[Task],
        metadata: dict[str, Any],
        contexts: dict[str, Context],
        sizes: dict[str, int] | None,
    ) -> list[RolloutGroup]:
        if not tasks:
            return []
        learn = self._config.learn
        draws = GroupSpec(
            group_size=learn.group_size,
            first_index=batch.epoch * learn.group_size,
            seed=learn.seed,
            scope=f"epoch{batch.epoch}",
            stage="practice",
            metadata=metadata,
        )
        return await self._sampler.groups(
            tasks,
            draws,
            lambda task: contexts[task.task_id],
            sizes=None if sizes is None else [sizes[t.task_id] for t in tasks],
        )

    def _contexts(
        self, step: int, tasks: Sequence[Task], version: Version
    ) -> tuple[dict[str, Context], list[str]]:
        """Return each task's context; entries are left out by chance where that is asked for."""
        learn = self._config.learn
        ids = [e.experience_id for e in version.library.shown]
        chance = not learn.preset.startswith("paper") and learn.keep_share < 1 and bool(ids)
        plan: list[frozenset[str]] = []
        if chance:
            seed = derive_seed("inclusion", learn.seed, step)
            plan = inclusion_plan(ids, len(tasks), keep=learn.keep_share, seed=seed)
        contexts: dict[str, Context] = {}
        for position, task in enumerate(tasks):
            context = prompt_context(
                version.library, self._settings, use="practice", step=step, task=task,
                selector=version.selector,
            )  # fmt: skip
            if chance:
                parts = tuple(p for p in context.parts if p.source in plan[position])
                context = Context(parts, context.placement, context.template)
            contexts[task.task_id] = context
        return contexts, ids if chance else []
