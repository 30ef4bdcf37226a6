"""`learn`: from settings to a finished run and its result, sync and async; `dry_run` before it.

Puts the parts together (tasks, journal, roles, sampler, critic, learner), so that everything is
checked before anything is spent. Does not know the loop (`learner`), what a result holds or the
command line. Source: own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfgrpo.config.learn import MAY_CHANGE, Config, SamplingConfig
from tfgrpo.errors import ChangedSettingsError, ConfigError
from tfgrpo.experience import ExperienceSettings
from tfgrpo.learning.components import OpenLM, RunComponents
from tfgrpo.learning.critics import make_critic
from tfgrpo.learning.experience_settings import experience_settings
from tfgrpo.learning.forecast import Forecast, forecast
from tfgrpo.learning.loop import Learner
from tfgrpo.learning.progress import ProgressView, QuietView
from tfgrpo.learning.result import Result, make_result, write_artefact
from tfgrpo.lm import open_lm
from tfgrpo.nudges import check_nudge, make_nudger, named_scheduler, with_scheduler
from tfgrpo.protocols import Allocator, HintScheduler, Policy, TopUp, Verifier
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.event_loop import run_sync
from tfgrpo.sampling import Sampler, SampleSettings, Stop
from tfgrpo.store import Budget, Journal
from tfgrpo.store.booking import require_price
from tfgrpo.store.budget import Ledger
from tfgrpo.store.forking import fork_run
from tfgrpo.store.prices import PriceTable
from tfgrpo.tasks import Splits
from tfgrpo.tasks.run_tasks import read_run_tasks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a caller may give in place of what the settings describe."""

    tasks: Sequence[Task] | None = None
    policy: Policy | None = None
    verifier: Verifier | None = None
    allocate: Allocator | TopUp | None = None
    opener: OpenLM = open_lm
    view: ProgressView | None = None
    stop: Stop | None = None
    scheduler: HintScheduler | None = None
    """When a failed practice task gets which hint; a fresh one. Turns nudging on."""
    on_open: Callable[[Journal], None] | None = None
    """Told the open journal, so that a view can show what was spent."""


def learn(config: Config, *, fork: bool = False, **parts: Any) -> Result:
    """Learn an experience library; the sync form of `learn_async`, in notebooks too."""
    return run_sync(lambda: learn_async(config, fork=fork, **parts))


async def learn_async(config: Config, *, fork: bool = False, **parts: Any) -> Result:
    """Learn an experience library from group rollouts and prove what it is worth.

    Running it again on the same folder goes on where it ended; nothing is paid twice.

    Args:
        config: the settings.
        fork: with changed settings, make a new run beside the old one and reuse what fits.
        parts: `tasks`, `policy`, `verifier`, `allocate`, `opener`, `view`, `stop`, `scheduler` in
            place of what the settings describe; `on_open` is told the open journal.

    Raises:
        ConfigError: bad settings or tasks, or contaminated splits.
        ProviderError: a wrong key or an unknown model.
        PolicyError, VerifierError: nothing could be scored.
        StoreError: the run folder cannot be used.
        Stopped: a stop was requested; the same call goes on.
    """
    given = Overrides(**parts)
    config = with_scheduler(config, given.scheduler)
    settings = experience_settings(config)
    found = read_run_tasks(config, given.tasks)
    splits, traces = found.splits, found.traces
    check_nudge(config.nudge, splits.practice, from_traces=bool(traces))
    scheduler = given.scheduler or named_scheduler(config.nudge)
    plan = _forecast(config, splits, settings)
    store = open_run(config, fork=fork, tasks=found.tasks, traces=traces)
    roles = RunComponents(config, store, given.opener)
    view = given.view or QuietView()
    try:
        if given.on_open is not None:
            given.on_open(store)
        store.record_decision("forecast", plan.to_dict(), key="run")
        store.record_decision("splits", splits.to_dict(), key="run")
        sampler = make_sampler(config, roles, given, store, view)
        practice_sampler = sampler
        if config.practice.sampling != SamplingConfig():
            if given.policy is not None:
                raise ConfigError(
                    "practice.sampling changes how the configured policy draws; a policy that was "
                    "given as an object draws as it was made: leave one of them out"
                )
            practice_sampler = make_sampler(config, roles, given, store, view, practice=True)
        settings = _with_best_reward(settings, sampler)
        critic = make_critic(config, settings, roles, practice_sampler, found.practised, splits)
        learner = Learner(
            config,
            splits,
            sampler,
            critic,
            settings,
            store,
            view,
            allocate=given.allocate,
            traces=traces,
            nudger=make_nudger(config, settings, practice_sampler, roles.lm, scheduler),
            practice_sampler=practice_sampler,
        )
        learned = await learner.run()
        result = make_result(config, store, learned, plan, splits, found.notes)
        write_artefact(config, result, settings)
        return result
    finally:
        await roles.aclose()
        store.close()


