"""`learn`: from settings to a finished run and its result, sync and async; `dry_run` before it.

Puts the parts together (tasks, journal, roles, sampler, critic, learner), so that everything is
checked before anything is spent. Does not know the loop (`learner`), what a result holds or the
command line. Source: own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from tfgrpo.config.learn import MAY_CHANGE, Config, SamplingConfig
from tfgrpo.errors import ChangedSettingsError, ConfigError
from tfgrpo.lm import open_lm
from tfgrpo.runtime.event_loop import run_sync

# What a run is made of is loaded when one starts, so that `from tfgrpo import learn` is quick.
if TYPE_CHECKING:
    from tfgrpo.experience import ExperienceSettings
    from tfgrpo.learning.components import OpenLM, RunComponents
    from tfgrpo.learning.forecast import Forecast
    from tfgrpo.learning.progress import ProgressView
    from tfgrpo.learning.result import Result
    from tfgrpo.protocols import Allocator, HintScheduler, Policy, Verifier
    from tfgrpo.rollout import RolloutGroup, Task
    from tfgrpo.sampling import Sampler, Stop
    from tfgrpo.store import Journal
    from tfgrpo.store.journal import Role
    from tfgrpo.tasks import Splits

if TYPE_CHECKING:
    from tfgrpo.learning.run_workers import RunWorkers

log = logging.getLogger(__name__)


class RunKeywords(TypedDict, total=False):
    """Keywords of every verb that rolls out; each stands in place of what the settings describe."""

    tasks: Sequence[Task] | None
    policy: Policy | None
    verifier: Verifier | None
    opener: OpenLM
    view: ProgressView | None
    stop: Stop | None
    on_open: Callable[[Journal], None] | None
    """Told the open journal, so that a view can show what was spent."""


class LearnKeywords(RunKeywords, total=False):
    """Keywords of learning."""

    allocate: Allocator | None
    scheduler: HintScheduler | None
    """When a failed practice task gets which hint; a fresh one. Turns nudging on."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """The keywords that a caller gave, and defaults for the others."""

    tasks: Sequence[Task] | None = None
    policy: Policy | None = None
    verifier: Verifier | None = None
    allocate: Allocator | None = None
    opener: OpenLM = open_lm
    view: ProgressView | None = None
    stop: Stop | None = None
    scheduler: HintScheduler | None = None
    on_open: Callable[[Journal], None] | None = None


def learn(config: Config, *, fork: bool = False, **parts: Unpack[LearnKeywords]) -> Result:
    """Learn an experience library; the sync form of `learn_async`, in notebooks too."""
    return run_sync(lambda: learn_async(config, fork=fork, **parts))


async def learn_async(
    config: Config, *, fork: bool = False, **parts: Unpack[LearnKeywords]
) -> Result:
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
    from tfgrpo.learning.components import RunComponents
    from tfgrpo.learning.critics import make_critic
    from tfgrpo.learning.experience_settings import experience_settings
    from tfgrpo.learning.finished import (
        has_fixed_embedder,
        keep_outcome,
        kept_outcome,
        outcome_key,
    )
    from tfgrpo.learning.learn_run import LearnRun
    from tfgrpo.learning.loop import Learner
    from tfgrpo.learning.practising import PracticeSampler
    from tfgrpo.learning.progress import QuietView
    from tfgrpo.learning.result import kept_library, make_result, short_result, write_artefact
    from tfgrpo.nudges import check_nudge, make_nudger, named_scheduler, with_scheduler
    from tfgrpo.tasks.run_tasks import read_run_tasks

    given = Overrides(**parts)
    config = with_scheduler(config, given.scheduler)
    settings = experience_settings(config)
    if config.learn.allocate and given.allocate is None:
        raise ConfigError(
            "learn.allocate is set: pass the allocator as learn(…, allocate=…), or use `tfgrpo "
            "learn`, which finds it by name"
        )
    found = read_run_tasks(config, given.tasks)
    splits, traces = found.splits, found.traces
    check_nudge(config.nudge, splits.practice, from_traces=bool(traces))
    scheduler = given.scheduler or named_scheduler(config.nudge)
    plan = _forecast(config, splits, settings, given)
    await _rehearsed(config, splits, given)  # what is wrong leaves no folder behind
    store = open_run(config, fork=fork, tasks=found.tasks, traces=traces)
    roles = RunComponents(config, store, given.opener)
    view = given.view or QuietView()
    try:
        if given.on_open is not None:
            given.on_open(store)
        store.record_decision("forecast", plan.to_dict(), key="run")
        store.record_decision("splits", splits.to_dict(), key="run")
        async with run_workers(config, roles) as workers:
            make = partial(make_sampler, config, roles, given, store, view, workers=workers)
            sampler = make()
            record_rewards(store, sampler)
            for warning in plan.warnings:
                view.say(f"warning: {warning}")
            practice_sampler = _practice_sampler(config, given, sampler, make)
            settings = _with_best_reward(settings, sampler)
            nudger = make_nudger(config, settings, practice_sampler, roles.lm, scheduler)
            sampler.raise_if_stopped()
            key = ""
            if given.allocate is None and nudger is None and has_fixed_embedder(config):
                # no key covers what those decide
                critic = roles.lm(config.critic).identity if settings.lessons else None
                policies = [sampler.policy_id, practice_sampler.policy_id]
                judge = [sampler.verifier_id, sampler.reward_range]
                key = outcome_key(
                    store, policy=policies, verifier=judge, critic=critic,
                    settings=settings, traces=[group.to_dict() for group in traces],
                )  # fmt: skip
            learned = kept_outcome(store, key, config) if key else None
            if learned is None:
                learner = Learner(
                    LearnRun(config, splits, settings, store, view),
                    sampler,
                    make_critic(config, settings, roles, practice_sampler, found.practised, splits),
                    PracticeSampler(
                        config, settings, practice_sampler, splits.practice,
                        traces=traces, allocate=given.allocate, keeps_texts=nudger is not None,
                    ),
                    nudger=nudger,
                )  # fmt: skip
                learned = await learner.run()
        result = make_result(
            config, store, learned, plan, splits, found.notes, sampler.reward_range
        )
        store.record_decision("result", short_result(result), key="result")
        if key:
            keep_outcome(store, key, result)
        write_artefact(config, result, settings, kept_library(store, result))
        return result
    finally:
        await roles.aclose()
        store.close()


def _practice_sampler(
    config: Config, given: Overrides, sampler: Sampler, make: Callable[..., Sampler]
) -> Sampler:
    """Return the sampler of practice: the run's own, unless practice draws in a way of its own."""
    if config.practice.sampling == SamplingConfig():
        return sampler
    if given.policy is not None:
        raise ConfigError(
            "practice.sampling changes how the configured policy draws; a policy that was given as "
            "an object draws as it was made: leave one of them out"
        )
    return make(practice=True)


