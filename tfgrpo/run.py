"""`learn` and `evaluate`: from settings to a finished run and its result, sync and async.

Puts the parts together (journal, roles, splits, sampler, critic, learner), checks tasks and leaks
before anything is spent, and writes the artefact at the end. Does not know the loop (`learner`)
or the command line. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tfgrpo.canonical import digest
from tfgrpo.config import Config, read_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.experience import (
    Artefact,
    Card,
    Critic,
    ExperienceSettings,
    Guards,
    Library,
    Splits,
    export_artefact,
    load_artefact,
    preset,
    split_tasks,
)
from tfgrpo.forecast import Forecast, forecast
from tfgrpo.gatekeeper import EMPTY
from tfgrpo.leaks import find_leaks, refuse_contaminated
from tfgrpo.learner import Learned, Learner, Proof
from tfgrpo.lm import open_lm
from tfgrpo.nudges import (
    check_nudge,
    make_nudger,
    named_scheduler,
    nudge_totals,
    with_scheduler,
)
from tfgrpo.progress import ProgressView, QuietView
from tfgrpo.protocols import Allocator, HintScheduler, Policy, Verifier
from tfgrpo.roles import OpenLM, Roles, sampling_of
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.sampling import Draws, Sampler, SampleSettings, Stop
from tfgrpo.statistics import Interval, Scores, mean_interval, min_detectable, paired_difference
from tfgrpo.store import Budget, RunStore, read_groups
from tfgrpo.store.fold import SpendRow
from tfgrpo.store.prices import PriceTable
from tfgrpo.verdict import Verdict, judge_gain

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a caller may give in place of what the settings describe."""

    tasks: Sequence[Task] | None = None
    policy: Policy | None = None
    verifier: Verifier | None = None
    allocate: Allocator | None = None
    opener: OpenLM = open_lm
    view: ProgressView | None = None
    stop: Stop | None = None
    scheduler: HintScheduler | None = None
    """When a failed practice task gets which hint; a fresh one. Turns nudging on."""
    on_open: Callable[[RunStore], None] | None = None
    """Told the open journal, so that a view can show what was spent."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to, for people and programs."""

    folder: Path
    learned: Learned
    verdict: Verdict | None
    """Whether the kept library beats the empty one on the test split; None without a test."""
    forecast: Forecast
    spend: tuple[SpendRow, ...]
    splits: Splits
    notes: tuple[str, ...]
    outcomes: dict[str, dict[str, int]]
    """How many rollouts of each stage ended in each way."""
    min_detectable: float | None
    """Smallest true difference that the test split could have found with 80 % power, measured on
    the run's own draws."""

    @property
    def library(self) -> Library:
        """The library that was kept; empty where none won."""
        return self.learned.version.library

    @property
    def empty_score(self) -> Interval | None:
        """Test-split mean of the empty library."""
        return _mean(self.learned.proof, "empty")

    @property
    def library_score(self) -> Interval | None:
        """Test-split mean of what was kept."""
        return _mean(self.learned.proof, "final")

    @property
    def exit_code(self) -> int:
        """0 verdict met, 1 not met, 4 stopped by a cap, 5 inconclusive."""
        if self.learned.stopped_by.startswith("budget"):
            return 4
        return self.verdict.exit_code if self.verdict is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        proof = self.learned.proof
        totals = nudge_totals(self.learned.nudges)
        return {
            "schema": 1,
            "folder": str(self.folder),
            "version_id": self.learned.version.version_id,
            "entries": [e.to_dict() for e in self.library.shown],
            "choice": self.learned.choice.to_dict(),
            "empty_score": _row(self.empty_score),
            "library_score": _row(self.library_score),
            "difference": _row(proof.difference if proof else None),
            "noise_floor": proof.noise_floor if proof else None,
            "min_detectable": self.min_detectable,
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "exit_code": self.exit_code,
            "stopped_by": self.learned.stopped_by,
            "splits": {k: len(v) for k, v in self.splits.to_dict().items()},
            "spend": [row.to_dict() for row in self.spend],
            "outcomes": self.outcomes,
            "notes": list(self.notes),
            **({} if totals is None else {"nudge": totals}),
        }


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
    given = Parts(**parts)
    config = with_scheduler(config, given.scheduler)
    settings = experience_settings(config)
    tasks, traces = _material(config, given)
    splits = _split(config, tasks)
    practised = _practised(splits, traces)
    notes = _check_leaks(practised, splits)
    check_nudge(config.nudge, splits.practice, from_traces=bool(traces))
    scheduler = given.scheduler or named_scheduler(config.nudge)
    plan = _forecast(config, splits, settings)
    store = open_run(config, fork=fork, tasks=tasks, traces=traces)
    roles = Roles(config, store, given.opener)
    view = given.view or QuietView()
    try:
        if given.on_open is not None:
            given.on_open(store)
        store.record_decision("forecast", plan.to_dict(), key="run")
        store.record_decision("splits", splits.to_dict(), key="run")
        sampler = _sampler(config, roles, given, store, view)
        settings = _with_best_reward(settings, sampler)
        held_out = (*splits.gate, *splits.test)
        critic = Critic(
            roles.lm(config.critic) if settings.lessons else None,
            settings,
            guards=Guards.of(practised, held_out, max_words=2 * settings.max_words),
        )
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
            nudger=make_nudger(config, settings, sampler, roles.lm, scheduler),
        )
        learned = await learner.run()
        result = _result(config, store, learned, plan, splits, notes)
        _write(config, result, settings)
        return result
    finally:
        await roles.aclose()
        store.close()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A library against the empty one on given tasks."""

    empty: Scores
    library: Scores
    difference: Interval | None
    verdict: Verdict | None
    notes: tuple[str, ...] = ()


async def evaluate_async(
    config: Config, artefact: Artefact, *, group_size: int = 4, **parts: Any
) -> Evaluation:
    """Score an exported library and the empty one on the config's tasks, paired by task.

    Raises like `learn_async`; the artefact's prompts are the ones it was learnt with.
    """
    given = Parts(**parts)
    tasks = list(given.tasks) if given.tasks is not None else read_tasks(config.tasks.path)
    store = open_run(config, tasks=tasks)
    roles = Roles(config, store, given.opener)
    if given.on_open is not None:
        given.on_open(store)
    try:
        sampler = _sampler(config, roles, given, store, given.view or QuietView())
        draws = Draws(group_size, seed=config.learn.seed, scope="eval", stage="eval")
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


def evaluate(config: Config, artefact: Artefact | Path | str, **parts: Any) -> Evaluation:
    """Score a library against the empty one; the sync form of `evaluate_async`."""
    loaded = artefact if isinstance(artefact, Artefact) else load_artefact(artefact)
    return run_sync(lambda: evaluate_async(config, loaded, **parts))


def experience_settings(config: Config) -> ExperienceSettings:
    """Return how groups become edits under these settings.

    Raises:
        ConfigError: an unknown experience setting or repair.
    """
    learn = config.learn
    changes: dict[str, Any] = dict(learn.settings)
    _check_settings(changes)
    changes |= {
        "objective": learn.objective_agent,
        "learning_objective": learn.objective_learning,
        "ground_truth": learn.ground_truth,
        "reference_exemplars": learn.reference_exemplars,
        "seed": learn.seed,
        "limits": config.critic.to_limits(),
    }
    if config.repairs:
        changes["repairs"] = config.repairs
    if learn.entries == "lessons":
        changes["exemplars"] = 0
    if learn.entries == "exemplars":
        changes["lessons"] = False
    settings = preset(learn.preset, **changes)
    asked = config.critic.sampling
    if asked != type(asked)():
        settings = replace(settings, sampling=asked.to_sampling())
    if config.critic.context_tokens or asked.max_tokens:
        budget = settings.budget
        settings = replace(
            settings,
            budget=replace(
                budget,
                context_tokens=config.critic.context_tokens or budget.context_tokens,
                reply_tokens=asked.max_tokens or budget.reply_tokens,
            ),
        )
    return settings


_SET_ELSEWHERE = {
    "objective": "learn.objective_agent",
    "learning_objective": "learn.objective_learning",
    "ground_truth": "learn.ground_truth",
    "reference_exemplars": "learn.reference_exemplars",
    "seed": "learn.seed",
    "limits": "critic.timeout_s",
    "sampling": "critic.sampling",
    "repairs": "repairs",
    "flow": "learn.preset",
}


def _check_settings(given: Mapping[str, Any]) -> None:
    """Check the values of `learn.settings`; names are the preset's to check."""
    hints = get_type_hints(ExperienceSettings)
    for key, value in given.items():
        if key in _SET_ELSEWHERE:
            raise ConfigError(f"learn.settings.{key}: set {_SET_ELSEWHERE[key]} instead")
        kind = hints.get(key)
        if is_dataclass(kind) and isinstance(value, dict):
            inner = get_type_hints(kind)
            for name, part in value.items():
                _check_value(f"learn.settings.{key}.{name}", part, inner.get(name, Any))
        elif kind is not None:
            _check_value(f"learn.settings.{key}", value, kind)


