"""`escalate`: from a finished learning run to trained weights and the table of four arms.

Evidence → plan → cost → distil → GRPO → choice on the gate tasks → table on the test tasks. Each
stage keeps what it made, so the same call goes on where it was cut. Test tasks are drawn only
after everything is chosen.

Does not know the command line. Source: own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tfgrpo.errors import ConfigError
from tfgrpo.escalate.comparison import Table, make_table
from tfgrpo.escalate.cost import Sizes, forecast_cost
from tfgrpo.escalate.distil_stage import Distilled, distil, scores_of, write_json
from tfgrpo.escalate.grpo_stage import Practised, practise
from tfgrpo.escalate.journal import EscalationJournal
from tfgrpo.escalate.plan import TrainingPlan, choose, gather, make_plan
from tfgrpo.escalate.result import Escalated, Preview
from tfgrpo.escalate.run_data import Material, read_material, task_states
from tfgrpo.escalate.settings import EscalateSettings, Say
from tfgrpo.escalate.stage import Stage
from tfgrpo.escalate.student import ContextOf, Student, bare, model_spec, student_sampling
from tfgrpo.learning.components import RunComponents, with_judge_role
from tfgrpo.protocols import LM, Verifier
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import canonical_json, derive_seed
from tfgrpo.runtime.event_loop import off_loop
from tfgrpo.runtime.files import write_for_people, write_whole
from tfgrpo.statistics import Scores
from tfgrpo.store import Budget
from tfgrpo.store.postgres.places import place_of

T = TypeVar("T")


def preview(
    run: Path | str,
    settings: EscalateSettings | None = None,
    *,
    verifier: Verifier | None = None,
    tasks: Sequence[Task] | None = None,
) -> Preview:
    """Return the plan, its reasons and its cost; loads the model, trains and writes nothing.

    Args:
        run: the learning run's folder.
        settings: see `EscalateSettings`.
        verifier: in place of the run's.
        tasks: as for `escalate`.

    Raises:
        ConfigError: the run cannot be used, or names no model with weights.
        StoreError: there is no run.
    """
    return off_loop(lambda: _preview(run, settings or EscalateSettings(), verifier, tasks))


def _preview(
    run: Path | str,
    settings: EscalateSettings,
    verifier: Verifier | None,
    tasks: Sequence[Task] | None,
) -> Preview:
    material = read_material(run, tasks)
    spec = model_spec(material.config, settings)
    plain = verifier or _plain_verifier(material)
    student = Student(spec, material.config, settings, plain, "base")
    return _plan_of(material, settings, student, plain)


def escalate(
    run: Path | str,
    settings: EscalateSettings | None = None,
    *,
    folder: Path | str = "",
    say: Say | None = None,
    verifier: Verifier | None = None,
    tasks: Sequence[Task] | None = None,
) -> Escalated:
    """Train a local model on what a learning run found, and compare all four arms.

    Args:
        run: the learning run's folder.
        settings: see `EscalateSettings`.
        folder: where to write; empty is RUN/escalate.
        say: shows progress, one line a call.
        verifier: in place of the run's.
        tasks: those that the run was given, where it drew no groups of some of them.

    Raises:
        ConfigError: as `preview`, or the folder holds an escalation with other settings.
        StoreError: a folder cannot be used.
        VerifierError: nothing could be graded.
    """
    chosen = settings or EscalateSettings()
    place = Path(folder) if folder else place_of(run).folder / "escalate"
    return off_loop(lambda: _escalate(run, chosen, place, say or _quiet, verifier, tasks))


def _escalate(
    run: Path | str,
    settings: EscalateSettings,
    folder: Path,
    say: Say,
    verifier: Verifier | None,
    tasks: Sequence[Task] | None,
) -> Escalated:
    material = read_material(run, tasks)
    spec = model_spec(material.config, settings)
    plain = verifier or _plain_verifier(material)
    identity = {
        "run": material.identity,
        "settings": settings.model_dump(),
        "model": spec,
        "verifier": plain.verifier_id,
    }
    # The run's caps hold for the judge here too; its seconds would end the training between.
    caps = Budget(**{**material.config.budget.model_dump(), "seconds": None})
    with EscalationJournal(folder, identity, plain.verifier_id, caps) as journal:
        judge = verifier or RunComponents(material.config, journal.store).verifier()
        if judge is None:
            raise ConfigError(
                f"run {str(run)!r} has no verifier (kind 'none'): training needs rewards; give one "
                "in [verifier]"
            )
        return _Escalation(material, settings, spec, folder, journal, judge, say).run()


@dataclass(slots=True)
class _Trained:
    """What training made: rewards on the gate tasks and specs by name, in order of training."""

    preview: Preview
    gate: dict[str, Scores]
    specs: dict[str, str]
    distilled: Distilled | None = None
    practised: Practised | None = None


class _Escalation:
    """One escalation; a method a stage."""

    def __init__(
        self,
        material: Material,
        settings: EscalateSettings,
        spec: str,
        folder: Path,
        journal: EscalationJournal,
        verifier: Verifier,
        say: Say,
    ) -> None:
        self._material = material
        self._settings = settings
        self._spec = spec
        self._folder = folder
        self._journal = journal
        self._verifier = verifier
        self._say = say
        self._full_marks = material.full_marks(verifier.reward_range[1])
        self._sizes = Sizes.of(material, settings)
        self._seconds: dict[str, float] = {}

    def run(self) -> Escalated:
        """Go through all stages; test tasks are drawn when everything is chosen."""
        trained = self._train()
        kept, why = choose(trained.gate)
        self._journal.decide("choice", {"kept": kept, "reason": why}, key="choice")
        self._say(f"kept: {kept} ({why})")
        table = self._timed("table", lambda: self._table(trained.specs[kept], kept))
        result = Escalated(
            folder=self._folder,
            preview=trained.preview,
            model=trained.specs[kept],
            kept=kept,
            choice=why,
            distilled=trained.distilled,
            practised=trained.practised,
            table=table,
            seconds={name: round(s, 1) for name, s in self._seconds.items()},
        )
        write_json(self._folder / "escalate.json", result.to_dict())
        write_for_people(self._folder / "escalate.md", result.markdown())
        return result

    def _train(self) -> _Trained:
        """Plan, distil, practise. Each stage loads its own weights and lets go of them."""
        trained = self._first_stage()
        plan = trained.preview.plan
        if plan.grpo_steps:
            start, _ = choose(trained.gate)
            practised = self._timed("grpo", lambda: self._practise(trained.specs[start], plan))
            trained.practised = practised
            if practised.spec:
                trained.gate["grpo"], trained.specs["grpo"] = practised.gate, practised.spec
        return trained

    def _first_stage(self) -> _Trained:
        """Plan, look at the base, distil."""
        student = self._student(self._spec, "base")
        found = _plan_of(self._material, self._settings, student, self._verifier)
        for line in found.lines():
            self._say(line)
        self._write_tasks()
        write_json(self._folder / "plan.json", found.to_dict())
        base = self._timed("base look", lambda: self._base(student))
        trained = _Trained(found, {"base": base}, {"base": self._spec})
        if found.plan.distil != "none":
            distilled = self._timed("distil", lambda: self._distil(student, found.plan))
            if distilled is not None:
                trained.distilled = distilled
                trained.gate["distilled"] = distilled.gate
                trained.specs["distilled"] = distilled.spec
        student.release()
        return trained

    def _timed(self, stage: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return work()
        finally:
            self._seconds[stage] = time.perf_counter() - started
            gc.collect()  # optimisers and caches stand in reference cycles

    def _student(self, spec: str, label: str) -> Student:
        return Student(spec, self._material.config, self._settings, self._verifier, label)

    def _write_tasks(self) -> None:
        """Write the training set: practice tasks with what the run knows about each."""
        states = task_states(
            self._material.practice, self._material.practice_groups, self._full_marks
        )
        text = "".join(canonical_json(s.marked().to_dict()) + "\n" for s in states)
        write_whole(self._folder / "tasks.jsonl", text)

    def _base(self, student: Student) -> dict[str, tuple[float, ...]]:
        gate = self._material.gate
        seed = derive_seed(self._settings.seed, "gate")
        return scores_of(
            self._journal.drawn(
                "gate", "base", gate, lambda: student.groups(gate, self._sizes.gate, seed)
            )
        )

    def _distil(self, student: Student, plan: TrainingPlan) -> Distilled | None:
        return distil(self._stage(student, plan, "distil"))

    def _practise(self, spec: str, plan: TrainingPlan) -> Practised:
        return practise(self._stage(self._student(spec, "start of grpo"), plan, "grpo"))

    def _stage(self, student: Student, plan: TrainingPlan, name: str) -> Stage:
        return Stage(
            student,
            self._material,
            self._settings,
            plan,
            self._journal,
            self._verifier,
            self._folder / name,
            self._full_marks,
            self._say,
        )

    def _table(self, spec: str, kept: str) -> Table:
        """Draw the test tasks in all arms; where nothing trained was kept, trained is the base."""
        scores = self._arms("base", "base", self._spec)
        if spec == self._spec:
            scores |= {n.replace("base", "trained"): s for n, s in scores.items()}
        else:
            scores |= self._arms("trained", kept, spec)
        return make_table(scores, seed=self._settings.seed)

    def _arms(self, name: str, label: str, spec: str) -> dict[str, Scores]:
        """Scores of one version of the weights, without the library and with it."""
        loaded: list[Student] = []
        scores = {name: self._arm(name, label, spec, bare, loaded)}
        if self._material.has_library:
            told = f"{name}_library"
            scores[told] = self._arm(told, label, spec, self._material.context, loaded)
        return scores

    def _arm(
        self, name: str, label: str, spec: str, context_of: ContextOf, loaded: list[Student]
    ) -> Scores:
        test = self._material.test

        def draw() -> Any:
            if not loaded:
                loaded.append(self._student(spec, label))
            seed = derive_seed(self._settings.seed, "test")
            self._say(f"table: {name} on {len(test)} test tasks")
            return loaded[0].groups(test, self._sizes.test, seed, context_of, label=f"test-{label}")

        return scores_of(self._journal.drawn("test", name, test, draw))


def _plan_of(
    material: Material, settings: EscalateSettings, student: Student, verifier: Verifier
) -> Preview:
    full_marks = material.full_marks(verifier.reward_range[1])
    evidence = gather(material, full_marks)
    plan = make_plan(evidence, settings)
    notes = []
    if student.spec != material.config.policy.lm:
        notes.append(
            f"the evidence is of {material.config.policy.lm}, not of the model to train: a weaker "
            "one may gain less from the library"
        )
    if student_sampling(material.config).temperature == 0 and plan.distil != "none":
        notes.append("the run samples at temperature 0: all draws of a task are equal")
    cost = forecast_cost(material, settings, plan, student)
    return Preview(student.spec, evidence, plan, cost, tuple(notes))


def _plain_verifier(material: Material) -> Verifier:
    """The run's verifier as settings describe it, a judge's LM not yet journalled."""
    from tfgrpo.lm import fleet_options, open_lm
    from tfgrpo.verifiers import make_verifier

    config = material.config

    def judge_lm(spec: str = "", **options: Any) -> LM:
        spec = spec or config.judge.lm or config.policy.lm
        return open_lm(spec, **fleet_options(spec, config.fleets), **options)

    return make_verifier(with_judge_role(config.verifier, config.judge), open_lm=judge_lm)


def _quiet(line: str) -> None:
    """Show nothing."""
    del line
