"""`evaluate`: a library against the empty one on given tasks, sync and async.

Both arms are rolled out on the same tasks and sample indices and compared task by task. Does not
know how a library is learnt. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfgrpo.config.learn import Config
from tfgrpo.experience import Artefact, load_artefact
from tfgrpo.learning.components import RunComponents
from tfgrpo.learning.learn import Overrides, make_sampler, open_run, run_workers
from tfgrpo.learning.progress import QuietView
from tfgrpo.rollout import Task
from tfgrpo.runtime.event_loop import run_sync
from tfgrpo.sampling import GroupSpec
from tfgrpo.statistics import Interval, Scores, paired_difference
from tfgrpo.statistics.verdict import Verdict, judge_gain
from tfgrpo.tasks.files import read_tasks

__all__ = ["Evaluation", "evaluate", "evaluate_async"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A library against the empty one on given tasks."""

    empty: Scores
    library: Scores
    difference: Interval | None
    verdict: Verdict | None
    notes: tuple[str, ...] = ()


def evaluate(config: Config, artefact: Artefact | Path | str, **parts: Any) -> Evaluation:
    """Score a library against the empty one; the sync form of `evaluate_async`."""
    loaded = artefact if isinstance(artefact, Artefact) else load_artefact(artefact)
    return run_sync(lambda: evaluate_async(config, loaded, **parts))


async def evaluate_async(
    config: Config, artefact: Artefact, *, group_size: int = 4, **parts: Any
) -> Evaluation:
    """Score an exported library and the empty one on the config's tasks, paired by task.

    Raises like `learn_async`; the artefact's prompts are the ones it was learnt with.
    """
    given = Overrides(**parts)
    tasks = list(given.tasks) if given.tasks is not None else read_tasks(config.tasks.path)
    store = open_run(config, tasks=tasks)
    roles = RunComponents(config, store, given.opener)
    if given.on_open is not None:
        given.on_open(store)
    try:
        async with run_workers(config, roles) as workers:
            view = given.view or QuietView()
            sampler = make_sampler(config, roles, given, store, view, workers=workers)
            draws = GroupSpec(group_size, seed=config.learn.seed, scope="eval", stage="eval")
            arms: list[Scores] = []
            for arm in ("empty", "final"):
                meta = {"arm": arm, "library_version": artefact.library.version_id}
                chosen = replace(draws, metadata=meta)
                if arm == "empty":
                    groups = await sampler.groups(tasks, chosen)
                else:
                    groups = await sampler.groups(tasks, chosen, artefact.context)
                arms.append({g.task.task_id: g.rewards_G for g in groups})
    finally:
        await roles.aclose()
        store.close()
    both = [t for t in arms[0] if arms[0][t] and arms[1].get(t)]
    difference = paired_difference(arms[0], arms[1]) if len(both) > 1 else None
    verdict = judge_gain(arms[0], arms[1])
    return Evaluation(arms[0], arms[1], difference, verdict, _taught(artefact, tasks))


def _taught(artefact: Artefact, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Say how many of the tasks the library was learnt from."""
    sources = {t for e in artefact.library.entries for t in e.provenance.task_ids}
    known = sorted(t.task_id for t in tasks if t.task_id in sources)
    if not known:
        return ()
    return (
        f"{len(known)} of {len(tasks)} tasks taught the library, such as {known[:3]}: figures on "
        "them describe what was memorised, leave them out",
    )