def _check_value(name: str, value: Any, kind: Any) -> None:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as exc:
        raise ConfigError(f"{name} = {value!r}: {exc.errors()[0]['msg']}") from None


def open_run(
    config: Config,
    *,
    fork: bool = False,
    tasks: Sequence[Task] = (),
    traces: Sequence[RolloutGroup] = (),
) -> RunStore:
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
    return RunStore.open(config.run.folder, create=True, config=values, fork=fork, budget=budget)


def dry_run(config: Config, **parts: Any) -> tuple[Forecast, Splits]:
    """Return what `learn` would ask for; reads the tasks, calls nothing, writes nothing."""
    given = Parts(**parts)
    config = with_scheduler(config, given.scheduler)
    settings = experience_settings(config)
    tasks, traces = _material(config, given)
    splits = _split(config, tasks)
    _check_leaks(_practised(splits, traces), splits)
    check_nudge(config.nudge, splits.practice, from_traces=bool(traces))
    return _forecast(config, splits, settings), splits


def _material(config: Config, given: Parts) -> tuple[list[Task], list[RolloutGroup]]:
    traces = list(read_groups(Path(config.tasks.traces))) if config.tasks.traces else []
    if given.tasks is not None:
        if not (given.tasks or traces):
            raise ConfigError("there are no tasks: give at least one of each split")
        return list(given.tasks), traces
    if config.tasks.path:
        return read_tasks(config.tasks.path), traces
    if not traces:
        raise ConfigError("tasks.path is empty: name a JSONL file of tasks, or tasks.traces")
    return [], traces


