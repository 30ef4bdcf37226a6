"""From a run's evidence to what will be trained, and why: pure functions, reasons in words.

Only practice and gate groups are looked at. The rules, all our own:

* Distil first where the kept library was at least as good as none on the gate tasks: it is the
  cheapest way to what is known to work. Where at least a quarter of the gate tasks were solved
  with it, verified replies are imitated, since they leave the failures behind; below that too few
  tasks would teach, and the whole distribution under the library is brought over.
* Without a library, the run's own verified replies are imitated where enough tasks have some.
* Then GRPO on the tasks that are mixed after that: only groups with two different rewards carry a
  gradient. Fewer than one mixed group in ten does not pay, nor does RL without a library where
  `advise` sees nothing to win.
* Hints where three tenths of the practice tasks fail as a whole and some of those have a solution
  or hints to cut from.

Does not know models. Source: own; the levers' figures are `tfgrpo.report.advise`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tfgrpo.escalate.run_data import Material, PracticeState, task_states
from tfgrpo.escalate.settings import EscalateSettings
from tfgrpo.report.advise import Advice, advise
from tfgrpo.rollout import RolloutGroup
from tfgrpo.statistics import Interval, Scores, mean_interval, paired_difference

ENOUGH_SOLVED = 0.25
"""Share of gate tasks solved with the library from which imitation has enough to go by."""
ENOUGH_TASKS = 3
"""Tasks with a verified reply that imitation needs."""
ENOUGH_MIXED = 0.1
"""Share of mixed groups from which GRPO pays."""
MANY_FAIL = 0.3
"""Share of practice tasks that fail as a whole from which hints are worth their rollouts."""
GRPO_STEPS = 10

Distil = Literal["supervised", "forward_kl", "reverse_kl", "nudge", "icpo", "none"]


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """What the run says, in numbers."""

    has_library: bool
    library_gain: Interval | None
    """Kept library minus none on the gate tasks; None where not both were scored."""
    solved_with_library: float
    """Share of gate tasks with a reply of full marks under the kept library."""
    practice_tasks: int
    verified_tasks: int
    """Practice tasks with a verified reply in the journal."""
    all_fail_tasks: int
    hintable_tasks: int
    """All-fail tasks whose metadata has hints or a solution to cut."""
    mixed_share: float
    """Share of groups with two different rewards, in the arm that training will start from: the
    gate groups with the library where there is one, else the bare practice groups."""
    advice: tuple[Advice, ...]
    """The levers by `tfgrpo.report.advise`, best first, without test groups."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What will be trained, with the reason of each choice."""

    distil: Distil
    distil_why: str
    grpo_steps: int
    """0 leaves GRPO out."""
    grpo_why: str
    hints: bool
    hints_why: str

    @property
    def draws_library(self) -> bool:
        """True when fresh rollouts with the library are needed beforehand."""
        return self.distil in ("supervised", "forward_kl", "reverse_kl")

    def lines(self) -> list[str]:
        """Return the plan for people."""
        name = "nothing is distilled" if self.distil == "none" else f"distil: {self.distil}"
        steps = f"{self.grpo_steps} steps at most" if self.grpo_steps else "none"
        return [
            f"1. {name}: {self.distil_why}",
            f"2. GRPO, {steps}: {self.grpo_why}",
            f"3. hints {'on' if self.hints else 'off'}: {self.hints_why}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def gather(material: Material, full_marks: float) -> RunEvidence:
    """Return what practice and gate groups say."""
    states = task_states(material.practice, material.practice_groups, full_marks)
    empty = [g for g in material.gate_groups if g.context.is_empty]
    kept = _kept_groups(material)
    base, library = _scores(empty), _scores(kept)
    gain = None
    if any(base.get(t) for t, r in library.items() if r):
        gain = paired_difference(base, library, level=0.90)
    solved = [max(r) >= full_marks for r in library.values() if r]
    start = kept if material.has_library else _bare_practice(material)
    failing = [s for s in states if s.state == "all_fail"]
    return RunEvidence(
        has_library=material.has_library,
        library_gain=gain,
        solved_with_library=sum(solved) / len(solved) if solved else 0.0,
        practice_tasks=len(material.practice),
        verified_tasks=sum(s.verified > 0 for s in states),
        all_fail_tasks=len(failing),
        hintable_tasks=sum(bool(s.hint_from) for s in failing),
        mixed_share=_mixed(start),
        advice=tuple(advise(material.groups)),
    )


def _kept_groups(material: Material) -> list[RolloutGroup]:
    """Gate groups of the kept version."""
    if not material.has_library:
        return []
    by_task = {t.task_id: material.context(t).context_hash for t in material.gate}
    return [g for g in material.gate_groups if g.context.context_hash == by_task[g.task.task_id]]


def _bare_practice(material: Material) -> list[RolloutGroup]:
    return [g for g in material.practice_groups if g.context.is_empty]


def _scores(groups: Iterable[RolloutGroup]) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for group in groups:
        found[group.task.task_id] = (*found.get(group.task.task_id, ()), *group.rewards_G)
    return found


def _mixed(groups: Sequence[RolloutGroup]) -> float:
    sized = [g for g in groups if len(g.rewards_G) >= 2]
    return sum(g.is_informative() for g in sized) / len(sized) if sized else 0.0


def make_plan(evidence: RunEvidence, settings: EscalateSettings) -> TrainingPlan:
    """Choose by the rules above; what a person asked for stands over them."""
    distil, why = _distil(evidence, settings)
    steps, steps_why = _grpo(evidence, settings)
    hints, hints_why = _hints(evidence, steps)
    return TrainingPlan(distil, why, steps, steps_why, hints, hints_why)


def _distil(e: RunEvidence, settings: EscalateSettings) -> tuple[Distil, str]:
    needs_library = settings.method in ("forward_kl", "reverse_kl", "nudge", "icpo")
    if needs_library and not e.has_library:
        return "none", f"{settings.method} was asked for, but the run kept no library"
    if settings.method != "auto":
        return settings.method, "asked for"
    own = f"{e.verified_tasks} of {e.practice_tasks} practice tasks have a verified reply"
    if not e.has_library:
        if e.verified_tasks >= ENOUGH_TASKS:
            return "supervised", f"the run kept no library; {own}"
        return "none", f"the run kept no library, and only {own}"
    gain = "was not compared" if e.library_gain is None else f"moved them by {e.library_gain}"
    told = f"the library {gain} on the gate tasks"
    if e.library_gain is not None and e.library_gain.estimate <= 0:
        if e.verified_tasks >= ENOUGH_TASKS:
            return "supervised", f"{told}, so only verified replies count; {own}"
        return "none", f"{told}; {own}, too few"
    solved = f"{e.solved_with_library:.0%} of them were solved with it"
    if e.solved_with_library >= ENOUGH_SOLVED:
        return "supervised", f"{told} and {solved}: enough verified replies to imitate"
    return "forward_kl", f"{told}, but {solved}: too few to imitate, so its distribution is kept"


def _ceiling(e: RunEvidence, lever: str) -> Interval | None:
    """What `advise` says that a lever can win at most; None where it cannot tell."""
    return next((a.gain for a in e.advice if a.lever == lever), None)


def _grpo(e: RunEvidence, settings: EscalateSettings) -> tuple[int, str]:
    found = f"{e.mixed_share:.0%} of the groups it starts from are mixed"
    most = _ceiling(e, "rl")
    if most is not None:
        found += f"; by `advise` RL alone wins {most} at most on the practice tasks"
    if settings.grpo_steps is not None:
        return settings.grpo_steps, f"asked for; {found}"
    if most is not None and most.high <= 0 and not e.has_library:
        return 0, f"{found}: nothing to win"
    if e.mixed_share >= ENOUGH_MIXED:
        return GRPO_STEPS, f"{found}; a profile of the distilled model chooses the tasks"
    if e.hintable_tasks and e.all_fail_tasks >= MANY_FAIL * e.practice_tasks:
        return GRPO_STEPS, f"only {found}, but all-fail tasks can be hinted"
    return 0, f"only {found}: too few carry a gradient"


def _hints(e: RunEvidence, grpo_steps: int) -> tuple[bool, str]:
    failing = f"{e.all_fail_tasks} of {e.practice_tasks} practice tasks fail as a whole"
    most = _ceiling(e, "hints")
    if most is not None:
        failing += f" (by `advise` worth {most} at most)"
    if not grpo_steps:
        return False, f"{failing}; without GRPO there is nothing to hint"
    if e.all_fail_tasks < MANY_FAIL * e.practice_tasks:
        return False, f"{failing}: few enough to leave out"
    if not e.hintable_tasks:
        return False, f"{failing}, and none has `solution` or `hints` in its metadata to cut from"
    return True, f"{failing}; {e.hintable_tasks} of them have something to cut hints from"


def choose(scores: dict[str, Scores]) -> tuple[str, str]:
    """Return which model is kept, by its mean on the gate tasks, and the reason.

    Candidates come in the order of their training; an earlier one wins a tie, so that what did not
    help is left out. All were drawn with the same tasks and seeds.
    """
    means = {name: mean_interval(s).estimate for name, s in scores.items() if any(s.values())}
    best = max(means, key=lambda name: means[name])
    told = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    return best, f"gate tasks, bare prompt: {told}"


def states_after(groups: Sequence[RolloutGroup], full_marks: float) -> list[PracticeState]:
    """Return the states of tasks by fresh groups of them."""
    return task_states([g.task for g in groups], groups, full_marks)
