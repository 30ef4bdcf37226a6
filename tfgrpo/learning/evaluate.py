"""`evaluate`: a library against the empty one on given tasks, sync and async.

Both arms are rolled out on the same tasks and sample indices and compared task by task. Does not
know how a library is learnt. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Unpack

from tfgrpo.config.learn import Config
from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.errors import ConfigError
from tfgrpo.experience import Artefact, load_artefact
from tfgrpo.learning.components import RunComponents
from tfgrpo.learning.learn import (
    Overrides,
    RunKeywords,
    make_sampler,
    open_run,
    record_rewards,
    run_workers,
)
from tfgrpo.learning.progress import QuietView
from tfgrpo.rollout import Task
from tfgrpo.runtime.event_loop import run_sync
from tfgrpo.sampling import GroupSpec
from tfgrpo.statistics import Interval, Scores, paired_difference
from tfgrpo.statistics.verdict import Verdict, judge_gain
from tfgrpo.tasks.files import read_tasks
from tfgrpo.tasks.run_tasks import read_run_tasks
from tfgrpo.tasks.splits import SPLITS

__all__ = ["EvaluatedSplit", "Evaluation", "evaluate", "evaluate_async"]

EvaluatedSplit = Literal["untaught", "all", "practice", "gate", "test"]
"""Which of the config's tasks an evaluation scores."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A library against the empty one on given tasks."""

    empty: Scores
    library: Scores
    difference: Interval | None
    verdict: Verdict | None
    notes: tuple[str, ...] = ()
    reward_range: tuple[float, float] | None = None
    """Least and largest reward of the verifier, where it has bounds."""


def evaluate(
    config: Config,
    artefact: Artefact | Path | str,
    *,
    group_size: int = 4,
    split: EvaluatedSplit = "untaught",
    fork: bool = False,
    **parts: Unpack[RunKeywords],
) -> Evaluation:
    """Score a library against the empty one; the sync form of `evaluate_async`."""
    loaded = artefact if isinstance(artefact, Artefact) else load_artefact(artefact)
    return run_sync(
        lambda: evaluate_async(
            config, loaded, group_size=group_size, split=split, fork=fork, **parts
        )
    )


async def evaluate_async(
    config: Config,
    artefact: Artefact,
    *,
    group_size: int = 4,
    split: EvaluatedSplit = "untaught",
    fork: bool = False,
    **parts: Unpack[RunKeywords],
) -> Evaluation:
    """Score an exported library and the empty one on the config's tasks, paired by task.

    Args:
        config: the settings, tasks among them.
        artefact: the library; its prompts are the ones it was learnt with.
        group_size: draws a task and arm.
        split: `untaught` leaves out the tasks that taught the library, `all` does not; the name of
            a split takes that split as the config makes it. Tasks given as `tasks` are all taken.
        fork: with changed settings, make a new run beside the old one and reuse what fits.

    Raises like `learn_async`.
    """
    given = Overrides(**parts)
    tasks, notes = _chosen(config, artefact, given, split)
    store = open_run(config, fork=fork, tasks=tasks, role="writer")
    roles = RunComponents(config, store, given.opener)
    if given.on_open is not None:
        given.on_open(store)
    try:
        async with run_workers(config, roles) as workers:
            view = given.view or QuietView()
            sampler = make_sampler(config, roles, given, store, view, workers=workers)
            record_rewards(store, sampler)
            known = sampler.reward_range
            draws = GroupSpec(group_size, seed=config.learn.seed, scope="eval", stage="eval")
            arms: list[Scores] = []
            for arm in ("empty", "final"):
                meta = {"arm": arm, "library_version": artefact.library.version_id}
                chosen = replace(draws, metadata=meta)
                context = EMPTY_CONTEXT if arm == "empty" else artefact.context
                groups = await sampler.groups(tasks, chosen, context)
                arms.append({g.task.task_id: g.rewards_G for g in groups})
    finally:
        await roles.aclose()
        store.close()
    both = [t for t in arms[0] if arms[0][t] and arms[1].get(t)]
    difference = paired_difference(arms[0], arms[1]) if len(both) > 1 else None
    verdict = judge_gain(arms[0], arms[1])
    if known is not None:
        difference = difference and difference.within(known, of_difference=True)
        verdict = verdict.within(known)
    return Evaluation(arms[0], arms[1], difference, verdict, notes, known)


def _chosen(
    config: Config, artefact: Artefact, given: Overrides, split: EvaluatedSplit
) -> tuple[list[Task], tuple[str, ...]]:
    """Return the tasks to score, and how many taught the library."""
    if split in SPLITS and given.tasks is None:
        splits = read_run_tasks(config).splits
        tasks = list(getattr(splits, split))
        if not tasks:
            raise ConfigError(f"split {split!r} has no tasks under these settings")
    else:
        tasks = list(given.tasks) if given.tasks is not None else read_tasks(config.tasks.path)
    sources = {t for e in artefact.library.entries for t in e.provenance.task_ids}
    taught = sorted(t.task_id for t in tasks if t.task_id in sources)
    if not taught:
        return tasks, ()
    if split == "untaught" and given.tasks is None and len(taught) < len(tasks):
        note = f"{len(taught)} of {len(tasks)} tasks taught the library and are left out"
        return [t for t in tasks if t.task_id not in sources], (note,)
    note = (
        f"{len(taught)} of {len(tasks)} tasks taught the library, such as {taught[:3]}: figures on "
        "them describe what was memorised, leave them out"
    )
    return tasks, (note,)