def _split(config: Config, tasks: Sequence[Task]) -> Splits:
    if not tasks:
        return Splits((), (), ())
    wanted = config.tasks
    if wanted.stratify and not any(wanted.stratify in t.metadata for t in tasks):
        raise ConfigError(
            f"tasks.stratify is {wanted.stratify!r}, which is in the metadata of no task"
        )
    gate = wanted.gate if config.gate.enabled else (wanted.gate or 0)
    return split_tasks(
        tasks,
        practice=wanted.practice,
        gate=gate,
        test=wanted.test,
        seed=wanted.seed,
        stratify=wanted.stratify,
    )


def _practised(splits: Splits, traces: Sequence[RolloutGroup]) -> tuple[Task, ...]:
    """Return what is learnt from: the practice split, or the tasks of saved traces in its place."""
    if not traces:
        return splits.practice
    practised = {g.task.task_id: g.task for g in traces}
    held_out = sorted(practised.keys() & {t.task_id for t in (*splits.gate, *splits.test)})
    if held_out:
        raise ConfigError(
            f"tasks.traces holds groups of {len(held_out)} gate or test tasks, such as "
            f"{held_out[:3]}: what is learnt from must not be tested on. Leave those tasks out of "
            "tasks.path, or set metadata split = 'practice' for them"
        )
    return tuple(practised.values())


def _check_leaks(practised: Sequence[Task], splits: Splits) -> tuple[str, ...]:
    """Refuse splits that overlap as a whole; name what overlaps otherwise."""
    notes = []
    for name, held_out in (("gate", splits.gate), ("test", splits.test)):
        if not (practised and held_out):
            continue
        report = find_leaks(practised, held_out)
        refuse_contaminated(report)
        if report.contaminated:
            notes.append(
                f"{len(report.contaminated)} of {len(held_out)} {name} tasks resemble practice "
                f"tasks: {', '.join(sorted(report.contaminated)[:5])}"
            )
    return tuple(notes)


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