def dry_run(config: Config, **parts: Unpack[LearnKeywords]) -> tuple[Forecast, Splits]:
    """Return what `learn` would ask for; opens what it opens, calls nothing, writes nothing.

    Raises:
        ConfigError: settings, tasks, functions or prices that `learn` refuses, too.
        MissingExtraError: the same.
    """
    from tfgrpo.learning.experience_settings import experience_settings
    from tfgrpo.nudges import check_nudge, with_scheduler
    from tfgrpo.tasks.run_tasks import read_run_tasks

    given = Overrides(**parts)
    config = with_scheduler(config, given.scheduler)
    settings = experience_settings(config)
    found = read_run_tasks(config, given.tasks)
    check_nudge(config.nudge, found.splits.practice, from_traces=bool(found.traces))
    _check_prices(config, given)
    splits = found.splits
    remarks = run_sync(lambda: _rehearsed(config, splits, given))
    plan = _forecast(config, splits, settings, given)
    return replace(plan, warnings=(*remarks, *plan.warnings)), splits


async def _rehearsed(config: Config, splits: Splits, given: Overrides) -> list[str]:
    from tfgrpo.learning.forecast import rehearse

    return await rehearse(
        config,
        (*splits.practice, *splits.gate, *splits.test),
        given.opener,
        policy=given.policy,
        verifier=given.verifier,
    )


