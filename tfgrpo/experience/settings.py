"""Settings of the experience module, the switches of its repairs, and the presets.

`default` reflects over panels of groups; `contrast` compares one group at a time, with every
repair of the published method on; `paper-main` and `paper-preview` reproduce the two published
variants of Training-Free GRPO with every repair off, and each can be switched on alone.
Does not know models, budgets, how many tasks. Source: Training-Free GRPO (youtu-agent, `main` and
branch `training_free_GRPO`) as described by its code; defect numbers as in `docs/experience.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from tfgrpo.context import Placement
from tfgrpo.errors import ConfigError
from tfgrpo.experience.draft import Caps
from tfgrpo.protocols import Limits, Sampling

Flow = Literal["reflect", "contrast", "paper-main", "paper-preview"]
"""How groups become edits: panels of groups and tried rules, one group at a time, or as published.
"""
PRESETS = ("default", "contrast", "paper-main", "paper-preview")


@dataclass(frozen=True, slots=True)
class Repairs:
    """What is done otherwise than in the published code; one switch a defect."""

    delete_by_id: bool = True
    """Defect 1. On: a delete needs only an id. Off: one without content is ignored."""
    id_aliases: bool = True
    """Defect 2. On: `[G0]`, `g0`, `0` mean G0, and an unknown id is rejected with a reason.
    Off: ids match letter by letter and an update of any other id becomes an add."""
    lenient_operations: bool = True
    """Defect 3. On: case, synonyms, wrappers and broken JSON are repaired, then asked again with
    the error. Off: exact names in a fenced JSON list, three tries, then the reply is ignored."""
    grounded_merge: bool = True
    """Defect 4. On: no proposals, no call; all fitting blocks count; what no proposal stands
    behind, or what repeats our prompts, is refused. Off: the call is always made, the last block
    counts and invented entries enter."""
    spread_filter: bool = True
    """Defect 5. On: a group teaches when its rewards differ. Off: when 0 < mean reward < 1."""
    bounded_library: bool = True
    """Defect 12. On: caps in entries and tokens, de-duplication. Off: neither."""
    group_by_id: bool = True
    """Defect 14. On: a group is one task id. Off: tasks of equal text are one group."""
    all_fail_path: bool = True
    """Defect 15. On: tasks where every rollout failed may give an exemplar of their reference,
    where the settings allow it. Off: they teach nothing."""
    fenced_data: bool = True
    """Defect 16. On: trajectories stand between random marks and lessons pass the guards.
    Off: text goes in as it is and every lesson is taken."""
    one_placement: bool = True
    """Defect 19. On: practice, evaluation and deployment use one placement. Off: practice puts
    the library into the user message, deployment into the system message."""
    empty_is_bare: bool = True
    """Defect 20. On: an empty library leaves the prompt as it is. Off: it adds the word None
    (paper-preview: from the second step)."""
    typed_outcomes: bool = True
    """Defect 21. On: only graded rollouts count and a group needs two. Off: a failed rollout
    vanishes and one left is enough (paper-preview: it counts as reward 0 without a trajectory)."""


NO_REPAIRS = Repairs(**{f.name: False for f in fields(Repairs)})


@dataclass(frozen=True, slots=True)
class CriticBudget:
    """How much the critic reads and writes."""

    context_tokens: int = 32_000
    """The critic model's window, prompt and reply together."""
    reply_tokens: int = 2_000
    """Limit of a reply; doubled once where a reply was cut."""
    send_limit: bool = True
    """False sends no limit: the provider's own holds, and `reply_tokens` only sizes prompts."""
    rollout_tokens: int = 6_000
    """Most of one trajectory that a prompt holds; more is cut in the middle, with marks."""
    concurrency: int = 16
    """Calls in flight."""


@dataclass(frozen=True, slots=True)
class ReflectSettings:
    """Sizes of the flow `reflect`."""

    panel_groups: int = 10
    """At most so many groups in full in one critic call; fewer where the critic's window is small.
    """
    counter_evidence: int = 2
    """Solved groups among them, against which rules are held."""
    other_tasks: int = 48
    """Further practised tasks that a panel shows in one line each, with their right answer."""
    rules: int = 12
    """At most so many rules of one reply."""
    entry_tokens: int = 300
    """Longest entry, in tokens."""
    replays: int = 8
    """Supporting practice tasks that are rolled again under proposed rules, once each; 0 rolls
    none."""
    crowded: int = 6
    """Entries of one topic from which the topic is rewritten as a whole; 0 never rewrites."""


