"""What turns groups into proposals in a run, and the replays that try proposed rules.

Does not know the loop, the gate or how a flow works. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.config.learn import Config
from tfgrpo.experience import (
    Conventions,
    Critic,
    ExperienceSettings,
    Guards,
    Library,
    Proposer,
    Reflector,
    prompt_context,
)
from tfgrpo.learning.components import RunComponents
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.sampling import GroupSpec, Sampler
from tfgrpo.tasks import Splits

__all__ = ["Replays", "make_critic"]


class Replays:
    """Rolls practice tasks again under a proposed library, one draw each.

    Args:
        sampler: runs rollouts.
        settings: how libraries are injected.
        seed: of the draws.
    """

    def __init__(self, sampler: Sampler, settings: ExperienceSettings, seed: int) -> None:
        self._sampler = sampler
        self._settings = settings
        self._seed = seed

    async def __call__(
        self, library: Library, tasks: Sequence[Task], draw: str
    ) -> list[RolloutGroup]:
        """Return one group a task; `draw` is the step and round. Raises like `Sampler.groups`."""
        step = int(draw.split(".")[0])
        draws = GroupSpec(
            group_size=1,
            seed=self._seed,
            scope=f"replay{draw}",
            stage="replay",
            metadata={"step": step, "arm": "replay", "library_version": library.version_id},
        )
        return await self._sampler.groups(
            tasks,
            draws,
            lambda task: prompt_context(
                library, self._settings, use="practice", step=step, task=task
            ),
        )


def make_critic(
    config: Config,
    settings: ExperienceSettings,
    roles: RunComponents,
    sampler: Sampler,
    practised: Sequence[Task],
    splits: Splits,
) -> Proposer:
    """Return the flow that the settings ask for, with guards over all tasks of the run."""
    held_out = (*splits.gate, *splits.test)
    lm = roles.lm(config.critic) if settings.lessons else None
    if settings.flow == "reflect" and lm is not None:
        conventions = Conventions.of(practised, held_out, agent=settings.agent)
        replay = Replays(sampler, settings, config.learn.seed)
        return Reflector(lm, settings, conventions=conventions, replay=replay)
    guards = Guards.of(practised, held_out, max_words=2 * settings.max_words)
    return Critic(lm, settings, guards=guards)