def _check_prices(config: Config, given: Overrides) -> None:
    """Refuse, before anything is asked, what the run would refuse: a cap on money and a model whose
    price is unknown."""
    from tfgrpo.store import Budget
    from tfgrpo.store.booking import require_price
    from tfgrpo.store.budget import Ledger
    from tfgrpo.store.prices import PriceTable

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
    role: Role = "learner",
) -> Journal:
    """Open the run's journal under its budget, or make it.

    What it learns from belongs to a run's settings by content: a changed task file is a changed
    setting, the same file under another path is not.
    """
    from tfgrpo.runtime.canonical import digest
    from tfgrpo.store import Budget, Journal, OpenOptions
    from tfgrpo.store.config_diff import ResumeRule
    from tfgrpo.store.forking import fork_run

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
            role=role,
            create=True,
            config=values,
            budget=budget,
            options=OpenOptions(
                config.run.store, resume=ResumeRule(MAY_CHANGE, type(config)().to_json())
            ),
        )
    except ChangedSettingsError as exc:
        if not fork:
            raise
        log.info("forking %s: %s", folder, exc)
    return fork_run(folder, values, store=config.run.store, budget=budget)


def make_sampler(
    config: Config,
    roles: RunComponents,
    given: Overrides,
    store: Journal,
    view: ProgressView,
    *,
    practice: bool = False,
    workers: RunWorkers | None = None,
) -> Sampler:
    """Return what rolls out: the policy and verifier given, or those that the settings describe;
    with `practice`, the policy as practice draws from it; on `workers` where there are any."""
    from tfgrpo.learning.counted_policy import counted
    from tfgrpo.sampling import Sampler, SampleSettings

    run = config.run
    settings = SampleSettings(
        concurrency=run.concurrency,
        timeout_s=run.timeout_s,
        on_truncated=run.on_truncated,
        probe=run.probe,
    )
    policy = given.policy or roles.policy(practice=practice)
    verifier = given.verifier or roles.verifier()
    executor = None
    if workers is not None:
        if given.policy is not None or given.verifier is not None:
            raise ConfigError(
                f"run.executor is {run.executor!r}, but policy or verifier was given as an object, "
                "which runs in this process only: name its code in the settings, as "
                "policy.kind = 'function' or a verifier's 'module:name', or leave run.executor out"
            )
        executor = workers.executor(policy, verifier, settings.of_units, practice=practice)
    elif given.policy is not None or config.policy.kind == "function":
        policy = counted(policy, store)
    return Sampler(
        policy,
        verifier,
        settings,
        recorder=store,
        on_progress=view.update,
        stop=given.stop,
        executor=executor,
    )


def record_rewards(store: Journal, sampler: Sampler) -> None:
    """Record the verifier's range of rewards, so that no figure of the run shows what cannot be."""
    low, high = sampler.reward_range or (None, None)
    store.record_decision("rewards", {"low": low, "high": high}, key="range")


@asynccontextmanager
async def run_workers(config: Config, roles: RunComponents) -> AsyncIterator[RunWorkers | None]:
    """Give the workers of a run, or None where its rollouts run in this process."""
    if config.run.executor == "local":
        yield None
        return
    from tfgrpo.learning.run_workers import RunWorkers

    workers = RunWorkers(config, roles)
    try:
        await workers.start()
        yield workers
    finally:
        await workers.aclose()


def _forecast(
    config: Config, splits: Splits, settings: ExperienceSettings, given: Overrides
) -> Forecast:
    from tfgrpo.learning.forecast import forecast
    from tfgrpo.store.prices import PriceTable

    if given.policy is not None:
        policy = config.policy.model_copy(update={"kind": "function"})
        config = config.model_copy(update={"policy": policy})
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
    "LearnKeywords",
    "Overrides",
    "RunKeywords",
    "dry_run",
    "learn",
    "learn_async",
    "make_sampler",
    "open_run",
    "record_rewards",
    "run_workers",
]