def dry_run(config: Config, **parts: Any) -> tuple[Forecast, Splits]:
    """Return what `learn` would ask for; reads the tasks, calls nothing, writes nothing.

    Raises:
        ConfigError: settings, tasks or prices that `learn` refuses, too.
    """
    given = Overrides(**parts)
    config = with_scheduler(config, given.scheduler)
    settings = experience_settings(config)
    found = read_run_tasks(config, given.tasks)
    check_nudge(config.nudge, found.splits.practice, from_traces=bool(found.traces))
    _check_prices(config, given)
    return _forecast(config, found.splits, settings), found.splits


def _check_prices(config: Config, given: Overrides) -> None:
    """Refuse, before anything is asked, what the run would refuse: a cap on money and a model whose
    price is unknown."""
    ledger = Ledger(Budget(**config.budget.model_dump()))
    table = PriceTable(config.run.prices or None)
    specs = [config.critic.lm or config.policy.lm]
    if given.policy is None and config.policy.kind != "function":
        specs.append(config.policy.lm)
    for spec in specs:
        require_price(ledger, table.find(spec), spec)


def open_run(
    config: Config,
    *,
    fork: bool = False,
    tasks: Sequence[Task] = (),
    traces: Sequence[RolloutGroup] = (),
) -> Journal:
    """Open the run's journal under its budget, or make it.

    What it learns from belongs to a run's settings by content: a changed task file is a changed
    setting, the same file under another path is not.
    """
    budget = Budget(**config.budget.model_dump())
    values = config.to_json()
    names = {key: Path(values["tasks"][key]).name for key in ("path", "traces")}
    values["tasks"] |= names | {
        "content": digest([t.to_dict() for t in tasks], 16),
        "traces_content": digest([g.group_id for g in traces], 16),
    }
    folder = Path(config.run.folder)
    try:
        return Journal.open(
            folder,
            create=True,
            config=values,
            budget=budget,
            may_change=MAY_CHANGE,
            defaults=type(config)().to_json(),
        )
    except ChangedSettingsError as exc:
        if not fork:
            raise
        log.info("forking %s: %s", folder, exc)
    return fork_run(folder, values, budget=budget)


def make_sampler(
    config: Config,
    roles: RunComponents,
    given: Overrides,
    store: Journal,
    view: ProgressView,
    *,
    practice: bool = False,
) -> Sampler:
    """Return what rolls out: the policy and verifier given, or those that the settings describe;
    with `practice`, the policy as practice draws from it."""
    run = config.run
    return Sampler(
        given.policy or (roles.practice_policy() if practice else roles.policy()),
        given.verifier or roles.verifier(),
        SampleSettings(
            concurrency=run.concurrency,
            timeout_s=run.timeout_s,
            on_truncated=run.on_truncated,
            probe=run.probe,
        ),
        recorder=store,
        on_progress=view.update,
        stop=given.stop,
    )


def _forecast(config: Config, splits: Splits, settings: ExperienceSettings) -> Forecast:
    table = PriceTable(config.run.prices or None)
    prices = []
    for spec in (config.policy.lm, config.critic.lm or config.policy.lm):
        price = table.find(spec)
        prices.append(None if price is None else (price.input, price.output))
    return forecast(
        config,
        splits.practice,
        splits.gate,
        splits.test,
        settings,
        policy_price=prices[0],
        critic_price=prices[1],
    )


def _with_best_reward(settings: ExperienceSettings, sampler: Sampler) -> ExperienceSettings:
    """Let only full marks become exemplars, where the verifier says what full marks are."""
    best = sampler.best_reward
    if settings.exemplar_reward is not None:
        return settings
    if not sampler.verifier_id:
        return replace(settings, exemplar_reward=1.0)  # what a majority gives at most
    if best is None:
        return settings
    return replace(settings, exemplar_reward=best)


__all__ = [
    "Overrides",
    "dry_run",
    "learn",
    "learn_async",
    "make_sampler",
    "open_run",
]