@dataclass(frozen=True, slots=True)
class ExperienceSettings:
    """How groups become edits of the library."""

    flow: Flow = "reflect"
    repairs: Repairs = field(default_factory=Repairs)
    caps: Caps = field(default_factory=Caps)
    budget: CriticBudget = field(default_factory=CriticBudget)
    lessons: bool = True
    """False asks no critic at all: exemplars only."""
    lessons_per_group: int = 2
    """At most so many lessons a group (K)."""
    give_up_after: int = 0
    """Ask no further group of a step where none of the first so many replies can be read, for a
    critic that may be too small; 0 asks about all."""
    max_words: int = 60
    """Longest lesson, in words."""
    summarise: Literal["auto", "always", "never"] = "auto"
    """`auto` reads single-turn rollouts under `summarise_over_tokens` as they are."""
    summarise_over_tokens: int = 800
    """Longer rollouts are summarised before they are compared, where `summarise` is `auto`."""
    update: Literal["auto", "direct"] = "auto"
    """`auto` asks how lessons relate to a library that has entries; `direct` adds them all."""
    merge: Literal["auto", "deterministic"] = "auto"
    """`auto` asks the critic where proposals of several groups meet; `deterministic` never asks."""
    exemplars: int = 4
    """At most so many exemplars in the library; 0 for none."""
    reference_exemplars: bool = True
    """Make exemplars of references where every rollout failed and references may be shown."""
    exemplar_reward: float | None = None
    """Least reward of an exemplar, and what a rollout must reach not to have failed. None: the
    best reward that was reached anywhere in the step. Set it to the verifier's largest reward
    where part marks are given."""
    ground_truth: bool = True
    """False hides rewards and references from the critic and lets every group teach."""
    tolerance: float = 1e-9
    """Rewards that differ by no more are equal."""
    placement: Placement = "system"
    """Where lessons stand: in the system text, or before the task in the user's turn."""
    template: str = "lessons"
    """The prompt file in `prompts/` that frames the lessons."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    """How the critic draws."""
    limits: Limits = field(default_factory=Limits)
    objective: str = ""
    """What the agent is for: what goes in and what comes out."""
    learning_objective: str = ""
    """What kind of lesson is wanted."""
    agent: str = ""
    """The agent's own instructions and tools, for the critic."""
    reflect: ReflectSettings = field(default_factory=ReflectSettings)
    seed: int = 0

    @property
    def deployed_placement(self) -> Placement:
        """Where lessons stand outside practice."""
        return self.placement if self.repairs.one_placement else "system"


def preset(name: str, **changes: Any) -> ExperienceSettings:
    """Return a preset by name, with some fields changed.

    A mapping for `repairs`, `caps`, `budget`, `sampling` or `limits` changes single fields of it.

    Raises:
        ConfigError: unknown preset, field or repair.

    >>> preset("paper-main", repairs={"delete_by_id": True}).repairs.delete_by_id
    True
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; allowed: {', '.join(PRESETS)}")
    settings = _PRESETS[name]
    known = {f.name for f in fields(ExperienceSettings)}
    for key in changes.keys() - known:
        raise ConfigError(f"experience setting {key!r} is unknown; allowed: {sorted(known)}")
    for key, value in changes.items():
        if isinstance(value, Mapping):
            changes[key] = _changed(getattr(settings, key), key, value)
    return replace(settings, **changes)


def _changed(current: Any, where: str, values: Mapping[str, Any]) -> Any:
    """Return a nested record with some fields changed."""
    if not is_dataclass(current) or isinstance(current, type):
        raise ConfigError(f"experience setting {where!r} is one value, not a table: {dict(values)}")
    allowed = sorted(f.name for f in fields(current))
    for key in values.keys() - set(allowed):
        raise ConfigError(f"{where}.{key} is unknown; allowed: {', '.join(allowed)}")
    return replace(current, **values)


_PAPER = ExperienceSettings(
    flow="paper-main",
    repairs=NO_REPAIRS,
    summarise="always",
    reference_exemplars=False,
    exemplars=0,
    lessons_per_group=2,
    placement="user",
    template="paper_lessons",
    sampling=Sampling(),
)
_PRESETS: dict[str, ExperienceSettings] = {
    "default": ExperienceSettings(template="rules", budget=CriticBudget(reply_tokens=4_000)),
    "contrast": ExperienceSettings(flow="contrast", reference_exemplars=False),
    "paper-main": _PAPER,
    "paper-preview": replace(
        _PAPER,
        flow="paper-preview",
        lessons_per_group=1,
        max_words=32,
        sampling=Sampling(temperature=0.0),
    ),
}