def _sampler(
    config: Config, roles: Roles, given: Parts, store: RunStore, view: ProgressView
) -> Sampler:
    run = config.run
    return Sampler(
        given.policy or roles.policy(),
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


def _result(
    config: Config,
    store: RunStore,
    learned: Learned,
    plan: Forecast,
    splits: Splits,
    notes: tuple[str, ...],
) -> Result:
    proof, smallest, verdict = learned.proof, plan.min_detectable, None
    if proof is not None:
        verdict = judge_gain(proof.empty, proof.final)
        if len(splits.test) > 1:
            smallest = min_detectable(
                len(splits.test), config.gate.test_group_size, pilot=proof.empty
            )
    library = {e.experience_id: e.body for e in learned.version.library.shown}
    leaks = find_leaks((*splits.practice, *splits.gate), splits.test, library)
    quoted = sorted({leak.task_id for leak in leaks.leaks if leak.kind.endswith("_in_library")})
    if quoted:
        notes = (*notes, f"test tasks or answers stand in the library: {', '.join(quoted[:5])}")
    spend = tuple(store.spend())
    return Result(
        folder=store.folder,
        learned=learned,
        verdict=verdict,
        forecast=plan,
        spend=spend,
        splits=splits,
        notes=(*notes, *learned.notes),
        outcomes=_outcomes(store),
        min_detectable=smallest,
    )


def _write(config: Config, result: Result, settings: ExperienceSettings) -> None:
    """Write the artefact into the run's folder: JSON, Markdown and the ready prompt."""
    if result.learned.version.version_id == EMPTY:
        return
    proof = result.learned.proof
    card = Card(
        name=result.folder.name,
        models={"policy": config.policy.lm, "critic": config.critic.lm or config.policy.lm},
        sampling=sampling_of(config.policy.sampling.model_dump()),
        tasks=result.to_dict()["splits"] | {"verifier": config.verifier},
        scores={
            "empty": _row(result.empty_score),
            "library": _row(result.library_score),
            "difference": _row(proof.difference if proof else None),
        },
        cost={"rows": [row.to_dict() for row in result.spend]},
        limits=result.notes,
        created=datetime.now(UTC).date().isoformat(),
        package_version=_package_version(),
    )
    artefact = Artefact(
        library=result.library,
        card=card,
        placement=settings.deployed_placement,
        template=settings.template,
        system=config.policy.system,
    )
    export_artefact(artefact, result.folder)


def _with_best_reward(settings: ExperienceSettings, sampler: Sampler) -> ExperienceSettings:
    """Let only full marks become exemplars, where the verifier says what full marks are."""
    best = sampler.best_reward
    if settings.exemplar_reward is not None or best is None:
        return settings
    return replace(settings, exemplar_reward=best)


def _outcomes(store: RunStore) -> dict[str, dict[str, int]]:
    """How the rollouts of each stage ended."""
    counts: dict[str, dict[str, int]] = {}
    for group in store.groups():
        row = counts.setdefault(str(group.metadata.get("stage", "other")), {})
        for outcome, n in group.outcome_counts().items():
            row[outcome] = row.get(outcome, 0) + n
    return counts


def _mean(proof: Proof | None, arm: str) -> Interval | None:
    if proof is None:
        return None
    scores = proof.empty if arm == "empty" else proof.final
    return mean_interval(scores) if any(scores.values()) else None


def _row(interval: Interval | None) -> dict[str, float | int] | None:
    return None if interval is None else interval.to_dict()


def _package_version() -> str:
    try:
        return installed_version("tfgrpo")
    except PackageNotFoundError:
        return ""


def run_sync(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, also where a loop is already running (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


__all__ = [
    "Evaluation",
    "Parts",
    "Result",
    "dry_run",
    "evaluate",
    "evaluate_async",
    "experience_settings",
    "learn",
    "learn_async",
    "open_run",
    "run_sync",
]
